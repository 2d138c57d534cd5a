"""AdamW's checkpoints: resumed to the bit, exchanged with torch's, never rounded."""

import copy
import io

import pytest
import torch

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
    back = AdamW(model.parameters(), lr=1e-2)
    back.load_state_dict(other.state_dict())
    for param, twin in zip(model.parameters(), copied.parameters(), strict=True):
        assert same_bits(back.state[param]["remainder"], optimizer.state[param]["remainder"]), (param.shape, twin.shape)


def test_a_master_that_torch_has_rounded_is_rebuilt_with_a_warning():
    model = network(B16)
    train(model, optimizer := AdamW(model.parameters(), master="fp32"), 2)
    state_dict = copy.deepcopy(optimizer.state_dict())
    for state in state_dict["state"].values():
        state["master"] = state["master"].to(B16)
    with pytest.warns(UserWarning, match="AdamW: master came back as torch.bfloat16; rebuilt from the weight"):
        optimizer.load_state_dict(state_dict)
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
