"""checkpoint.load sets back unusual objects, too, and shows the error that stopped it."""

import pytest
import torch

from mpkernels.checkpoint import load, save


class Frozen(dict):
    def _refuse(self, *_):
        raise TypeError("frozen")

    clear = update = _refuse


class Refusing:
    """An object that refuses both a new state and its own old one."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise KeyError("not mine")


class OnlyLoading:
    def load_state_dict(self, state):
        self.state = state


class Copying(torch.optim.SGD):
    """An object that loads by writing to its tensors."""

    def load_state_dict(self, state_dict):
        for param, state in zip(self.state, state_dict["state"].values(), strict=True):
            self.state[param]["momentum_buffer"].copy_(state["momentum_buffer"])


def linear(value):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return model


def stepped(grad, kind=Copying):
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.full((2,), grad)
    optimizer = kind([weight], momentum=0.9)
    optimizer.step()
    return optimizer


def refused(path, saved, it):
    """Load into the object and then into one that refuses."""
    save(path, it=saved, last={})
    with pytest.raises(KeyError, match="not mine") as caught:
        load(path, it=it, last=Refusing())
    return caught.value


def test_a_dict_that_can_not_change_stops_no_undo(tmp_path):
    model = linear(1.0)
    model._internal_dict = frozen = Frozen(depth=3)
    refused(tmp_path / "last.pt", linear(2.0), model)
    assert model.weight.item() == 1
    assert model._internal_dict is frozen
    assert frozen == {"depth": 3}


def test_an_attribute_that_a_load_has_added_is_removed(tmp_path):
    class Counting(torch.nn.Linear):
        def load_state_dict(self, state):
            self.times = self.__dict__.get("times", 0) + 1
            super().load_state_dict(state)

    model = Counting(1, 1, bias=False)
    refused(tmp_path / "last.pt", linear(2.0), model)
    assert not hasattr(model, "times")


def test_an_undo_that_fails_hides_no_error_and_stops_no_other(tmp_path):
    class Stubborn(Refusing):
        def load_state_dict(self, state):
            if self in loaded:
                raise OSError("broken")
            loaded.append(self)

    loaded, model = [], linear(1.0)
    save(tmp_path / "last.pt", model=linear(2.0), stubborn={}, last={})
    with pytest.raises(OSError, match="broken") as caught:
        load(tmp_path / "last.pt", model=model, stubborn=Stubborn(), last=Refusing())
    assert model.weight.item() == 1
    assert str(caught.value.__context__) == "'not mine'"


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_coo], ids=str)
def test_sparse_buffers_are_loaded_and_set_back(tmp_path, layout):
    model, other = torch.nn.Module(), torch.nn.Module()
    model.register_buffer("graph", torch.eye(3).to_sparse(layout=layout))
    other.register_buffer("graph", (2 * torch.eye(3)).to_sparse(layout=layout))
    refused(tmp_path / "last.pt", other, model)
    assert torch.equal(model.graph.to_dense(), torch.eye(3))
    load(tmp_path / "last.pt", it=model)
    assert torch.equal(model.graph.to_dense(), 2 * torch.eye(3))


def test_an_object_without_a_state_dict_is_loaded_last(tmp_path):
    first, model = OnlyLoading(), linear(1.0)
    save(tmp_path / "last.pt", first={"a": 1}, model=linear(2.0), last={})
    with pytest.raises(KeyError, match="not mine"):
        load(tmp_path / "last.pt", first=first, model=model, last=Refusing())
    assert vars(first) == {}
    load(tmp_path / "last.pt", first=first, model=model)
    assert (first.state, model.weight.item()) == ({"a": 1}, 2)


class Wrapper(torch.optim.Optimizer):
    """A wrapper that shows its inner optimizer's state, like Accelerate's."""

    def __init__(self, inner):
        self.inner = inner

    state = property(lambda self: self.inner.state)
    param_groups = property(lambda self: self.inner.param_groups)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict(state_dict)


def with_own_method(optimizer):
    optimizer.load_state_dict = lambda state: Copying.load_state_dict(optimizer, state)
    return optimizer


@pytest.mark.parametrize(
    "make",
    [stepped, lambda grad: Wrapper(stepped(grad)), lambda grad: with_own_method(stepped(grad, torch.optim.SGD))],
    ids=["method of the class", "wrapped", "method set on the object"],
)
def test_an_optimizer_that_loads_by_writing_is_set_back(tmp_path, make):
    optimizer = make(1.0)
    kept = [state["momentum_buffer"] for state in optimizer.state.values()]
    refused(tmp_path / "last.pt", make(2.0), optimizer)
    (now,) = [state["momentum_buffer"] for state in optimizer.state.values()]
    assert now is kept[0]
    assert now.tolist() == [1, 1]
    load(tmp_path / "last.pt", it=optimizer)
    assert next(iter(optimizer.state.values()))["momentum_buffer"].tolist() == [2, 2]


NESTED = [torch.ones(2, 3), torch.ones(4, 3)]
OPAQUE = {
    "a nested tensor": lambda: torch.nested.nested_tensor(NESTED),
    "a nested tensor, jagged": lambda: torch.nested.nested_tensor(NESTED, layout=torch.jagged),
    "mkldnn's": lambda: torch.ones(2, 3).to_mkldnn(),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", OPAQUE)
def test_an_opaque_buffer_that_is_not_saved_stays_as_it_is(tmp_path, name):
    model = linear(1.0)
    model.register_buffer("odd", odd := OPAQUE[name](), persistent=False)
    refused(tmp_path / "last.pt", linear(2.0), model)
    assert model.weight.item() == 1
    load(tmp_path / "last.pt", it=model)
    assert model.weight.item() == 2
    assert model.odd is odd
