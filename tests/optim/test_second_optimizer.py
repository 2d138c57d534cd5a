"""A new optimizer of the same parameters ends what an earlier one's ``release_grads`` does to them."""

import pytest
import torch

from mpkernels import find_max_batch_size
from mpkernels.optim import AdamW, Masters
from tests.hard_grads import same_bits
from tests.networks import backward, network


def test_a_new_masters_wrapper_ends_it_too():
    model, plain = network(), network()
    AdamW(model.parameters(), lr=0.5).release_grads()
    with pytest.warns(UserWarning, match="^Masters: params have an earlier optimizer"):
        optimizer = Masters(torch.optim.SGD(model.parameters(), lr=0.0))
    backward(model, 0)
    optimizer.step()
    assert all(map(same_bits, model.parameters(), plain.parameters()))


def test_find_max_batch_size_refuses_a_model_whose_grads_are_released():
    """Its own steps would end the release, or be the optimizer's."""
    model = network()
    release = AdamW(model.parameters()).release_grads()
    with pytest.raises(
        ValueError, match=r"^find_max_batch_size: model must keep its grads, got one after release_grads"
    ):
        find_max_batch_size(model, (20,), max_batch=2)
    assert release.is_on


@pytest.mark.parametrize("releases", [True, False])
def test_a_new_optimizer_ends_what_an_earlier_one_does_in_the_backward(releases):
    """As where a notebook's cell runs again: nobody holds the earlier optimizer any more, but its hooks would step."""
    model, plain = network(), network()
    by_itself = AdamW(plain.parameters(), lr=0.25)
    AdamW(model.parameters(), lr=0.5).release_grads()
    with pytest.warns(UserWarning, match=r"^AdamW: params have an earlier optimizer whose release_grads\(\)"):
        optimizer = AdamW(model.parameters(), lr=0.25)
    if releases:
        optimizer.release_grads()
    for seed in range(3):
        for trained, stepped in ((model, optimizer), (plain, by_itself)):
            backward(trained, seed)
            stepped.step()
            stepped.zero_grad()
    assert all(map(same_bits, model.parameters(), plain.parameters()))


def test_after_remove_a_new_optimizer_has_nothing_to_end(recwarn):
    model = network()
    release = AdamW(model.parameters()).release_grads()
    release.remove()
    AdamW(model.parameters())
    assert not recwarn.list
