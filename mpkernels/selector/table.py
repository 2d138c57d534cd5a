"""The table of what computes a linear layer or block where nobody has tuned it: the first line that fits, else plain
torch. Each line says which measurement it comes from."""

from math import inf
from typing import NamedTuple

from mpkernels.ops._extension import multiplies_halves
from mpkernels.ops.linear.block_kind import ROUNDING
from mpkernels.selector.case import Case

_ALL, _MLPS = ("linear_act", "gated_linear", "mlp", "gated_mlp"), ("mlp", "gated_mlp")
FP32, HALVES, WIDENED = "fp32", "16 bits", "16 bits in fp32"

_ANY = (1, inf)
ZEN3, EPYC = "rule/cpu-epyc-zen3-2026-11-25.json", "cpu-epyc-2026-11-23.json"
XEON, H200 = "rule/cpu-xeon-amx-2026-11-26.json", "rule/cuda-h200-2026-11-26.json"
MODELS = "models/cpu-epyc-2026-11-25.json"


class Line(NamedTuple):
    device: str
    numbers: str
    ops: tuple[str, ...]
    activations: tuple[str, ...]  # () is any
    trains: bool  # whether only calls that train fit
    rows: tuple[int, float]  # from, to; a graph that serves any number counts as more than any other
    least_hidden: int  # features between the layers, or of a lone one's result
    kernel: str
    measured: str  # a file of benchmarks/results, and the measured speed relative to torch

    def fits(self, case: Case) -> bool:
        first, last = self.rows
        return (
            case.device.type == self.device
            and _numbers(case) == self.numbers
            and case.op in self.ops
            and (not self.activations or case.activation in self.activations)
            and (case.trains or not self.trains)
            and first <= (inf if case.rows is None else case.rows) <= last
            and (not case.sizes or case.sizes[1] >= self.least_hidden)
            and self.kernel in case.kernels
        )


TABLE = (
    Line("cpu", WIDENED, _ALL, (), False, _ANY, 1, "native", f"{ZEN3}: 3.7 to 12.8 (64 rows, silu)"),
    Line("cpu", HALVES, ("mlp",), ("gelu_tanh",), True, (2048, inf), 1, ROUNDING, f"{MODELS}: 1.07 (GPT-2)"),
    Line("cpu", HALVES, ("gated_mlp",), ("silu",), True, (2048, inf), 1, ROUNDING, f"{MODELS}: 1.01 (Llama)"),
    Line("cpu", FP32, ("linear_act",), ("gelu",), False, (1, 8), 1, "native", f"{EPYC}: 1.06 to 1.47"),
    Line("cpu", FP32, ("linear_act",), ("gelu",), True, (1, 64), 1, "native", f"{XEON}: 0.98 to 1.03"),
    Line("cpu", FP32, ("linear_act",), ("gelu_tanh",), True, (16, inf), 1, "native", f"{XEON}: 1.02 to 1.44"),
    Line("cpu", FP32, _MLPS, ("gelu_tanh",), True, (64, inf), 1, "native", f"{XEON}: 0.95 to 1.14"),
    Line("cpu", FP32, _MLPS, ("silu",), True, (256, inf), 3072, "native", f"{XEON}: 0.98 to 1.03"),
    Line("cpu", FP32, ("mlp",), ("relu",), True, (256, inf), 1, "native", f"{ZEN3}: 0.99 to 1.01"),
    Line("cpu", FP32, ("mlp",), ("gelu",), True, (16, inf), 3072, "native", f"{XEON}: 0.98 to 1.02"),
    Line("cuda", HALVES, ("gated_mlp",), ("silu",), True, _ANY, 11008, "native", f"{H200}: 1.01 to 1.68"),
    Line("cuda", HALVES, ("mlp",), ("gelu", "gelu_tanh"), True, (512, inf), 14336, "native", f"{H200}: 1.02 to 1.12"),
    Line("cuda", HALVES, ("linear_act",), ("gelu",), True, (512, inf), 14336, "native", f"{H200}: 1.00 to 1.04"),
)


def kernel(case: Case) -> str:
    return next((line.kernel for line in TABLE if line.fits(case)), "torch")


def leaves_to_torch(case: Case) -> bool:
    """Return whether no line fits the case with any number of rows; in any size, if the case has no sizes."""
    return not any(it.fits(case._replace(rows=it.rows[0], trains=True, kernels=(it.kernel,))) for it in TABLE)


def _numbers(case: Case) -> str:
    dtype = case.dtypes[0]
    if dtype.itemsize != 2:
        return FP32
    return HALVES if case.device.type != "cpu" or multiplies_halves(dtype) else WIDENED
