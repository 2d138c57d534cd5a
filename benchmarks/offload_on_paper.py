"""Computes the tables of docs/offload.md: what ``offload`` keeps and copies. Nothing here is measured.

``python -m benchmarks.offload_on_paper`` writes them into the page.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.book import END
from benchmarks.formatting import table
from mpkernels.optim import AdamW

PAGE = Path(__file__).parents[1] / "docs" / "offload.md"
BEGIN = "<!-- {} written by python -m benchmarks.offload_on_paper -->\n"
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "int8"}
ELEMENTS = 64 * 256  # fills blocks of 8-bit moments

HOST = 100e9  # bytes a second, read and written in the host's memory
BUSES = {"PCIe 4": 25e9, "PCIe 5": 50e9}  # bytes a second, each way
GPUS = {"100 TFLOP/s": 100e12, "400 TFLOP/s": 400e12}  # reached in training, less than a data sheet says
MODELS = {"1B": 1e9, "8B": 8e9, "70B": 70e9}


class Choice(NamedTuple):
    weights: torch.dtype
    master: str
    moments: torch.dtype


_MASTERS = (torch.bfloat16, "split"), (torch.bfloat16, "fp32"), (torch.float32, "split")
CHOICES = [Choice(weights, master, moments) for (weights, master), moments in product(_MASTERS, NAMES)]


class Kept(NamedTuple):
    """Bytes that are kept for each parameter."""

    weights: float  # on the GPU, and once more on the host; grads take as many bytes
    states: float  # on the host: master and moments

    @property
    def moved(self) -> float:
        """Return the bytes that a step reads and writes, the grads read twice."""
        return 2 * self.weights + 2 * sum(self)


class Way(NamedTuple):
    """A way to step on the host, in bytes a parameter. Each frees grads on the GPU while the backward runs."""

    on_gpu: float
    on_host: float
    to_host: float  # grads, copied in a step
    to_gpu: float  # weights, copied in a step
    step: float  # read and written in the host's memory by a step
    overlaps: bool = True  # weights are copied back while others are stepped

    def after_backward(self, bus: float) -> float:
        """Return the seconds a parameter that the GPU waits for weights, once the grads are on the host."""
        times = self.step / HOST, self.to_gpu / bus
        return max(times) if self.overlaps else sum(times)


def kept(choice: Choice, device: str = "cpu") -> Kept:
    """Return what an optimizer with ``offload=True`` has after a step."""
    weight = torch.nn.Parameter(torch.ones(ELEMENTS, dtype=choice.weights, device=device))
    optimizer = AdamW([weight], offload=True, master=choice.master, state_dtype=choice.moments)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return Kept(bytes_of([weight]), bytes_of(it for key, it in optimizer.state[weight].items() if key != "step"))


def bytes_of(tensors: Iterable[Tensor]) -> float:
    """Return the bytes of the tensors for each of the parameter's ELEMENTS."""
    return sum(it.numel() * it.itemsize for it in tensors) / ELEMENTS


def ours(choice: Choice) -> Way:
    """Return our way, with ``release_grads``. The host computes the norm, so it reads the grads twice."""
    weights, states = both = kept(choice)
    return Way(weights, 2 * weights + states, weights, weights, both.moved)


def torchaos(weights: int) -> Way:
    """CPUOffloadOptimizer(offload_gradients=True): host copies of weights and grads, and torch's fused AdamW, whose
    moments are as wide as the weights. Nothing is clipped."""
    return Way(weights, 4 * weights, weights, weights, 7 * weights)


def deepspeeds() -> Way:
    """ZeRO-Offload of DeepSpeed 0.19.6 in one process, as runtime/zero/stage_1_and_2.py has it. The GPU widens grads to
    fp32 before they are sent. Master, grads and moments are fp32. The host unscales and clips the grads in place, then
    steps the whole partition, then rounds the weights into a pinned buffer, which is sent last."""
    unscale, adam, rounding = 4 + 4, 4 + 2 * 12, 4 + 2
    return Way(2, 4 + 4 + 8 + 2, 4, 2, unscale + adam + rounding, overlaps=False)


WAYS = {
    "`offload=True`, bf16 weights, fp32 moments": ours(Choice(torch.bfloat16, "split", torch.float32)),
    "the same, int8 moments": ours(Choice(torch.bfloat16, "split", torch.int8)),
    "torchao, fp32 weights": torchaos(4),
    "torchao, bf16 weights without masters": torchaos(2),
    "DeepSpeed, bf16 weights": deepspeeds(),
}


def ways() -> Iterator[str]:
    """Yield the table of the three ways to keep states of bf16 weights with split masters."""
    kept_by = {moments: kept(Choice(torch.bfloat16, "split", moments)) for moments in NAMES}

    def cell(count: Callable[[Kept], float]) -> str:
        return " / ".join(_number(count(it)) for it in kept_by.values())

    states = cell(lambda it: it.states)
    header = "", "GPU: weights, grads, states", "host", "each way in a step", "limited by", "moves there"
    rows = [
        [
            "without",
            cell(lambda it: 2 * it.weights + it.states),
            "0",
            "0",
            "the GPU's memory",
            cell(lambda it: it.moved),
        ],
        ["`offload=True`", "4", cell(sum), "2", "the host's memory and cores", cell(lambda it: it.moved - it.weights)],
        ['`offload="stream"`', "4, and 192 MiB", states, states, "copies, each way", states],
    ]
    return table(header, rows)


def memory() -> Iterator[str]:
    """Yield the table of bytes a parameter, for each choice."""
    gpu = "GPU: weights and grads", "weights alone"
    host = "host: master and moments", "weights, pinned", "host in all", "released grads, pinned", "host in all"
    header = "weights", "master", "moments", *gpu, *host
    rows = []
    for choice in CHOICES:
        weights, states = kept(choice)
        master = choice.master if choice.weights == torch.bfloat16 else "none"
        sums = 2 * weights, weights, states, weights, states + weights, weights, states + 2 * weights
        rows.append([NAMES[choice.weights], master, NAMES[choice.moments], *map(_number, sums)])
    return table(header, rows)


def traffic() -> Iterator[str]:
    """Yield the table that compares ways: bytes a parameter, and for models the seconds over each bus, first of the
    grads' copies to the host, then of what comes after the backward."""

    def cell(size: float, way: Way) -> str:
        grads = " / ".join(f"{size * way.to_host / bus:.2g}" for bus in BUSES.values())
        return f"{grads}, then {' / '.join(f'{size * way.after_backward(bus):.2g}' for bus in BUSES.values())}"

    header = "", "on GPU", "on host", "grads travel", "weights travel", "step moves", *(f"{it}: s" for it in MODELS)
    rows = (
        [name, *map(_number, way[:5]), *(cell(size, way) for size in MODELS.values())] for name, way in WAYS.items()
    )
    return table(header, rows)


def tokens() -> Iterator[str]:
    """Yield the table of how many tokens a step needs to hide copies and updates. A backward takes 4 operations a
    parameter and token, a forward 2, so the model's size doesn't matter."""
    way = next(iter(WAYS.values()))
    hides = [f"over {bus}, grads hide" for bus in BUSES]
    header = "GPU reaches", *hides, "forward and backward take as long as the step", "with int8 moments"
    rows = []
    for gpu, speed in GPUS.items():
        grads = (way.to_host / bus * speed / 4 for bus in BUSES.values())
        steps = (it.after_backward(min(BUSES.values())) * speed / 6 for it in list(WAYS.values())[:2])
        rows.append([gpu, *(f"{count:,.0f}" for count in (*grads, *steps))])
    return table(header, rows)


def _number(value: float) -> str:
    return f"{value:.4g}"


def page(text: str) -> str:
    """Return the page's text with new tables."""
    for make in (ways, memory, traffic, tokens):
        begin = BEGIN.format(make.__name__)
        before, _, rest = text.partition(begin)
        _, end, after = rest.partition(END)
        if not end:
            raise SystemExit(f"{PAGE.name}: the lines {begin.strip()} and {END.strip()} are missing")
        text = before + begin + "\n".join(make()) + end + after
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
