"""What kernels that are limited by memory would take, from their machine code: tests/proof/gate counts and predicts."""

from collections.abc import Iterator

from mpkernels.bench import show
from tests.proof.gate import traces
from tests.proof.gate.cases import CASES
from tests.proof.gate.chips import CHIPS
from tests.proof.gate.prediction import LANES, Traced, predict

KERNELS = {"nvcc": "CUDA C++", "triton": "Triton"}

Row = tuple[str, str, dict[str, list[Traced]]]  # case, kernel, chip -> launches


def rows() -> Iterator[Row]:
    of_compiler = traces.read().of_compiler
    for case in CASES:
        for compiler, name in KERNELS.items():
            launches = {chip: of_compiler[compiler].rows.get((case, it.code), []) for chip, it in CHIPS.items()}
            if any(launches.values()):
                yield case, name, launches


def tables() -> Iterator[tuple[str, list[str], Iterator[list[str]]]]:
    """What each shows, its header, its rows."""
    yield (
        "Kernels that memory limits, at 50 million elements: *predicted* time, share of the speed of a copy of as many "
        "bytes, and what the time is spent on. It is the best that the compiled code allows: a CPU ran a block of each "
        "launch, instruction by instruction, and counted its bytes, waits and instructions "
        "([prediction.py](../tests/proof/gate/prediction.py), [chips.py](../tests/proof/gate/chips.py)).",
        ["", "kernel", "bytes", *CHIPS],
        times(),
    )
    yield (
        "As compiled for sm_90: instructions an element, the share of bytes that come 16 at a time, what a thread "
        "asks for before it waits. On each chip: what all threads of a multiprocessor have asked for then, and what "
        "Little's law wants of them.",
        ["", "kernel", "instructions", "by 16", "of a thread", *CHIPS],
        counts(),
    )


def times() -> Iterator[list[str]]:
    for case, name, of_chip in rows():
        cells = []
        for chip, launches in of_chip.items():
            it = traces.of_case(case, launches, chip)
            cells.append(f"{show.time(it.seconds * 1e6)}, {it.of_copy:.0%}, {it.limit}")
        yield [case, name, f"{CASES[case].bytes:.4g}", *cells]


def counts() -> Iterator[list[str]]:
    """Of the launch that moves most."""
    for case, name, of_chip in rows():
        most = {chip: max(launches, key=lambda it: it.data) for chip, launches in of_chip.items()}
        on_hopper = most["H200"]
        wide = on_hopper.counts["wide"] / (on_hopper.counts["loaded"] + on_hopper.counts["stored"])
        elements = on_hopper.data / CASES[case].bytes
        instructions = on_hopper.counts["instructions"] * on_hopper.blocks * LANES / elements
        predictions = [predict(it, CHIPS[chip]) for chip, it in most.items()]
        cells = [f"{it.in_flight / 1e3:.0f} / {it.needed / 1e3:.0f} KB" for it in predictions]
        yield [case, name, f"{instructions:.0f}", f"{wide:.0%}", f"{on_hopper.in_flight:.0f} B", *cells]
