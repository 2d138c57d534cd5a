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


def adapter(name, kind, **options):
    """Make a row of a kind of adapter."""

    def change(run):
        adapted(run, kind(**options))
        yield

    change.__name__ = name
    changes_modules(change)


LORA = {"r": 2, "lora_alpha": 2}
LAST, FIRST = ({"target_modules": [name]} for name in ("last", "first"))
adapter("peft lora", LoraConfig, **LORA, **LAST)
adapter("peft dora", LoraConfig, **LORA, **LAST, use_dora=True)
adapter("peft ia3", IA3Config, **LAST, feedforward_modules=["last"])
# target_parameters names a weight: peft then changes the weight itself, where target_modules wrap the layer around it.
adapter("peft lora of a parameter", LoraConfig, **LORA, target_modules=[], target_parameters=["first.weight"])
adapter("peft lora of the layer", LoraConfig, **LORA, **FIRST)
adapter("peft dora of the layer", LoraConfig, **LORA, **FIRST, use_dora=True)
adapter("peft ia3 of the layer", IA3Config, **FIRST, feedforward_modules=["first"])


@changes_modules
def peft_lora_of_all_linear(run):
    """LinearAct is no Linear, so peft leaves it alone."""
    swaps = ["last"] if run.drop_in.first_layer is None else "all-linear"
    adapted(run, LoraConfig(**LORA, target_modules=swaps))
    yield


@changes_modules
def peft_lora_merged(run):
    """Merge midway into the weights, which are then trained."""
    adapted(run, LoraConfig(**LORA, **LAST))
    run.model.base_model.model.requires_grad_(True)
    yield
    run.model.merge_adapter()


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
