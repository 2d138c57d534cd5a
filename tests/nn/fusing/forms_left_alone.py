"""Modules that fuse leaves as they are, most of them because a fused op would compute something else."""

import functools

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.nn.fusing.models import Mlp


class HiddenIsUsedAgain(Mlp):
    def forward(self, x):
        h = self.fc1(x)
        y = self.act(h)
        return self.fc2(y) + h.sum()


class HiddenIsCapturedBefore(Mlp):
    def forward(self, x):
        later = lambda: h.sum()  # noqa: E731
        h = self.fc1(x)
        y = self.act(h)
        return y + later()


class HiddenIsCapturedByAFunctionBefore(Mlp):
    def forward(self, x):
        def later():
            return h.sum()

        h = self.fc1(x)
        y = self.act(h)
        return y + later()


class HiddenIsKeptByTheLoop(Mlp):
    def forward(self, x):
        h = None
        for _ in range(2):
            if h is not None:
                x = x + h[..., :8]
            h = self.fc1(x)
            y = self.act(h)
        return y


class HiddenIsKeptByAWhile(Mlp):
    def forward(self, x):
        h, i = None, 0
        while i < 2:
            if h is not None:
                x = x + h.sum()
            with torch.enable_grad():
                h = self.act(self.fc1(x))
                x = self.fc2(h)
            i += 1
        return x


class InputIsBoundAnew(Mlp):
    def forward(self, x):
        gate = self.act(self.fc1(x))
        x = self.norm(x)
        return gate * self.up(x)


class BoundByAnAugmentedAssignment(Mlp):
    def forward(self, x):
        x = self.fc1(x)
        x += self.act(x)
        return x


class ArgumentsHaveNoNames(Mlp):
    def forward(self, x, /):
        return self.fc2(self.act(self.fc1(x)))


class NameOfAComprehension(Mlp):
    def forward(self, x):
        h = self.fc1(x)  # noqa: F841  the h below is another one
        return sum([self.act(h) for h in (x, 2 * x)])


class ChangedInBetween(Mlp):
    def forward(self, x):
        h = self.fc1(x)
        h += 1
        return self.act(h)


class StatementInBetween(Mlp):
    def forward(self, x):
        h = self.fc1(x)
        self.act = nn.ReLU()
        return self.act(h)


class BoundInsideAnExpression(Mlp):
    def forward(self, x):
        _ = self.fc1(h := self.norm(x))
        return self.act(h)


class LocalsAreRead(Mlp):
    def forward(self, x):
        h = self.fc1(x)
        y = self.act(h)
        return y + locals()["h"]


class GlobalIsAssigned(Mlp):
    def forward(self, x):
        global hidden
        hidden = self.fc1(x)
        return self.act(hidden)


class SameNameForAnotherInput(Mlp):
    def __init__(self):
        super().__init__()
        self.fc1, self.up = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.act(self.fc1(x))
        return x * self.up(x)


class ReadAfterAnError(Mlp):
    def forward(self, x):
        try:
            with torch.enable_grad():
                x = self.fc1(x)
                x = self.act(x)
        finally:
            self.seen = x
        return x


class MultipliesByTheLayerItself(Mlp):
    def forward(self, x):
        h = self.fc1(x)
        return h.tanh() * h


class ChunksAnotherDimension(Mlp):
    def forward(self, x):
        gate, up = self.packed(x).chunk(2, dim=1)
        return self.act(gate) * up if up.shape == gate.shape else gate


class LocalNamedTorch(Mlp):
    def forward(self, x):
        torch = nn.Sequential()
        torch.relu = nn.GELU()
        return torch.relu(self.fc1(x))


class CallsSuper(Mlp):
    def forward(self, x):
        return super().forward(x) + self.act(self.fc1(x)).sum()


class Doubling:
    """A decorator that keeps the function as an attribute, not in a closure."""

    def __init__(self, function):
        functools.update_wrapper(self, function)

    def __get__(self, module, kind):
        return functools.partial(self, module)

    def __call__(self, module, x):
        return 2 * self.__wrapped__(module, x)


class DecoratedByAnObject(Mlp):
    @Doubling
    def forward(self, x):
        return self.act(self.fc1(x))


def kept_in_a_list(function):
    functions = [function]

    @functools.wraps(function)
    def doubled(self, x):
        return 2 * functions[0](self, x)

    return doubled


class DecoratedOutsideOfACell(Mlp):
    @kept_in_a_list
    def forward(self, x):
        return self.act(self.fc1(x))


class HasNoSource(Mlp):
    exec("def forward(self, x):\n    return self.act(self.fc1(x))")


class DoubledGelu(nn.GELU):
    def forward(self, x):
        return 2 * super().forward(x)


class UnknownActivation(Mlp):
    def __init__(self):
        super().__init__()
        self.act = nn.ELU()


class SubclassedActivation(Mlp):
    def __init__(self):
        super().__init__()
        self.act = DoubledGelu()


class OtherLinear(Mlp):
    def __init__(self):
        super().__init__()
        self.fc1 = type("Own", (nn.Linear,), {"forward": lambda self, x: 2 * nn.Linear.forward(self, x)})(8, 16)

    def forward(self, x):
        return self.act(self.fc1(x))


class InAnInnerFunction(Mlp):
    def forward(self, x):
        def run(h):
            h = self.fc1(h)
            h = self.act(h)
            return self.fc2(h)

        return checkpoint(run, x, use_reentrant=False)


class InALambda(Mlp):
    def forward(self, x):
        return checkpoint(lambda h: self.fc2(self.act(self.fc1(h))), x, use_reentrant=False)


class InAComprehension(Mlp):
    def forward(self, x):
        return torch.stack([F.relu(self.fc1(it)) for it in x])


class GluOfADimension(Mlp):
    def forward(self, x):
        return F.glu(self.packed(x), -1)


class ActivationInPlace(Mlp):
    def forward(self, x):
        return F.relu(self.fc1(x), inplace=True)


LEFT = {
    HiddenIsUsedAgain: "its forward applies no",
    HiddenIsCapturedBefore: "its forward applies no",
    HiddenIsCapturedByAFunctionBefore: "its forward applies no",
    HiddenIsKeptByTheLoop: "its forward applies no",
    HiddenIsKeptByAWhile: None,
    InputIsBoundAnew: None,
    BoundByAnAugmentedAssignment: "its forward applies no",
    ArgumentsHaveNoNames: "its forward applies no",
    NameOfAComprehension: "its forward applies no",
    ChangedInBetween: "its forward applies no",
    StatementInBetween: "its forward applies no",
    BoundInsideAnExpression: "its forward applies no",
    LocalsAreRead: "its forward applies no",
    GlobalIsAssigned: "its forward applies no",
    SameNameForAnotherInput: None,
    ReadAfterAnError: "its forward applies no",
    MultipliesByTheLayerItself: "its forward applies no",
    ChunksAnotherDimension: "its forward applies no",
    LocalNamedTorch: "its forward applies no",
    CallsSuper: "its forward is a closure, or calls super()",
    DecoratedByAnObject: "its forward is no Python function",
    DecoratedOutsideOfACell: "its forward is decorated, and the decorator keeps it in no cell of its closure",
    HasNoSource: "its forward has no source",
    UnknownActivation: "act is no activation that mpkernels knows",
    SubclassedActivation: "its forward applies no",
    InAnInnerFunction: "it stands in an inner function or a comprehension",
    InALambda: "it stands in an inner function or a comprehension",
    InAComprehension: "it stands in an inner function or a comprehension",
    GluOfADimension: "glu is no activation that mpkernels knows",
    ActivationInPlace: "relu is called with inplace=True",
    OtherLinear: "fc1 is no plain torch.nn.Linear",
}
