"""csrc/step/split.h's guarantee holds for all 2^32 masters, and its twin in torch gives the same bits."""

import platform
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpkernels.ops.step.split import TOGETHER, join, join_each, split, split_each
from tests import ROOT
from tests.hard_grads import same_bits
from tests.ops.step.rules_table import RULES, Rows
from tests.proof.emulation import find_compiler

CSRC = ROOT / "csrc"


@pytest.mark.exhaustive
def test_every_master_survives_in_c_plus_plus(tmp_path):
    program = tmp_path / "split"
    x86 = ["-DMPK_X86"] if platform.machine() in ("x86_64", "AMD64") else []
    flags = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-Wno-psabi", "-pthread", "-DMPK_ISA=native"]
    source = Path(__file__).with_name("split.cpp")
    subprocess.run([*find_compiler(), *flags, *x86, f"-I{CSRC}", str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "all 2^32 masters hold\n")


def masters():
    """Return random bits, every exponent with extreme mantissas, and both sides of the ties of some weights."""
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    ends = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0x7FFFFF])
    exponents = torch.arange(256) << 23
    edges = (exponents[:, None] | ends).flatten()
    ties = (torch.arange(0, 2**16, 37)[:, None] << 16 | ends).flatten()
    return torch.cat([bits, edges, edges | 1 << 31, ties]).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_twin_in_torch_keeps_the_guarantee(dtype):
    master = masters()
    weight, remainder = split(master, dtype)
    assert (weight.dtype, remainder.dtype) == (dtype, torch.int16)
    back = join(weight, remainder)
    assert torch.equal(back.isnan(), master.isnan())
    assert torch.equal(back.signbit(), master.signbit())
    assert torch.equal(weight.signbit(), master.signbit())
    if dtype == torch.bfloat16:
        assert same_bits(back, master)
    else:
        small, large = master.abs() < 2**-14, master.abs() >= 65520
        assert same_bits(back[~small & ~large], master[~small & ~large])
        assert ((back - master).abs()[small] <= 2**-40).all()
        assert back[large].isinf().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_each_kernel_splits_as_the_twin_does(target, dtype):
    """From a weight of 0, a step of SGD with a rate of 1 stores the grad with the other sign."""
    master = masters()[:: 97 if target.is_interpreted else 1]
    master = master[~master.isnan()] + 0.0  # no -0.0, because 0.0 - 0.0 is 0.0
    line = RULES["sgd"]
    rows = Rows(line, (len(master),), [(dtype, "split")], (torch.float32,), (torch.float32,), target.device)
    for tensor in (*rows.lists["params"], *rows.lists["masters"]):
        tensor.zero_()
    hypers = dict.fromkeys(line.hypers, (0.0, 0.0)) | {"lr": (1.0, 1.0)}
    rows.step([-master.to(target.device) for _ in rows.cases], hypers, maximize=(False, False))
    for halves in zip(rows.lists["params"], rows.lists["masters"], strict=True):
        assert all(map(same_bits, (it.cpu() for it in halves), split(master, dtype)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_weight_that_was_written_to_stays_beside_any_remainder(dtype):
    """The test writes every weight, except NaNs, beside any remainder."""
    weights = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    weights = weights[~weights.isnan()]
    remainders = torch.tensor([-32768, -32767, -16385, -16384, -8, -1, 0, 1, 8, 16384, 32767], dtype=torch.int16)
    weight, remainder = torch.broadcast_tensors(weights[:, None], remainders)
    master = join(weight, remainder)
    assert not master.isnan().any()
    assert same_bits(split(master, dtype)[0], weight.contiguous())
    assert torch.equal(join(torch.zeros(7, dtype=dtype), remainders[:7]), torch.zeros(7))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_weight_is_the_nearest_to_its_master(dtype):
    master = masters()
    master = master[master.isfinite()]
    weight = split(master, dtype)[0]
    other = weight != master.to(dtype)
    distance = [(x.double() - master.double()).abs()[other] for x in (weight, master.to(dtype))]
    assert torch.equal(*distance)


class CallCounter(TorchDispatchMode):
    """Counts calls of an op."""

    def __init__(self, op):
        super().__init__()
        self.op, self.count = op, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket == self.op
        return function(*args, **(kwargs or {}))


def weights_of(dtype):
    """Return five weights of 5 elements, an empty one, 0-dim ones, one too large to join with others, odd layouts."""
    made = [torch.randn(5) for _ in range(5)] + [torch.randn(0, 3), torch.randn(()), torch.randn(7, 9), torch.randn(())]
    made += [torch.randn(3, 4).t(), torch.randn(1, 2, 3, 2).to(memory_format=torch.channels_last), torch.randn(6)[::2]]
    return [it.to(dtype) if it.is_contiguous() else it.to(dtype, memory_format=torch.preserve_format) for it in made]


@pytest.mark.parametrize("together", [0, 1, 12, 20, 1000])
def test_small_weights_are_joined_and_split_as_each_alone(monkeypatch, together):
    monkeypatch.setitem(TOGETHER, "cpu", together)
    weights = weights_of(torch.bfloat16) + weights_of(torch.float16) + weights_of(torch.bfloat16)[:3]
    remainders = [torch.randint_like(it, -(2**15), 2**15, dtype=torch.int16) for it in weights]
    masters = join_each(weights, remainders)
    for mine, weight, remainder in zip(masters, weights, remainders, strict=True):
        alone = join(weight, remainder)
        assert same_bits(mine, alone)
        assert mine.stride() == alone.stride()
        assert mine.untyped_storage().nbytes() == alone.untyped_storage().nbytes()
    moved = [it * 1.01 for it in masters]
    split_each(moved, weights, remainders)
    for master, weight, remainder in zip(moved, weights, remainders, strict=True):
        assert all(map(same_bits, (weight, remainder), split(master, weight.dtype)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_many_small_weights_take_few_calls(monkeypatch, dtype):
    monkeypatch.setitem(TOGETHER, "cpu", 40)
    weights = [torch.randn(5).to(dtype) for _ in range(16)]
    remainders = [torch.zeros(5, dtype=torch.int16) for _ in weights]
    with CallCounter(torch.ops.aten.where) as for_one:
        join(weights[0], remainders[0])
    with CallCounter(torch.ops.aten.where) as for_all:
        join_each(weights, remainders)
    assert for_all.count == 2 * for_one.count
