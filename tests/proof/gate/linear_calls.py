"""Calls of linear_act and its backward: every activation in every kernel, on one chip at least; every kind of tile."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from mpkernels.ops.linear.activations import ACTIVATIONS
from tests.linear_cases import layer

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MANY, FEW = (256, 64, 512), (16, 64, 512)  # rows, features, outputs, all multiples of 16
ODD = (255, 63, 511)
ONE_ROW, ONE_OUTPUT = (1, 64, 512), (256, 64, 1)  # Triton makes a constant of a 1
Calls = Iterator[tuple[Any, ...]]


def _each_tile(call: Callable[[tuple[int, int, int], torch.dtype, str], tuple[Any, ...]]) -> Calls:
    """Yield calls for every kind of tile, whose kernels differ whatever the activation is."""
    yield call(FEW, FP16, "silu")
    yield call(ODD, BF16, "gelu")
    yield call(ONE_ROW, BF16, "gelu")
    yield call(ONE_OUTPUT, BF16, "gelu")
    yield call(MANY, FP32, "gelu")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield call(MANY, FP32, "gelu")
    torch.backends.cuda.matmul.fp32_precision = "none"


def _forward(chip: str) -> Calls:
    def call(shape: tuple[int, int, int], dtype: torch.dtype, activation: str) -> tuple[Any, ...]:
        x, weight, bias, _ = layer(*shape, dtype)
        return x, weight, bias, activation, True

    yield from _each_tile(call)
    for activation in ACTIVATIONS if chip in ("sm_80", "sm_90") else ["gelu"]:
        yield call(MANY, BF16, activation)
    if chip == "sm_90":
        x, weight, _, activation, _ = call(MANY, BF16, "gelu_tanh")
        yield x, weight, None, activation, False
        yield x.t().contiguous().t(), weight, None, activation, False


def _backward(chip: str) -> Calls:
    def call(dtype: torch.dtype, activation: str, shape: tuple[int, int, int] = MANY) -> tuple[Any, ...]:
        x, weight, _, dy = layer(*shape, dtype)
        saved = torch.empty_like(dy) if ACTIVATIONS[activation].saves else dy.new_empty(0)
        return dy, x, weight, saved, activation, FP32, FP32

    for activation in ACTIVATIONS if chip == "sm_90" else ["gelu"]:
        yield call(BF16, activation)
    yield call(FP16, "silu")
    yield call(FP32, "gelu")
    yield call(BF16, "gelu", ONE_ROW)
    yield call(BF16, "gelu", ONE_OUTPUT)
    dy, x, weight, saved, activation, weight_dtype, _ = call(BF16, "gelu")
    yield dy, x, weight, saved, activation, weight_dtype, None  # dz alone
    yield dy, None, None, saved, activation, None, FP32  # sums alone


def _dact(chip: str) -> Calls:
    def call(shape: tuple[int, int, int], dtype: torch.dtype, activation: str) -> tuple[Any, ...]:
        _, weight, _, dy = layer(*shape, dtype)
        saved = dy.new_empty(len(dy) if ACTIVATIONS[activation].saves else 0, weight.shape[1])
        return dy, weight, saved if len(saved) else dy.new_empty(0), activation, FP32, True

    yield from _each_tile(call)
    for activation in ACTIVATIONS if chip in ("sm_80", "sm_90") else ["gelu"]:
        *arguments, _ = call(MANY, BF16, activation)
        yield *arguments, True
        if ACTIVATIONS[activation].saves == "z":
            yield *arguments, False
    dy, weight, saved, activation, *_ = call(MANY, BF16, "gelu_tanh")
    yield dy, weight, saved, activation, None, False
    yield dy, weight, saved.t().contiguous().t(), activation, FP32, True


def _gated(chip: str) -> Calls:
    def call(shape: tuple[int, int, int], dtype: torch.dtype, activation: str) -> tuple[Any, ...]:
        rows, features, outputs = shape
        x, weights, bias, _ = layer(rows, features, 2 * outputs, dtype)
        return x, *weights.chunk(2), *bias.chunk(2), activation, True

    yield from _each_tile(call)
    for activation in ACTIVATIONS if chip in ("sm_80", "sm_90") else ["silu", "gelu"]:
        yield call(MANY, BF16, activation)
    x, gate, up, *_ = call(MANY, BF16, "silu")
    yield x, gate, up, None, None, "silu", False
    yield x, gate.t().contiguous().t(), up.t().contiguous().t(), None, None, "silu", True


def _dgated(chip: str) -> Calls:
    def call(shape: tuple[int, int, int], dtype: torch.dtype, activation: str) -> tuple[Any, ...]:
        _, weight, _, dy = layer(*shape, dtype)
        return dy, weight, dy.new_empty(len(dy), 2 * weight.shape[1]), activation, True

    yield from _each_tile(call)
    for activation in ACTIVATIONS if chip in ("sm_80", "sm_90") else ["silu", "gelu"]:
        yield call(MANY, BF16, activation)
    dy, weight, z, activation, _ = call(MANY, BF16, "silu")
    yield dy, weight, z, activation, False
    yield dy, weight, z.t().contiguous().t(), activation, True
    yield z[:, ::2].contiguous(), None, z, activation, False  # dh at hand


CALLS: dict[str, Callable[[str], Calls]] = {
    "linear_act": _forward,
    "linear_act_backward": _backward,
    "linear_dact": _dact,
    "linear_gated": _gated,
    "linear_dgated": _dgated,
}
