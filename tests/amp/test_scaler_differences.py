"""GradScaler's intended differences from torch's."""

import pickle
import weakref

import pytest
import torch

from mpkernels.amp import GradScaler, autocast, inf_check
from mpkernels.optim import AdamW
from tests.amp.test_grad_scaler import OPTIMIZERS, SCALINGS, iterate, one_param
from tests.hard_grads import DTYPES
from tests.networks import B16, F16

every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


@every_optimizer
def test_a_finite_grad_that_overflows_when_unscaled_skips_the_step(target, make):
    """With a scale below 1, torch finds no inf, and the parameters become NaN."""
    param, optimizer = one_param(make, target.device)
    scaler = GradScaler(target.device.type, init_scale=0.5)
    scaler.scale(param.sum()).backward()
    param.grad.fill_(3e38)
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [1.0] * 3
    assert scaler.get_scale() == 0.25
    assert iterate(scaler, param, optimizer) == 0.25
    assert (param < 1).all()


@every_optimizer
def test_a_scale_that_has_fallen_to_0_skips_each_step(target, make):
    """Grads of a loss that is scaled by 0 are 0. With torch's scaler they become NaN, and so do the parameters."""
    param, optimizer = one_param(make, target.device)
    scaler = GradScaler(target.device.type)
    scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=0.0).state_dict())
    assert iterate(scaler, param, optimizer) == 0.0
    assert param.tolist() == [1.0] * 3
    assert scaler.step_was_skipped


def test_one_optimizer_may_have_grads_of_every_dtype():
    params = [torch.ones(3, dtype=dtype, requires_grad=True) for dtype in DTYPES]
    for bad in (None, 0, 1, 2, 3):
        optimizer, scaler = torch.optim.SGD(params, lr=0.25), GradScaler("cpu", init_scale=8.0)
        before = [param.detach().clone() for param in params]
        optimizer.zero_grad()
        scaler.scale(sum(param.double().sum() for param in params)).backward()
        if bad is not None:
            params[bad].grad[2] = float("nan")
        scaler.step(optimizer)
        scaler.update()
        moved = [not torch.equal(a, b) for a, b in zip(params, before, strict=True)]
        assert moved == [bad is None] * 4
        assert scaler.get_scale() == (8.0 if bad is None else 4.0)
    assert all(param.tolist() == [0.75] * 3 for param in params)


def test_torch_refuses_fp16_grads():
    """When torch takes fp16 grads, the test above can go."""
    param, optimizer = one_param(OPTIMIZERS["SGD"], dtype=F16)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(param.float().sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.step(optimizer)


@pytest.mark.parametrize("new_scale", [64, 64.0, torch.tensor(64), torch.tensor([[64.0]]), torch.tensor(64.0).half()])
def test_update_takes_any_number_and_any_tensor_of_one_element(new_scale):
    param, optimizer = one_param(OPTIMIZERS["SGD"])
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    scaler.update(new_scale)
    assert scaler.get_scale() == float(new_scale)
    assert scaler._get_growth_tracker() == 0


def test_update_with_a_new_scale_counts_a_skip_all_the_same():
    param, optimizer = one_param(OPTIMIZERS["SGD"])
    scaler = GradScaler("cpu", init_scale=8.0)
    assert iterate(scaler, param, optimizer) == 8.0
    scaler.scale(param.sum()).backward()
    param.grad[0] = float("inf")
    scaler.step(optimizer)
    scaler.update(32.0)
    assert (scaler.get_scale(), scaler._get_growth_tracker(), scaler.skipped_steps.item()) == (32.0, 1, 1)


def test_the_machines_device_is_the_default():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert GradScaler().is_enabled()
    assert GradScaler()._device == device
    assert autocast().device == autocast(dtype=B16).device == autocast(False).device == device


def test_found_inf_of_several_devices_is_one_at_most():
    """torch adds up the devices' flags to 2, and then its own fused optimizers step, because they compare with 1."""
    one, zero, cpu = torch.ones(()), torch.zeros(()), torch.device("cpu")
    assert inf_check._together([one, zero, one], cpu)[cpu].item() == 1.0
    assert inf_check._together([zero, zero], cpu)[cpu].item() == 0.0
    assert inf_check._together([], cpu) == {}


@every_optimizer
def test_skips_are_counted_and_shown(make):
    (param, optimizer), scaler = one_param(make), GradScaler("cpu", init_scale=2.0**10)
    assert (scaler.step_was_skipped, scaler.skipped_steps) == (None, None)
    seen = []
    for bad in (None, float("inf"), float("nan"), None):
        iterate(scaler, param, optimizer, bad)
        seen.append((bool(scaler.step_was_skipped), scaler.skipped_steps.item()))
    assert seen == [(False, 0), (True, 1), (True, 2), (False, 2)]


def test_a_deleted_optimizer_is_freed():
    (param, optimizer), scaler = one_param(OPTIMIZERS["our AdamW"]), GradScaler("cpu")
    iterate(scaler, param, optimizer)
    alive = weakref.ref(optimizer)
    del optimizer
    assert alive() is None


def test_an_unpickled_scaler_goes_on_as_the_original():
    for options in SCALINGS.values():
        (param, optimizer), scaler = one_param(OPTIMIZERS["SGD"]), GradScaler("cpu", **options)
        for bad in (float("inf"), None, float("inf")):
            iterate(scaler, param, optimizer, bad)
        twin = pickle.loads(pickle.dumps(scaler))
        assert not any(isinstance(value, torch.Tensor) for value in vars(twin).values())  # their device may be missing
        assert twin.step_was_skipped is None
        for bad in (float("inf"), None):
            assert iterate(twin, param, optimizer, bad) == iterate(scaler, param, optimizer, bad)
            assert twin.state_dict() == scaler.state_dict()
            assert twin.skipped_steps.item() == scaler.skipped_steps.item() == 3


def test_a_scale_that_the_user_has_set_multiplies_the_scalers():
    """torch's step multiplies both scales, too."""
    param = torch.nn.Parameter(torch.ones(3))
    optimizer, scaler = AdamW([param], max_norm=1e6), GradScaler("cpu", init_scale=4.0)
    optimizer.grad_scale = torch.full((), 2.0)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(optimizer.grad_norm, torch.tensor(3**0.5 / 2))


def test_a_misspelt_option_is_named():
    with pytest.raises(TypeError) as raised:
        GradScaler("cpu", growth_intervall=100)
    assert str(raised.value).endswith("unexpected keyword argument 'growth_intervall'. Did you mean 'growth_interval'?")
