"""The table of what computes a linear layer or block where nobody has tuned it: the first line that fits, else plain
torch. Each line says which measurement it comes from."""

from typing import NamedTuple

from mpkernels._extension import multiplies_halves
from mpkernels.ops.linear.kind import ROUNDING
from mpkernels.selector.case import Case

_ALL, _MLPS = ("linear_act", "gated_linear", "mlp", "gated_mlp"), ("mlp", "gated_mlp")
FP32, HALVES, WIDENED = "fp32", "16 bits", "16 bits without instructions for them"


class Line(NamedTuple):
    device: str
    numbers: tuple[str, ...]
    ops: tuple[str, ...]
    activations: tuple[str, ...]  # () is any
    trains: bool  # else any call
    least_rows: int
    kernel: str
    measured: str

    def fits(self, case: Case) -> bool:
        return (
            case.device.type == self.device
            and _numbers(case) in self.numbers
            and case.op in self.ops
            and (not self.activations or case.activation in self.activations)
            and (case.trains or not self.trains)
            and (case.rows is None or case.rows >= self.least_rows)
            and self.kernel in case.kernels
        )


TABLE = (
    Line("cpu", (WIDENED,), _ALL, (), False, 1, "native", "cpu-epyc-2026-11-23.json (fp16): 26 to 50 times torch"),
    Line("cpu", (HALVES,), _MLPS, (), True, 1, ROUNDING, "models/cpu-epyc-2026-11-25.json: 1.07 times torch (GPT-2)"),
    Line("cpu", (HALVES,), _MLPS, (), True, 1, "native", "the same: without fp32 weights, nothing is rounded"),
    Line("cpu", (FP32,), ("linear_act",), ("gelu",), False, 1, "native", "cpu-epyc-2026-11-23.json: 1.01 to 1.48"),
    Line(
        *("cpu", (FP32,), ("mlp",), ("none", "relu", "relu2", "gelu_tanh", "silu", "sigmoid", "tanh"), True, 64),
        *("native", "models/cpu-epyc-2026-11-25.json: 1.09 (GPT-2)"),
    ),
    Line(
        *("cpu", (FP32,), ("gated_mlp",), ("relu", "gelu_tanh", "silu"), True, 512),
        *("native", "models/cpu-epyc-2026-11-25.json: 1.00 (Llama)"),
    ),
    Line("cuda", (FP32, HALVES), _ALL, (), False, 1, "native", "none yet: no more bytes than torch, which multiplies"),
)
HEAD = "device", "computes in", "functions", "activations", "calls", "from rows", "computed by", "measured"


def table() -> list[list[str]]:
    """Return the table's cells, for people."""
    return [
        [
            *(it.device, " or ".join(it.numbers), ", ".join(it.ops), ", ".join(it.activations) or "any"),
            *("that train" if it.trains else "any", str(it.least_rows), it.kernel, it.measured),
        ]
        for it in TABLE
    ]


def kernel(case: Case) -> str:
    return next((line.kernel for line in TABLE if line.fits(case)), "torch")


def leaves_to_torch(case: Case) -> bool:
    """Return whether no line fits a case of any size."""
    return not any(it.fits(case._replace(rows=None, trains=True, kernels=(it.kernel,))) for it in TABLE)


def _numbers(case: Case) -> str:
    dtype = case.dtypes[0]
    if dtype.itemsize != 2:
        return FP32
    return HALVES if case.device.type != "cpu" or multiplies_halves(dtype) else WIDENED
