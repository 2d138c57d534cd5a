"""FSDP1: torch's FullyShardedDataParallel. Each process steps its part of all weights."""

import copy
import warnings
from functools import partial
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from mpkernels.amp import clip_grad_norm_
from tests.matrix.changed_modules import Recorded
from tests.matrix.many_processes import plain_weights
from tests.matrix.runner import FIRST, PARTS, REST, tool

MAX_NORM = 4.0


def clip_in_the_loop(run):
    backward = run.backward

    def backward_and_clip(number):
        backward(number)
        run.scaler.unscale_(run.optimizer)
        clip_grad_norm_([it for group in run.optimizer.param_groups for it in group["params"]], MAX_NORM)

    run.backward = backward_and_clip


def by_hand(run, cuts_at_params, processes=2, prepare=lambda run: None, **options):
    """Train in one process, with a parameter for each process's part of the flattened weights."""
    weights = list(run.model.parameters())
    sizes = [it.numel() for it in weights]
    cuts = {0, -(-sum(sizes) // processes), sum(sizes)}
    if cuts_at_params:
        cuts |= {sum(sizes[:i]) for i in range(len(sizes))}
    lengths = [b - a for a, b in pairwise(sorted(cuts))]
    parts = [nn.Parameter(it.clone()) for it in torch.cat([it.detach().flatten() for it in weights]).split(lengths)]
    inner = run.drop_in.optimizer(parts, **options)

    def hand_over(*_):
        grads = torch.cat([it.grad.flatten() for it in weights]).split(lengths)
        for part, grad in zip(parts, grads, strict=True):
            part.grad = grad.clone()

    def hand_back(*_):
        for weight, new in zip(weights, torch.cat([it.detach() for it in parts]).split(sizes), strict=True):
            weight.detach().copy_(new.view_as(weight))

    backward, zero_grad = run.backward, run.model.zero_grad
    run.backward = lambda number: (zero_grad(), backward(number), hand_over())
    inner.register_step_post_hook(hand_back)
    run.optimizer = inner
    prepare(run)
    run.steps()
    return weights_of(run.model) | run.scaler_result()


def weights_of(model):
    return {name: it.detach().clone() for name, it in model.named_parameters()}


def wrapped(run, uses_orig_params, strategy=ShardingStrategy.FULL_SHARD, mixed_precision=None, **options):
    how = {"device_id": torch.device("cpu"), "sharding_strategy": strategy, "mixed_precision": mixed_precision}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # FSDP1 is deprecated
        run.model = FullyShardedDataParallel(run.model, use_orig_params=uses_orig_params, **how)
    run.optimizer = run.drop_in.optimizer(run.model.parameters(), **options)


def whole(run):
    with FullyShardedDataParallel.summon_full_params(run.model):
        return weights_of(run.model.module) | run.scaler_result()


def trained(run, uses_orig_params, prepare=lambda run: None, **options):
    wrapped(run, uses_orig_params, **options)
    prepare(run)
    run.steps()
    return whole(run)


def resumed(run, uses_orig_params, kind, order):
    wrapped(run, uses_orig_params)
    run.steps(FIRST)
    fsdp = FullyShardedDataParallel
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", UserWarning)  # of a group with several backends
        with fsdp.state_dict_type(run.model, kind):
            saved = copy.deepcopy({"model": run.model.state_dict(), "scaler": run.scaler.state_dict()})
            saved["optimizer"] = copy.deepcopy(fsdp.optim_state_dict(run.model, run.optimizer))
        run.model, run.scaler = run.drop_in.network(seed=7), run.drop_in.scaler()
        wrapped(run, uses_orig_params)
        with fsdp.state_dict_type(run.model, kind):
            saved["optimizer"] = fsdp.optim_state_dict_to_load(run.model, run.optimizer, saved["optimizer"])
            for name in order:
                getattr(run, name).load_state_dict(saved[name])
    run.steps(REST)
    return whole(run)


def row(name, train, uses_orig_params, processes=2, **as_by_hand):
    """Train with FSDP1, and by hand with the same options."""

    def function(run):
        return train(run, uses_orig_params, **as_by_hand)

    function.__name__ = name
    tool(like=lambda run: by_hand(run, uses_orig_params, processes, **as_by_hand))(function)


FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
MODEL_FIRST, OPTIMIZER_FIRST = ("model", "optimizer", "scaler"), ("scaler", "optimizer", "model")
row("fsdp1", trained, False)
row("fsdp1 orig params", trained, True)
row("fsdp1 shard grad op", partial(trained, strategy=ShardingStrategy.SHARD_GRAD_OP), False)
row("fsdp1 no shard", partial(trained, strategy=ShardingStrategy.NO_SHARD), True, processes=1)
row("fsdp1 no shard max norm", partial(trained, strategy=ShardingStrategy.NO_SHARD), True, 1, max_norm=MAX_NORM)
row("fsdp1 max norm", trained, False, max_norm=MAX_NORM)
row("fsdp1 orig params max norm", trained, True, max_norm=MAX_NORM)
row("fsdp1 clip grad norm", trained, False, prepare=clip_in_the_loop)
row("fsdp1 full checkpoint", partial(resumed, kind=FULL, order=OPTIMIZER_FIRST), False)
row("fsdp1 sharded checkpoint", partial(resumed, kind=SHARDED, order=MODEL_FIRST), False)
row("fsdp1 orig params sharded checkpoint", partial(resumed, kind=SHARDED, order=OPTIMIZER_FIRST), True)


@tool(oracle=lambda run: run.record.replayed(run))
def fsdp1_mixed_precision(run):
    """Weights in fp32 get grads in bf16."""
    precision = MixedPrecision(torch.bfloat16, torch.bfloat16, keep_low_precision_grads=True)
    wrapped(run, True, mixed_precision=precision)
    run.record = Recorded(run.optimizer)
    run.steps()
    assert {it.grad.dtype for it in run.model.parameters() if it.grad is not None} == {torch.bfloat16}
    return run.record.result()


@tool(like=lambda run: by_hand(run, False))
def fsdp1_sharded_grad_scaler(run):
    scaler = run.scaler
    run.scaler = ShardedGradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=scaler.is_enabled())
    return trained(run, False)


@tool(like=lambda run: by_hand(run, False))
def fsdp1_own_state_dict(run):
    """Each process saves and loads its part by the optimizer's own ``state_dict``."""
    wrapped(run, False)
    run.steps(FIRST)
    saved = copy.deepcopy(run.optimizer.state_dict())
    run.optimizer = run.drop_in.optimizer(run.model.parameters())
    run.optimizer.load_state_dict(saved)
    run.steps(REST)
    return whole(run)


@tool(like=lambda run: by_hand(run, True))
def fsdp1_after_the_optimizer(run):
    """The optimizer is made before FSDP1, and its parameters stay, as in Accelerate."""
    optimizer = run.optimizer
    wrapped(run, True)
    run.optimizer = optimizer
    run.steps()
    return whole(run)


def full_states(run):
    """Return weights and states by the parameters' names."""
    fsdp = FullyShardedDataParallel
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with fsdp.state_dict_type(run.model, StateDictType.FULL_STATE_DICT):
            return run.model.state_dict(), fsdp.optim_state_dict(run.model, run.optimizer)


@tool(like=plain_weights)
def fsdp1_to_one_process(run):
    """What FSDP1 saves is loaded into a plain model."""
    wrapped(run, False)
    run.steps(FIRST)
    model, states = full_states(run)
    run.model, run.parts = run.drop_in.network(seed=7), PARTS
    run.optimizer = run.drop_in.optimizer(run.model.parameters())
    run.model.load_state_dict(model)
    states = FullyShardedDataParallel.rekey_optim_state_dict(states, OptimStateKeyType.PARAM_ID, run.model)
    run.optimizer.load_state_dict(states)
    run.steps(REST)
    return weights_of(run.model) | run.scaler_result()


@tool(like=plain_weights)
def fsdp1_from_one_process(run):
    parts, run.parts, plain = run.parts, PARTS, run.model
    run.steps(FIRST)
    fsdp, states = FullyShardedDataParallel, copy.deepcopy(run.optimizer.state_dict())
    states = fsdp.rekey_optim_state_dict(states, OptimStateKeyType.PARAM_NAME, plain)
    wrapped(run, False)
    run.parts = parts
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with fsdp.state_dict_type(run.model, StateDictType.FULL_STATE_DICT):
            run.optimizer.load_state_dict(fsdp.optim_state_dict_to_load(run.model, run.optimizer, states))
    run.steps(REST)
    return whole(run)
