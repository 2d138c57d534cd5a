"""A hyperparameter that is no number is refused by its name, in the constructor, in a group, and between steps."""

import re

import pytest
import torch

from mpkernels.optim import AdamW
from tests.networks import network
from tests.optim.optimizers import OPTIMIZERS, all_same_bits, assert_same_states, saved_numbers

BAD = "1e-1", b"1", None, [0.1], 1j
BAD_BETAS = {
    0.9: "betas must be two numbers, got 0.9",
    None: "betas must be two numbers, got None",
    (0.9,): "betas must be two numbers, got (0.9,)",
    (0.9, 0.99, 0.9): "betas must be two numbers, got (0.9, 0.99, 0.9)",
    ("0.9", 0.99): "betas[0] must be a number, got '0.9'",
    (0.9, None): "betas[1] must be a number, got None",
}
CASES = [
    pytest.param(line, key, id=f"{name}, {key}")
    for name, line in OPTIMIZERS.items()
    for key in ("lr", "betas", "eps", "weight_decay", "momentum", "dampening")
    if key in line.ours(network().parameters()).defaults
]
each_number = pytest.mark.parametrize(("line", "key"), CASES)


def bad_values(line, key):
    """Return pairs of a value and the text of its error."""
    pairs = BAD_BETAS.items() if key == "betas" else [(it, f"{key} must be a number, got {it!r}") for it in BAD]
    return [(it, f"^{re.escape(f'{line.kind.__name__}: {text}')}$") for it, text in pairs]


@each_number
def test_it_is_refused_where_it_is_given(line, key):
    for bad, text in bad_values(line, key):
        params, options = [torch.ones(2, 1, requires_grad=True)], {"lr": line.lr, **line.options}
        with pytest.raises((TypeError, ValueError), match=text):
            line.kind(params, **options | {key: bad})
        with pytest.raises((TypeError, ValueError), match=text):
            line.kind([{"params": params, key: bad}], **options)
        optimizer = line.kind(params, **options)
        with pytest.raises((TypeError, ValueError), match=text):
            optimizer.add_param_group({"params": [torch.ones(2, 1, requires_grad=True)], key: bad})
        assert len(optimizer.param_groups) == 1


@pytest.mark.each_value_once
@each_number
def test_a_step_refuses_it_and_moves_nothing(target, line, key):
    """float() would take text. torch's steps raise, too."""
    param, twin = (torch.ones(3, 1, device=target.device, requires_grad=True) for _ in range(2))
    optimizer, other = line.ours([param]), line.ours([twin])
    for it in (param, twin):
        it.grad = torch.ones_like(it)
    optimizer.step()
    other.step()
    [group] = optimizer.param_groups
    good = group[key]
    for bad, text in bad_values(line, key):
        group[key] = bad
        with pytest.raises((TypeError, ValueError), match=text):
            optimizer.step()
        assert_same_states(saved_numbers(optimizer), saved_numbers(other))
    group[key] = good
    optimizer.step()
    other.step()
    assert all_same_bits([param], [twin])


def test_a_step_in_the_backward_refuses_it():
    param = torch.ones(3, requires_grad=True)
    optimizer = AdamW([param])
    optimizer.release_grads()
    optimizer.param_groups[0]["lr"] = "1e-1"
    with pytest.raises(TypeError, match=r"^AdamW: lr must be a number, got '1e-1'$"):
        param.sum().backward()
    assert param.tolist() == [1.0] * 3


def test_a_key_that_torch_gives_no_meaning_is_the_users():
    param = torch.ones(3, requires_grad=True)
    optimizer = AdamW([{"params": [param], "momentum": None, "dampening": "none"}])
    param.sum().backward()
    optimizer.step()
    assert (param < 1).all()
