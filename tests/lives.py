"""Random lives of optimizers under scalers, in one process and in two. ``python -m tests.lives --seeds 200`` prints a
line an act, to be compared between two commits: seed, rank, act, error, digests of weights and states, what is told."""

import argparse
import copy
import hashlib
import math
import pickle
import random
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._pytree import tree_leaves

from mpkernels.amp import GradScaler, clip_grad_norm_
from tests.distributed.sharding import mesh_of, part_of
from tests.networks import B16, F16
from tests.optim.optimizers import WITH_MASTERS
from tests.processes import spawn

F32, SHAPES, ACTS = torch.float32, ((6, 5), (4,), (9, 2)), 14


def digest(*them):
    parts = (part_of(it) for it in them if isinstance(it, torch.Tensor))
    tensors = [it.contiguous().view(-1).view(torch.uint8).numpy() for it in parts]
    return hashlib.sha256(b"".join(tensors) if tensors else repr(them).encode()).hexdigest()[:8]


def fail(*_):
    raise MemoryError


class Life:
    """Parameters, their optimizer and scaler. Methods without an underscore are acts."""

    def __init__(self, seed, rank=None, state_dtypes=(F32, B16, torch.int8)):
        self._chance, self._rank, self._hooks, self._seen = random.Random(seed), rank, [], 0.0
        self._generator, choice = torch.Generator().manual_seed(seed), self._chance.choice
        self._line, self._dtype = WITH_MASTERS[name := choice(list(WITH_MASTERS))], choice((F32, B16, B16, F16))
        self._is_wrapper = name.startswith("Masters")
        own = {"master": choice(("split", "fp32")), "state_dtype": choice(state_dtypes)}
        self._options = {"max_norm": choice((None, 0.5))} | ({} if self._is_wrapper else own)
        self._params = [*self._line.taken(nn.Parameter(self._random(it)) for it in SHAPES)]
        self._optimizer = self._line.ours(self._params, **self._options)
        kind, enabled = choice(((GradScaler, False), (GradScaler, True), (torch.amp.GradScaler, True)))
        self._scaler = kind("cpu", init_scale=64.0, growth_interval=2, enabled=enabled)
        self._tell(f"{name}, {self._dtype}, {self._options}, {kind.__module__}, {enabled}")

    def _random(self, shape, bad=False):
        value = torch.randn(shape, generator=self._generator).to(self._dtype)
        if bad:
            value.view(-1)[self._chance.randrange(value.numel())] = math.inf
        if self._rank is None:
            return value
        return distribute_tensor(value, mesh_of("fsdp2"), [Shard(0)], src_data_rank=None)

    def _tell(self, *words):
        optimizer, told = self._optimizer, [self._scaler.get_scale(), self._seen]
        states = [it for param in self._params for it in tree_leaves(dict(optimizer.state.get(param, {})))]
        for it in (self._scaler, optimizer):
            told += [getattr(it, name, None) for name in ("skipped_steps", "step_was_skipped", "grad_norm")]
        told = [it.item() if isinstance(it, torch.Tensor) else it for it in told]
        told += [None if self._is_wrapper else digest(optimizer.overflow_report().as_dict())]
        self.told = " | ".join(map(str, (*words, digest(*self._params), digest(*states), *told)))

    def _give_grads(self):
        scale, optimizer = self._scaler.scale(torch.ones(())).item(), self._optimizer
        is_guarded = optimizer.guard or (optimizer.guard is None and (optimizer.max_norm or self._dtype != F32))
        bad = self._chance.randrange(9) if is_guarded or self._scaler.is_enabled() else None
        for i, param in enumerate(self._params):
            grad, is_idle = self._random(param.shape, i == bad) * scale, self._chance.random() < 0.15
            param.grad = None if is_idle or not param.requires_grad else grad

    def _take_step(self):
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def step(self):
        self._give_grads()
        if self._scaler.is_enabled() and self._chance.random() < 0.3:
            self._scaler.unscale_(self._optimizer)
            clip_grad_norm_(self._params, 0.7)
        self._take_step()

    def step_is_tried_again(self):
        self._give_grads()
        hook = self._optimizer.register_step_pre_hook(fail)
        try:
            self._scaler.step(self._optimizer)
        except MemoryError:
            hook.remove()
            self._scaler.step(self._optimizer)
        self._scaler.update()
        hook.remove()

    def hook_comes(self):
        def look(optimizer, *_):
            grads = [part_of(it.grad) for it in self._params if it.grad is not None]
            self._seen += sum(float(it.float().sum()) for it in grads)

        ranks, way = self._chance.choice(((None, 0), (None, 1), (None, 0, 1))), self._chance.choice(("pre", "post"))
        if self._rank in ranks or self._is_wrapper:  # Masters may wait forever with a hook in one rank
            self._hooks.append(getattr(self._optimizer, f"register_step_{way}_hook")(look))

    def hooks_go(self):
        while self._hooks:
            self._hooks.pop().remove()

    def group_comes(self):
        self._params.append(nn.Parameter(self._random((4, 3))))
        self._optimizer.add_param_group({"params": self._params[-1:], "lr": 1e-3})

    def states_are_loaded(self):
        saved, (first, *others) = self._optimizer.state_dict(), self._optimizer.param_groups
        if self._chance.random() < 0.5:
            self._hooks, self._optimizer = [], self._line.ours(first["params"], **self._options)
            for group in others:
                self._optimizer.add_param_group({"params": group["params"]})
        self._optimizer.load_state_dict(saved)
        self._scaler.load_state_dict(self._scaler.state_dict())

    def all_are_copied(self):
        self.hooks_go()
        copied = self._chance.choice((copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))))
        self._optimizer, self._params, self._scaler = copied((self._optimizer, self._params, self._scaler))

    def options_change(self):
        optimizer, choice = self._optimizer, self._chance.choice
        optimizer.max_norm, optimizer.guard = choice(
            ((None, None), (0.5, None), (2.0, True), (None, True), (None, False))
        )
        optimizer.param_groups[0]["lr"] = choice((1e-2, 3e-3))

    def model_is_converted(self):
        self._dtype = self._chance.choice((F32, B16, F16))
        self._optimizer.zero_grad()
        nn.ParameterList(self._params).to(self._dtype)

    def one_is_frozen_or_thawed(self):
        param = self._chance.choice(self._params)
        param.requires_grad_(not param.requires_grad)

    def one_is_written(self):
        with torch.no_grad():
            self._chance.choice(self._params).mul_(0.75)

    def acts(self):
        """Yield after the birth and each act."""
        yield
        names = [it for it in vars(Life) if not it.startswith("_") and it != "acts"]
        for name in ["step", *self._chance.choices([*["step"] * len(names), *names], k=ACTS), "step"]:
            error = ""
            try:
                getattr(self, name)()
            except (AssertionError, RuntimeError, TypeError, ValueError) as raised:
                error = f"{type(raised).__name__}: {raised}"
            self._tell(name, error)
            yield


def live(rank, seeds, path):
    with path.with_suffix(f".{rank}").open("w") as file:
        for seed in range(seeds):
            life = Life(seed, rank)
            for _ in life.acts():
                print(seed, rank, life.told, sep=" | ", file=file, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=200)
    seeds = parser.parse_args().seeds
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lives")
        live(None, seeds, path)
        spawn(partial(live, seeds=seeds, path=path), Path(folder), seconds=20)
        for rank in (None, 0, 1):
            print(path.with_suffix(f".{rank}").read_text(), end="")
