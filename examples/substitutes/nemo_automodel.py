"""A substitute for nemo_automodel.components.optim.optimizer, from its documentation: a class built by its name.

Like NeMo Automodel 0.7.0, it imports a dotted path, and calls the class with the trainable parameters of each part of
the model and the other keys. It has none of Automodel's own optimizers, groups, meshes and trainers.
"""

import importlib
from typing import Any

import torch


def build_optimizer(model: torch.nn.Module, config: tuple[str, dict[str, Any]]) -> list[torch.optim.Optimizer]:
    path, options = config
    module, _, name = path.rpartition(".")
    build = getattr(importlib.import_module(module), name)
    parts = getattr(model, "parts", [model])
    return [build(params=[it for it in part.parameters() if it.requires_grad], **options) for part in parts]
