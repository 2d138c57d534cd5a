"""Masters around the optimizers of other libraries, in one group and in three: over 16-bit weights each steps as over
fp32 ones, bit for bit, or is refused. What isn't named below is a class that takes parameters alone."""

import copy
import random
import warnings

import numpy as np
import pytest
import torch
from torch.optim import SGD, Optimizer

from mpkernels.optim import Masters, split_params
from mpkernels.optim.masters import true_weight
from tests import libraries
from tests.hard_grads import same_bits
from tests.networks import B16
from tests.optim.wrapped import all_params, parameters

libraries.need()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lion_pytorch
    import optimi
    import prodigyopt
    import pytorch_optimizer
    import schedulefree
    import transformers

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own

OPTIONS = {
    "Ranger21": {"num_iterations": 10},
    "optimi": {"lr": 1e-3, "triton": False},  # all of this library's; Triton's kernels look for a GPU
}
WITH_MATRICES = {"AdaGO", "AdaMuon", "Muon", "MuonClip", "NorMuon"}  # their groups say use_muon
NOT_TRIED = {  # their step fails over fp32 parameters, too
    "AdaHessian": "grads that have a graph",
    "AdaLOMO": "a model, which it steps in the backward",
    "AdamMini": "a model",
    "AliG": "a closure",
    "DeMo": "einops, and processes",
    "DistributedMuon": "processes",
    "BSAM": "a closure",
    "GSAM": "a model",
    "WSAM": "a model",
    "LOMO": "a model, which it steps in the backward",
    "LoRARite": "pairs of matrices",
    "PCGrad": "several losses",
    "SophiaH": "grads that have a graph",
}
AROUND_OTHERS = {  # each is made around SGD, and then wrapped itself
    **dict.fromkeys(("SAM", "LookSAM", "FriendlySAM"), lambda kind, groups: kind(groups, SGD)),
    **dict.fromkeys(
        ("TRAC", "Lookahead", "OrthoGrad", "ScheduleFreeWrapper", "Magma"), lambda kind, groups: kind(SGD(groups, 0.1))
    ),
    "SafeFP16Optimizer": lambda kind, groups: kind(SGD(groups, 0.1)),
}
REFUSED = {"LBFGS", "AdamWScheduleFreeClosure", "RAdamScheduleFreeClosure", "SGDScheduleFreeClosure", *AROUND_OTHERS}


def optimizers():
    """Return the libraries' optimizers by name."""
    found = {}
    for library in (pytorch_optimizer, optimi, schedulefree, lion_pytorch, prodigyopt):
        for name, kind in vars(library).items():
            is_one = isinstance(kind, type) and issubclass(kind, Optimizer) and kind.__module__.startswith("torch.") < 1
            if is_one and name not in NOT_TRIED:
                found[f"{library.__name__}.{name}"] = kind
    return found


def groups(name, params, count):
    if name in WITH_MATRICES:
        return [{"params": [it], "use_muon": it.ndim == 2} for it in params]
    if name == "SpectralSphere":
        params = [it for it in params if it.ndim == 2]
    options = [{}, {}, {}] if name == "Prodigy" else [{}, {"lr": 5e-3}, {"lr": 2e-3}]  # Prodigy wants one lr
    return [{"params": params[i::count], **options[i]} for i in range(count)]


def made(kind, path, dtype, count):
    library, name = path.split(".")
    random.seed(0)
    torch.manual_seed(0)
    params = [*parameters(dtype), torch.nn.Parameter(torch.linspace(-1, 1, 8).to(B16).to(dtype))]
    if name in AROUND_OTHERS:
        return AROUND_OTHERS[name](kind, groups(name, params, count))
    optimizer = kind(groups(name, params, count), **OPTIONS.get(library, OPTIONS.get(name, {})))
    if hasattr(optimizer, "train"):  # schedule-free classes step after it
        optimizer.train()
    return optimizer


def step(optimizer, seed):
    for generator in (torch.manual_seed, np.random.seed, random.seed):
        generator(seed)
    for param in all_params(optimizer):
        param.grad = torch.randn(param.shape).to(B16).to(param.dtype)
    optimizer.step()


def assert_equal(ours, bare):
    for param, other in zip(all_params(ours), all_params(bare), strict=True):
        assert same_bits(true_weight(param, ours.state[param]).float(), other.detach())


def reloaded(make, optimizer):
    """Return another optimizer with the same weights and states."""
    again = make()
    with torch.no_grad():
        for param, other in zip(all_params(again), all_params(optimizer), strict=True):
            param.copy_(other)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return again


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("path", optimizers())
def test_a_class_steps_16_bit_weights_as_fp32_ones_or_is_refused(path, count):
    kind, name = optimizers()[path], path.split(".")[1]
    if name in REFUSED:
        with pytest.raises((ValueError, TypeError), match="Masters: optimizer must"):
            Masters(made(kind, path, B16, 1))
        return
    make_ours, make_bare = lambda: Masters(made(kind, path, B16, count)), lambda: made(kind, path, torch.float32, count)
    ours, bare = make_ours(), make_bare()
    for seed in range(4):
        step(ours, seed)
        step(bare, seed)
        assert_equal(ours, bare)
    for copied in (copy.deepcopy, None):
        pair = []
        for optimizer, make in ((bare, make_bare), (ours, make_ours)):
            try:
                again = copied(optimizer) if copied else reloaded(make, optimizer)
                step(again, 5)
            except Exception as error:  # a copy of many classes lacks attributes, and fails without Masters, too
                again = type(error)
            pair.append(again)
        if isinstance(pair[0], type):
            assert pair[0] is pair[1]
        else:
            assert_equal(pair[1], pair[0])


def test_split_params_finds_the_heads_of_hugging_faces_models():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=50, **sizes)
    for kind in (transformers.LlamaForCausalLM, transformers.LlamaModel):
        model = kind(config)
        matrices, others = split_params(model)
        assert len(matrices) == 7
        assert {it.shape for it in others if it.ndim == 2} == {(50, 16)}
