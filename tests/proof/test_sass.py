"""What is counted of machine code: the counts of hand-written kernels are those derived here, and it notices faults."""

import shlex
import struct
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import setup
from tests.proof.gate import measure, traces
from tests.proof.gate.chips import CHIPS
from tests.proof.gate.traces import Traced, Traces
from tests.proof.sass.code import Code
from tests.proof.sass.counts import count
from tests.proof.sass.warp import Launch, run_block
from tests.targets import ROOT

pytestmark = pytest.mark.exhaustive
BLOCKS, THREADS, WARPS = 4, 256, 8
SOURCE = ROOT / "tests" / "proof" / "sass" / "kernels.cu"


@dataclass
class Compiled:
    codes: dict[tuple[str, str], Code]  # by kernel and chip

    def run(self, kernel, chip, *arguments):
        """Of the kernel's second block, what it costs and what it stores."""
        parameters = b"".join(it if isinstance(it, bytes) else struct.pack("Q", it.ctypes.data) for it in arguments)
        counts, memory = count(self.codes[kernel, chip], Launch(parameters, (BLOCKS,), THREADS))
        return Traced(kernel, [BLOCKS], THREADS, **counts), memory


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    cuda = setup.find_cuda(setup.find_cxx())
    if cuda.left_out:
        pytest.skip(cuda.left_out)
    codes = {}
    command = shlex.join([*shlex.split(cuda.compile), "-O3", "-std=c++17"])
    measure.cuda(command, SOURCE, False, lambda name, code: codes.update({(measure.demangled(name), code.chip): code}))
    return Compiled(codes)


chips = pytest.mark.parametrize("chip", ["sm_80", "sm_90", "sm_100"])


def numbers(*shape):
    """In torch's memory, which begins with a sector."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).numpy()


def room(like):
    return torch.empty(like.shape).numpy()


def stored(memory, tensor):
    """What the second block has stored in it, of its first two warps."""
    begin = tensor.ctypes.data
    return {at - begin: byte for at, byte in memory.stored.items() if begin <= at < begin + tensor.nbytes}


def assert_stored(memory, tensor, want):
    got, content = stored(memory, tensor), want.tobytes()
    assert got
    assert all(byte == content[at] for at, byte in got.items())


@chips
def test_a_copy(compiled, chip):
    """3 rounds of 4 x 16 bytes in and out."""
    rounds = 3
    source = numbers(BLOCKS * rounds * 1024, 4)
    target = room(source)
    traced, memory = compiled.run("copy", chip, source, target)
    counts, each_way = traced.counts, THREADS * rounds * 64
    assert (counts["loaded"], counts["stored"], counts["wide"]) == (each_way, each_way, 2 * each_way)
    assert counts["moved"] == 2 * each_way
    assert counts["trips"] == rounds
    assert traced.in_flight == 64
    assert [
        counts[it] for it in ("fp64_after_data", "fp64_after_exchange", "divergent_constants", "bank_conflicts")
    ] == [0] * 4
    assert_stored(memory, target, source)


@chips
def test_a_strided_copy(compiled, chip):
    """Of 32 bytes that are read 4 are wanted."""
    source, target = numbers(BLOCKS * THREADS, 8), numbers(BLOCKS * THREADS)
    traced, memory = compiled.run("strided_copy", chip, source, target)
    counts = traced.counts
    assert (counts["loaded"], counts["stored"], counts["wide"]) == (4 * THREADS, 4 * THREADS, 0)
    assert counts["moved"] == 32 * THREADS + 4 * THREADS
    assert counts["trips"] == 1
    assert traced.in_flight == 4
    assert_stored(memory, target, source[:, 0].copy())


@chips
def test_a_chain(compiled, chip):
    """Two latencies, and in each 4 bytes a thread on the way."""
    places = torch.randperm(BLOCKS * THREADS, dtype=torch.int32).numpy()
    source, target = numbers(BLOCKS * THREADS), numbers(BLOCKS * THREADS)
    traced, memory = compiled.run("chain", chip, places, source, target)
    counts = traced.counts
    assert (counts["loaded"], counts["stored"]) == (8 * THREADS, 4 * THREADS)
    assert counts["trips"] == 2
    assert traced.in_flight == 4
    assert_stored(memory, target, source[places])


LISTING = """
    /*0000*/  S2R R0, SR_TID.X ;
    /*0010*/  BSSY B0, 0x70 ;
    /*0020*/  ISETP.GE.U32.AND P0, PT, R0, 0x10, PT ;
    /*0030*/  BMOV.32.CLEAR R2, B0 ;
    /*0040*/  BMOV.32 B0, R2 ;
    /*0050*/  @P0 BRA 0x70 ;
    /*0060*/  IMAD.SHL.U32 R0, R0, 0x2, RZ ;
    /*0070*/  BSYNC B0 ;
    /*0080*/  P2R R1, PR, RZ, 0x1 ;
    /*0090*/  EXIT ;
"""


def test_lanes_that_part_meet_again():
    lanes, numbers = {}, {}

    def watch(instruction, warp):
        lanes[instruction.address] = int(warp.active.sum())
        numbers.update({i: warp.registers["R"][i].copy() for i in (0, 1)})

    code = Code("sm_90", 8, 0, 0x210, LISTING, {})
    run_block(code, Launch(b"", (1,), 32), (0,), {0: watch})
    assert [lanes[at] for at in (0x50, 0x60, 0x80)] == [16, 16, 32]
    lane = np.arange(32)
    assert (numbers[0] == np.where(lane < 16, 2 * lane, lane)).all()
    assert (numbers[1] == (lane >= 16)).all()


VOTES = """
    /*0000*/  S2R R0, SR_TID.X ;
    /*0010*/  ISETP.GE.U32.AND P0, PT, R0, 0x3f, PT ;
    /*0020*/  BAR.RED.OR.DEFER_BLOCKING 0x0, P0 ;
    /*0030*/  B2R.RESULT RZ, P1 ;
    /*0040*/  ISETP.GE.U32.AND P0, PT, R0, 0x40, PT ;
    /*0050*/  BAR.RED.OR.DEFER_BLOCKING 0x0, P0 ;
    /*0060*/  B2R.RESULT RZ, P2 ;
    /*0070*/  EXIT ;
"""


def test_warps_vote_where_they_meet():
    """Only the last lane of the second warp says yes, and only the first time."""
    answers = {}

    def watch(instruction, warp):
        answers[warp.number] = [bool(warp.predicates["P"][i].all()) for i in (1, 2)]

    code = Code("sm_90", 8, 0, 0x210, VOTES, {})
    run_block(code, Launch(b"", (1,), 64), (0,), {0: watch, 1: watch})
    assert answers == {0: [True, False], 1: [True, False]}


def blend(compiled, kernel, chip="sm_90"):
    (a, b), rates = numbers(2, BLOCKS * THREADS, 4), abs(numbers(64))
    target = room(a)
    traced, memory = compiled.run(kernel, chip, a, b, target, rates.tobytes())
    rate = rates[np.arange(BLOCKS * THREADS) // THREADS % 64].astype(np.float64)
    if kernel == "blend_pow_a_thread":
        rate = 1 - rate**7.5
    if kernel == "blend_lane_by_lane":
        rate = rates[np.arange(BLOCKS * THREADS) % 64].astype(np.float64)
    assert_stored(memory, target, a + rate.astype(np.float32)[:, None] * b)
    return traced._replace(kernel="blend")


def complaints(good, bad):
    """What the gate says if a kernel has become another."""
    case = "unscale_ fp32", "sm_90"  # a case of which neither fp64 nor a divergent constant is wanted
    before, after = (Traces("13.0", {case: [it]}) for it in (good, bad))
    worse = [line.rpartition(": ")[2].split(",")[0] for line in traces.regressions(after, before)]
    missed = traces.missed({"nvcc": after})
    return worse, {name.rpartition(": ")[2] for name in missed} - {"bytes", "92% of a copy"}


def test_a_sound_kernel_is_not_complained_of(compiled):
    traced = blend(compiled, "blend")
    assert traced.in_flight == 32
    assert complaints(traced, traced) == ([], set())


def test_a_load_behind_a_use_is_noticed(compiled):
    good, bad = blend(compiled, "blend"), blend(compiled, "blend_loads_behind_a_use")
    assert bad.in_flight == good.in_flight / 2
    assert f"trips {good.counts['trips'] + 1}" in complaints(good, bad)[0]


def test_a_pow_a_thread_is_noticed(compiled):
    good, bad = blend(compiled, "blend"), blend(compiled, "blend_pow_a_thread")
    worse, missed = complaints(good, bad)
    assert bad.counts["fp64_after_data"] > WARPS * 20
    assert {f"{name} {bad.counts[name]}" for name in ("instructions", "fp64_after_data")} <= {*worse}
    assert missed == {"fp64 in the loop"}


def test_a_constant_read_lane_by_lane_is_noticed(compiled):
    good, bad = blend(compiled, "blend"), blend(compiled, "blend_lane_by_lane")
    worse, missed = complaints(good, bad)
    assert bad.counts["divergent_constants"] == WARPS
    assert f"divergent_constants {WARPS}" in worse
    assert "divergent constants" in missed


def test_a_bank_that_all_lanes_ask_is_noticed(compiled):
    """A warp's 32 numbers lie in 32 banks, or 8 words apart in 4: then each bank is asked 8 times."""
    source = numbers(BLOCKS * THREADS)
    counts = {}
    for kernel in ("mirror", "mirror_in_few_banks"):
        target = room(source)
        traced, memory = compiled.run(kernel, "sm_90", source, target)
        assert_stored(memory, target, source.reshape(-1, 32)[:, ::-1].copy().reshape(-1))
        counts[kernel] = traced.counts["bank_conflicts"]
    assert counts == {"mirror": 0, "mirror_in_few_banks": WARPS * 2 * 7}


def test_bytes_in_flight_are_what_littles_law_wants():
    """A copy on an H200, derived by hand: 40 registers of 256 threads leave room for 6 blocks, and half of what moves
    in 700 ns is loaded."""
    each_way = THREADS * 3 * 64
    traced = Traced("copy", [100_000], THREADS, 40, 0, {"loaded": each_way, "stored": each_way, "trips": 3})
    assert traced.resident_blocks(CHIPS["H200"]) == 6
    assert traces._in_flight([traced], CHIPS["H200"]) == (True, "98 KB, Little's law wants 11")
    assert traced.in_flight == 64
    assert CHIPS["H200"].in_one_latency == pytest.approx(4.3e12 * 700e-9 / 132)
    a_few_at_a_time = traced._replace(counts=traced.counts | {"trips": 27})
    assert traces._in_flight([a_few_at_a_time], CHIPS["H200"]) == (False, "11 KB, Little's law wants 11")


def test_what_a_block_holds_bounds_how_many_a_multiprocessor_has():
    def resident(**limits):
        it = Traced("kernel", [1], THREADS, 32, 0, {})._replace(**limits)
        return it.resident_blocks(CHIPS["H200"])

    assert resident() == 8  # 2048 threads
    assert resident(registers=64) == 4
    assert resident(registers=65) == 3  # in portions of 256 a warp
    assert resident(shared=75 << 10) == 3
    assert resident(block=32, registers=16) == 32
