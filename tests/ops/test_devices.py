"""A device that the compiled kernels can't run on gets the next kernel of each op, with one warning."""

import warnings

import pytest
import torch

import mpkernels
from mpkernels.doctor.kernels import why_not
from mpkernels.ops import _devices, _dispatcher, _extension, _registry, _routes
from tests.ops.step.rules_table import RULES

CPU = torch.device("cpu")
BUILT_FOR = ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "compute_100"]
GOOD = (0, 13000)


@pytest.fixture(autouse=True)
def decisions_restored():
    """Restore after the test what was decided about devices."""
    kept = _devices.capabilities, _devices.left_out, _devices._warned
    before = [it.copy() for it in kept]
    yield
    for it, content in zip(kept, before, strict=True):
        it.clear()
        it.update(content)
    for device_type in ("cpu", "cuda"):
        _routes.go_by_devices(device_type)


@pytest.mark.parametrize(
    "capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 3), (11, 0), (12, 0), (12, 1), (13, 0)]
)
def test_a_chip_with_code_or_ptx_runs_it(capability):
    assert _devices.why_not_native(capability, BUILT_FOR, "nvcc 13.0", GOOD) == ""


def test_ptx_serves_the_chip_that_it_is_for():
    assert _devices.why_not_native((9, 0), ["sm_80", "compute_90"], "nvcc 13.0", GOOD) == ""


@pytest.mark.parametrize(
    ("capability", "built_for", "driver", "advice"),
    [
        ((7, 0), BUILT_FOR, GOOD, "need compute capability 7.5, and it has 7.0"),
        ((8, 0), ["sm_86", "compute_90"], GOOD, "need compute capability 8.6, and it has 8.0"),
        ((9, 0), ["sm_80", "sm_100"], GOOD, "built for sm_80, sm_100: build mpkernels anew, with an nvcc that knows"),
        ((13, 0), BUILT_FOR, (0, 12080), "the driver of CUDA 12.8 can't translate that of 13.0: update the driver, or"),
        ((9, 0), BUILT_FOR, (35, 0), "too old for CUDA 13.0, which they are built with: update the driver, or build"),
        ((9, 0), BUILT_FOR, (999, 0), "fails with error 999"),
    ],
)
def test_for_another_chip_the_reason_says_what_to_do(capability, built_for, driver, advice):
    assert advice in _devices.why_not_native(capability, built_for, "nvcc 13.0", driver)


def test_an_older_driver_of_the_same_major_version_runs_code_but_no_ptx():
    assert _devices.why_not_native((9, 0), BUILT_FOR, "nvcc 13.2", GOOD) == ""
    assert _devices.why_not_native((11, 0), BUILT_FOR, "nvcc 13.2", GOOD) != ""  # PTX alone


@pytest.fixture
def machine_with(monkeypatch):
    """Return a function that acts as if torch began to use CUDA devices of the given capabilities. The library is built
    for BUILT_FOR."""
    monkeypatch.setattr(_registry, "_native", {(op, kind) for op in _registry._ops for kind in ("cpu", "cuda")})
    built = {"cuda": {"built_for": BUILT_FOR, "compiler": "nvcc 13.0", "left_out": ""}}
    monkeypatch.setattr(_extension, "build_info", lambda _: built)

    def begin(*capabilities, driver=GOOD):
        monkeypatch.setattr(_extension, "ask_driver", lambda: driver)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"chip {device.index}")
        _devices.decide()
        _routes.go_by_devices("cuda")

    return begin


def kernels(op, device):
    return _registry.kernels_on(torch.device(device), op)


@pytest.mark.parametrize("op", ["unscale_", "linear_act"])
def test_each_device_has_the_kernels_that_run_on_it(machine_with, op):
    machine_with((9, 0), (7, 5), (7, 0), (6, 1))
    available = [kernels(op, f"cuda:{i}") for i in range(4)]
    assert available == [["native", "triton", "reference"]] * 2 + [["triton", "reference"], ["reference"]]


def test_if_all_devices_run_all_kernels_no_routes_are_made(machine_with, monkeypatch):
    pushed = []
    monkeypatch.setattr(_routes._dispatcher, "push", lambda kernels: pushed.append(kernels))
    machine_with((9, 0), (8, 6), (7, 5))
    assert not any(pushed)
    assert not _devices.left_out


@pytest.mark.parametrize("op", {line.ops.rule.op: None for line in RULES.values()})
def test_with_a_driver_that_is_too_old_all_devices_run_the_next_kernel(machine_with, op):
    machine_with((9, 0), (8, 0), driver=(35, 0))
    assert kernels(op, "cuda:0") == kernels(op, "cuda:1") == ["triton", "reference"]


def test_doctor_says_why_a_device_lacks_the_native_kernel(machine_with):
    machine_with((9, 0), (7, 0))
    assert "need compute capability 7.5" in why_not()["native on cuda:1"]
    assert "native on cuda:0" not in {*why_not()} - {"native on cuda"}


def test_each_of_two_devices_runs_its_own_kernel(machine_with, monkeypatch):
    op, ran = _registry._ops["unscale_"], []
    monkeypatch.setattr(_routes, "find_kernel", lambda *_: lambda *arguments: ran.append("native"))
    monkeypatch.setattr(op, "triton", lambda *arguments: ran.append("triton"))
    machine_with((9, 0), (7, 0))
    run = _routes._route(op, "cuda")
    with torch._subclasses.FakeTensorMode():
        here, there = (torch.empty(2, device=f"cuda:{i}") for i in range(2))
        run([here], here, here)
        with pytest.warns(RuntimeWarning, match=r"can't run on cuda:1 \(chip 1\).*need compute capability 7.5"):
            run([there], there, there)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run([there], there, there)
        with mpkernels.backend("native"):
            native = _dispatcher.forced[-1]["unscale_", "cuda"]
            native([here], here, here)
            with pytest.raises(
                NotImplementedError,
                match="unscale_: the native kernel can't run on cuda:1, only triton, reference: they need compute",
            ):
                native([there], there, there)
    assert ran == ["native", "triton", "triton", "native"]


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 0)], ids=str)
def test_asking_for_kernels_does_not_begin_to_use_cuda(monkeypatch, device):
    """Otherwise processes forked later couldn't use CUDA."""

    def refuse(*arguments):
        raise AssertionError("CUDA was initialised")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("init", "_lazy_init", "current_device", "get_device_capability"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    assert mpkernels.backends("unscale_", device)[-1] == "reference"


def test_once_cuda_is_in_use_kernels_are_those_of_the_current_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    _devices.left_out[torch.device("cuda", 1)] = "it is a test"
    assert "native" not in mpkernels.backends("unscale_", "cuda")


# ---- the same on a machine without a GPU: the tests leave the CPU out, as a CUDA device would be left out


@pytest.fixture
def native():
    if "native" not in mpkernels.backends("unscale_"):
        pytest.skip("the compiled kernels are missing")


def unscale():
    grads, found_inf = [torch.tensor([2.0, -3.0]), torch.tensor([float("inf")])], torch.zeros(())
    mpkernels.ops.unscale_(grads, found_inf, torch.tensor(4.0))
    return [*grads, found_inf]


def leave_out_the_cpu():
    _devices.left_out[CPU] = "it is a test"
    _routes.go_by_devices("cpu")


@pytest.mark.usefixtures("native")
def test_a_device_that_is_left_out_runs_the_next_kernel(monkeypatch):
    want = unscale()
    leave_out_the_cpu()
    following, ran = mpkernels.backends("unscale_")[0], []
    assert following != "native"
    op = _registry._ops["unscale_"]
    kernel = getattr(op, following)
    monkeypatch.setattr(op, following, lambda *arguments: ran.append(following) or kernel(*arguments))
    with pytest.warns(RuntimeWarning, match="can't run on cpu.*it is a test"):
        got = unscale()
    assert ran == [following]
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    with mpkernels.backend("native"), pytest.raises(NotImplementedError, match="no native kernel on cpu, only"):
        unscale()
    with mpkernels.backend("reference"):
        torch.testing.assert_close(unscale(), want, rtol=0, atol=0)


@pytest.mark.usefixtures("native")
def test_routes_made_inside_backend_lead_to_the_native_kernel_afterwards(monkeypatch):
    """Routes are made when torch begins to use CUDA, which may happen inside ``backend``."""
    op, ran = _registry._ops["unscale_"], []
    kernel = op.reference
    monkeypatch.setattr(op, "reference", lambda *arguments: ran.append("reference") or kernel(*arguments))
    with mpkernels.backend("reference"):
        _devices.left_out[torch.device("cpu", 1)] = "it is a test"
        _routes.go_by_devices("cpu")
        unscale()
    assert ran == ["reference"]
    unscale()
    assert ran == ["reference"]


@pytest.mark.usefixtures("native")
def test_an_error_of_a_launch_is_raised_and_the_device_stays_in_use(monkeypatch):
    message = "CUDA says cudaErrorMemoryAllocation: out of memory"

    def run(*arguments):
        raise RuntimeError(f"unscale_: {message}")

    monkeypatch.setattr(_registry._ops["unscale_"], "overload", run)
    with pytest.raises(RuntimeError, match=message):
        unscale()
    assert CPU not in _devices.left_out
