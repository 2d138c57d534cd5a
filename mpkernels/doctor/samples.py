"""Makes arguments for every op, ordinary and odd ones, with which tests and ``mpkernels doctor`` call kernels."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpkernels.ops.step.rule import Rule
from mpkernels.ops.step.rules.adam import adam_
from mpkernels.ops.step.rules.adamw import adamw_
from mpkernels.ops.step.rules.lion import lion_
from mpkernels.ops.step.rules.sgd import sgd_

F16, B16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


class Sample(NamedTuple):
    arguments: Callable[[torch.device], tuple[Any, ...]]  #: makes new arguments in each call
    tolerance: float = 0.0  #: the largest distance from the reference, relative to its norm; 0 demands equal bits


def grads(device: torch.device, *specials: float) -> list[Tensor]:
    """Make tensors in every dtype, of a size that fills vectors and one that doesn't, each with ``specials`` first."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(size, generator=generator, dtype=F64).to(dtype) for size in (5, 1025) for dtype in DTYPES]
    for grad in made:
        grad[: len(specials)] = torch.tensor(specials)
    return [grad.to(device) for grad in made]


DTYPES = (F32, F16, B16, F64)
SPECIALS = torch.inf, -torch.inf, torch.nan, -0.0


def unscale(device: torch.device, *specials: float) -> tuple[Any, ...]:
    return grads(device, *specials), torch.zeros((), device=device), torch.full((), 0.5, device=device)


# The numbers that `optimizer_step` gives to its first group and to its second one. It gives 0.5 for any other name.
HYPERPARAMETERS = {
    "lr": (1e-3, 1e-3), "beta1": (0.9, 0.9), "beta2": (0.999, 0.999), "weight_decay": (0.01, 0.01), "eps": (1e-8, 1e-8),
    "decoupled": (0.0, 1.0), "momentum": (0.9, 0.9), "nesterov": (0.0, 1.0),
}  # fmt: skip


def optimizer_step(
    rule: Rule, device: torch.device, state_dtype: torch.dtype = F32, found_inf: float = 0.0
) -> tuple[Any, ...]:
    """Make arguments of a step with every way to keep a weight, in two groups. One group has hyperparameters on the
    device, one has the rule's optional states."""
    make: dict[str, Any] = {"device": device}
    params = [
        torch.linspace(-1, 1, size, **make).to(dtype) for size, dtype in ((5, B16), (1025, F16), (33, F32), (7, B16))
    ]
    masters = [torch.zeros(5, dtype=torch.int16, **make), torch.zeros(1025, dtype=torch.int16, **make)]
    masters += [torch.empty(0, **make), params[3].float()]
    counts = [rule.needed, rule.needed, len(rule.states), len(rule.states)]  # of states
    states = []
    for i, key in enumerate(rule.states):
        values = [param.sign().abs() if key in rule.not_negative else param.sign() for param in params]
        there = [i < n for n in counts]
        states.append([it.to(state_dtype) if has else it[:0] for it, has in zip(values, there, strict=True)])
    sizes = [n * -(-it.numel() // 256) for it, n in zip(params, counts, strict=True)]
    scales = [torch.ones(size, **make) for size in sizes] if state_dtype == torch.int8 else []
    steps = [torch.ones((), **make) for _ in params]
    step_grads = [param.clone() for param in params]
    if found_inf:
        step_grads[1][:4] = torch.tensor(SPECIALS)
    lists = params, step_grads, *states, masters, scales, steps
    hyper = [[*HYPERPARAMETERS.get(name, (0.5, 0.5))] for name in rule.hyperparameters]
    nothing = torch.empty(0, **make)
    on_device = [nothing] * (2 * rule.may_be_tensors)
    on_device[rule.may_be_tensors] = torch.full((), 1e-2, **make)
    on_device[-1] = torch.full((), 0.99, **make).double()
    shared = torch.full((), 8.0, **make), torch.full((), found_inf, **make), torch.ones((), dtype=F64, **make)
    written = torch.zeros(2, **make), torch.zeros((), **make), torch.zeros(5, 6, dtype=F64, **make)
    return (*lists, [2, 2], *hyper, [False, False], on_device, *shared, 1.0, *written)


def steps_by(rule: Rule) -> list[Sample]:
    return [
        Sample(partial(optimizer_step, rule)),
        Sample(partial(optimizer_step, rule, state_dtype=torch.int8)),
        Sample(partial(optimizer_step, rule, state_dtype=B16, found_inf=1.0)),
    ]


def overflown(device: torch.device) -> tuple[Any, ...]:
    """Make the arguments of a step that was skipped."""
    looked_at, report = grads(device), torch.zeros(9, 6, dtype=F64, device=device)
    looked_at[0][1], looked_at[1][2] = torch.inf, torch.nan
    return looked_at, torch.ones((), device=device), torch.full((), 0.5, device=device), False, report


def scale_state(device: torch.device, found_inf: float = 1.0) -> tuple[Any, ...]:
    """Make the arguments of an update after an overflow, with a hysteresis of two."""
    make: dict[str, Any] = {"device": device}
    scale, found = torch.full((), 3.0, **make), torch.full((), found_inf, **make)
    tracker, overflows = torch.full((), 5, dtype=torch.int32, **make), torch.ones(2, dtype=torch.int32, **make)
    return scale, tracker, found, 2.0, 0.5, 2000, overflows, 1.0, 2.0**24, 2


def matrices(dtype: torch.dtype, device: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=F64).to(dtype).to(device) for shape in shapes]


ODD, TILES = (5, 7, 9), (16, 24, 32)  # rows, columns, outputs; the second sizes suit tensor cores


def linear(
    device: torch.device, dtype: torch.dtype, activation: str, sizes: tuple[int, int, int] = ODD, *specials: float,
    bias: bool = True,
) -> tuple[Any, ...]:  # fmt: skip
    rows, columns, outputs = sizes
    x, weight, b = matrices(dtype, device, (rows, columns), (outputs, columns), (outputs,))
    x[: len(specials), 0] = torch.tensor(specials)
    return x, weight, b if bias else None, activation, True


def linear_backward(device: torch.device, dtype: torch.dtype, activation: str, *by_columns: bool) -> tuple[Any, ...]:
    dy, x, weight, saved = matrices(dtype, device, (5, 9), (5, 7), (9, 7), (1, 9))
    return dy, x, weight, saved.expand(5, 9), activation, F32, dtype, *by_columns


def linear_backward_of_nothing(device: torch.device) -> tuple[Any, ...]:
    (dy,) = matrices(B16, device, (5, 9))
    return dy, None, None, torch.empty(0, dtype=B16, device=device), "none", None, None


def linear_dact(
    device: torch.device, dtype: torch.dtype, activation: str, sizes: tuple[int, int, int] = (5, 9, 7)
) -> tuple[Any, ...]:
    rows, outputs, columns = sizes
    dy, weight, saved = matrices(dtype, device, (rows, outputs), (outputs, columns), (1, columns))
    return dy, weight, saved.expand(rows, columns), activation, F32, True


def linear_dact_in_tiles(device: torch.device, dtype: torch.dtype, *specials: float) -> tuple[Any, ...]:
    dy, weight, saved = matrices(dtype, device, (16, 24), (24, 32), (16, 32))
    for i, each in enumerate((dy, saved)):
        each[i, : len(specials)] = torch.tensor(specials)
    return dy, weight, saved, "gelu_tanh", None, False


def linear_dact_alone(device: torch.device, dtype: torch.dtype, activation: str) -> tuple[Any, ...]:
    dy, saved = matrices(dtype, device, (5, 9), (5, 9))
    return dy, None, saved, activation, F32, True


def linear_dact_of_nothing_saved(device: torch.device) -> tuple[Any, ...]:
    dy, weight = matrices(F32, device, (5, 9), (9, 7))
    return dy, weight, torch.empty(0, device=device), "none", None, True


def linear_gated(
    device: torch.device, dtype: torch.dtype, activation: str, sizes: tuple[int, int, int] = ODD, *specials: float
) -> tuple[Any, ...]:
    """Make arguments with a bias for the gate, and none for up."""
    rows, features, outputs = sizes
    x, weights, bias = matrices(dtype, device, (rows, features), (2 * outputs, features), (outputs,))
    x[: len(specials), 0] = torch.tensor(specials)
    return x, weights[:outputs], weights[outputs:], bias, None, activation, True


def linear_gated_apart(device: torch.device) -> tuple[Any, ...]:
    x, gate, up = matrices(F32, device, (5, 7), (9, 7), (9, 7))
    return x, gate, up, None, None, "gelu_tanh", False


def linear_dgated(
    device: torch.device, dtype: torch.dtype, activation: str, sizes: tuple[int, int, int] = (5, 9, 7), *specials: float
) -> tuple[Any, ...]:
    rows, outputs, columns = sizes
    dy, weight, z = matrices(dtype, device, (rows, outputs), (outputs, columns), (rows, 2 * columns))
    z[: len(specials), 0] = torch.tensor(specials)
    return dy, weight, z, activation, True


def linear_dgated_of_h(device: torch.device) -> tuple[Any, ...]:
    dh, z = matrices(B16, device, (5, 7), (5, 14))
    return dh, None, z, "silu", False


# Sums of n terms in two orders differ by at most n roundings of the sum of magnitudes; two roundings to a dtype differ
# by at most its eps. If terms cancel, the sum of magnitudes is several times the sum.
SUMS = 1100 * torch.finfo(F64).eps
ROUNDED = {dtype: 8 * torch.finfo(dtype).eps if dtype == F32 else torch.finfo(dtype).eps for dtype in (F32, F16, B16)}


def in_dtypes(make: Callable[..., tuple[Any, ...]], *arguments: tuple[Any, ...]) -> list[Sample]:
    """Return a sample for each tuple of ``make``'s arguments after the device, the first of which is a dtype."""
    return [Sample(lambda device, it=it: make(device, *it), ROUNDED[it[0]]) for it in arguments]  # type: ignore[misc]


SAMPLES: dict[str, list[Sample]] = {
    "unscale_": [Sample(unscale), Sample(lambda device: unscale(device, *SPECIALS))],
    "grad_stats": [
        Sample(lambda device: (grads(device),), SUMS),
        Sample(lambda device: (grads(device, *SPECIALS),), SUMS),
    ],
    "update_scale_": [Sample(scale_state), Sample(lambda device: scale_state(device, 0.0))],
    **{it.rule.op: steps_by(it.rule) for it in (adam_, adamw_, lion_, sgd_)},
    "overflow_": [Sample(overflown)],
    "linear_act": [
        *in_dtypes(
            linear,
            *((B16, "gelu"), (F16, "silu"), (B16, "relu", ODD, *SPECIALS)),
            *((F16, "none", TILES), (B16, "gelu_tanh", TILES, torch.nan)),
        ),
        Sample(lambda device: linear(device, F32, "relu", bias=False), ROUNDED[F32]),
        Sample(lambda device: linear(device, F16, "gelu_tanh", TILES, bias=False), ROUNDED[F16]),
    ],
    "linear_act_backward": [
        *in_dtypes(linear_backward, (B16, "gelu"), (F32, "silu"), (B16, "silu", True)),
        Sample(linear_backward_of_nothing),
    ],
    "linear_dact": [
        *in_dtypes(linear_dact, (B16, "gelu"), (F32, "tanh"), (F16, "silu", (128, 32, 64))),
        *in_dtypes(linear_dact_in_tiles, (F16,), (B16, torch.nan)),
        *in_dtypes(linear_dact_alone, (B16, "silu"), (F32, "tanh")),
        Sample(linear_dact_of_nothing_saved, ROUNDED[F32]),
    ],
    "linear_gated": [
        *in_dtypes(linear_gated, (B16, "silu"), (F16, "gelu", TILES), (B16, "relu", TILES, *SPECIALS)),
        Sample(linear_gated_apart, ROUNDED[F32]),
    ],
    "linear_dgated": [
        *in_dtypes(linear_dgated, (B16, "silu"), (F16, "gelu", (128, 32, 64)), (F32, "tanh")),
        *in_dtypes(linear_dgated, (B16, "relu", TILES, torch.nan)),
        Sample(linear_dgated_of_h, ROUNDED[B16]),
    ],
}
