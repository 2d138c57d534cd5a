"""Modules that fuse leaves as they are, most of them because a fused op would compute something else."""

import functools

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.nn.fusing.models import Mlp, forms_of


class ApplyNoActivation:
    """Each method is a module's forward."""

    def hidden_is_used_again(self, x):
        h = self.fc1(x)
        y = self.act(h)
        return self.fc2(y) + h.sum()

    def hidden_is_captured_before(self, x):
        later = lambda: h.sum()  # noqa: E731
        h = self.fc1(x)
        y = self.act(h)
        return y + later()

    def hidden_is_captured_by_a_function_before(self, x):
        def later():
            return h.sum()

        h = self.fc1(x)
        y = self.act(h)
        return y + later()

    def hidden_is_kept_by_the_loop(self, x):
        h = None
        for _ in range(2):
            if h is not None:
                x = x + h[..., :8]
            h = self.fc1(x)
            y = self.act(h)
        return y

    def bound_by_an_augmented_assignment(self, x):
        x = self.fc1(x)
        x += self.act(x)
        return x

    def arguments_have_no_names(self, x, /):
        return self.fc2(self.act(self.fc1(x)))

    def name_of_a_comprehension(self, x):
        h = self.fc1(x)  # noqa: F841  the h below is another one
        return sum([self.act(h) for h in (x, 2 * x)])

    def changed_in_between(self, x):
        h = self.fc1(x)
        h += 1
        return self.act(h)

    def statement_in_between(self, x):
        h = self.fc1(x)
        self.act = nn.ReLU()
        return self.act(h)

    def bound_inside_an_expression(self, x):
        _ = self.fc1(h := self.norm(x))
        return self.act(h)

    def locals_are_read(self, x):
        h = self.fc1(x)
        y = self.act(h)
        return y + locals()["h"]

    def global_is_assigned(self, x):
        global hidden
        hidden = self.fc1(x)
        return self.act(hidden)

    def read_after_an_error(self, x):
        try:
            with torch.enable_grad():
                x = self.fc1(x)
                x = self.act(x)
        finally:
            self.seen = x
        return x

    def multiplies_by_the_layer_itself(self, x):
        h = self.fc1(x)
        return h.tanh() * h

    def chunks_another_dimension(self, x):
        gate, up = self.packed(x).chunk(2, dim=1)
        return self.act(gate) * up if up.shape == gate.shape else gate

    def local_named_torch(self, x):
        torch = nn.Sequential()
        torch.relu = nn.GELU()
        return torch.relu(self.fc1(x))

    def an_import_named_torch(self, x):
        from torch.nn import functional as torch

        return torch.relu(self.fc1(x))

    def a_function_named_torch(self, x):
        def torch():
            pass

        torch.relu = nn.GELU()
        return torch.relu(self.fc1(x))


class FusedInPart:
    def hidden_is_kept_by_a_while(self, x):
        h, i = None, 0
        while i < 2:
            if h is not None:
                x = x + h.sum()
            with torch.enable_grad():
                h = self.act(self.fc1(x))
                x = self.fc2(h)
            i += 1
        return x

    def input_is_bound_anew(self, x):
        gate = self.act(self.fc1(x))
        x = self.norm(x)
        return gate * self.up(x)


class InInnerFunctions:
    def in_an_inner_function(self, x):
        def run(h):
            h = self.fc1(h)
            h = self.act(h)
            return self.fc2(h)

        return checkpoint(run, x, use_reentrant=False)

    def in_a_lambda(self, x):
        return checkpoint(lambda h: self.fc2(self.act(self.fc1(h))), x, use_reentrant=False)

    def in_a_comprehension(self, x):
        return torch.stack([F.relu(self.fc1(it)) for it in x])


class CallOtherForms:
    def glu_of_a_dimension(self, x):
        return F.glu(self.packed(x), -1)

    def activation_in_place(self, x):
        return F.relu(self.fc1(x), inplace=True)


class SameNameForAnotherInput(Mlp):
    def __init__(self):
        super().__init__()
        self.fc1, self.up = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.act(self.fc1(x))
        return x * self.up(x)


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


class InAStaticMethod(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 8)

    def forward(self, x):
        return self.activated(self.fc1, x)

    @staticmethod
    def activated(layer, x):
        return F.relu(layer(x))


class InAModuleDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"fc": nn.Linear(8, 8), "act": nn.GELU()})

    def forward(self, x):
        return self.layers["act"](self.layers["fc"](x))


GLU, IN_PLACE = forms_of(CallOtherForms)
LEFT = {
    **dict.fromkeys(forms_of(ApplyNoActivation), "its forward applies no"),
    **dict.fromkeys(forms_of(FusedInPart)),
    **dict.fromkeys(forms_of(InInnerFunctions), "it stands in an inner function or a comprehension"),
    GLU: "glu is no activation that mpkernels knows",
    IN_PLACE: "relu is called with inplace=True",
    SameNameForAnotherInput: None,
    **dict.fromkeys((SubclassedActivation, InAStaticMethod, InAModuleDict), "its forward applies no"),
    CallsSuper: "its forward is a closure, or calls super()",
    DecoratedByAnObject: "its forward is no Python function",
    DecoratedOutsideOfACell: "its forward is decorated, and the decorator keeps it in no cell of its closure",
    HasNoSource: "its forward has no source",
    UnknownActivation: "act is no activation that mpkernels knows",
    OtherLinear: "fc1 is no plain torch.nn.Linear",
}
