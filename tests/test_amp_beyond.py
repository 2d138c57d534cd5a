"""GradScaler where it differs from torch's: on purpose."""

import pickle
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpkernels import _found_inf
from mpkernels.amp import GradScaler, autocast
from mpkernels.optim import AdamW
from tests.cases import DTYPES
from tests.networks import B16, F16, backward, network, one_thread
from tests.test_amp import OPTIMIZERS

__all__ = ["one_thread"]  # a fixture that each test uses

FUSED = {
    "torch's AdamW, fused": OPTIMIZERS["torch's AdamW, fused"],
    "torch's SGD, fused": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "our AdamW": OPTIMIZERS["our AdamW"],
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
every_fused_one = pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)


def one_param(make, device="cpu", dtype=torch.float32, value=1.0):
    param = torch.full((3,), value, dtype=dtype, device=device, requires_grad=True)
    return param, make([param])


def iterate(scaler, param, optimizer, bad=None, grad=1.0):
    """One iteration whose unscaled grads are all ``grad``."""
    optimizer.zero_grad()
    scaler.scale((param * grad).sum()).backward()
    if bad is not None:
        param.grad[1] = bad
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


@every_optimizer
def test_a_finite_grad_that_overflows_when_unscaled_skips_the_step(target, make):
    """A scale below 1: torch finds nothing, and the parameters become NaN."""
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


def test_grads_of_every_dtype_in_one_optimizer():
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
    """When it no longer does, the test above need not be here."""
    param, optimizer = one_param(OPTIMIZERS["SGD"], dtype=F16)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(param.float().sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.step(optimizer)


@pytest.mark.parametrize(
    "new_scale", [64, 64.0, True, torch.tensor(64), torch.tensor([[64.0]]), torch.tensor(64.0).half()]
)
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


def test_autocast_is_torchs():
    assert isinstance(autocast(), torch.amp.autocast)
    old = autocast(False, B16, False)
    assert (old._enabled, old.fast_dtype, old._cache_enabled) == (False, B16, False)
    assert autocast("cpu", B16).fast_dtype == autocast(device_type="cpu", dtype=B16).fast_dtype == B16
    assert not autocast("cpu", enabled=False)._enabled
    with pytest.raises(TypeError, match="enabled"):
        autocast(True, enabled=False)

    @autocast("cpu", dtype=B16)
    def double(x):
        return x @ x

    assert double(torch.ones(2, 2)).dtype == B16


def test_autocast_compiles_without_a_graph_break():
    def double(x):
        with autocast(device_type="cpu", dtype=B16):
            return x @ x

    assert torch.compile(double, fullgraph=True, backend="aot_eager")(torch.ones(2, 2)).dtype == B16
    torch.compiler.reset()


@every_fused_one
def test_an_error_in_the_step_leaves_nothing_behind(make, monkeypatch):
    """torch leaves its scale on the optimizer, and the next step divides by it twice."""
    (param, optimizer), (same, reference) = one_param(make), one_param(make)
    scaler, scaler_of_reference = GradScaler("cpu", init_scale=8.0), GradScaler("cpu", init_scale=8.0)

    def fail(*arguments, **keywords):
        assert optimizer.grad_scale.item() == 8.0
        raise MemoryError

    scaler.scale(param.sum()).backward()
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "step", fail)
        with pytest.raises(MemoryError):
            scaler.step(optimizer)
    assert not vars(optimizer).keys() & {"grad_scale", "found_inf"}
    scaler.step(optimizer)  # once more, with the same grads
    scaler.update()
    iterate(scaler_of_reference, same, reference)
    assert torch.equal(param, same)


def test_an_error_in_the_step_leaves_a_scale_of_the_users_own():
    param, optimizer = one_param(OPTIMIZERS["our AdamW"])
    scaler, own = GradScaler("cpu"), torch.full((), 2.0)
    scaler.scale(param.sum()).backward()
    optimizer.grad_scale = own
    with pytest.raises(TypeError):
        scaler.step(optimizer, 1, 2, 3)
    assert optimizer.grad_scale is own


class Watch(TorchDispatchMode):
    """Raises where the host waits for a value, and notes which ops ran."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.seen.append(str(function))
        if function is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("the host waits for the device")
        return function(*arguments, **(keywords or {}))


SCALINGS = {
    "dynamic": {},
    "bounded": {"min_scale": 1.0, "max_scale": 2.0**17, "hysteresis": 2},
    "static": {"scaling": "static"},
    "scheduled": {"scaling": [(0, 8.0), (2, 16.0)]},
}


@pytest.mark.parametrize("options", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("unscales", [False, True])
@every_fused_one
def test_the_host_waits_for_nothing(make, unscales, options):
    param, optimizer = one_param(make)
    scaler = GradScaler("cpu", **options)
    with Watch():
        for bad in (None, float("inf"), None):
            optimizer.zero_grad()
            scaler.scale(param.sum()).backward()
            if bad is not None:
                param.grad[1].fill_(bad)
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert isinstance(scaler.step_was_skipped, torch.Tensor)
            assert isinstance(scaler.skipped_steps, torch.Tensor)
        scaler.scale(param.sum()).backward()
        scaler.unscale_(optimizer)
        scaler.update(None if options.get("scaling") == SCALINGS["scheduled"]["scaling"] else 4.0)
    assert scaler.skipped_steps.item() == 1


def test_the_watch_sees_a_wait():
    param, optimizer = one_param(OPTIMIZERS["torch's AdamW"])
    with pytest.raises(AssertionError, match="the host waits"), Watch():
        iterate(GradScaler("cpu"), param, optimizer)


def test_our_adamw_looks_at_its_grads_itself_and_writes_none():
    model = network()
    optimizer, scaler = AdamW(model.parameters()), GradScaler("cpu", init_scale=8.0)
    for seed in range(3):
        backward(model, seed, scaler.scale(torch.ones(())).item())
        grads = [param.grad.clone() for param in model.parameters()]
        with Watch() as watch:
            scaler.step(optimizer)
        kernels = [name for name in watch.seen if name.startswith("mpkernels") and "plan." not in name]
        assert kernels == ["mpkernels.adamw_planned_.default"]
        assert all(torch.equal(param.grad, grad) for param, grad in zip(model.parameters(), grads, strict=True))
        scaler.update()
    assert optimizer.grad_norm is not None


@pytest.mark.parametrize("options", [{}, {"guard": False}, {"guard": True}, {"max_norm": 0.1}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, B16, F16], ids=str)
def test_our_adamw_hands_its_verdict_back(target, dtype, options):
    param = torch.ones(3, dtype=dtype, device=target.device, requires_grad=True)
    optimizer, scaler = AdamW([param], lr=0.1, **options), GradScaler(target.device.type, init_scale=8.0)
    assert [iterate(scaler, param, optimizer, bad) for bad in (None, float("nan"), None)] == [8.0, 4.0, 4.0]
    assert (optimizer.state[param]["step"].item(), optimizer.skipped_steps.item()) == (2.0, 1.0)
    assert not vars(optimizer).keys() & {"grad_scale", "found_inf"}


def test_our_adamw_releases_its_grads_under_our_scaler():
    model, scaler = network(B16), GradScaler("cpu", init_scale=8.0)
    optimizer = AdamW(model.parameters(), lr=0.1)
    optimizer.release_grads(scaler)
    before = model[0].weight.detach().clone()
    backward(model, 0, scaler.scale(torch.ones(())).item())
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model[0].weight, before)
    assert all(param.grad is None for param in model.parameters())


def test_one_of_two_optimizers_overflows():
    scaler = GradScaler("cpu", init_scale=8.0)
    (bad, first), (good, second) = one_param(OPTIMIZERS["our AdamW"]), one_param(OPTIMIZERS["torch's AdamW"])
    for loss in scaler.scale([bad.sum(), good.sum()]):
        loss.backward()
    bad.grad[0] = float("inf")
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert bad.tolist() == [1.0] * 3
    assert (good < 1).all()
    assert (scaler.get_scale(), bool(scaler.step_was_skipped)) == (4.0, True)


def test_found_inf_of_several_devices_is_one_at_most():
    """torch adds them up, and then its own fused optimizers step, for which 2 is not 1."""
    one, zero, cpu = torch.ones(()), torch.zeros(()), torch.device("cpu")
    assert _found_inf._together([one, zero, one], cpu)[cpu].item() == 1.0
    assert _found_inf._together([zero, zero], cpu)[cpu].item() == 0.0
    assert _found_inf._together([], cpu) == {}


@every_optimizer
def test_skips_are_visible(make):
    (param, optimizer), scaler = one_param(make), GradScaler("cpu", init_scale=2.0**10)
    assert (scaler.step_was_skipped, scaler.skipped_steps) == (None, None)
    seen = []
    for bad in (None, float("inf"), float("nan"), None):
        iterate(scaler, param, optimizer, bad)
        seen.append((bool(scaler.step_was_skipped), scaler.skipped_steps.item()))
    assert seen == [(False, 0), (True, 1), (True, 2), (False, 2)]


def test_a_forgotten_optimizer_is_let_go():
    (param, optimizer), scaler = one_param(OPTIMIZERS["our AdamW"]), GradScaler("cpu")
    iterate(scaler, param, optimizer)
    alive = weakref.ref(optimizer)
    del optimizer
    assert alive() is None


def test_a_scaler_is_pickled_as_it_is():
    for options in SCALINGS.values():
        (param, optimizer), scaler = one_param(OPTIMIZERS["SGD"]), GradScaler("cpu", **options)
        for bad in (float("inf"), None, float("inf")):
            iterate(scaler, param, optimizer, bad)
        twin = pickle.loads(pickle.dumps(scaler))
        for bad in (float("inf"), None):
            assert iterate(twin, param, optimizer, bad) == iterate(scaler, param, optimizer, bad)
            assert twin.state_dict() == scaler.state_dict()
            assert twin.skipped_steps.item() == scaler.skipped_steps.item() == 3
