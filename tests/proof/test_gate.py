"""The compile gate notices kernels that got worse."""

import json
import os
from pathlib import Path

import pytest

from tests.proof.gate import limits, measure, traces
from tests.proof.gate.launches import Launch
from tests.proof.gate.limits import SHARED_LIMIT, Section, regressions
from tests.proof.sass.counts import TOTALS

GOOD = {"registers": 40, "spills": 0, "stack": 0, "shared": 1024, "load128": 4, "HGMMA": 8}
KERNEL = "kernel", "sm_90"


def complaints(version="13.0", **changes):
    measured = Section(version, {KERNEL: GOOD | changes})
    return [*regressions(measured, Section("13.0", {KERNEL: GOOD}))]


@pytest.mark.parametrize(
    "change",
    [{"spills": 1}, {"load128": 3}, {"HGMMA": 0}, {"registers": 41}, {"stack": 8}, {"shared": 1025}],
    ids=str,
)
def test_what_is_worse_is_named(change):
    (complaint,) = complaints(**change)
    ((name, number),) = change.items()
    assert complaint.startswith("kernel on sm_90: ")
    assert name in complaint
    assert str(number) in complaint


def test_what_is_as_good_or_better_passes():
    assert not complaints()
    assert not complaints(registers=39, load128=5, shared=0, store128=1)


def test_of_another_compiler_only_limits_count():
    assert not complaints("13.1", registers=255, stack=8, shared=SHARED_LIMIT["sm_90"], load128=1, HGMMA=1)
    for change in ({"spills": 1}, {"shared": SHARED_LIMIT["sm_90"] + 1}, {"load128": 0}, {"HGMMA": 0}):
        assert len(complaints("13.1", **change)) == 1


def test_kernels_that_come_and_go():
    some, none = Section("13.0", {KERNEL: GOOD | {"spills": 2}}), Section("13.0", {})
    assert len([*regressions(some, none)]) == 2  # new, and it spills
    assert len([*regressions(none, some)]) == 1


def test_a_launch_names_the_functions_that_a_kernel_is_given():
    """Rules share a kernel and differ in these functions. Without names, launches of two rules would look alike."""
    said = {
        "signature": {"rows": "*i64", "STATES": "constexpr", "STEP": "constexpr"},
        "constant_keys": [[1], [2]],
        "constant_vals": [1, {"jit_function": "mpkernels.ops.step.rules.lion_triton:step"}],
        "attrs_keys": [[0]],
        "attrs_vals": [[["tt.divisibility", 16]]],
        "options": {"num_warps": 4, "enable_fp_fusion": False},
    }
    launch = Launch("mpkernels.ops.step.launch_kernel", "step_kernel", "sm_90", json.dumps(said))
    kernel = "launch_kernel.step_kernel(*i64:16, STATES=1, STEP=lion_triton.step)"
    assert launch.name == f"{kernel} num_warps=4 enable_fp_fusion=False"


USAGE = """
 Function kernel:
  REG:40 STACK:16 SHARED:1024 LOCAL:8 CONSTANT[0]:600 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
CODE = """
		Function : kernel
        /*0000*/                   LDC R1, c[0x0][0x28] ;                 /* 0x00000a00ff017b82 */
        /*0010*/              @!P0 LDG.E.128.CONSTANT R8, desc[UR4][R2.64] ;
        /*0020*/                   LDG.E.64 R4, desc[UR4][R2.64] ;
        /*0030*/              @P1  STL.64 [R1+0x8], R4 ;
        /*0040*/                   LDL R5, [R1+0x8] ;
        /*0050*/                   STG.E.128 desc[UR4][R2.64], R8 ;
        /*0060*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
"""


def test_a_cubin_in_numbers(monkeypatch):
    monkeypatch.setattr(measure, "output", lambda *command: USAGE if "-res-usage" in command else CODE)
    used = {"registers": 40, "spills": 2, "stack": 24, "shared": 1024}
    assert measure._of_cubin("x.cubin") == {"kernel": used | {"load128": 1, "store128": 1, "HGMMA": 1}}


def test_what_is_missed_is_printed_where_it_is_known_and_fails_where_it_is_not():
    missed = {"a": "52%", "b": "3", "kernel on sm_90: 3 spills": ""}
    known, unknown = traces.judge(missed, ["a", "kernel on sm_90: 3 spills"])
    assert known == ["known shortfall: a: 52%", "known shortfall: kernel on sm_90: 3 spills"]
    assert unknown == ["b: 3"]
    assert traces.judge({}, ["a"])[1] == ["a: listed as a shortfall, and is none"]


def test_the_tables_are_of_the_same_compilers():
    assert {name: it.version for name, it in traces.read().of_compiler.items()} == {
        name: it.version for name, it in limits.read().items()
    }


def test_only_known_requirements_are_missed():
    of_compiler, shortfalls = traces.read()
    assert traces.missed(of_compiler).keys() <= {*shortfalls}


def test_an_update_takes_shortfalls_off_the_list_and_adds_none(monkeypatch, tmp_path):
    monkeypatch.setattr(traces, "PATH", tmp_path / "traces.json")
    traces.PATH.write_text('{"shortfalls": ["a", "b"]}')
    counted = {"nvcc": traces.Traces("13.0", {})}
    traces.update(counted, ["b", "c"])
    assert traces.read() == (counted, ["b"])


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Return a source, and the object that was built of it."""
    source, built = Path("csrc/grads/unscale_cuda.cu"), Path("build/native/unscale_cuda.o")
    monkeypatch.chdir(tmp_path)
    for path in (source, Path("setup.py"), Path("csrc/common/cuda.h"), built):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (10, 10 + (path == built)))
    built.with_name("build.ninja").write_text(f"build {built}: compile {source} | {built}.by\n  compile = nvcc -O3\n\n")
    return source, built


def test_an_object_of_the_last_build_is_reused(checkout):
    source, built = checkout
    assert measure.built_before("nvcc -O3", source) == built
    assert measure.built_before("nvcc -O2", source) is None
    assert measure.built_before("nvcc", source) is None


@pytest.mark.parametrize("changed", ["csrc/common/cuda.h", "csrc/grads/unscale_cuda.cu", "setup.py"])
def test_an_object_older_than_its_sources_is_not_reused(checkout, changed):
    os.utime(changed, (12, 12))
    assert measure.built_before("nvcc -O3", checkout[0]) is None


def test_where_nothing_was_built_nothing_is_reused(checkout):
    checkout[1].unlink()
    assert measure.built_before("nvcc -O3", checkout[0]) is None


@pytest.mark.parametrize(
    ("packs", "block", "missed"), [(0, 0, ""), (1, 0, "fp64 in the loop"), (0, 1, "fp64 of the block")]
)
def test_grad_stats_may_add_once_in_fp64_for_8_elements_and_once_for_each_lane_and_warp(packs, block, missed):
    """A block of 8 warps: 16 packs a lane, each converted and added; then 5 sums over a warp and 7 over the warps."""
    counts = dict.fromkeys([*TOTALS, "trips"], 0) | {
        "loaded": 8 * 32 * 16 * 8 * 4,
        "fp64_after_data": 8 * (32 + packs),
        "fp64_after_exchange": 8 * (12 + block),
    }
    launch = traces.Traced("kernel", [1526], 256, 32, 0, counts)
    found = traces.requirements("nvcc", "grad_stats fp32", "sm_90", [launch])
    assert [it.name for it in found if "fp64" in it.name and not it.holds] == [
        f"nvcc, grad_stats fp32, sm_90: {name}" for name in [missed] if name
    ]
