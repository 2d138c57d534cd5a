"""What AdamW hands to the op: all parameters of a device that step together, group after group."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Batch:
    def __init__(self) -> None:
        self.groups: list[dict[str, Any]] = []
        self.sizes: list[int] = []
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.states: list[dict[str, Tensor]] = []

    def add(self, group: dict[str, Any], params: Sequence[Tensor], states: Sequence[dict[str, Tensor]]) -> None:
        self.groups.append(group)
        self.sizes.append(len(params))
        self.params += map(real, params)
        self.grads += (real(param.grad) for param in params if param.grad is not None)
        self.states += states

    def arguments(self) -> tuple[Any, ...]:
        device = self.params[0].device
        amsgrad = [group["amsgrad"] for group, size in zip(self.groups, self.sizes, strict=True) for _ in range(size)]
        nothing = torch.empty(0, device=device)
        largest = [
            state["max_exp_avg_sq"] if needed else nothing for state, needed in zip(self.states, amsgrad, strict=True)
        ]
        masters = [state.get("remainder", state.get("master", nothing)) for state in self.states]
        betas = [group["betas"] for group in self.groups]
        by_value = [
            [0.0 if isinstance(x, Tensor) else float(x) for x in row]
            for row in (
                [group["lr"] for group in self.groups],
                [beta1 for beta1, _ in betas],
                [beta2 for _, beta2 in betas],
            )
        ]
        return (
            self.params,
            self.grads,
            [state["exp_avg"] for state in self.states],
            [state["exp_avg_sq"] for state in self.states],
            largest if any(amsgrad) else [],
            masters if any(master is not nothing for master in masters) else [],
            [state["step"] for state in self.states],
            self.sizes,
            *by_value,
            [float(group["weight_decay"]) for group in self.groups],
            [float(group["eps"]) for group in self.groups],
            [bool(group["maximize"]) for group in self.groups],
            _on_device(self.groups, device),
        )  # fmt: skip


def _on_device(groups: Sequence[dict[str, Any]], device: torch.device) -> list[Tensor]:
    """lr and betas of each group that has one of them in a tensor, together in fp64; empty for the others."""
    hypers = [(group["lr"], *group["betas"]) for group in groups]
    if not any(isinstance(x, Tensor) for hyper in hypers for x in hyper):
        return []
    return [
        torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device).reshape(()) for x in hyper])
        for hyper in hypers
    ]


def real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
