"""What is timed, what is left out, what is remembered, and that nothing on disk can do harm."""

import json

import pytest
import torch

import mpkernels
from mpkernels import selector
from mpkernels.selector import disk
from mpkernels.selector.case import Choice
from mpkernels.selector.timing import Race
from tests.selector.ways import CASE, CLOCK, NAMES, Ways, afresh, another_process  # noqa: F401


@pytest.mark.parametrize(("native", "torchs", "chosen"), [(1, 2, "native"), (2, 1, "torch")])
def test_the_fastest_is_chosen_once(native, torchs, chosen):
    ways = Ways(native=native, torch=torchs)
    assert selector.choose(CASE, NAMES, ways) == chosen
    calls = dict(ways.calls)
    assert selector.choose(CASE, NAMES, ways) == chosen
    assert ways.calls == calls
    assert selector.choices() == {"op gelu 8x3x5 float32": chosen}


@pytest.mark.parametrize(
    ("torchs", "ours", "chosen"),
    [
        (1.0, 1.009, "native"),
        (1.0, 1.011, "torch"),
        (250e-6, 252e-6, "native"),
        (250e-6, 253e-6, "torch"),
        (100e-6, 100.5e-6, "torch"),
        (100e-6, 99.5e-6, "native"),
    ],
)
def test_ours_may_take_one_per_cent_more_if_that_is_above_two_microseconds(monkeypatch, torchs, ours, chosen):
    monkeypatch.setattr(selector, "race", lambda *_: Race({"native": ours, "torch": torchs}, {}))
    assert selector.choose(CASE, NAMES, Ways(native=0, torch=0)) == chosen


def test_what_is_timed_takes_none_of_the_callers_random_numbers():
    """Or a checkpointed block would drop other elements when it is computed again."""
    ways = Ways(native=1, torch=2)
    ways.also["native"] = lambda: torch.rand(3)
    state = torch.get_rng_state()
    selector.choose(CASE, NAMES, ways)
    assert ways.were_timed
    assert torch.equal(torch.get_rng_state(), state)


def test_a_choice_is_remembered_on_disk():
    assert selector.choose(CASE, NAMES, Ways(native=2, torch=1)) == "torch"
    another_process()
    ways = Ways(native=1, torch=2)
    assert selector.choose(CASE, NAMES, ways) == "torch"
    assert not ways.were_timed
    assert [path.name for path in disk.path().parent.iterdir()] == ["choices.json"]  # no temporary file is left


def test_each_case_has_its_own():
    assert selector.choose(CASE, NAMES, Ways(native=1, torch=2)) == "native"
    for other in (
        CASE._replace(op="other"),
        CASE._replace(rows=16),
        CASE._replace(sizes=(3, 6)),
        CASE._replace(dtypes=(torch.float16,)),
        CASE._replace(variant="relu"),
    ):
        assert selector.choose(other, NAMES, Ways(native=2, torch=1)) == "torch"
        assert selector.choose(CASE, NAMES, Ways(native=2, torch=1)) == "native"
    another_process()
    assert selector.choose(CASE, NAMES, Ways(native=2, torch=1)) == "native"


def test_other_versions_and_machines_are_timed_anew(monkeypatch):
    selector.choose(CASE, NAMES, Ways(native=2, torch=1))
    for name in ("torch 2", "triton", "mpkernels 0", f"{torch.get_num_threads()} threads"):
        assert name in disk._key("", CASE.device)
    another_process()
    monkeypatch.setattr(disk, "_version", lambda package: f"{package} of tomorrow")
    assert selector.choose(CASE, NAMES, Ways(native=1, torch=2)) == "native"
    assert len(json.loads(disk.path().read_text())) == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        '{"KEY": 3}',
        '{"KEY": {"choice": ["torch"]}}',
        '{"KEY": {"choice": "gone"}}',
        '{"KEY": {"choice": "native", "left_out": 3}}',
        "\x00\xff",
    ],
)
def test_a_corrupt_file_is_no_error(text):
    path = disk.path()
    path.parent.mkdir()
    path.write_text(text.replace("KEY", disk._key(CASE.key(), CASE.device)), "latin-1")
    assert selector.choose(CASE, NAMES, Ways(native=2, torch=1)) == "torch"
    another_process()
    assert selector.choose(CASE, NAMES, Ways(native=1, torch=2)) == "torch"  # it has been mended


def test_a_place_that_cant_be_written_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(disk, "path", lambda: tmp_path / "file" / "choices.json")  # also root can't write there
    assert selector.choose(CASE, NAMES, Ways(native=2, torch=1)) == "torch"
    assert selector.choose(CASE, NAMES, Ways(native=1, torch=2)) == "torch"
    selector.forget()

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(disk, "path", no_home)
    assert selector.choose(CASE, NAMES, Ways(native=1, torch=2)) == "native"
    selector.forget()


def test_a_failed_write_leaves_the_old_file(monkeypatch):
    selector.choose(CASE, NAMES, Ways(native=2, torch=1))
    before = disk.path().read_text()

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(disk.os, "replace", fail)
    selector.choose(CASE._replace(rows=99), NAMES, Ways(native=1, torch=2))
    assert disk.path().read_text() == before
    assert [path.name for path in disk.path().parent.iterdir()] == ["choices.json"]


def test_trials_may_differentiate_wherever_the_call_is():
    modes, ways = set(), Ways(native=1, torch=1)

    def prepare():
        modes.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return ways

    ways.also["native"] = prepare
    with torch.inference_mode():
        selector.choose(CASE, NAMES, prepare)
    with torch.no_grad():
        selector.choose(CASE._replace(rows=16), NAMES, prepare)
    assert modes == {(True, False)}


def test_what_is_known_of_any_number_of_rows():
    """The last choice for such a case, whatever was chosen for others."""
    asked = CASE._replace(rows=None)
    assert selector.known(asked, NAMES) == "native"
    selector.choose(CASE, NAMES, Ways(native=1, torch=2))
    selector.choose(CASE._replace(rows=16), NAMES, Ways(native=2, torch=1))
    selector.choose(CASE._replace(variant="silu"), NAMES, Ways(native=1, torch=2))
    assert selector.known(asked, NAMES) == "torch"


def test_pin():
    ways = Ways(native=2, torch=1)
    selector.pin("native")
    assert selector.choose(CASE, NAMES, ways) == "native"
    selector.pin("triton")
    assert selector.choose(CASE, NAMES, ways) == "native"  # the first, where there is none
    assert not ways.were_timed
    selector.pin(None)
    assert selector.choose(CASE, NAMES, ways) == "torch"
    with pytest.raises(ValueError, match="pin: name must be 'native', 'triton', 'torch' or None, got 'cuda'"):
        selector.pin("cuda")


def test_deterministic():
    selector.choose(CASE, NAMES, Ways(native=2, torch=1))
    torch.use_deterministic_algorithms(True)
    try:
        assert selector.choose(CASE, NAMES, Ways(native=2, torch=1)) == "native"
    finally:
        torch.use_deterministic_algorithms(False)
    assert selector.choose(CASE, NAMES, Ways(native=2, torch=1)) == "torch"
    selector.make_deterministic()
    ways = Ways(native=2, torch=1)
    assert selector.choose(CASE, NAMES, ways) == "native"
    assert not ways.were_timed


def test_nothing_is_timed_while_torch_traces():
    ways = Ways(native=2, torch=1)

    def chosen(x):
        names.append(selector.choose(CASE, NAMES, ways))
        return x + 1

    names = []
    with torch._subclasses.FakeTensorMode():
        chosen(torch.ones(3))
    torch.func.vmap(chosen)(torch.ones(3))
    torch.fx.experimental.proxy_tensor.make_fx(chosen)(torch.ones(3))
    assert len(names) == 3
    assert set(names) == {"native"}
    assert not ways.were_timed
    assert selector.choose(CASE, NAMES, ways) == "torch"  # what was taken meanwhile was no choice
    torch.func.vmap(chosen)(torch.ones(3))
    assert names[-1] == "torch"


def test_out_of_memory_is_no_later_surprise():
    """A checkpoint's second forward, which may find room, must compute what its first did. Another process may time."""

    def no_room():
        raise torch.OutOfMemoryError("no room")

    without_room = Ways(native=2, torch=1)
    without_room.also["native"] = no_room
    for prepare in (no_room, without_room):
        for ways in (prepare, Ways(native=2, torch=1)):
            assert selector.choose(CASE, NAMES, ways) == "native"
        selector._known.clear()
    assert selector.choose(CASE, NAMES, Ways(native=2, torch=1)) == "torch"


def test_who_chose_first_is_right():
    """Of two threads that time the same at once, and may find different winners."""

    def prepare():
        selector._known[CASE] = Choice("native", {})
        return Ways(native=2, torch=1)

    assert selector.choose(CASE, NAMES, prepare) == "native"


@pytest.mark.parametrize(("torchs", "is_hopeless"), [(30, True), (0.9, False)])
def test_the_hopeless_are_not_timed_further(torchs, is_hopeless):
    ways = Ways(native=torchs / 30, torch=torchs)  # what is brief may only have been held up
    assert selector.choose(CASE, NAMES, ways) == "native"
    assert (ways.calls["torch"] == 2 < ways.calls["native"]) == is_hopeless


def test_the_first_run_does_not_count():
    """It compiles."""
    ways = Ways(native=1, torch=3)
    ways.also["native"] = lambda: CLOCK.wait(100 if ways.calls["native"] == 1 else 0)
    assert selector.choose(CASE, NAMES, ways) == "native"


def test_it_is_found_under_the_package():
    assert mpkernels.selector is selector
