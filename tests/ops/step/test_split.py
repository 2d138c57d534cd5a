"""The guarantee of csrc/step/split.h, over all 2^32 masters; and that its twin in torch gives the same bits."""

import platform
import subprocess
from pathlib import Path

import pytest
import torch

from mpkernels.ops.step.split import join, split
from tests import ROOT
from tests.cases import same_bits
from tests.proof.emulation import find_compiler

CSRC = ROOT / "csrc"


def test_every_master_survives(tmp_path):
    program = tmp_path / "split"
    x86 = ["-DMPK_X86"] if platform.machine() in ("x86_64", "AMD64") else []
    flags = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-Wno-psabi", "-pthread", "-DMPK_ISA=native"]
    source = Path(__file__).with_name("split.cpp")
    subprocess.run([*find_compiler(), *flags, *x86, f"-I{CSRC}", str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "all 2^32 masters hold\n")


def masters():
    """Random bits, every exponent with extreme mantissas, and both sides of every tie of some weights."""
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    ends = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0x7FFFFF])
    exponents = torch.arange(256) << 23
    edges = (exponents[:, None] | ends).flatten()
    ties = (torch.arange(0, 2**16, 37)[:, None] << 16 | ends).flatten()
    return torch.cat([bits, edges, edges | 1 << 31, ties]).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_torch_twin_keeps_the_guarantee(dtype):
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
def test_the_remainder_of_another_weight(dtype):
    """What has been written to a weight stays: every weight but NaN, beside any remainder."""
    weights = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    weights = weights[~weights.isnan()]
    remainders = torch.tensor([-32768, -32767, -16385, -16384, -8, -1, 0, 1, 8, 16384, 32767], dtype=torch.int16)
    weight, remainder = torch.broadcast_tensors(weights[:, None], remainders)
    master = join(weight, remainder)
    assert not master.isnan().any()
    assert same_bits(split(master, dtype)[0], weight.contiguous())
    assert torch.equal(join(torch.zeros(7, dtype=dtype), remainders[:7]), torch.zeros(7))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_weight_is_the_nearest(dtype):
    """It differs from torch's rounding on ties alone."""
    master = masters()
    master = master[master.isfinite()]
    weight = split(master, dtype)[0]
    other = weight != master.to(dtype)
    distance = [(x.double() - master.double()).abs()[other] for x in (weight, master.to(dtype))]
    assert torch.equal(*distance)
