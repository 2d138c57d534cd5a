"""What roofline.py makes of the cases: beside what was measured, and for GPUs that were never at hand."""

from collections.abc import Iterable, Iterator

import torch

from mpkernels.bench import roofline
from mpkernels.bench.linear import SHAPES
from mpkernels.bench.results import Result
from mpkernels.bench.roofline import Gpu, Work
from mpkernels.bench.settings import DTYPES, LISTS, LISTS_ANYWHERE

VARIANTS = {"": torch.float32, "moments-bf16": torch.bfloat16, "moments-8bit": torch.int8}
SIZES = {case.name: [torch.Size(shape).numel() for shape in case.shapes] for case in (*LISTS["cuda"], *LISTS_ANYWHERE)}

Pair = tuple[Work, Work]


def step(dtype: str, variant: str, case: str) -> Pair:
    sizes = SIZES[case]
    return roofline.our_step(sizes, DTYPES[dtype], VARIANTS[variant]), roofline.torchs_step(sizes)


def linear_act(shape: Iterable[int]) -> Pair:
    rows, inputs, outputs = shape
    return roofline.our_linear_act(rows, inputs, outputs), roofline.torchs_linear_act(rows, inputs, outputs)


def of_result(result: Result, gpu: Gpu) -> float | None:
    """None for what roofline.py has not counted."""
    is_step = result.op == "step" and result.baseline == "torch.amp fused" and result.variant in VARIANTS
    if is_step and result.case in SIZES and "host" not in result.case:
        return roofline.ratio(gpu, *step(result.dtype, result.variant, result.case))
    if result.op == "linear_act" and result.baseline == "torch.amp eager" and result.dtype != "fp32":
        return roofline.ratio(gpu, *linear_act(map(int, result.case.split("x"))))
    return None


def rows() -> Iterator[tuple[str, list[float]]]:
    """Times torch on each of GPUS."""
    pairs = {
        f"step {' '.join(filter(None, (dtype, variant)))} {case}": step(dtype, variant, case)
        for case in ("1x1e9", "gpt2")
        for dtype, variant in (("fp32", ""), ("bf16", ""), ("bf16", "moments-bf16"), ("bf16", "moments-8bit"))
    }
    shapes = [shape for shape in SHAPES["cuda"] if shape.rows in (512, 8192, 65536) and shape.outputs in (3072, 16384)]
    pairs |= {f"linear_act bf16 {shape}": linear_act(shape) for shape in shapes}
    for name, pair in pairs.items():
        yield name, [roofline.ratio(gpu, *pair) for gpu in roofline.GPUS.values()]
