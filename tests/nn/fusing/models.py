"""Small modules with MLPs in all the ways that people write them, and helpers that show which fused ops ran."""

from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812  most people import it so
from torch import nn
from torch.testing import assert_close

from mpkernels import functional

X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
OPS = ("linear_act", "mlp", "gated_linear", "gated_mlp")


@contextmanager
def recorded_ops():
    """Yield a list that gets the name of each op which fused modules call."""
    ran = []

    def record(name, op, *arguments):
        ran.append(name)
        with mock.patch.multiple(functional, **originals):  # an op that calls another op counts once
            return op(*arguments)

    originals = {name: getattr(functional, name) for name in OPS}
    with mock.patch.multiple(functional, **{name: partial(record, name, op) for name, op in originals.items()}):
        yield ran


def assert_computes(run, want, ops, x=X):
    """Assert that run(x) calls these fused ops, and returns what is wanted: to the bit, if it calls none."""
    with recorded_ops() as ran:
        got = run(x)
    assert ran == ops
    assert_close(got, want, rtol=1e-5 if ops else 0, atol=1e-5 if ops else 0)


def compiled(model):
    """Return the model under torch.compile without a graph break, and a list that gets the text of each graph."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.print_readable(print_output=False))
        return graph

    return torch.compile(model, backend=backend, fullgraph=True), graphs


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return 2 * weight


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2, self.up = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16, bias=False)
        self.packed = nn.Linear(8, 32)
        self.act, self.dropout, self.norm = nn.GELU(), nn.Dropout(0.0), nn.LayerNorm(8)
        self.function, self.rate = F.silu, 0.0

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


def forms_of(forwards, base=Mlp):
    """Return a class with each method of ``forwards`` as its forward."""
    methods = {name: it for name, it in vars(forwards).items() if callable(it)}
    return [type(name, (base,), {"forward": it, "__module__": it.__module__}) for name, it in methods.items()]


class Chain(Mlp):
    def forward(self, x):
        x = self.fc1(x)
        x = self.act(x)
        x = self.dropout(x)
        x = self.fc2(x)
        return self.dropout(x)


class Function(Mlp):
    def forward(self, x):
        return F.gelu(self.fc1(self.norm(x)), approximate="tanh")


class Gated(Mlp):
    def forward(self, x):
        return self.act(self.fc1(x)) * self.up(x)


class GatedByOneNumber(Mlp):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 1)

    def forward(self, x):
        return torch.sigmoid(self.gate(x)) * self.up(x)


class GatingOneNumber(GatedByOneNumber):
    def forward(self, x):
        return self.fc2(self.gate(x) * self.act(self.fc1(x)))


class GatedApart(Mlp):
    def forward(self, x):
        gate = self.act(self.fc1(x))
        up = self.up(x)
        x = gate * up
        x = self.dropout(x)
        return self.fc2(x)


class Packed(Mlp):
    def forward(self, x):
        up = self.packed(x)
        gate, up = up.chunk(2, dim=-1)
        return self.fc2(up * self.function(gate))


class PackedByTorch(Mlp):
    def forward(self, x):
        gate, up = torch.chunk(self.packed(x), 2, dim=-1)
        return self.act(gate) * up


class InMethod(Mlp):
    def forward(self, x):
        return x + self._block(x)

    def _block(self, x):
        return self.fc2(self.dropout(self.act(self.fc1(x))))


class InMethodOfALambda(InMethod):
    def forward(self, x):
        run = lambda h: self._block(h)  # noqa: E731
        return x + run(x)


class InBranchAndLoop(Mlp):
    def forward(self, x):
        for _ in range(2):
            if x.ndim == 3:
                h = self.fc1(x)
                x = self.fc2(self.act(h))
        return x


class TwoInARow(Mlp):
    def forward(self, x):
        x = torch.relu(self.fc1(x))
        x = torch.relu(self.fc2(x))
        return self.up(x)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Mlp()

    def forward(self, x):
        return self.inner.act(self.inner.fc1(x))


class AfterOperators(Mlp):
    """An MLP where only reads come before the last layer's call."""

    def forward(self, x, scale=0.5):
        h = self.act(self.fc1(x))
        return torch.add(x * scale + self.rate, self.fc2(h), alpha=2)


class Squared(Mlp):
    def forward(self, x):
        return x + self.fc2(F.relu(self.fc1(self.norm(x))).square())


class SquaredByAnOperator(Mlp):
    def forward(self, x):
        h = torch.relu(self.fc1(x))
        h = h**2
        h = self.dropout(h)
        return self.fc2(h)


class GatedBySquares(Mlp):
    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)).pow(2) * self.up(x))


class Private(Mlp):
    def __init__(self):
        super().__init__()
        self.__scale = 3.0

    def forward(self, x):
        return self.__scale * torch.tanh(self.fc1(x))


class Keywords(Mlp):
    def forward(self, x, *, scale=2.0, **options):
        """Scale."""
        return scale * self.act(self.fc1(x))


class BecomeAnMlp:
    """Each method is the forward of a module."""

    def chain_with_residual(self, x):
        residual = x
        x = self.norm(x)
        h = self.fc1(x)
        h = self.act(h)
        h = F.dropout(h, self.rate, training=self.training)
        x = residual + self.fc2(h)
        return x * 2

    def torch_function(self, x):
        hidden: torch.Tensor = torch.relu(self.fc1(x))
        return self.fc2(hidden)

    def after_a_method(self, x):
        h = self.act(self.fc1(x))
        return x.add(self.fc2(h))


class BecomeAGatedMlp:
    def gated_last(self, x):
        _, up = self.fc1(x), self.up(x)  # one statement for two names stays as it is
        up = self.up(x)
        return self.fc2(up * F.silu(self.fc1(x)))

    def packed_gate_last(self, x):
        up, gate = self.packed(x).chunk(2, dim=-1)
        return self.fc2(self.dropout(up * self.act(gate)))


class BecomeALinearAct:
    def function_of_instance(self, x):
        y = self.function(self.fc1(x))
        return y.sum(-1)

    def under_a_context(self, x):
        with torch.autocast("cpu", enabled=False):
            x = self.fc1(x)
            x = self.act(x)
        return x + 0

    def one_layer_for_gate_and_up(self, x):
        return self.act(self.fc1(x)) * self.fc1(x)

    def another_dropout(self, x):
        return self.fc2(F.alpha_dropout(self.act(self.fc1(x)), p=self.rate, training=self.training))

    def cubed(self, x):
        return self.fc2(F.relu(self.fc1(x)) ** 3)

    def squared_gelu(self, x):
        return self.fc2(self.act(self.fc1(x)).square())

    def squared_by_torch(self, x):
        return self.fc2(torch.square(F.relu(self.fc1(x))))


FORMS = {
    Mlp: ["mlp"],
    Chain: ["mlp"],
    Function: ["linear_act"],
    Gated: ["gated_linear"],
    GatedByOneNumber: ["linear_act"],
    GatingOneNumber: ["linear_act"],
    GatedApart: ["gated_mlp"],
    Packed: ["gated_mlp"],
    PackedByTorch: ["gated_linear"],
    InMethod: ["mlp"],
    InMethodOfALambda: ["mlp"],
    InBranchAndLoop: ["mlp", "mlp"],
    TwoInARow: ["linear_act", "mlp"],
    Nested: ["linear_act"],
    AfterOperators: ["mlp"],
    Squared: ["mlp"],
    SquaredByAnOperator: ["mlp"],
    GatedBySquares: ["gated_mlp"],
    Private: ["linear_act"],
    Keywords: ["linear_act"],
    **{key: ["mlp"] for key in forms_of(BecomeAnMlp)},
    **{key: ["gated_mlp"] for key in forms_of(BecomeAGatedMlp)},
    **{key: ["linear_act"] for key in forms_of(BecomeALinearAct)},
}
