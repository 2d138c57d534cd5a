"""torch's own tools that put other weights or modules in a model."""

import warnings

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.matrix.changed_modules import changes_modules
from tests.matrix.runner import Run, batch, midway, tool


@changes_modules
def prune_(run):
    for layer in (run.model.first, run.model.last):
        prune.l1_unstructured(layer, "weight", 0.5)
        prune.random_unstructured(layer, "bias", 0.2)
    yield


@changes_modules
def prune_made_permanent(run):
    for layer in (run.model.first, run.model.last):
        prune.l1_unstructured(layer, "weight", 0.5)
    yield
    for layer in (run.model.first, run.model.last):
        prune.remove(layer, "weight")


@changes_modules
def weight_norm(run):
    _make_rows_of_length_1(run)
    for layer in (run.model.first, run.model.last):
        parametrizations.weight_norm(layer)
    yield


@changes_modules
def weight_norm_of_old(run):
    _make_rows_of_length_1(run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # that it is old
        nn.utils.weight_norm(run.model.first)
        nn.utils.weight_norm(run.model.last)
    yield


@torch.no_grad()
def _make_rows_of_length_1(run):
    """Give the weight rows of length 1, so that the normalisation doesn't round."""
    for layer in (run.model.first, run.model.last):
        layer.weight.copy_(torch.where(layer.weight > 0, 0.25, -0.25))
        layer.weight[:, 16:] = 0


class _Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@changes_modules
def parametrization(run):
    for layer in (run.model.first, run.model.last):
        parametrize.register_parametrization(layer, "weight", _Doubled())
    yield


@changes_modules
def parametrization_removed(run):
    for layer in (run.model.first, run.model.last):
        parametrize.register_parametrization(layer, "weight", _Doubled())
    yield
    for layer in (run.model.first, run.model.last):
        parametrize.remove_parametrizations(layer, "weight")


@changes_modules
def tied_weights(run):
    """One tensor in two layers."""
    more = nn.Linear(5, 40, bias=False), nn.Linear(40, 5)
    run.model.extend(it.to(run.dtype) for it in more)
    run.model[-1].weight = run.model.last.weight
    yield


@changes_modules
def frozen_and_thawed(run):
    run.model.first.requires_grad_(False)
    yield
    run.model.first.requires_grad_(True)
    run.model.last.bias.requires_grad_(False)


@changes_modules
def a_group_added(run):
    yield
    run.model.append(nn.Linear(5, 5, dtype=run.dtype))
    run.optimizer.add_param_group({"params": list(run.model[-1].parameters())})


@changes_modules
def turned_to_fp32(run):
    yield
    run.model.float()


@changes_modules
def turned_to_bf16(run):
    yield
    run.model.bfloat16()


@changes_modules
def sharpness_aware(run):
    """SAM moves the weights, takes the grads there, and puts the weights back."""
    backward, model = run.backward, run.model

    def backward_there(number):
        backward(number)
        kept = [(param, param.data.clone()) for param in model.parameters()]
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.sign(param.grad), alpha=0.125)
        model.zero_grad()
        backward(number)
        for param, weight in kept:
            param.data = weight

    run.backward = backward_there
    yield


def dynamically_quantised(model, which):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it will be removed
        from torch.ao.quantization import quantize_dynamic

        return quantize_dynamic(model, which)


@midway()
def quantize_dynamic(run):
    """Quantise a copy of the model midway."""
    dynamically_quantised(run.model, {nn.Linear})


def outputs_quantised(run, which):
    model = dynamically_quantised(run.model.float(), which)
    return {"outputs": model(batch(0, 0, torch.float32)[0])}


@tool(oracle=lambda run: outputs_quantised(Run(run.drop_in.with_torchs_layer()), {"last"}))
def quantize_dynamic_of_the_layer(run):
    """LinearAct is no Linear, so it is left alone."""
    return outputs_quantised(run, {nn.Linear})
