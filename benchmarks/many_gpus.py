"""The cost of a step on each of many GPUs under FSDP2: bytes and launches are counted, the host's time is measured.

``python -m benchmarks.many_gpus NAME`` measures, and writes results/scale/NAME.json for the book. A fake process group
stands for the other ranks: collectives cost nothing, so that the times are the host's alone.
"""

import json
import sys
from collections.abc import Callable, Iterator
from math import ceil
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import Parameter
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.optimizers import bytes_of_torchs_step
from mpkernels.bench import steps
from mpkernels.bench.show import time

FOLDER = Path(__file__).parent / "results" / "scale"
RANKS = 8, 128, 2048, 16384
TENSORS = 100, 300, 900
SAMPLES = 40
SIDES: dict[str, Callable[[list[Parameter]], Any]] = {
    "ours": lambda params: steps.our_step(params, "cpu").finish,
    "torch": lambda params: steps.torchs_step(params, "cpu", steps.fused).finish,
}


class Model(NamedTuple):
    """A Llama 3. A layer has four projections for attention, three for the MLP, and two norms."""

    width: int
    hidden: int
    layers: int
    keys: int  # rows of the projections for keys and values
    embeddings: int = 2  # 1 if inputs and outputs share the embedding
    vocabulary: int = 128256

    def sizes(self) -> list[int]:
        width = self.width
        layer = [width * width] * 2 + [width * self.keys] * 2 + [width * self.hidden] * 3 + [width] * 2
        return [width * self.vocabulary] * self.embeddings + layer * self.layers + [width]


MODELS = {
    "1B": Model(2048, 8192, 16, 512, embeddings=1),
    "8B": Model(4096, 14336, 32, 1024),
    "70B": Model(8192, 28672, 80, 1024),
    "405B": Model(16384, 53248, 126, 1024),
}


def sharded(tensors: int, ranks: int) -> list[Parameter]:
    """Return DTensors on a mesh of so many ranks. This rank's part of each, and of its grad, has 16 elements."""
    mesh = init_device_mesh("cpu", (ranks,))

    def place() -> Any:
        return DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)], run_check=False)

    params = [Parameter(place()) for _ in range(tensors)]
    for param in params:
        param.grad = place()
    return params


def among(ranks: int, run: Callable[[], Any]) -> Any:
    """Run as rank 0 of so many ranks; the others don't exist."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        return run()
    finally:
        distributed.destroy_process_group()


def collectives(finish: Callable[[], object]) -> int:
    with CommDebugMode() as counted:
        finish()
    return counted.get_total_counts()


def measure(tensors: int, ranks: int) -> dict[str, Any]:
    """Return each side's collectives, and the host's microseconds: the least, because others may use the cores."""
    finishes = {side: make(sharded(tensors, ranks)) for side, make in SIDES.items()}
    samples: dict[str, list[float]] = {side: [] for side in finishes}
    for finish in finishes.values():
        finish()  # makes the states
    for _ in range(SAMPLES):
        for side, finish in finishes.items():
            began = perf_counter()
            finish()
            samples[side].append(1e6 * (perf_counter() - began))
    sides = {side: {"us": min(samples[side]), "collectives": collectives(finishes[side])} for side in finishes}
    return {"tensors": tensors, "ranks": ranks, **sides}


# A launch of a foreach op holds at most these tensors and elements, by ATen's MultiTensorApply.cuh.
MOST_TENSORS = {1: 110, 4: 36}  # number of lists -> tensors in each
MOST_ELEMENTS = 320 * 65536
OUR_LAUNCHES = 2 + 1 + 4  # grad_stats and adamw_; update_scale_; the outcome's zeros, and three small ones at the scale


def torchs_launches(sizes: list[int]) -> int:
    """Return the launches of torch's step: four foreach ops over one list (unscale_, norms, clipping, counts of
    steps), the update over four lists, and single ops."""
    single = 4 + 2 + 3 + 3 + 1  # for the inverse scale, found_inf, the norm of norms, the coefficient, the scale
    return 4 * _foreach_launches(sizes, 1) + _foreach_launches(sizes, 4) + single


def _foreach_launches(sizes: list[int], lists: int) -> int:
    return max(ceil(len(sizes) / MOST_TENSORS[lists]), ceil(sum(sizes) / MOST_ELEMENTS))


def counted() -> Iterator[list[str]]:
    """Yield a row for each model and number of GPUs: GB held, GB moved, launches. Ours has bf16 weights with split
    masters, torch's fp32 weights."""
    for name, model in MODELS.items():
        for ranks in RANKS:
            sizes = [-(-size // ranks) for size in model.sizes()]
            held = 14, 16  # bytes a parameter: weight, master, two moments and grad
            moved = steps.bytes_of_our_step(torch.bfloat16), bytes_of_torchs_step()
            yield [
                f"{name}, {len(sizes)} tensors",
                str(ranks),
                " / ".join(f"{it * sum(sizes) / 1e9:.3g}" for it in held),
                " / ".join(f"{it * sum(sizes) / 1e9:.3g}" for it in moved),
                f"{OUR_LAUNCHES} / {torchs_launches(sizes)}",
            ]


def measured(path: Path) -> Iterator[list[str]]:
    for row in json.loads(path.read_text())["rows"]:
        sides = [row[side] for side in SIDES]
        us, calls = [it["us"] for it in sides], [it["collectives"] for it in sides]
        yield [
            str(row["tensors"]),
            str(row["ranks"]),
            " / ".join(map(time, us)),
            f"{us[1] / us[0]:.1f}",
            " / ".join(map(str, calls)),
        ]


def main(name: str) -> None:
    torch.set_num_threads(1)
    rows = [among(ranks, lambda n=n, ranks=ranks: measure(n, ranks)) for n in TENSORS for ranks in RANKS]
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
