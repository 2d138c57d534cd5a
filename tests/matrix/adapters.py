"""peft and torchao: tools that replace linear layers by adapters or quantised layers."""

import warnings

from torch import nn

from tests.matrix.changed_modules import changes_modules, set_exact
from tests.matrix.runner import Run

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from peft import IA3Config, LoraConfig, get_peft_model
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training
    from torchao.quantization import Int8WeightOnlyConfig, quantize_


def adapted(run: Run, config) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.model = get_peft_model(run.model, config)
    set_exact(run)


@changes_modules
def peft_lora(run):
    adapted(run, LoraConfig(r=2, lora_alpha=2, target_modules=["last"]))
    yield


@changes_modules
def peft_lora_of_all_linear(run):
    """LinearAct is no Linear, so peft leaves it alone."""
    swaps = ["last"] if run.drop_in.first_layer is None else "all-linear"
    adapted(run, LoraConfig(r=2, lora_alpha=2, target_modules=swaps))
    yield


@changes_modules
def peft_lora_of_a_parameter(run):
    """The adapter adds to the weight, not to what the layer computes."""
    adapted(run, LoraConfig(r=2, lora_alpha=2, target_modules=[], target_parameters=["first.weight"]))
    yield


@changes_modules
def peft_lora_merged(run):
    """Merge midway into the weights, which are then trained."""
    adapted(run, LoraConfig(r=2, lora_alpha=2, target_modules=["last"]))
    run.model.base_model.model.requires_grad_(True)
    yield
    run.model.merge_adapter()


@changes_modules
def peft_dora(run):
    adapted(run, LoraConfig(r=2, lora_alpha=2, use_dora=True, target_modules=["last"]))
    yield


@changes_modules
def peft_ia3(run):
    adapted(run, IA3Config(target_modules=["last"], feedforward_modules=["last"]))
    yield


@changes_modules
def peft_lora_of_the_layer(run):
    adapted(run, LoraConfig(target_modules=["first"]))
    yield


def is_swapped(run: Run):
    """Return whether torchao should swap this module: all Linears beside a LinearAct, else the last Linear alone."""
    layers = [run.model.last] if run.drop_in.first_layer is None else list(run.model)
    return lambda module, name: isinstance(module, nn.Linear) and module in layers


@changes_modules
def torchao_float8(run):
    convert_to_float8_training(run.model, config=Float8LinearConfig(emulate=True), module_filter_fn=is_swapped(run))
    yield


@changes_modules
def torchao_int8(run):
    quantize_(run.model, Int8WeightOnlyConfig(), filter_fn=is_swapped(run))
    yield


@changes_modules
def torchao_int8_of_any_weight(run):
    """LinearAct's weight is quantised, too."""
    quantize_(run.model, Int8WeightOnlyConfig(), filter_fn=lambda module, _: hasattr(module, "weight"))
    yield


@changes_modules
def torchao_int8_training(run):
    quantize_(run.model, int8_weight_only_quantized_training(), filter_fn=is_swapped(run))
    yield
