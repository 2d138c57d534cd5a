"""Kernels that are wrong, raise or hang are left out."""

import pytest

from mpkernels import selector
from mpkernels.selector.timing import Race
from tests.selector.ways import CASE, CLOCK, NAMES, Ways, afresh, another_process  # noqa: F401


def fail():
    raise RuntimeError("Failed to find C compiler")


UNFIT = {
    "raises": ("also", fail, "it can't run here: Failed to find C compiler"),
    "is wrong": ("error_of", 3e-4, "its result is off by 3.0e-04, torch's by 1.0e-04"),
    "is NaN": ("error_of", float("nan"), "its result is off by nan, torch's by 1.0e-04"),
    "is slow": ("also", lambda: CLOCK.wait(1.1e4), "it took 11 s"),
}


@pytest.mark.parametrize(("attribute", "value", "reason"), UNFIT.values(), ids=UNFIT)
def test_an_unfit_kernel_is_left_out_for_good(attribute, value, reason):
    """Though it is the first and the fastest. One warning, and none from the next process."""
    names, ways = ("triton", "native", "torch"), Ways(triton=1, native=2, torch=3)
    getattr(ways, attribute)["triton"] = value
    with pytest.warns(RuntimeWarning, match="the triton kernel is left out") as warned:
        assert [selector.choose(CASE, names, ways) for _ in range(2)] == ["native", "native"]
    assert [str(it.message) for it in warned] == [f"mpkernels: the triton kernel is left out of {CASE}: {reason}"]
    assert ways.calls["triton"] == 1
    shown = {str(CASE): f"native; without triton: {reason}"}
    assert selector.choices() == shown
    another_process()
    assert selector.choose(CASE, names, ways) == "native"
    assert ways.calls["triton"] == 1
    assert selector.choices() == shown


def test_a_result_as_near_as_the_bound_allows_is_right():
    """2 % beyond torch's error, and eps / 8, of fp16's 2**-10."""
    ways = Ways(native=1, torch=2)
    ways.error_of["native"] = 1.02e-4 + 2**-13
    assert selector.choose(CASE, NAMES, ways) == "native"


def test_where_torch_overflows_nothing_can_be_told():
    ways = Ways(native=1, torch=2)
    ways.error_of |= {"native": float("inf"), "torch": float("nan")}
    assert selector.choose(CASE, NAMES, ways) == "native"


def test_one_that_hangs_leaves_torch(monkeypatch):
    reason = "it has not ended after 10 s"
    monkeypatch.setattr(selector, "race", lambda *_: Race({}, {"native": reason}))
    with pytest.warns(RuntimeWarning, match=f"the native kernel is left out of .*: {reason}"):
        assert selector.choose(CASE, NAMES, Ways(native=1, torch=2)) == "torch"
    assert selector.choices() == {str(CASE): f"torch; without native: {reason}"}


def test_a_call_that_torch_refuses_raises():
    def refuse():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    ways = Ways(native=1, torch=2)
    ways.also["torch"] = refuse
    with pytest.raises(RuntimeError, match="mat1"):
        selector.choose(CASE, NAMES, ways)
