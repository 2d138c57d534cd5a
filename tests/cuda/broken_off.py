"""Lets a call break off at each of its allocations and waits. Nothing may be half done, and a second call must work.

test_allocators.py runs this in a process whose torch caches no memory, so that CUDA's stand-in sees each allocation."""

import ctypes
import re
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only

from mpkernels import checkpoint
from mpkernels.nn import LinearAct
from tests.cuda.offloading import buckets_of
from tests.cuda.training import CUDA, Loop, batch


class Break(NamedTuple):
    countdown: str  # a variable of the stand-in: at 1 the next allocation or wait breaks off
    error: type[BaseException]
    says: str

    @contextmanager
    def at(self, number):
        """Let the allocation or wait of this number fail, and turn its error into a BrokenOffError."""
        countdown = ctypes.c_int.in_dll(ctypes.CDLL("libcudart.so.13"), self.countdown)
        countdown.value = number
        try:
            yield
        except self.error as error:
            if not re.search(self.says, str(error)):
                raise
            raise BrokenOffError from error
        finally:
            countdown.value = 0


class BrokenOffError(Exception):
    pass


OUT_OF_MEMORY = Break("standin_allocations_to_failure", RuntimeError, "out of memory|could not allocate")
CTRL_C = Break("standin_waits_to_interrupt", KeyboardInterrupt, "")


def ready(options, steps):
    """Return a loop after some steps, with the grads of the next step."""
    torch.manual_seed(0)
    layers = nn.ModuleList([LinearAct(24, 8), nn.Linear(8, 4)]).to(CUDA)  # few, because each allocation takes a run
    loop = Loop(CUDA, layers=layers, **options)
    loop.metrics.remove()  # else its hook might fail after the step is done
    for step in range(steps):
        loop.step(batch(step, CUDA))
    loop.optimizer.zero_grad()
    loss = torch.stack([param.float().square().mean() for param in loop.layers.parameters()]).sum()
    loop.scaler.scale(loss).backward()
    return loop


def state_of(loop):
    """Return the state without grads: unscale_ may have changed some, but knows which."""
    states = loop.optimizer.state_dict()["state"].values()
    held = [it for state in states for it in state.values() if torch.is_tensor(it)]
    return [it.detach().cpu() for it in (*loop.layers.parameters(), *held)], loop.scaler.get_scale()


def grads_of(loop):
    return [None if param.grad is None else param.grad.cpu() for param in loop.layers.parameters()], 0


def is_same(one, other):
    return one[1] == other[1] and len(one[0]) == len(other[0]) and all(map(torch.equal, one[0], other[0]))


_buckets = buckets_of(1000)  # several
CALLS = {
    "step": lambda loop, saved, path: loop.optimizer.step(),
    "step under a scaler": lambda loop, saved, path: loop.scaler.step(loop.optimizer),
    "unscale_": lambda loop, saved, path: loop.scaler.unscale_(loop.optimizer),
    "load_state_dict": lambda loop, saved, path: loop.optimizer.load_state_dict(saved),
    "save": lambda loop, saved, path: checkpoint.save(path, model=loop.layers, optimizer=loop.optimizer),
}
INT8 = {"state_dtype": torch.int8}
CASES = [*((call, {"max_norm": 0.5}, 2) for call in CALLS), ("step", INT8, 0), ("step under a scaler", {}, 0)]
CASES += [(call, {"max_norm": 0.5, "offload": way}, 2) for call in CALLS for way in (True, "stream")]


@pytest.mark.parametrize("breaks", [OUT_OF_MEMORY, CTRL_C], ids=["out of memory", "Ctrl-C"])
@pytest.mark.parametrize(("name", "options", "steps"), CASES)
def test_a_call_that_breaks_off_leaves_nothing_half_done(name, options, steps, breaks, tmp_path):
    call = CALLS[name]
    saved = tree_map_only(torch.Tensor, lambda it: it.cpu(), ready(options, 1).optimizer.state_dict())
    wanted = ready(options, steps)
    call(wanted, saved, tmp_path / "wanted")
    for number in range(1, 1000):
        loop = ready(options, steps)
        before = state_of(loop)
        try:
            with breaks.at(number):
                call(loop, saved, tmp_path / "it")
            break
        except BrokenOffError:
            assert {path.name for path in tmp_path.iterdir()} <= {"wanted", "it"}
            if (tmp_path / "it").exists():
                checkpoint.load(tmp_path / "it")  # raises if it isn't whole
        is_done = is_same(state_of(loop), state_of(wanted)) and is_same(grads_of(loop), grads_of(wanted))
        if steps > 0:  # else the call may have made states
            assert is_same(state_of(loop), before) or (is_done and breaks is CTRL_C)
        if not is_done or name == "save":
            call(loop, saved, tmp_path / "it")
        assert is_same(state_of(loop), state_of(wanted))
        assert is_same(grads_of(loop), grads_of(wanted))
    else:
        pytest.fail("each try broke off")
    if name == "save":
        (leaves, tree), (wanted_leaves, wanted_tree) = (
            tree_flatten(checkpoint.load(tmp_path / it)) for it in ("it", "wanted")
        )
        assert tree == wanted_tree
        pairs = zip(leaves, wanted_leaves, strict=True)
        assert all(torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in pairs)
    can_break = {"save", "load_state_dict"} if breaks is CTRL_C else CALLS.keys() - {"save"}  # a save allocates nothing
    if "offload" in options:  # the host holds the states that are loaded
        steps_on_host = {"step", "step under a scaler"} if options["offload"] is True else {"load_state_dict"}
        can_break = {"save"} | steps_on_host if breaks is CTRL_C else CALLS.keys() - {"save", "load_state_dict"}
    assert (number > 1) == (name in can_break)
