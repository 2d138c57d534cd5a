"""AdamW in fp64, written from the papers, and how far a step of adamw_ may be from it.

Decoupled weight decay is that of Loshchilov and Hutter, "Decoupled weight decay regularization", algorithm 2; amsgrad
that of Reddi, Kale and Kumar, "On the convergence of Adam and beyond", with torch's largest of the raw second moment;
unscaling, clipping and the skip are as docs/differences.md has them. Each step is compared by itself, from what was
stored before it, so that no error adds up.
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from mpkernels.ops.step.split import copied_master, join  # proven for every weight there is in test_split.py
from tests.hard_grads import same_bits

F32, F64, I8 = torch.float32, torch.float64, torch.int8
HALF = {F32: 2.0**-24, F64: 2.0**-53, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # largest error of a rounding
STORED = ("params", "masters", "scales", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "steps")
QUANTIZED = 256  # 8-bit moments that share a scale


@dataclass
class Hyper:
    """The numbers of one parameter's step. ``factor`` unscales, clips and negates the grad."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    eps: float
    factor: float


@dataclass
class Point:
    """The values of one parameter's tensors in fp64. ``largest`` is None without amsgrad."""

    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    largest: Tensor | None
    steps: float


def stepped(before: Point, grad: Tensor, hyper: Hyper) -> tuple[Point, Tensor]:
    """Return the next point, and by how much a unit of exp_avg lowers the weight."""
    steps = before.steps + 1
    exp_avg = hyper.beta1 * before.exp_avg + (1 - hyper.beta1) * grad
    exp_avg_sq = hyper.beta2 * before.exp_avg_sq + (1 - hyper.beta2) * grad.square()
    largest = None if before.largest is None else torch.maximum(before.largest, exp_avg_sq)
    root = ((exp_avg_sq if largest is None else largest) / (1 - hyper.beta2**steps)).sqrt()
    slope = hyper.lr / (1 - hyper.beta1**steps) / (root + hyper.eps)
    weight = before.weight - hyper.lr * hyper.weight_decay * before.weight - slope * exp_avg
    return Point(weight, exp_avg, exp_avg_sq, largest, steps), slope


def snapshot(model) -> SimpleNamespace:
    return SimpleNamespace(**{name: [it.detach().cpu().clone() for it in getattr(model, name)] for name in STORED})


def assert_step(before, after, grads, hypers, grad_scale=None, found_inf=None, max_norm=math.inf):
    """Compare snapshots before and after a step. ``hypers`` has those of each parameter, with factors of 1 or -1."""
    grads = [grad.detach().cpu().double() for grad in grads]
    unscale = 1.0 if grad_scale is None else (1 / torch.tensor(grad_scale, dtype=F64)).float().item()
    norm = math.sqrt(sum(grad.square().sum().item() for grad in grads)) * unscale if max_norm < math.inf else 0.0
    if found_inf or not math.isfinite(unscale) or (grad_scale is not None and norm > torch.finfo(F32).max):
        for name in STORED:
            assert all(map(same_bits, getattr(before, name), getattr(after, name))), f"{name} moved in a skipped step"
        return
    factor = unscale * min(1.0, max_norm / (norm + 1e-6))
    for i, (grad, hyper) in enumerate(zip(grads, hypers, strict=True)):
        if grad.numel():
            _assert_near(before, after, i, grad * hyper.factor * factor, hyper)
        assert after.steps[i] == before.steps[i] + 1


def _assert_near(before, after, i: int, grad: Tensor, hyper: Hyper) -> None:
    """A kernel takes some twenty roundings from grad to weight, of half an ulp each, in fp32 or, for fp64, in fp64."""
    old, new = _point(before, i), _point(after, i)
    want, slope = stepped(old, grad, hyper)
    half = HALF[F64 if after.params[i].dtype == F64 else F32]
    # Roundings: four of the grad's factor, with its norm; of grad - exp_avg, its factor, their product and the sum.
    exp_avg_bound = half * (want.exp_avg.abs() + (1 - hyper.beta1) * (8 * grad.abs() + 4 * old.exp_avg.abs()))
    square_bound = 20 * half
    weight_bound = half * (3 * old.weight.abs() + want.weight.abs() + 20 * (slope * want.exp_avg).abs())
    weight_bound += slope * exp_avg_bound + _bound_of_storing(after, i, want.weight)
    plain = _is_plain(grad, old, want)
    _assert_within("weight", i, new.weight, want.weight, weight_bound, plain)
    param = after.params[i]
    fits = plain & (new.weight.abs() <= torch.finfo(param.dtype).max)
    _assert_within("param", i, param.double(), new.weight, _bound_of_param(after, i, new.weight), fits)
    moments = [("exp_avg", after.exp_avgs, exp_avg_bound)]
    moments += [("exp_avg_sq", after.exp_avg_sqs, square_bound * want.exp_avg_sq)]
    moments += [] if want.largest is None else [("largest", after.max_exp_avg_sqs, square_bound * want.largest)]
    for name, tensors, bound in moments:
        value, is_coded = getattr(want, name), tensors[i].dtype == I8
        stored = HALF[tensors[i].dtype] * value.abs() if not is_coded else _bound_of_codes(value, tensors[i], name)
        comparable = plain & plain.all() if is_coded else plain  # codes share a scale, which one odd number spoils
        _assert_within(name, i, getattr(new, name), value, 1.01 * (bound + stored), comparable)


def _point(at, i: int) -> Point:
    """Return the values of parameter i's tensors."""
    param, master, scales = at.params[i], at.masters[i], at.scales[i]
    moments = [at.exp_avgs[i], at.exp_avg_sqs[i], at.max_exp_avg_sqs[i]]
    if scales.numel():
        rows = scales.view(-1, -(-param.numel() // QUANTIZED)).double()
        moments = [_decoded(it, rows[k], k > 0) if it.numel() else it for k, it in enumerate(moments)]
    weight = (copied_master if master.dtype == F32 else join)(param, master) if master.numel() else param
    largest = moments[2].double() if moments[2].numel() else None
    return Point(weight.double(), moments[0].double(), moments[1].double(), largest, at.steps[i].item())


def _decoded(codes: Tensor, scales: Tensor, is_squared: bool) -> Tensor:
    """Return 8-bit moments as csrc/step/int8.h describes them. They share scales in the order that they lie in."""
    flat = codes.as_strided((codes.numel(),), (1,)).double()
    root = (flat + 128) / 255 if is_squared else flat / 127
    values = scales.repeat_interleave(QUANTIZED)[: flat.numel()] * root * root.abs()
    return (values.square() if is_squared else values).as_strided(codes.shape, codes.stride())


def _bound_of_codes(values: Tensor, codes: Tensor, name: str) -> Tensor:
    """Return the error bound that int8.h states for a moment of this name."""
    is_squared = name != "exp_avg"
    root = values.sqrt() if is_squared else values
    flat = torch.empty_like(codes, dtype=F64).copy_(root.abs()).as_strided((codes.numel(),), (1,))
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % QUANTIZED)).view(-1, QUANTIZED)
    most = blocks.amax(1).repeat_interleave(QUANTIZED)[: flat.numel()].as_strided(codes.shape, codes.stride())
    if not is_squared:
        return most * (1 / 127 + 1 / 254**2)
    root_bound = most * (1 / 255 + 1 / 510**2)
    return 2 * root * root_bound + root_bound.square()


def _bound_of_storing(at, i: int, weight: Tensor) -> Tensor | float:
    """Return what storing a weight may lose: in 16 bits without a master, or as fp16 with a remainder."""
    dtype, master = at.params[i].dtype, at.masters[i]
    if not master.numel():
        return _bound_of_param(at, i, weight)
    is_split_fp16 = dtype == torch.float16 and master.dtype == torch.int16
    return weight.abs() * 2.0**-26 + 2.0**-40 if is_split_fp16 else 0.0


def _bound_of_param(at, i: int, weight: Tensor) -> Tensor:
    """Return how far a 16-bit weight is from its master at most: half its last place, 2^-25 where fp16 is subnormal."""
    dtype = at.params[i].dtype
    return weight.abs() * (0.0 if dtype in (F32, F64) else HALF[dtype]) + (2.0**-25 if dtype == torch.float16 else 0.0)


def _is_plain(grad: Tensor, old: Point, new: Point) -> Tensor:
    """Return where no number is or becomes inf, NaN, or so small that fp32 rounds it with a larger relative error."""
    plain = torch.ones_like(grad, dtype=torch.bool)
    numbers = [grad, grad.square(), old.weight, new.weight, *vars(old).values(), *vars(new).values()]
    for it in numbers:
        if isinstance(it, Tensor):
            plain &= (it == 0) | ((it.abs() > 2.0**-100) & (it.abs() < 2.0**120))
    return plain


def _assert_within(name: str, i: int, got: Tensor, want: Tensor, bound: Tensor, plain: Tensor) -> None:
    wrong = ~((got - want).abs() <= bound) & plain
    assert not wrong.any(), f"{name} of parameter {i}: {got[wrong][0]}, over {bound[wrong][0]} off {want[wrong][0]}"
