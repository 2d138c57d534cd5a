"""A new optimizer of the same parameters ends what an earlier one's ``release_grads`` does to them."""

import pytest

from mpkernels.optim import AdamW
from tests.hard_grads import same_bits
from tests.networks import backward, network


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
