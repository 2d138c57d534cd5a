"""The compile gate notices kernels that got worse."""

import os
from pathlib import Path

import pytest
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from benchmarks import performance_page
from tests.proof.gate import limits, loops, measure
from tests.proof.gate.launches import Launch
from tests.proof.gate.limits import SHARED_LIMIT, Section, of_chips, regressions

GOOD = {
    "registers": 40,
    "spills": 0,
    "stack": 0,
    "shared": 1024,
    "load128": 4,
    "HGMMA": 8,
    "UTMALDG": 6,
    "groups_left": 1,
    "loads": 5,
    "instructions": 300,
}
KERNEL = "kernel", "sm_90"


def complaints(version="13.0", **changes):
    measured = Section(version, {KERNEL: GOOD | changes})
    return [*regressions(measured, Section("13.0", {KERNEL: GOOD}))]


@pytest.mark.parametrize(
    "change",
    [
        {"spills": 1},
        {"load128": 3},
        {"HGMMA": 0},
        {"UTMALDG": 5},
        {"groups_left": 0},
        {"unguarded": 1},
        {"registers": 41},
        {"stack": 8},
        {"shared": 1025},
        {"loads": 6},
        {"stores": 1},
        {"atomics": 1},
        {"barriers": 1},
        {"fma": 1},
        {"fp64": 1},
        {"instructions": 301},
    ],
    ids=str,
)
def test_a_number_that_is_worse_is_named(change):
    (complaint,) = complaints(**change)
    ((name, number),) = change.items()
    assert complaint.startswith("kernel on sm_90: ")
    assert name in complaint
    assert str(number) in complaint


def test_numbers_that_are_equal_or_better_pass():
    assert not complaints()
    assert not complaints(registers=39, load128=5, shared=0, store128=1, loads=4)


def test_only_limits_count_beside_another_compilers_table():
    assert not complaints(
        "13.1", registers=255, stack=8, shared=SHARED_LIMIT["sm_90"], load128=1, HGMMA=1, UTMALDG=1, fp64=1
    )
    for change in ({"spills": 1}, {"shared": SHARED_LIMIT["sm_90"] + 1}, {"load128": 0}, {"HGMMA": 0}):
        assert len(complaints("13.1", **change)) == 1


def test_kernels_for_chips_that_are_left_out_are_not_missed():
    table = Section("13.0", {KERNEL: GOOD, ("kernel", "sm_80"): GOOD})
    assert of_chips(table, ("sm_90", "sm_75")) == Section("13.0", {KERNEL: GOOD})


def test_kernels_that_only_one_side_has_are_named():
    some, none = Section("13.0", {KERNEL: GOOD | {"spills": 2}}), Section("13.0", {})
    assert len([*regressions(some, none)]) == 2  # new, and it spills
    assert len([*regressions(none, some)]) == 1


def formula():
    """Stand for a rule's formula, and for the kernel that is given it."""


def test_a_launch_names_the_functions_that_a_kernel_is_given():
    """Rules share a kernel and differ in these functions. Without names, launches of two rules would look alike."""
    function = JITFunction(formula)
    source = ASTSource(
        function,
        {"rows": "*i64", "STATES": "constexpr", "STEP": "constexpr"},
        {(1,): 1, (2,): function},
        {(0,): [["tt.divisibility", 16]]},
    )
    launch = Launch(source, "sm_90", {"num_warps": 4, "enable_fp_fusion": False})
    kernel = "test_gate.formula(*i64:16, STATES=1, STEP=test_gate.formula)"
    assert launch.name == f"{kernel} num_warps=4 enable_fp_fusion=False"


USAGE = """
 Function kernel:
  REG:40 STACK:16 SHARED:1024 LOCAL:8 CONSTANT[0]:600 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
CODE = """
	.target	sm_90a
//--------------------- .text.kernel         --------------------------
	.section	.text.kernel,"ax",@progbits
kernel:
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128.CONSTANT R8, desc[UR4][R2.64] ;
.L_x_1:
        /*0020*/                   LDG.E.64 R4, desc[UR4][R2.64] ;
        /*0030*/              @P1  STL.64 [R1+0x8], R4 ;
        /*0040*/                   LDL R5, [R1+0x8] ;
        /*0050*/                   STG.E.128 desc[UR4][R2.64], R8 ;
        /*0060*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0070*/                   FFMA R9, R8, R8, R4 ;
        /*0080*/                   F2F.F64.F32 R10, R9 ;
        /*0090*/                   DADD R10, R10, R12 ;
        /*00a0*/                   ATOMG.E.ADD.STRONG.GPU PT, R5, desc[UR4][R2.64], R6 ;
        /*00b0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
"""


def test_a_cubins_numbers_are_read(monkeypatch):
    monkeypatch.setattr(measure, "output", lambda *command: USAGE if "-res-usage" in command else CODE)
    used = {"registers": 40, "spills": 2, "stack": 24, "shared": 1024}
    kept = {"load128": 1, "store128": 1, "HGMMA": 1}
    bounded = {"loads": 2, "stores": 1, "atomics": 1, "barriers": 1, "fma": 1, "fp64": 2}
    assert measure._cubin_numbers("x.cubin") == {"kernel": used | kept | bounded}


LOOP = """
        /*0000*/                   UTMALDG.2D [UR16], [UR4] ;
.L_x_2:
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20], R24, gsb0 ;
        /*0020*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0030*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0040*/                   @UP0 UTMALDG.2D [UR12], [UR18] ;
        /*0050*/                   @UP1 UTMALDG.2D [UR8], [UR20] ;
        /*0060*/              @!P0 BRA `(.L_x_2) ;
        /*0070*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0080*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0090*/                   UTMALDG.2D [UR12], [UR18] ;
"""


def test_waits_for_products_are_read():
    assert measure.waits(LOOP) == {"groups_left": 1}
    assert measure.waits(LOOP.replace("0x1", "0x0")) == {}
    assert measure.waits(LOOP.replace("BAR.SYNC", "NOP")) == {"groups_left": 1, "unguarded": 3}
    assert measure.waits(CODE) == {}


FORMULA = """
struct Formula {
  forward
};
struct Other {
"""
LOOPS = """
.L_x_1:
        /*0000*/                   LDG.E.64 R4, desc[UR4][R2.64] ;
.L_x_2:
        /*0010*/                   LDG.E.128.CONSTANT R8, desc[UR4][R2.64] ;
        /*0020*/                   LDG.E.U8 R9, desc[UR4][R2.64] ;
        /*0028*/                   BRA.DIV UR4, `(.L_x_5) ;
	//## File "PATH", line 3 inlined at "elsewhere.cu", line 5
        /*0030*/               @P0 BRA `(.L_x_5) ;
	//## File "elsewhere.cu", line 5
        /*0040*/              @!P1 BRA `(.L_x_3) ;
        /*0050*/                   MUFU.SQRT R9, R9 ;
        /*0060*/                   MUFU.RCP R9, R9 ;
.L_x_3:
        /*0070*/                   STG.E.EF desc[UR4][R2.64], R8 ;
        /*0080*/              @!P2 BRA `(.L_x_2) ;
        /*0090*/               @P3 BRA `(.L_x_1) ;
        /*00a0*/                   EXIT ;
.L_x_5:
        /*00b0*/                   MOV R1, R2 ;
        /*00c0*/                   MOV R2, R3 ;
        /*00d0*/                   BRA `(.L_x_3) ;
"""


def test_the_shortest_way_through_each_innermost_loop_counts(tmp_path):
    path = tmp_path / "csrc" / "formula.h"
    path.parent.mkdir()
    path.write_text(FORMULA)
    assert next(loops.innermost(LOOPS.replace("PATH", str(path)))) == loops.Code(
        instructions=7, read=17, written=4, structs={"", "Formula"}
    )


def test_the_shortest_of_the_loops_that_look_like_the_wanted_one_counts():
    compiled = [loops.Code(count, 8, 8, {"", struct}) for count, struct in ((9, "A"), (7, "A"), (5, "B"))]
    wanted = loops.Loop("title", "source", "kernel", 4, 8, 8, elements=4, struct="A")
    assert loops._numbers(wanted, compiled) == {"instructions": 7, "elements": 4, "moved": 4}
    with pytest.raises(ValueError, match="none of the kernel's loops"):
        loops._numbers(wanted._replace(read=16), compiled)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_a_pass_over_16_bits_takes_less_time_for_its_instructions_than_for_its_bytes(activation):
    """At the share of the chip's rate that is reached. The table holds what the compiler makes of the passes."""
    counted = limits.read()["loops"].kernels
    passes = [it for (title, _), it in counted.items() if title.partition(",")[0] == activation]
    assert len(passes) >= 3
    assert all(performance_page.share_of_time(it, "H200") < performance_page.REACHED for it in passes)


def test_a_step_of_8_bit_states_takes_less_time_for_its_instructions_than_for_its_bytes():
    """At nine tenths of the chip's rate."""
    steps = [it for (title, _), it in limits.read()["loops"].kernels.items() if "8-bit" in title]
    assert len(steps) == 2
    assert all(performance_page.share_of_time(it, "H200") <= 0.9 for it in steps)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Return a source, and an object that was built from it."""
    source, built = Path("csrc/grads/unscale_cuda.cu"), Path("build/native/unscale_cuda.o")
    monkeypatch.chdir(tmp_path)
    for path in (source, *map(Path, ("setup.py", "toolchain.py", "csrc/common/cuda.h")), built):
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


@pytest.mark.parametrize("changed", ["csrc/common/cuda.h", "csrc/grads/unscale_cuda.cu", "setup.py", "toolchain.py"])
def test_an_object_older_than_its_sources_is_not_reused(checkout, changed):
    os.utime(changed, (12, 12))
    assert measure.built_before("nvcc -O3", checkout[0]) is None


def test_where_nothing_was_built_nothing_is_reused(checkout):
    checkout[1].unlink()
    assert measure.built_before("nvcc -O3", checkout[0]) is None
