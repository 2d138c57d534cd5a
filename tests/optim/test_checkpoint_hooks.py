"""AdamW saves and loads with users' hooks around it, and as torch's own tests use checkpoints."""

import copy

import pytest
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from mpkernels.optim import AdamW
from tests.networks import B16


def test_load_hooks_get_the_optimizer_itself():
    """A hook before the load may still add a group that the checkpoint has."""
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


def test_what_a_hook_sets_before_the_load_stays():
    optimizer = AdamW([torch.nn.Parameter(torch.ones(2))])
    optimizer.register_load_state_dict_pre_hook(lambda it, _: setattr(it, "max_norm", 2.0))
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.max_norm == 2


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
    """In old checkpoints, steps were numbers, and groups had fewer options."""
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["step"] = int(state["step"])
    for group in saved["param_groups"]:
        for key in ("maximize", "foreach", "capturable", "differentiable", "fused", "amsgrad"):
            group.pop(key)
        group.pop("decoupled_weight_decay", None)
    optimizer.load_state_dict(saved)
    return optimizer.state_dict()


def groups_that_do_not_fit(optimizer, say):
    saved = optimizer.state_dict()
    [group] = saved["param_groups"]
    for groups in ([group, group], [group | {"params": group["params"][:-1]}]):
        with pytest.raises(ValueError, match=r"different number|doesn't match the size") as error:
            optimizer.load_state_dict(saved | {"param_groups": groups})
        say(str(error.value))


def post_hook_writes_to_a_loaded_state(optimizer, say):
    optimizer.register_load_state_dict_post_hook(lambda it: next(iter(it.state.values()))["exp_avg"].fill_(7.0))
    optimizer.load_state_dict(optimizer.state_dict())
    return optimizer.state_dict()


USES = [
    hook_sets_a_state,
    hook_adds,
    hook_replaces,
    hooks_in_order,
    load_hook_replaces,
    foreign_states,
    an_old_checkpoint,
    groups_that_do_not_fit,
    post_hook_writes_to_a_loaded_state,
]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_each_use_gives_what_torchs_optimizer_gives(use):
    """Checkpoints equal torch's, plus our options, and the next step is the same."""
    results = []
    for kind in (AdamW, torch.optim.AdamW):
        params, messages = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)], []
        optimizer = kind([("a", params[0]), ("b", params[1])], lr=0.1)
        for _ in range(2):
            for i, param in enumerate(params):
                param.grad = torch.full((3,), 1.0 + i)
            optimizer.step()
        saved = use(optimizer, messages.append)
        optimizer.step()
        leaves, _ = tree_flatten_with_path((saved, messages, params))
        results.append({keystr(path): leaf for path, leaf in leaves})
    ours, theirs = results
    our_options = [path for path in ours if path.endswith(("['master']", "['state_dtype']"))]
    assert all("['param_groups']" in path and ours.pop(path) in ("split", "torch.float32") for path in our_options)
    assert ours.keys() == theirs.keys()
    for path, leaf in ours.items():
        if isinstance(leaf, torch.Tensor):
            torch.testing.assert_close(leaf, theirs[path])
        else:
            assert leaf == theirs[path], path
