"""find_max_batch_size finds the largest size that fits: where memory runs out at a known size, and on this machine."""

import copy
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import mpkernels
from mpkernels.amp import GradScaler, set_global_policy
from mpkernels.memory import measure
from mpkernels.optim import AdamW
from tests.networks import B16, network, train

pytestmark = pytest.mark.exhaustive

MB = 2**20


class Step:
    """Runs out of memory above a size; remembers what it was called with."""

    def __init__(self, capacity, error=None):
        self.capacity, self.error, self.tried = capacity, error or torch.OutOfMemoryError("no"), []

    def __call__(self, inputs):
        self.tried.append(len(inputs))
        if len(inputs) > self.capacity:
            raise self.error


@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 100, 127, 128, 129, 1000, 10**9])
@pytest.mark.parametrize("start", [1, 5, 2000])
@pytest.mark.parametrize("memory_of", ["cpu", "cuda"])
def test_the_largest_size_that_fits_is_found(monkeypatch, capacity, start, memory_of):
    monkeypatch.setattr(measure, "clean_up", lambda: None)  # it is slow
    step, max_batch = Step(capacity), 1000
    if memory_of == "cuda":  # there a search knows only by trying what fits
        monkeypatch.setattr(measure, "available", lambda: 2**60)
    found = mpkernels.find_max_batch_size(step, (2,), start, "cpu", max_batch)
    assert step.tried[0] == min(start, max_batch)
    assert found == min(capacity, max_batch)
    assert found in step.tried
    assert max(step.tried) <= max_batch
    assert len(step.tried) == len(set(step.tried)) <= 2 + 2 * max_batch.bit_length()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_each_error_that_means_out_of_memory_counts(monkeypatch, error):
    monkeypatch.setattr(measure, "clean_up", lambda: None)
    assert mpkernels.find_max_batch_size(Step(5, error), (2,), device="cpu") == 5


def test_a_real_allocation_that_fails_counts():
    def step(inputs):
        if len(inputs) > 3:
            torch.empty(2**62, dtype=torch.uint8)

    assert mpkernels.find_max_batch_size(step, (2,), device="cpu") == 3


@pytest.mark.parametrize(
    "error", [ValueError("mine"), RuntimeError("shapes cannot be multiplied"), KeyboardInterrupt()]
)
def test_other_errors_pass_through(error):
    model = network()
    before = copy.deepcopy(model.state_dict())

    def step(inputs):
        model[0].weight.data.zero_()
        Step(4, error)(inputs)

    with pytest.raises(type(error)) as raised:
        mpkernels.find_max_batch_size(step, (2,), device="cpu", restore=[model])
    assert raised.value is error
    assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_step_for_which_no_batch_fits_is_refused():
    with pytest.raises(RuntimeError, match="not even a batch of 1 fits into the memory of cpu"):
        mpkernels.find_max_batch_size(Step(0), (2,), device="cpu")
    with pytest.raises(ValueError, match="must be above 0, got 0 and 65536"):
        mpkernels.find_max_batch_size(Step(1), (2,), start=0)


def test_a_search_may_start_at_the_two_examples_that_a_layer_needs():
    model = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30))
    assert mpkernels.find_max_batch_size(model, (20,), start=2, max_batch=13) == 13


def test_a_model_without_memory_is_refused():
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 5, device="meta"))
    with pytest.raises(ValueError, match=r"^find_max_batch_size: model must have memory, got 1.weight on the meta"):
        mpkernels.find_max_batch_size(model, (20,))


def test_a_failed_step_holds_no_memory():
    """The error keeps the step's frame alive, and the frame its tensors, until both are dropped."""
    alive = []

    def step(inputs):
        assert [it() for it in alive] == [None] * len(alive)
        local = inputs.clone()
        alive.append(weakref.ref(local))
        Step(2)(local)

    assert mpkernels.find_max_batch_size(step, (2,), max_batch=16, device="cpu") == 2
    assert len(alive) > 3


class WithBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Dropout(), nn.Linear(30, 5))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls = self.calls + 1  # another tensor
        return {"logits": self.body(torch.cat([x, x]) if len(x) == 1 else x), "calls": self.calls}


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_a_model_is_left_as_it_was(policy):
    model = WithBuffers().eval()
    model.body[3].train()
    model(torch.ones(2, 20))["logits"].sum().backward()
    params = list(model.parameters())
    grads, calls = [param.grad for param in params], model.calls
    before = copy.deepcopy((model.state_dict(), grads, calls))
    random = torch.get_rng_state()
    set_global_policy(policy)
    try:
        assert mpkernels.find_max_batch_size(model, (20,), max_batch=13) == 13
    finally:
        set_global_policy("float32")
    assert_close(
        (model.state_dict(), [param.grad for param in model.parameters()], model.calls), before, rtol=0, atol=0
    )
    assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))
    assert model.calls is calls
    assert [model.training, model.body[0].training, model.body[3].training] == [False, False, True]
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("taken", [0, 2])
@pytest.mark.parametrize("kind", [AdamW, torch.optim.AdamW])
def test_what_a_users_step_has_changed_is_undone(kind, taken):
    """Two networks are trained alike; in between, one of them looks for its largest batch."""
    model, twin = network(B16), network(B16)
    optimizer, reference, scaler = (
        kind(model.parameters()),
        kind(twin.parameters()),
        GradScaler("cpu", growth_interval=1),
    )
    scaler.scale(torch.ones(()))
    for trained, its_optimizer in ((model, optimizer), (twin, reference)) if taken else ():
        train(trained, its_optimizer, taken)
    sizes = []

    def step(inputs):
        sizes.append(len(inputs))
        optimizer.zero_grad()
        scaler.scale(model(inputs.to(B16)).float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    before = (
        {key: it.clone() for key, it in vars(optimizer).items() if isinstance(it, torch.Tensor)},
        scaler.get_scale(),
    )
    found = mpkernels.find_max_batch_size(step, (20,), max_batch=4, device="cpu", restore=[model, optimizer, scaler])
    assert (found, sizes) == (4, [1, 2, 4])
    after = {key: it for key, it in vars(optimizer).items() if isinstance(it, torch.Tensor)}, scaler.get_scale()
    assert_close(after, before, rtol=0, atol=0)
    train(model, optimizer, 2, first=2)
    train(twin, reference, 2, first=2)
    assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)
    for param, twin_param in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(optimizer.state[param], reference.state[twin_param], rtol=0, atol=0)


BELOW_70_PERCENT = """
import torch, mpkernels
from mpkernels.memory import measure
MB = 1 << 20
torch.ones(80 * MB, dtype=torch.uint8)
began = measure.resident()
measure.available = lambda: 100 * MB + began - measure.resident()

def step(inputs):
    size = 20 + len(inputs)
    assert size <= 70  # before it is taken
    torch.ones(size * MB, dtype=torch.uint8)

print(mpkernels.find_max_batch_size(step, (2,), device="cpu"))
"""


def test_a_cpu_stays_below_70_percent():
    """100 MB are said to be available at the start; a step takes 20 MB, and 1 MB for each example. It runs in a new
    process, because memory that earlier tests have left would count, too."""
    run = subprocess.run([sys.executable, "-c", BELOW_70_PERCENT], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert 40 <= int(run.stdout) <= 50


def test_no_more_memory_is_available_than_the_machine_has():
    assert 0 < measure.available() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("line", "group", "limit", "usage"),
    [
        ("0::/a/b", "a", "memory.max", "memory.current"),
        ("0::/", "", "memory.max", "memory.current"),
        ("4:cpu,memory:/a/b", "memory/a/b", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("4:memory:/not/mounted/here", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_limits_of_control_groups(tmp_path, line, group, limit, usage):
    for other in ("", "a/b"):
        (tmp_path / "sys" / other).mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys" / other / "memory.max").write_text("max\n")
    folder = tmp_path / "sys" / group
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in ((limit, "1000\n"), (usage, "700\n"), ("memory.stat", "anon 600\ninactive_file 50\n")):
        (folder / name).write_text(value)
    (tmp_path / "cgroup").write_text(f"9:name=systemd:/\n{line}\n")
    assert list(measure._left_in_control_groups(tmp_path / "sys", tmp_path / "cgroup")) == [350]


def test_a_peak_is_measured_and_forgotten():
    measure.clean_up()
    before = measure.resident()
    measure.start_peak()
    torch.ones(64 * MB, dtype=torch.uint8)
    assert measure.peak() - before >= 60 * MB
    measure.start_peak()
    status = Path("/proc/self/status")
    if status.exists() and "VmHWM" in status.read_text():  # else the system can't forget a peak
        assert measure.peak() - before < 32 * MB


def test_a_model_with_a_buffer_that_cannot_be_written_to_is_restored():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Flatten())
    model.register_buffer("ones", torch.ones(1).expand(3))
    model[1].eval()

    def step(x):
        model.train()
        model(x).sum().backward()

    mpkernels.find_max_batch_size(step, (2, 3), 2, "cpu", 4, restore=[model])
    assert model[0].num_batches_tracked == 0
    assert not model[1].training
    assert model.ones.tolist() == [1, 1, 1]
