"""Who asks other processes, waits, skips and tells of it: a line for each kind of optimizer, scaler and hook."""

import json
import math
import re
from functools import partial

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer

from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW, Masters
from tests.distributed.counted import Counted
from tests.distributed.sharding import mesh_of, part_of
from tests.networks import B16
from tests.processes import in_processes, spawn

# Three steps of two processes are measured. An entry such as 0/1 means 0 in rank 0 and 1 in rank 1.
# finite: calls of all_reduce, of which torch's scalers add one at each look at DTensors; how often the host reads a
#   number that a GPU would make it wait for; whether the step has a norm.
# inf in rank 1, or with ZeRO in both: calls, waits, and who tells of the skip, or "steps" where there is none.
# no grads in rank 0: calls; ! if the scaler raises; - where torch's scaler or ZeRO would wait forever.
TABLE = """
optimizer             parameters     scaler               hooks            finite        inf                  no grads
# No scaler. Without a guard nobody looks; a guard looks inside the step; processes that hold parts ask.
AdamW unguarded       bf16 DTensors  -                    -                0 0 -         0 0 steps            0
AdamW                 bf16           -                    -                0 0 norm      0 0 steps/optimizer  0
AdamW group unguarded  fp32          -                    -                0 0 -         0 0 steps            0
AdamW group           fp32           -                    -                1 0 norm      1 0 optimizer        1
AdamW                 bf16 DTensors  -                    -                1 0 norm      1 0 optimizer        1
AdamW max_norm        fp32 FSDP1     -                    -                1 0 norm      1 0 optimizer        1
ZeRO                  fp32           -                    -                0 0 -         0 0 steps            -
ZeRO unguarded        bf16           -                    -                0 0 -         0 0 steps            -
ZeRO                  bf16           -                    -                1 0 norm      1 0 optimizer        -
ZeRO max_norm         fp32           -                    -                1 0 norm      1 0 optimizer        -
# Our scaler leaves the look to the step.
AdamW                 fp32           ours                 -                0 0 norm      0 0 steps/both       0
AdamW unguarded       bf16           ours                 -                0 0 norm      0 0 steps/both       0
AdamW                 fp32           ours group           -                1 0 norm      1 0 both             1
AdamW group max_norm  fp32           ours                 -                1 0 norm      1 0 both             1
AdamW                 fp32 DTensors  ours                 -                1 0 norm      1 0 both             1
AdamW                 fp32 FSDP1     ours                 -                1 0 norm      1 0 both             1
AdamW                 fp32 DTensors  ours unscale_        -                2 0 -         2 0 both             2
AdamW unguarded       fp32           ours group unscale_  -                2 0 -         2 0 both             2
AdamW max_norm        bf16 DTensors  ours unscale_        -                2 0 norm      2 0 both             2
# torch's scalers look before the step, which asks and hands the answer back.
AdamW                 fp32           torch's              -                0 0 -         0 0 steps/both       -
AdamW group           fp32           torch's              -                1 0 -         1 0 both             -
AdamW                 fp32 DTensors  torch's              -                2 0 -         2 0 both             -
AdamW                 fp32+DTensors  torch's              -                2 0 -         2 0 both             -
AdamW                 fp32 FSDP1     torch's              -                1 0 -         1 0 both             -
AdamW max_norm        fp32 FSDP1     torch's unscale_     -                1 0 norm      1 0 both             -
AdamW group           fp32           replaced             -                1 0 -         1 0 both             -
AdamW max_norm        fp32           sharded              -                1 0 norm      1 0 both             -
AdamW                 fp32 DTensors  sharded              -                2 0 -         2 0 both             -
AdamW                 fp32 FSDP1     sharded unscale_     -                2 0 -         2 0 both             -
# Hooks in all ranks: the scaler's read of an attribute unscales, looks and asks, not the step.
AdamW                 fp32           ours                 after on all     0 1 -         0 1 steps/both       0
AdamW                 bf16           torch's              before on all    0 1 -         0 1/2 steps/both     -
AdamW                 fp32 DTensors  ours                 before on all    1 1 -         1 1 both             1
AdamW                 bf16 DTensors  torch's              after on all     2 1 -         2 2 both             -
AdamW                 fp32           ours group unscale_  after on all     2 1 -         2 1 both             2
AdamW group           fp32           torch's              after on all     1 1 -         1 2 both             -
AdamW max_norm        bf16 DTensors  ours                 after on all     1 4 norm      1 2 both             1
# Those that may change grads before the step has a norm: a step that is taken asks once more.
AdamW max_norm        fp32 DTensors  ours                 before on all    2 3 norm      1 4 both             2
AdamW guard           fp32 DTensors  ours unscale_        before on all    3 3 norm      2 4 both             3
AdamW max_norm        fp32           ours group           own step on all  2 3 norm      1 4 both             2
AdamW max_norm        bf16 DTensors  torch's              before on all    3 3 norm      2 5 both             -
AdamW max_norm        fp32           sharded              before on all    2 3 norm      1 5 both             -
# A hook in one rank: that rank asks in the read, the other in its step.
AdamW                 fp32 DTensors  ours                 after on 1       1 0/1 norm/-  1 0/1 both           1
AdamW max_norm        fp32 DTensors  ours                 before on 1      1 0/5 norm    1 0/3 both           1
AdamW max_norm        fp32 DTensors  ours                 own step on 0    1 5/0 norm    1 3/0 both           1
AdamW                 bf16 DTensors  ours unscale_        before on 1      2 0/1 -       2 0/1 both           2
AdamW                 fp32           ours group           after on 1       1 0/1 norm/-  1 0/1 both           1
AdamW group max_norm  fp32           replaced             before on 1      1 0/5 norm    1 0/3 both           -
AdamW                 fp32 DTensors  torch's              before on 1      2 0/1 -       2 0/2 both           -
AdamW max_norm        bf16 DTensors  torch's              after on 1       2 0/4 norm    2 0/3 both           -
AdamW group           fp32           torch's unscale_     after on 0       1 1/0 -       1 2/0 both           -
AdamW                 fp32 FSDP1     torch's              before on 1      1 0/1 -       1 0/2 both           -
AdamW max_norm        fp32 FSDP1     ours                 before on 1      1 0/5 norm    1 0/3 both           1
AdamW max_norm        bf16 FSDP1     ours                 before on all    2 3 norm      1 4 both             2
AdamW max_norm        fp32           sharded unscale_     before on 1      2 0/5 norm    2 0/4 both           -
# The scaler unscales and looks for ZeRO; the optimizer inside looks again if it is guarded.
ZeRO                  fp32           ours                 -                0 1 -         0 1 scaler           -
ZeRO                  bf16           ours                 -                1 1 norm      0 1 scaler           -
ZeRO max_norm         fp32           sharded              -                2 1 norm      1 1 scaler           -
# Masters waits, and asks for DTensors alone.
Masters unguarded     fp32 DTensors  -                    -                0 0 -         0 0 steps            0
Masters               bf16           -                    -                0 1 norm      0 1 steps/optimizer  0
Masters guard         fp32 DTensors  -                    -                1 1 norm      1 1 optimizer        1
Masters               bf16           ours                 -                0 1 norm      0 1 steps/both       0
Masters               fp32           ours group           -                1 1 norm      1 1 both             1
Masters               fp32 DTensors  ours                 -                1 1 norm      1 1 both             1
Masters guard         fp32 DTensors  ours unscale_        -                2 1 norm      2 1 both             2
Masters               fp32+DTensors  torch's              -                2 1 -         2 1 both             -
Masters               fp32           sharded              -                1 1 -         1 1 both             -
Masters               bf16 DTensors  sharded              -                2 1 -         2 1 both             -
Masters               bf16           ours                 before on all    0 2 -         0 2 steps/both       0
Masters               fp32 DTensors  ours                 after on all     1 2 -         1 2 both             1
Masters max_norm      bf16 DTensors  torch's              before on all    3 4 norm      2 6 both             -
Masters guard         fp32           sharded              after on all     1 5 norm      1 4 both             -
Masters               bf16           ours                 before on 1      0 1/2 norm/-  0 1/2 steps/both     0
Masters               fp32 DTensors  ours                 before on 1      1 1/2 norm/-  1 1/2 both           1
Masters max_norm      bf16 DTensors  ours                 after on 0       1 5/1 norm    1 3/1 both           1
Masters               fp32 DTensors  torch's              after on 1       2 1/2 -       2 1/3 both           -
Masters               fp32           sharded              before on 1      1 1/2 -       1 1/3 both           -
# The scaler unscales and looks for torch's own optimizers.
torch.SGD             fp32           ours                 -                0 1 -         0 1 steps/scaler     !/0
torch.SGD             fp32 DTensors  ours                 -                1 1 -         1 1 scaler           1
torch.SGD             fp32+DTensors  ours unscale_        -                1 1 -         1 1 scaler           1
torch.SGD             fp32 FSDP1     ours unscale_        -                1 1 -         1 1 scaler           1
torch.SGD             fp32 DTensors  torch's              -                1 1 -         1 1 scaler           -
torch.SGD             fp32           sharded              -                1 1 -         1 1 scaler           -
torch.AdamW           fp32 DTensors  ours                 -                1 0 -         1 0 scaler           1
"""
LINES = [tuple(re.split("  +", it)) for it in TABLE.splitlines()[2:] if not it.startswith("#")]


class Own(AdamW):
    """An AdamW with a step of its own, which may look at grads."""

    def step(self, closure=None):
        return super().step(closure)


class Replaces(GradScaler):
    """A scaler with a look of its own."""

    def _check_inf_per_device(self, optimizer):
        return super()._check_inf_per_device(optimizer)


OPTIMIZERS = {
    "AdamW": AdamW,
    "Own": Own,
    "Masters": lambda params, lr, **options: Masters(torch.optim.SGD(params, lr=lr), **options),
    "ZeRO": partial(ZeroRedundancyOptimizer, optimizer_class=AdamW),
    "torch.SGD": torch.optim.SGD,
    "torch.AdamW": partial(torch.optim.AdamW, fused=True),
}
SCALERS = {"-": partial(GradScaler, enabled=False), "ours": GradScaler, "replaced": Replaces}
SCALERS |= {"torch's": torch.amp.GradScaler, "sharded": ShardedGradScaler}
OPTIONS = {"max_norm": ("max_norm", 1e9), "guard": ("guard", True), "unguarded": ("guard", False)}


def made(kinds, description, *args, **options):
    name, *words = description.split()
    known = OPTIONS | {"group": ("process_group", distributed.group.WORLD)}
    return kinds[name](*args, **options, **dict(known[it] for it in words if it in known))


def module_of(parameters):
    module = nn.Linear(4, 4).to(B16 if "bf16" in parameters else torch.float32)
    if "DTensors" in parameters:
        module = fully_shard(module, mesh=mesh_of("fsdp2"))
    if "+" in parameters:
        module.plain = nn.Parameter(torch.ones(4, dtype=torch.float64))
    return FullyShardedDataParallel(module, device_id=torch.device("cpu")) if "FSDP1" in parameters else module


class Training:
    """One line's optimizer and scaler in this process."""

    def __init__(self, line, rank):
        optimizer, parameters, scaler, hooks = line
        hook, _, where = hooks.partition(" on ")
        has_hook = where in ("all", str(rank))
        self.module = module_of(parameters)  # AdamW looks for FSDP1's
        self.params = list(self.module.parameters())
        optimizer = optimizer.replace("AdamW", "Own") if has_hook and hook == "own step" else optimizer
        self.optimizer = made(OPTIMIZERS, optimizer, self.params, lr=0.1)  # more than a bf16 weight's spacing
        if has_hook and hook != "own step":
            register = {"before": "register_step_pre_hook", "after": "register_step_post_hook"}[hook]
            getattr(self.optimizer, register)(lambda *_: None)
        self.scaler, self.unscales = made(SCALERS, scaler, "cpu", init_scale=4.0), "unscale_" in scaler
        self.teller = getattr(self.optimizer, "optim", self.optimizer)  # the one inside ZeRO's

    def skips(self):
        return float(getattr(self.teller, "skipped_steps", None) or 0.0)

    def step(self, is_bad=False, has_grads=True):
        """Return the counts of calls and waits, and who tells of a skip."""
        scale, skips = self.scaler.scale(torch.ones(())).item(), self.skips()
        weights = [part_of(it).clone() for it in self.params]
        for param in self.params:
            param.grad = torch.full_like(param, scale) if has_grads else None
        if is_bad:
            part_of(self.params[-1].grad).view(-1)[0] = math.inf
        with Counted() as counted:
            if self.unscales:
                self.scaler.unscale_(self.optimizer)
            self.scaler.step(self.optimizer)
        if has_grads:
            self.scaler.update()
        told = {"optimizer": self.skips() > skips, "scaler": self.scaler.get_scale() < scale}
        assert told["optimizer"] == bool(getattr(self.teller, "step_was_skipped", None)) or not has_grads
        if any(not torch.equal(part_of(it), old) for it, old in zip(self.params, weights, strict=True)):
            assert not any(told.values())
            return counted.calls, counted.waits, "steps"
        return counted.calls, counted.waits, "both" if all(told.values()) else "".join(it for it in told if told[it])


def measured(line, rank):
    """Return this rank's entries of a line."""
    training, is_zero = Training(line, rank), line[0].startswith("ZeRO")
    training.step()  # makes states
    calls, waits, told = training.step()
    assert told == "steps"
    norm = "-" if getattr(training.teller, "grad_norm", None) is None else "norm"
    infinite = training.step(is_bad=rank == 1 or is_zero)
    without = "-"
    if not is_zero and line[2].startswith(("-", "ours")):
        try:
            without = training.step(has_grads=rank == 1)[0]
        except AssertionError:
            without = "!"
    return [[calls, waits, norm], infinite, [without]]


def measure_all(rank, lines, folder):
    found = []
    for line in lines:
        found.append(measured(line, rank))
        distributed.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(found))


def joined(first, second):
    return " ".join(f"{a}" if a == b else f"{a}/{b}" for a, b in zip(first, second, strict=True))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return both ranks' entries of each line."""
    folder, lines = tmp_path_factory.mktemp("lines"), [line[:4] for line in LINES]
    spawn(partial(measure_all, lines=lines, folder=folder), folder, seconds=300)  # if one asks alone, nobody waits on
    ranks = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    return {line: tuple(map(joined, *entries)) for line, *entries in zip(lines, *ranks, strict=True)}


@in_processes
@pytest.mark.parametrize("line", LINES, ids=lambda it: ", ".join(it[:4]))
def test_each_line_says_what_happens(found, line):
    assert found[line[:4]] == line[4:]
