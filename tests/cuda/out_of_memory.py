"""Lets each allocation of a call fail in turn: python -m tests.cuda.out_of_memory CALL. Nothing may be half done, and the
call works when it is made again. torch must not cache memory, and CUDA's stand-in counts the allocations."""

import ctypes
import sys
import tempfile
from pathlib import Path

import torch

from mpkernels import checkpoint
from tests.cuda.training import CUDA, Loop, batch

OPTIONS = {"max_norm": 0.5}, {"state_dtype": torch.int8}, {}


def to_failure():
    return ctypes.c_int.in_dll(ctypes.CDLL("libcudart.so.13"), "standin_allocations_to_failure")


def ready(options, steps):
    """Return a loop after some steps, and with the grads of the next one."""
    loop = Loop(CUDA, **options)
    for step in range(steps):
        loop.step(batch(step, CUDA))
    loop.optimizer.zero_grad()
    loss = loop.layers[0](batch(9, CUDA)).float().square().mean()
    loop.scaler.scale(loss).backward()
    return loop


def state_of(loop):
    states = loop.optimizer.state_dict()["state"].values()
    held = [it for state in states for it in state.values() if torch.is_tensor(it)]
    grads = [param.grad for param in loop.layers.parameters() if param.grad is not None]
    return [it.detach().cpu() for it in (*loop.layers.parameters(), *grads, *held)], loop.scaler.get_scale()


def same(one, other):
    return one[1] == other[1] and all(map(torch.equal, one[0], other[0]))


def save(loop):
    with tempfile.TemporaryDirectory() as directory:
        checkpoint.save(Path(directory, "it.pt"), model=loop.layers, optimizer=loop.optimizer)


CALLS = {
    "step": lambda loop: loop.optimizer.step(),
    "step under a scaler": lambda loop: loop.scaler.step(loop.optimizer),
    "unscale_": lambda loop: loop.scaler.unscale_(loop.optimizer),
    "state_dict": lambda loop: loop.optimizer.state_dict(),
    "load_state_dict": lambda loop: loop.optimizer.load_state_dict(SAVED[0]),
    "save": save,
}
SAVED = []


def try_all(name, options, steps):
    call, number = CALLS[name], 0
    wanted = ready(options, steps)
    SAVED[:] = [ready(options, 1).optimizer.state_dict()]
    call(wanted)
    while True:
        number += 1
        loop = ready(options, steps)
        before = state_of(loop)
        to_failure().value = number
        try:
            call(loop)
        except RuntimeError as error:
            assert "out of memory" in str(error), error
        else:
            to_failure().value = 0
            return number - 1
        if steps > 0:  # else states are being made
            assert same(before, state_of(loop)), f"{name} {options}: allocation {number} leaves something half done"
        call(loop)
        assert same(state_of(wanted), state_of(loop)), f"{name} {options}: again after allocation {number}"


if __name__ == "__main__":
    for options in OPTIONS:
        for steps in (0, 2):
            print(sys.argv[1], options, steps, "steps before:", try_all(sys.argv[1], options, steps), "allocations")
