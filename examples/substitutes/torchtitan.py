"""A substitute for torchtitan.components.optimizer, from its documentation: the parts that a container's subclass uses.

Like torchtitan 0.3.0, it gives each parameter to the first group whose pattern its name matches, makes one optimizer
of each kind, and has state dicts whose keys are the parameters' names. It has nothing else of torchtitan.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(kw_only=True)
class ParamGroupConfig:
    pattern: str
    optimizer_name: str
    optimizer_kwargs: dict[str, Any] = field(default_factory=dict)


class OptimizersContainer(torch.optim.Optimizer):
    @dataclass(kw_only=True, slots=True)
    class Config:
        param_groups: list[ParamGroupConfig] = field(default_factory=list)
        implementation: str = "fused"

    def __init_subclass__(cls) -> None:
        cls.Config.build = lambda config, **arguments: cls(config, **arguments)

    def __init__(self, config: Config, *, model_parts: list[torch.nn.Module]) -> None:
        fused = {"fused": config.implementation == "fused", "foreach": config.implementation == "foreach"}
        self.optimizers, everything = [], []
        for part in model_parts:
            groups, unmatched = {}, {name: it for name, it in part.named_parameters() if it.requires_grad}
            for group in config.param_groups:
                names = [name for name in unmatched if re.search(group.pattern, name)]
                options = {"params": [unmatched.pop(name) for name in names], "param_names": names, **fused}
                groups.setdefault(group.optimizer_name, []).append(options | group.optimizer_kwargs)
            for name, own_groups in groups.items():
                self.optimizers.append(self._resolve_optimizer_factory(name)(own_groups))
                everything += [param for group in own_groups for param in group["params"]]
        super().__init__(everything, {})  # lets hooks be registered

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> type[torch.optim.Optimizer]:
        return {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[name]

    def step(self, closure: None = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        flat = {}
        for optimizer in self.optimizers:
            state = optimizer.state_dict()
            for group in state["param_groups"]:
                options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                for name, number in zip(group["param_names"], group["params"], strict=True):
                    flat |= {f"state.{name}.{key}": value for key, value in state["state"][number].items()}
                    flat |= {f"param_groups.{name}.{key}": value for key, value in options.items()}
        return flat

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer in self.optimizers:
            state = optimizer.state_dict()
            for group in state["param_groups"]:
                for name, number in zip(group["param_names"], group["params"], strict=True):
                    state["state"][number] = _below(f"state.{name}.", state_dict)
                    group |= _below(f"param_groups.{name}.", state_dict)
            optimizer.load_state_dict(state)


def _below(prefix: str, flat: dict[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in flat.items() if key.startswith(prefix)}
