"""The gate tells when a warp-specialised kernel may overwrite what a wgmma still reads."""

import pytest

from tests.proof.gate import ptx_release
from tests.proof.gate.ptx_arithmetic import Registers

# Two buffers of 1024 bytes, at 0 and 1024. Barriers from 2048 on tell that a buffer is full, those from 2064 on that
# it is released. In both loops %r1 counts, %r2 is the offset of a barrier, %r3 the buffer.
KERNEL = """
.visible .entry kernel(.param .u64 kernel_param_0)
{
	.reg .b32 	%r<20>;
	mov.u32 	%r10, %tid.x;
	setp.lt.u32 	%p1, %r10, 128;
	mov.b32 	%r1, 0;
	@%p1 bra 	$L__BB0_4;
	bra.uni 	$L__BB0_1;
$L__BB0_1:                              // copies
	and.b32 	%r4, %r1, 1;
	shl.b32 	%r2, %r4, 3;
	shl.b32 	%r3, %r4, 10;
	add.s32 	%r5, %r2, 2064;
	add.s32 	%r6, %r2, 2048;
	// begin inline asm
	{
	.reg .pred complete;
	waitLoop:
	mbarrier.try_wait.parity.shared::cta.b64 complete, [%r5], %r4;
	@!complete bra.uni waitLoop;
	}
	// end inline asm
	@%p2 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r6], 1024;
	@%p2 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r3], [%rd1, {%r8, %r9}], [%r6];
	add.s32 	%r1, %r1, 1;
	setp.lt.s32 	%p3, %r1, %r11;
	@%p3 bra 	$L__BB0_1;
	bra.uni 	$L__BB0_6;
$L__BB0_4:                              // multiplies
	mov.b32 	%r12, COUNTED_BEFORE;
$L__BB0_5:
	and.b32 	%r4, %r1, 1;
	shl.b32 	%r3, %r4, 10;
	bfe.u32 	%r7, %r3, 4, 14;
	cvt.u64.u32 	%rd2, %r7;
	or.b64 	%rd3, %rd2, 4611686293305294848;
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r20,%r21,%r22,%r23}, %rd3, %rd3, %p4, 1, 1, 0, 0;
	wgmma.commit_group.sync.aligned;
	wgmma.wait_group.sync.aligned PENDING;
	and.b32 	%r13, RELEASED, 1;
	shl.b32 	%r2, %r13, 3;
	add.s32 	%r5, %r2, 2064;
	bar.sync 	1, 128;
	@%p2 mbarrier.arrive.shared::cta.b64 _, [%r5], 128;
	add.s32 	%r1, %r1, 1;
	add.s32 	%r12, %r12, 1;
	setp.lt.s32 	%p3, %r1, %r11;
	@%p3 bra 	$L__BB0_5;
$L__BB0_6:
	ret;
}
"""


def complaints(pending, released, before=-1, changed=("", "")):
    kernel = (
        KERNEL.replace("PENDING", str(pending)).replace("RELEASED", released).replace("COUNTED_BEFORE", str(before))
    )
    assert changed[0] in kernel
    return ptx_release.early_releases(kernel.replace(*changed))


def test_a_release_after_all_wgmma_is_safe():
    assert not complaints(pending=0, released="%r1")


def test_a_release_of_the_buffer_before_is_safe_while_one_group_is_pending():
    assert not complaints(pending=1, released="%r12")  # %r12 is one less than %r1


@pytest.mark.parametrize(
    ("pending", "released", "before"), [(1, "%r1", -1), (1, "%r12", 0), (2, "%r12", -1), (7, "%r12", -1)]
)
def test_a_release_of_a_buffer_that_a_pending_group_reads_is_named(pending, released, before):
    (complaint,) = complaints(pending, released, before)
    assert complaint.startswith("released before its wgmma is over:")


def test_one_thread_releases_only_after_all_have_waited():
    (complaint,) = complaints(0, "%r1", changed=("bar.sync 	1, 128;", ""))
    assert complaint.startswith("released before its wgmma is over in other warps:")


@pytest.mark.parametrize(
    "changed",
    [
        ("add.s32 	%r5, %r2, 2064;\n	bar", "ld.shared.b32 	%r5, [%r2];\n	bar"),  # which barrier?
        ("add.s32 	%r5, %r2, 2064;\n	bar", "add.s32 	%r5, %r2, 4096;\n	bar"),  # nobody waits there
        ("or.b64 	%rd3, %rd2, 4611686293305294848;", "ld.param.b64 	%rd3, [kernel_param_0];"),  # what is read?
    ],
    ids=["barrier", "buffer", "descriptor"],
)
def test_what_cannot_be_told_is_no_pass(changed):
    assert complaints(1, "%r12", changed=changed)[0].startswith("can't tell what is released:")


def test_a_release_elsewhere_is_no_pass():
    away = ("$L__BB0_6:\n", "$L__BB0_6:\n	mbarrier.arrive.shared::cta.b64 _, [%r14], 128;\n")
    assert complaints(0, "%r1", changed=away)[0].startswith("not on a way around a wgmma:")


def test_kernels_without_partitions_pass():
    assert not ptx_release.early_releases("no wgmma")
    with pytest.raises(ValueError, match="may be overwritten"):
        ptx_release.refuse_early(
            KERNEL.replace("PENDING", "1").replace("RELEASED", "%r1").replace("COUNTED_BEFORE", "0")
        )


@pytest.mark.parametrize(
    ("statement", "result"),
    [
        ("mul.hi.u64 %x, 7, -6148914691236517205", 4),  # 7 * 2 / 3
        ("mad.lo.s32 %x, 3, -24, 5", -67),
        ("mul.wide.s32 %x, -2, 3", -6),
        ("shr.s32 %x, -8, 1", -4),
        ("shr.u32 %x, -8, 1", 2**31 - 4),
        ("bfe.u32 %x, 2064, 4, 14", 129),
        ("selp.b32 %x, 1, 2, 0", 2),
        ("setp.lt.s32 %x, -1, 0", 1),
        ("setp.lt.u32 %x, -1, 0", 0),
        ("div.s32 %x, -7, 2", -3),
        ("mov.b32 %x, global_smem", 0),
        ("add.s32 %x, %unknown, 1", None),
        ("@%p1 mov.b32 %x, 1", None),
        ("ld.shared.v2.b32 {%x, %y}, [%z]", None),
    ],
)
def test_arithmetic_is_that_of_the_chip(statement, result):
    registers = Registers()
    registers.execute("mov.b32 %x, 77")
    registers.execute(statement)
    assert registers.value("%x") == result
