"""The MLPs of timm and diffusers, written by us with the same calls in the same order."""

import torch
from torch import nn

from tests.nn.fusing import as_diffusers

X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))


class TimmMlp(nn.Module):
    def __init__(self, drop=0.0, norm=None):
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(8, 16), nn.GELU(), nn.Dropout(drop)
        self.norm = nn.Identity() if norm is None else norm(16)
        self.fc2, self.drop2 = nn.Linear(16, 8), nn.Dropout(0.0)

    def forward(self, x):
        x = self.fc1(x)
        x = self.act(x)
        x = self.drop1(x)
        x = self.norm(x)
        x = self.fc2(x)
        return self.drop2(x)


class TimmGatedMlp(TimmMlp):
    def __init__(self, drop=0.0):
        super().__init__(drop)
        self.gate = nn.Identity()

    def forward(self, x):
        x = self.fc1(x)
        x = self.act(x)
        x = self.drop1(x)
        x = self.gate(x)
        x = self.norm(x)
        x = self.fc2(x)
        return self.drop2(x)


class TimmSwiGLU(nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        self.fc1_g, self.fc1_x, self.act = nn.Linear(8, 16), nn.Linear(8, 16), nn.SiLU()
        self.drop1, self.norm, self.fc2, self.drop2 = nn.Dropout(drop), nn.Identity(), nn.Linear(16, 8), nn.Dropout(0.0)

    def forward(self, x):
        gate = self.fc1_g(x)
        x = self.fc1_x(x)
        x = self.act(gate) * x
        x = self.drop1(x)
        x = self.norm(x)
        x = self.fc2(x)
        return self.drop2(x)


class TimmGluMlp(TimmMlp):
    """A gated MLP that decides in each call which half is the gate."""

    def __init__(self, drop=0.0):
        super().__init__(drop)
        self.fc1, self.chunk_dim, self.gate_last = nn.Linear(8, 32), -1, True

    def forward(self, x):
        x = self.fc1(x)
        x1, x2 = x.chunk(2, dim=self.chunk_dim)
        x = x1 * self.act(x2) if self.gate_last else self.act(x1) * x2
        x = self.drop1(x)
        x = self.norm(x)
        x = self.fc2(x)
        return self.drop2(x)


class FeedForward(nn.Module):
    """diffusers' FeedForward."""

    def __init__(self, projection, drop=0.0, **options):
        super().__init__()
        self.net = nn.ModuleList([projection(8, 16, **options)])
        self.net.append(nn.Dropout(drop))
        self.net.append(nn.Linear(16, 8))
        self.net.append(nn.Dropout(0.0))

    def forward(self, hidden_states, *args, **kwargs):
        if len(args) > 0 or kwargs.get("scale") is not None:
            raise TypeError("scale is gone")
        for module in self.net:
            hidden_states = module(hidden_states)
        return hidden_states


class InSequence(nn.Sequential):
    def __init__(self, drop=0.0):
        layers = nn.Linear(8, 16), nn.Tanh(), nn.Identity(), nn.Dropout(drop), nn.Identity(), nn.Linear(16, 8)
        super().__init__(*layers, nn.Dropout(0.0))


class Looped(nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        self.layers = nn.ModuleList([nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Dropout(drop), nn.Linear(16, 8)])

    def forward(self, x):
        y = 2 * x
        for layer in self.layers:
            y = layer(y)
        return x + y


def _feed_forward(name, **options):
    return lambda drop=0.0: FeedForward(getattr(as_diffusers, name), drop, **options)


KINDS = {
    "timm's Mlp": (TimmMlp, "mlp"),
    "timm's GatedMlp": (TimmGatedMlp, "mlp"),
    "timm's SwiGLU": (TimmSwiGLU, "gated_mlp"),
    "a sequence": (InSequence, "mlp"),
    "a loop": (Looped, "mlp"),
    "diffusers' GELU": (_feed_forward("GELU"), "mlp"),
    "diffusers' tanh GELU": (_feed_forward("GELU", approximate="tanh"), "mlp"),
    "diffusers' LinearActivation": (_feed_forward("LinearActivation"), "mlp"),
    "diffusers' GEGLU": (_feed_forward("GEGLU"), "gated_mlp"),
    "diffusers' SwiGLU": (_feed_forward("SwiGLU"), "gated_mlp"),
}


def made(name, **options):
    torch.manual_seed(0)
    return KINDS[name][0](**options)


def results(model, x=X, dy=None):
    """Return y and all gradients. Without dy, they are those of the sum of y's squares."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(2 * y.detach() if dy is None else dy.to(y.dtype))
    return [y.detach(), x.grad, *(it.grad for it in model.parameters() if it.grad is not None)]
