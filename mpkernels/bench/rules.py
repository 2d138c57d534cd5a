"""Each optimizer's step beside torch's fused class, Lion's beside torch-optimi's.

With clipping, the bytes allow AdamW and Adam 1.25 times torch's speed, SGD with momentum 1.33, without 1.5; under a
scaler, too, 1.5, 1.67 and 2.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from mpkernels.bench import peers, steps
from mpkernels.bench.pairs import Pair
from mpkernels.bench.settings import LISTS_ANYWHERE, Case, Place, Setting
from mpkernels.optim import SGD, Adam, AdamW, Lion


class Rule(NamedTuple):
    ours: Callable[..., Any]
    theirs: steps.MakeOptimizer
    op: str
    states: int  # of a parameter
    peer: str = ""  # the library that ``theirs`` is of, if not torch


RULES = {
    "adamw": Rule(AdamW, steps.fused, "adamw_", 2),
    "adam": Rule(Adam, partial(steps.fused, kind=torch.optim.Adam), "adam_", 2),
    "sgd-momentum": Rule(partial(SGD, momentum=0.9), partial(torch.optim.SGD, momentum=0.9, fused=True), "sgd_", 1),
    "sgd": Rule(SGD, partial(torch.optim.SGD, fused=True), "sgd_", 0),
    "lion": Rule(Lion, peers.maker(peers.LION), "lion_", 1, "torch-optimi"),
}
CASES = Case("1x50M", ((50_000_000,),)), *(it for it in LISTS_ANYWHERE if it.name in ("100x500k", "1000x5k"))


class Comparison(NamedTuple):
    setting: Setting
    prepare: Callable[[], Pair]
    op: str
    baseline: str
    rule: str
    missing: str


def comparisons(place: Place, baseline: str, baseline_with_scaler: str) -> Iterator[Comparison]:
    for (name, rule), case in product(RULES.items(), CASES):
        setting = Setting(place, "fp32", case)
        alone = partial(steps.compare_without_scaler, setting, rule.ours, rule.theirs, rule.states)
        clock = "loop" if rule.peer else case.clock  # no graph can hold a peer's step
        scaled = partial(steps.compare_steps, setting, rule.theirs, clock, rule.states, make=rule.ours)
        names, missing = (baseline, baseline_with_scaler), ""
        if rule.peer:
            names = rule.peer, f"torch.amp {rule.peer}"
            missing = peers.why_not(peers.LION.module, peers.LION.needs_cuda, place.device)
        for prepare, of_theirs in zip((alone, scaled), names, strict=True):
            yield Comparison(setting, prepare, rule.op, of_theirs, name, missing)
