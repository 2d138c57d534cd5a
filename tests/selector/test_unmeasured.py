"""What computes where nothing may be timed, and when something is timed anew."""

import threading
from time import sleep

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mpkernels import selector
from mpkernels.distributed import processes
from mpkernels.functional import linear_act, mlp
from mpkernels.linear import block_choice, choice
from tests.selector.ways import CASE, NAMES, Ways, afresh, another_process  # noqa: F401

ON_CUDA = CASE._replace(device=torch.device("cuda", 0))


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch):
    """Which nobody needs here but for its name."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")


def no_room():
    raise torch.OutOfMemoryError("no room")


def several(monkeypatch):
    monkeypatch.setattr(processes, "are_several", lambda: True)


def deterministic(monkeypatch):
    monkeypatch.setattr(selector, "_is_deterministic", True)


def pinned_to_what_is_not_there(monkeypatch):
    monkeypatch.setattr(selector, "_pinned", "triton")


def traced(monkeypatch):
    monkeypatch.setattr(selector, "is_tracing", lambda: True)


SITUATIONS = [several, deterministic, pinned_to_what_is_not_there, traced]


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize(("case", "name"), [(CASE, "native"), (ON_CUDA, "torch")], ids=["cpu", "cuda"])
def test_torch_computes_on_a_gpu_where_nothing_may_be_timed(monkeypatch, situation, case, name):
    situation(monkeypatch)
    ways = Ways(native=1, torch=2)
    assert selector.choose(case, NAMES, ways) == name
    assert selector.known(case._replace(rows=None), NAMES) == name
    assert not ways.were_timed


@pytest.mark.parametrize(("case", "name"), [(CASE, "native"), (ON_CUDA, "torch")], ids=["cpu", "cuda"])
def test_torch_computes_on_a_gpu_where_timing_finds_no_room(monkeypatch, case, name):
    monkeypatch.setattr(selector, "_may_measure", lambda device: True)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: torch.enable_grad())
    assert selector.choose(case, NAMES, no_room) == name


def test_what_was_measured_counts_from_then_on(monkeypatch):
    selector._known[ON_CUDA] = selector.Choice("native", {})
    several(monkeypatch)
    assert selector.choose(ON_CUDA, NAMES, no_room) == "native"


def test_a_kernel_that_is_there_later_is_tried():
    assert selector.choose(CASE, ("triton", "torch"), Ways(triton=1, torch=2)) == "triton"
    for restart in (lambda: None, another_process):
        restart()
        ways = Ways(native=1, triton=2, torch=3)
        assert selector.choose(CASE, ("native", "triton", "torch"), ways) == "native"
    another_process()
    assert selector.choose(CASE, ("triton", "torch"), no_room) == "triton"  # what is known of these is still known


@pytest.fixture(params=["ieee", "tf32"])
def precision(request):
    torch.backends.cuda.matmul.fp32_precision = request.param
    yield request.param
    torch.backends.cuda.matmul.fp32_precision = "none"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("call", [linear_act, mlp])
def test_a_choice_on_a_gpu_depends_on_tf32(monkeypatch, precision, call, device, dtype):
    """Tensors without memory need no GPU; what is known counts for them."""
    cases = []
    monkeypatch.setattr(selector, "known", lambda case, _: cases.append(str(case)) or "torch")
    with FakeTensorMode(), torch.no_grad():
        x, weight = (torch.empty(8, 8, dtype=dtype, device=device) for _ in range(2))
        call(x, weight, *((None, weight, None) if call is mlp else ()))
    is_other = precision == "tf32" and device == "cuda" and dtype == torch.float32
    assert ["TF32" in it for it in cases] == [is_other]


def test_what_is_remembered_of_a_call_on_a_gpu_depends_on_tf32():
    x, kind = torch.empty(8, 8, device="meta"), ("mlp", "gelu", False, False, 0.0, False)
    keys = []
    for allowed in ("ieee", "tf32"):
        torch.backends.cuda.matmul.fp32_precision = allowed
        keys += choice.key_of(x, x, None, "gelu"), block_choice.key_of(kind, x, (x, None, None, None, x, None))
        torch.backends.cuda.matmul.fp32_precision = "none"
    assert None not in keys
    assert len(set(keys)) == 4


def test_threads_do_not_time_each_other():
    """DataParallel's replicas come at the same moment, and would keep for good what they measured of each other."""
    timed, together = [], []

    class Slow(Ways):
        def run(self, name):
            timed.append(name)
            together.append(len(timed))
            sleep(0.001)
            timed.remove(name)
            return super().run(name)

    def of_device(i):
        selector.choose(CASE._replace(sizes=(3, i % 2)), NAMES, Slow(native=1, torch=2))

    threads = [threading.Thread(target=of_device, args=(i,)) for i in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert set(together) == {1}
    assert len(selector.choices()) == 2
