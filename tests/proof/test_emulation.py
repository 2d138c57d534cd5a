"""The emulation of CUDA finds races, and only races, in whatever order the threads run."""

import ctypes
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.proof import emulation
from tests.targets import TARGETS

pytestmark = pytest.mark.exhaustive
BLOCKS, THREADS = 7, 256
KERNEL = """
__global__ void sum_kernel(const double* values, double* of_block, uint32_t* ticket, double* total) {
  const double sum = block_sum(values[blockIdx.x * kThreads + threadIdx.x]);
  const double count = block_sum(1);
  const double before = *total;
  if (threadIdx.x == 0) of_block[blockIdx.x] = sum / count;
  if (!last_one_out(ticket, gridDim.x)) return;
  double share = 0;
  if (threadIdx.x < gridDim.x) share = __ldcg(of_block + threadIdx.x);
  share = block_sum(share);
  if (threadIdx.x == 0) *total = before + share;
}
"""
# A text of the kernel, or of the functions of common/cuda.h that it calls, and the text that stands there instead.
PLANTED = {
    "the_barrier_before_the_ticket": ("  __syncthreads();\n  if (threadIdx.x == 0) {", "  if (threadIdx.x == 0) {"),
    "the_fence_before_the_ticket": ("    __threadfence();\n    is_last =", "    is_last ="),
    "the_fence_after_the_ticket": ("- 1;\n    __threadfence();\n", "- 1;\n"),
    "the_barrier_after_the_ticket": ("  __syncthreads();\n  return is_last;", "  return is_last;"),
    "the_barrier_within_a_sum": ("  __syncthreads();\n  double joined", "  double joined"),
    "the_barrier_after_a_sum": ("  __syncthreads();\n  return joined;", "  return joined;"),
    "the_way_past_l1": ("__ldcg(of_block + threadIdx.x)", "of_block[threadIdx.x]"),
}
# Bodies of kernels that race. Those of NO_RACES look similar, and don't.
RACES = {
    "two_values": "if (threadIdx.x % 32 == 0) *total = threadIdx.x;",
    "two_bytes": "reinterpret_cast<char*>(total)[threadIdx.x % 8] = threadIdx.x;",
    "two_blocks": "if (threadIdx.x == 0) *total = blockIdx.x;",
    "a_shuffle": "__shared__ int of_warp[8]; if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = threadIdx.x;"
    " __shfl_xor_sync(~0u, 0, 1); of_block[blockIdx.x * kThreads + threadIdx.x] = of_warp[threadIdx.x / 32];",
    "a_fence_without_an_atomic": "if (threadIdx.x == 0) of_block[blockIdx.x] = 1, __threadfence();"
    " __syncthreads(); if (threadIdx.x == 0) *total = __ldcg(of_block + (blockIdx.x + 1) % gridDim.x);",
    "an_atomic_and_a_store": "if (threadIdx.x == 0 && blockIdx.x > 0) atomicAdd(ticket, 1u);"
    " if (threadIdx.x == 0 && blockIdx.x == 0) *ticket = 7;",
}
NO_RACES = {
    "one_value": "*total = 3;",
    "own_bytes": "if (blockIdx.x == 0 && threadIdx.x < 8) reinterpret_cast<char*>(total)[threadIdx.x] = threadIdx.x;",
    "own_elements": "of_block[blockIdx.x * kThreads + threadIdx.x] = values[(blockIdx.x * 3 + threadIdx.x) % 99];",
    "a_warp_in_step": "__shared__ int of_warp[8]; if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = threadIdx.x;"
    " __syncwarp(); of_block[blockIdx.x * kThreads + threadIdx.x] = of_warp[threadIdx.x / 32];",
    "read_before_a_shuffle": "const int warp = blockIdx.x * kThreads + threadIdx.x / 32 * 32;"
    " double x = of_block[warp]; x += __shfl_xor_sync(~0u, x, 1); if (threadIdx.x % 32 == 0) of_block[warp] = x;",
    "atomics": "atomicAdd(ticket, 1u);",
    "a_ticket_for_each_warp": "const int warp = threadIdx.x / 32; double* mine = of_block + blockIdx.x * kThreads;"
    " mine[threadIdx.x] = 1; __syncwarp(); __shared__ bool is_last[8]; if (threadIdx.x % 32 == 0) {"
    " __threadfence(); is_last[warp] = atomicAdd(ticket, 1u) == 8 * gridDim.x - 1; __threadfence(); }"
    " __syncwarp(); if (is_last[warp]) *total = __ldcg(of_block + threadIdx.x % 32);",
    # Counts the blocks that have come while this one stood at a barrier.
    "turns": "__shared__ unsigned first; if (threadIdx.x == 0) first = atomicAdd(ticket, 1u); __syncthreads();"
    " if (threadIdx.x == 0) of_block[blockIdx.x] = atomicAdd(ticket, 0u) - first - 1;",
}


def functions_of_blocks():
    """Return the source of block_join, block_sum and last_one_out, without comments."""
    source = re.sub(r" *//.*", "", (emulation.CSRC / "common" / "cuda.h").read_text())
    return re.search(r"template <class Join>\n.*?(?=template <class\.\.\. Parameters)", source, re.DOTALL)[0]


def namespace(name, text):
    """Return the source of a kernel in a namespace, and of a function that launches it."""
    return f"""
namespace {name} {{
using namespace mpk;
{text}
}}
extern "C" __attribute__((visibility("default"))) const char* run_{name}(const double* values, double* of_block,
                                                                         uint32_t* ticket, double* total) {{
  return cudaGetErrorString(mpk::launch({name}::sum_kernel, {BLOCKS}, nullptr, values, of_block, ticket, total));
}}"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if why := TARGETS["cpu-cuda"].why_missing():
        pytest.skip(why)
    sound = functions_of_blocks() + KERNEL
    parts = [namespace("sound", sound)]
    for name, (text, instead) in PLANTED.items():
        assert sound.count(text) == 1, name
        parts.append(namespace(name, sound.replace(text, instead)))
    head = KERNEL[: KERNEL.index("{") + 1]
    parts += [namespace(name, f"{head}\n{body}\n}}") for name, body in (RACES | NO_RACES).items()]
    csrc = tmp_path_factory.mktemp("csrc")
    (csrc / "common").symlink_to(emulation.CSRC / "common")
    (csrc / "races_cuda.cu").write_text('#include "common/cuda.h"\n' + "".join(parts))
    library = ctypes.CDLL(str(emulation.build(emulation.CSRC.parent / "build" / "emulation", csrc)))
    ctypes.c_int.in_dll(library, "emulation_device").value = -1  # where tensors are
    return library


def run(library, name):
    """Return CUDA's message, and what the kernel leaves in `of_block` and `total`."""
    values = (ctypes.c_double * (BLOCKS * THREADS))(*range(BLOCKS * THREADS))
    of_block, ticket, total = (ctypes.c_double * (BLOCKS * THREADS))(), ctypes.c_uint32(), ctypes.c_double(0.5)
    kernel = getattr(library, f"run_{name}")
    kernel.restype = ctypes.c_char_p
    message = kernel(values, of_block, ctypes.byref(ticket), ctypes.byref(total)).decode()
    return message, list(of_block), total.value


def seed(library):
    return ctypes.c_uint.in_dll(library, "emulation_seed")


def test_a_sound_sum_over_blocks_is_right_in_any_order(library):
    expected = 0.5 + sum(range(BLOCKS * THREADS)) / THREADS
    for _ in range(20):
        message, _, total = run(library, "sound")
        assert (message, total) == ("no error", expected)


@pytest.mark.parametrize("name", PLANTED)
def test_a_barrier_fence_or_way_past_l1_that_is_left_out_is_found(library, name):
    for _ in range(20):
        message, *_ = run(library, name)
        assert ("L1 cache" if name == "the_way_past_l1" else "nothing orders the two") in message


@pytest.mark.parametrize("name", RACES)
def test_races_are_found(library, name):
    for _ in range(20):
        message, *_ = run(library, name)
        assert "nothing orders the two" in message


@pytest.mark.parametrize("name", NO_RACES)
def test_kernels_without_a_race_pass(library, name):
    for _ in range(20):
        assert run(library, name)[0] == "no error"


def test_work_for_another_stream_than_the_current_one_is_refused(library, monkeypatch):
    monkeypatch.setattr(ctypes.c_int.in_dll(library, "emulation_stream"), "value", 1)
    assert "not given to the current stream" in run(library, "sound")[0]


def test_the_same_seed_gives_blocks_the_same_turns(library):
    first = seed(library).value
    turns = [run(library, "turns")[1] for _ in range(10)]
    assert any(map(sum, turns))
    assert len(set(map(tuple, turns))) > 1
    seed(library).value = first
    assert [run(library, "turns")[1] for _ in range(10)] == turns


def test_a_failure_tells_its_seed_and_where_it_is(library):
    now = seed(library).value
    message, *_ = run(library, "two_values")
    assert f"(seed {now})" in message
    assert re.search(r"addr2line -Cfie \S+ 0x[0-9a-f]+ tells where", message)


def test_the_library_is_built_once_if_several_need_it_at_the_same_time(tmp_path, monkeypatch):
    built = []

    def link(compiler, objects):
        built.append(tmp_path / f"built-{len(built)}.so")
        time.sleep(0.2)  # in which the others come
        built[-1].touch()
        return built[-1]

    monkeypatch.setattr(emulation, "compile_all", lambda *_: [])
    monkeypatch.setattr(emulation, "_link", link)
    with ThreadPoolExecutor(3) as pool:
        libraries = [*pool.map(emulation.build, [tmp_path] * 3)]
    assert len(built) == len({*libraries}) == 1
    assert libraries[0].exists()
