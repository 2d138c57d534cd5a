"""Calls of the linear ops: every activation in every kernel, on one chip; every kind of tile and of weight."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from mpkernels.ops.linear.activations import ACTIVATIONS
from tests.linear_cases import layer, transposed

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS, FEATURES, OUTPUTS = 256, 64, 512  # a kernel serves all sizes
Calls = Iterator[tuple[Any, ...]]


def _each_kind(chip: str, call: Callable[[torch.dtype, str], tuple[Any, ...]], activation: str) -> Calls:
    """Yield calls in each precision and, on the one chip that has run Triton's kernels, with every activation."""
    yield from (call(BF16, each) for each in (ACTIVATIONS if chip == "sm_90" else [activation]))
    if chip == "sm_90":
        yield call(FP16, activation)
    yield call(FP32, activation)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield call(FP32, activation)
    torch.backends.cuda.matmul.fp32_precision = "none"


def _forward(chip: str) -> Calls:
    def call(dtype: torch.dtype, activation: str) -> tuple[Any, ...]:
        x, weight, bias, _ = layer(ROWS, FEATURES, OUTPUTS, dtype)
        return x, weight, bias, activation, True

    yield from _each_kind(chip, call, "gelu")
    if chip == "sm_90":
        x, weight, *_ = call(BF16, "gelu_tanh")
        yield x, transposed(weight), None, "gelu_tanh", False


def _gated(chip: str) -> Calls:
    def call(dtype: torch.dtype, activation: str) -> tuple[Any, ...]:
        x, weights, bias, _ = layer(ROWS, FEATURES, 2 * OUTPUTS, dtype)
        return x, *weights.chunk(2), *bias.chunk(2), activation, True

    yield from _each_kind(chip, call, "silu")
    if chip == "sm_90":
        x, gate, up, *_ = call(BF16, "silu")
        yield x, transposed(gate), transposed(up), None, None, "silu", False


def _dact(chip: str) -> Calls:
    def call(dtype: torch.dtype, activation: str) -> tuple[Any, ...]:
        _, weight, _, dy = layer(ROWS, FEATURES, OUTPUTS, dtype)
        saved = dy.new_empty((ROWS, FEATURES) if ACTIVATIONS[activation].saves else 0)
        return dy, weight, saved, activation, FP32, True

    yield from _each_kind(chip, call, "gelu")
    if chip == "sm_90":
        dy, weight, saved, *_ = call(BF16, "gelu_tanh")
        yield dy, transposed(weight), saved, "gelu_tanh", None, False


def _dgated(chip: str) -> Calls:
    def call(dtype: torch.dtype, activation: str) -> tuple[Any, ...]:
        _, weight, _, dy = layer(ROWS, FEATURES, OUTPUTS, dtype)
        return dy, weight, dy.new_empty(ROWS, 2 * FEATURES), activation, True

    yield from _each_kind(chip, call, "silu")
    z = call(BF16, "silu")[2]
    yield z[:, :FEATURES], None, z, "silu", True  # the product is at hand


def _backward(chip: str) -> Calls:
    def call(dtype: torch.dtype) -> tuple[Any, ...]:
        x, weight, _, dy = layer(ROWS, FEATURES, OUTPUTS, dtype)
        return dy, x, weight, torch.empty_like(dy), "gelu", FP32, FP32

    yield call(BF16)
    yield call(FP32)
    if chip == "sm_90":
        dy, x, weight, saved, *_ = call(BF16)
        yield dy, x, weight, saved, "gelu", FP32, None  # dz alone
        yield dy, None, None, dy.new_empty(0), "none", None, FP32  # sums alone


CALLS: dict[str, Callable[[str], Calls]] = {
    "linear_act": _forward,
    "linear_act_backward": _backward,
    "linear_dact": _dact,
    "linear_gated": _gated,
    "linear_dgated": _dgated,
}
