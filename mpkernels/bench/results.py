"""Holds measurements as raw samples. Medians and intervals are computed from the samples when they are read."""

from dataclasses import dataclass, field, replace

import torch

from mpkernels._shared import cpu
from mpkernels.bench.pairs import Interval, Samples

Counts = dict[str, int]


@dataclass(frozen=True)
class Result:
    op: str
    variant: str
    place: str
    dtype: str
    case: str
    kernel: str
    moved: int  # bytes
    waited: float
    ours_us: list[float]
    torch_us: list[float]
    baseline: str = "torch"
    flops: int = 0
    counts: dict[str, Counts] = field(default_factory=dict)  # of each side; python -m benchmarks counts

    @property
    def name(self) -> str:
        words = (self.op, self.variant, self.place, self.dtype, self.case, "vs", self.baseline)
        return " ".join(filter(None, words))

    @property
    def ratio(self) -> Interval:
        """torch's time over ours: above 1, ours is faster."""
        return self._samples.ratio()

    @property
    def doubts(self) -> list[str]:
        return self._samples.doubts()

    @property
    def _samples(self) -> Samples:
        return Samples(self.ours_us, self.torch_us, self.waited)

    def and_more(self, later: "Result") -> "Result":
        """Return this result with the samples of another turn added."""
        here, there = len(self.ours_us), len(later.ours_us)
        return replace(
            self,
            ours_us=self.ours_us + later.ours_us,
            torch_us=self.torch_us + later.torch_us,
            waited=round((self.waited * here + later.waited * there) / (here + there), 3),
        )


@dataclass(kw_only=True)
class Session:
    """All results of one run."""

    skipped: dict[str, str] = field(default_factory=dict)  # name: reason
    results: list[Result] = field(default_factory=list)

    @property
    def device(self) -> str:
        """The GPU, if anything was measured on one, or the CPU."""
        return torch.cuda.get_device_name() if self.is_on_gpu else cpu.name()

    @property
    def is_on_gpu(self) -> bool:
        return any(it.place == "cuda" for it in self.results)

    def add(self, result: Result) -> Result:
        """Add a result, or its samples to those of an earlier turn."""
        for at, earlier in enumerate(self.results):
            if earlier.name == result.name:
                self.results[at] = earlier.and_more(result)
                return self.results[at]
        self.results.append(result)
        return result


def microseconds(seconds: list[float]) -> list[float]:
    return [float(f"{value * 1e6:.4g}") for value in seconds]
