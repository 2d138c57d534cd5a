"""AdamW's checkpoints: resumed to the bit, exchanged with torch's, never rounded."""

import copy
import io

import pytest
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from mpkernels.optim import AdamW
from tests.cases import same_bits
from tests.networks import B16, F16, assert_close, network, one_thread, train

__all__ = ["one_thread"]  # a fixture that each test uses


def saved_and_loaded(optimizer):
    """A state_dict as it comes back from a file, read the safe way."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("master", ["split", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, B16, F16], ids=str)
@pytest.mark.parametrize("state_dtype", [torch.float32, B16, torch.int8], ids=str)
def test_resumed_training_is_the_same_to_the_bit(state_dtype, dtype, master):
    options = {"lr": 1e-2, "master": master, "amsgrad": True, "max_norm": 1.0, "state_dtype": state_dtype}
    model = network(dtype)
    optimizer = AdamW(model.parameters(), **options)
    train(model, optimizer, 5)
    resumed = network(dtype, seed=7)
    resumed.load_state_dict(model.state_dict())
    other = AdamW(resumed.parameters(), **options)
    other.load_state_dict(saved_and_loaded(optimizer))
    copy.deepcopy(other.state_dict())  # which torch refuses of what hangs on a graph
    for each in ((model, optimizer), (resumed, other)):
        train(*each, 5, first=5)
    assert all(map(same_bits, model.parameters(), resumed.parameters()))


def test_checkpoints_go_both_ways_between_torch_and_us():
    ours, theirs = network(), network()
    train(ours, source := AdamW(ours.parameters()), 5)
    theirs.load_state_dict(ours.state_dict())
    torchs = torch.optim.AdamW(theirs.parameters(), foreach=False)
    torchs.load_state_dict(saved_and_loaded(source))  # torch would share the tensors
    train(ours, source, 5, first=5)
    train(theirs, torchs, 5, first=5)
    assert_close(ours, theirs, 20)
    back = AdamW(ours.parameters())
    back.load_state_dict(torchs.state_dict())
    assert back.state[ours[0].weight]["step"].item() == 10


def test_masters_move_between_the_schemes_without_rounding():
    model = network(B16)
    train(model, optimizer := AdamW(model.parameters(), lr=1e-2), 5)
    copied = copy.deepcopy(model)
    other = AdamW(copied.parameters(), lr=1e-2, master="fp32")
    other.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 1, first=5)
    train(copied, other, 1, first=5)
    before = [optimizer.state[param]["remainder"].clone() for param in model.parameters()]
    back = AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    back.load_state_dict(other.state_dict())
    back.param_groups[0].update(lr=0.0, weight_decay=0.0)
    back.step()
    for param, remainder in zip(model.parameters(), before, strict=True):
        assert same_bits(back.state[param]["remainder"], remainder), param.shape


def test_a_master_that_torch_has_rounded_is_rebuilt_with_a_warning():
    model = network(B16)
    train(model, optimizer := AdamW(model.parameters(), master="fp32"), 2)
    state_dict = copy.deepcopy(optimizer.state_dict())
    for state in state_dict["state"].values():
        state["master"] = state["master"].to(B16)
    with pytest.warns(UserWarning, match="AdamW: master came back as torch.bfloat16; rebuilt from the weight"):
        optimizer.load_state_dict(state_dict)
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    optimizer.step()
    for param in model.parameters():
        assert torch.equal(optimizer.state[param]["master"], param.detach().float())


def test_checkpoints_of_apex_and_transformer_engine():
    """Both count steps once for a group; TransformerEngine calls the master master_param."""
    model = network(B16)
    optimizer = AdamW(model.parameters(), master="fp32")
    train(model, optimizer, 3)
    theirs = copy.deepcopy(optimizer.state_dict())
    for state in theirs["state"].values():
        del state["step"]
        state["master_param"] = state.pop("master")
    theirs["param_groups"][0]["step"] = 3
    other = AdamW(model.parameters(), master="fp32")
    other.load_state_dict(theirs)
    torch.testing.assert_close(other.state_dict()["state"], optimizer.state_dict()["state"], rtol=0, atol=0)


def test_empty_parameters_and_8_bit_moments():
    params = [torch.nn.Parameter(torch.ones(size)) for size in (0, 300)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = AdamW(params, state_dtype=torch.int8, amsgrad=True)
    optimizer.step()
    other = AdamW(params, state_dtype=torch.int8, amsgrad=True)
    other.load_state_dict(saved_and_loaded(optimizer))
    torch.testing.assert_close(dict(other.state), dict(optimizer.state), rtol=0, atol=0)


def test_post_hooks_of_the_user_have_the_last_word():
    model = network()
    train(model, optimizer := AdamW(model.parameters()), 1)
    weight = model[0].weight
    optimizer.register_load_state_dict_post_hook(lambda it: it.state[weight]["exp_avg"].fill_(7.0))
    optimizer.load_state_dict(optimizer.state_dict())
    assert (optimizer.state[weight]["exp_avg"] == 7).all()


def test_hooks_of_the_user_see_the_optimizer_itself():
    """One that comes before the load may still add the group that the checkpoint has."""
    weights, seen = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)], []
    optimizer = AdamW([weights[0]])
    both = AdamW([{"params": [weight]} for weight in weights])

    def add_group(it, saved):
        seen.append(it)
        it.add_param_group({"params": [weights[1]], "state_dtype": B16})

    optimizer.register_load_state_dict_pre_hook(add_group)
    optimizer.register_load_state_dict_post_hook(seen.append)
    optimizer.load_state_dict(both.state_dict())
    assert seen == [optimizer, optimizer]
    assert [group["state_dtype"] for group in optimizer.param_groups] == [torch.float32, B16]


def hook_sets_a_state(optimizer, say):
    optimizer.register_state_dict_pre_hook(lambda it: it.state.__setitem__("test", 1))
    return optimizer.state_dict()


def hook_adds(optimizer, say):
    optimizer.register_state_dict_post_hook(lambda _, saved: saved["state"].update(test=1))
    optimizer.register_state_dict_post_hook(lambda _, saved: saved.update(version=2))
    return optimizer.state_dict()


def hook_replaces(optimizer, say):
    optimizer.register_state_dict_post_hook(lambda _, saved: {"mine": list(saved["state"])})
    return optimizer.state_dict()


def hooks_in_order(optimizer, say):
    for i in range(3):
        optimizer.register_state_dict_pre_hook(lambda _, i=i: say(f"before {i}"), prepend=i == 2)
        optimizer.register_state_dict_post_hook(lambda _, saved, i=i: say(f"after {i}"), prepend=i == 2)
        optimizer.register_load_state_dict_pre_hook(lambda _, saved, i=i: say(f"load {i}"), prepend=i == 2)
        optimizer.register_load_state_dict_post_hook(lambda _, i=i: say(f"loaded {i}"), prepend=i == 2)
    for _ in range(2):
        optimizer.load_state_dict(optimizer.state_dict())
    return optimizer.state_dict()


def load_hook_replaces(optimizer, say):
    def halve(_, saved):
        groups = [group | {"lr": 0.5} for group in saved["param_groups"]]
        return saved | {
            "state": {**saved["state"], "test": {"a": 1}, 0: copy.deepcopy(saved["state"][1])},
            "param_groups": groups,
        }

    optimizer.register_load_state_dict_pre_hook(lambda _, saved: {"state": saved["state"], **saved["rest"]})
    optimizer.register_load_state_dict_pre_hook(halve)
    saved = optimizer.state_dict()
    optimizer.load_state_dict({"state": saved["state"], "rest": {"param_groups": saved["param_groups"]}})
    return optimizer.state_dict()


def foreign_states(optimizer, say):
    saved = optimizer.state_dict()
    saved["state"] |= {"test": 1, "more": {"scales": torch.ones(2)}}
    optimizer.load_state_dict(saved)
    say(optimizer.state["test"])
    return optimizer.state_dict()


def an_old_checkpoint(optimizer, say):
    """Steps were numbers, and groups had fewer options."""
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["step"] = int(state["step"])
    for group in saved["param_groups"]:
        for key in (
            "maximize",
            "foreach",
            "capturable",
            "differentiable",
            "fused",
            "amsgrad",
            "decoupled_weight_decay",
        ):
            group.pop(key, None)
    optimizer.load_state_dict(saved)
    return optimizer.state_dict()


def one_group_too_many(optimizer, say):
    saved = optimizer.state_dict()
    saved["param_groups"].append(saved["param_groups"][0])
    with pytest.raises(ValueError, match="different number of parameter groups") as error:
        optimizer.load_state_dict(saved)
    return str(error.value)


def one_parameter_too_few(optimizer, say):
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["params"][-1]
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group") as error:
        optimizer.load_state_dict(saved)
    return str(error.value)


USES = [
    hook_sets_a_state,
    hook_adds,
    hook_replaces,
    hooks_in_order,
    load_hook_replaces,
    foreign_states,
    an_old_checkpoint,
    one_group_too_many,
    one_parameter_too_few,
]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_used_as_torchs_own_tests_use_theirs(use):
    """Said and saved is what torch says and saves, beside our options; and the next step is the same."""
    results = []
    for kind in (AdamW, torch.optim.AdamW):
        params, said = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)], []
        optimizer = kind([("a", params[0]), ("b", params[1])], lr=0.1)
        for _ in range(2):
            for i, param in enumerate(params):
                param.grad = torch.full((3,), 1.0 + i)
            optimizer.step()
        saved = use(optimizer, said.append)
        optimizer.step()
        leaves, _ = tree_flatten_with_path((saved, said, params))
        results.append({keystr(path): leaf for path, leaf in leaves})
    ours, theirs = results
    own = [path for path in ours if path.endswith(("['master']", "['state_dtype']"))]
    assert all("['param_groups']" in path and ours.pop(path) in ("split", "torch.float32") for path in own)
    assert ours.keys() == theirs.keys()
    for path, leaf in ours.items():
        if isinstance(leaf, torch.Tensor):
            torch.testing.assert_close(leaf, theirs[path])
        else:
            assert leaf == theirs[path], path


@pytest.mark.parametrize("key", ["exp_avg", "max_exp_avg_sq", "master"])
def test_a_state_of_another_shape_is_refused_before_anything_changes(key):
    """copy_ would spread a single element over all."""
    model = network(B16)
    train(model, optimizer := AdamW(model.parameters(), amsgrad=True, master="fp32"), 1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][3][key] = saved["state"][3][key][:1]
    saved["param_groups"][0]["lr"] = 0.5
    text = rf"AdamW.load_state_dict: state\[3\]\['{key}'\] must have its parameter's shape \(30,\), got \(1,\)"
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert not optimizer._optimizer_load_state_dict_pre_hooks


@pytest.mark.parametrize("missing", ["exp_avg", "exp_avg_sq"])
def test_a_state_without_a_moment_is_refused(missing):
    """Another optimizer's, say, whose moments would silently be 0."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = AdamW([weight])
    weight.grad = torch.ones(2)
    optimizer.step()
    saved = optimizer.state_dict()
    del saved["state"][0][missing]
    before = dict(optimizer.state[weight])
    with pytest.raises(ValueError, match=r"AdamW.load_state_dict: state\[0\] must have exp_avg and exp_avg_sq, got "):
        optimizer.load_state_dict(saved)
    assert all(optimizer.state[weight][key] is value for key, value in before.items())


def test_an_empty_state_is_none():
    """To ask a state for one makes one, for it is a defaultdict."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = AdamW(weights)
    weights[0].grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state[weights[1]] == {}
    again = AdamW(weights)
    again.load_state_dict(optimizer.state_dict())
    weights[1].grad = torch.ones(2)
    again.step()
    assert [again.state[weight]["step"].item() for weight in weights] == [2, 1]
