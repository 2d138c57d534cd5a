"""The table of what computes a linear layer or block where nobody has tuned it: the first line that fits, else plain
torch. Each line says which measurement it comes from."""

from typing import NamedTuple

from mpkernels._extension import multiplies_halves
from mpkernels.ops.linear.kind import ROUNDING
from mpkernels.selector.case import Case

_ALL, _MLPS = ("linear_act", "gated_linear", "mlp", "gated_mlp"), ("mlp", "gated_mlp")
FP32, HALVES, WIDENED = "fp32", "16 bits", "16 bits, which the CPU has no instructions for"


class Line(NamedTuple):
    device: str
    numbers: tuple[str, ...]
    ops: tuple[str, ...]
    least_rows: int
    kernel: str
    measured: str
    activations: tuple[str, ...] = ()  # any

    def fits(self, case: Case) -> bool:
        return (
            case.device.type == self.device
            and _numbers(case) in self.numbers
            and case.op in self.ops
            and (case.rows is None or case.rows >= self.least_rows)
            and (not self.activations or case.activation in self.activations)
            and self.kernel in case.kernels
        )


TABLE = (
    Line("cpu", (WIDENED,), _ALL, 1, "native", "cpu-epyc-2026-11-23.json"),
    Line("cpu", (HALVES,), _MLPS, 1, ROUNDING, "models/cpu-epyc-2026-11-25.json"),
    Line("cpu", (FP32,), _MLPS, 64, "native", "models/cpu-epyc-2026-11-25.json"),
    Line("cuda", (FP32, HALVES), _ALL, 1, "native", "none yet"),
)


HEAD = "device", "computes in", "functions", "activations", "from rows", "computed by", "measured"


def table() -> list[list[str]]:
    """Return the table's cells, for people."""
    return [
        [line.device, " or ".join(line.numbers), ", ".join(line.ops), ", ".join(line.activations) or "any",
         str(line.least_rows), line.kernel, line.measured]
        for line in TABLE
    ]  # fmt: skip


def kernel(case: Case) -> str:
    return next((line.kernel for line in TABLE if line.fits(case)), "torch")


def _numbers(case: Case) -> str:
    dtype = case.dtypes[0]
    if dtype.itemsize != 2:
        return FP32
    return HALVES if case.device.type != "cpu" or multiplies_halves(dtype) else WIDENED
