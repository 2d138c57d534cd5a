"""GradScaler.step makes no host wait, lets our step check its own grads, and leaves nothing on the optimizer."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW
from mpkernels.optim.under_scaler import NOTHING
from tests.amp.test_grad_scaler import OPTIMIZERS, SCALINGS, iterate, one_param
from tests.networks import B16, F16, backward, network

FUSED = {
    "torch's AdamW, fused": OPTIMIZERS["torch's AdamW, fused"],
    "torch's SGD, fused": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "our AdamW": OPTIMIZERS["our AdamW"],
}
each_fused_optimizer = pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)


@each_fused_optimizer
@pytest.mark.parametrize("preset", [None, 2.0])
def test_an_error_in_the_step_leaves_what_was_there(make, preset, monkeypatch):
    """torch leaves its scale on the optimizer, and the next step divides by it twice. A loop may set one of its own."""
    (param, optimizer), (same, reference) = one_param(make), one_param(make)
    scaler, scaler_of_reference = GradScaler("cpu", init_scale=8.0), GradScaler("cpu", init_scale=8.0)

    def fail(*arguments, **keywords):
        handed = optimizer.handed_over() if isinstance(optimizer, AdamW) else optimizer
        assert handed.grad_scale.item() == 8.0 * (preset or 1)
        raise MemoryError

    if preset is not None:
        optimizer.grad_scale = reference.grad_scale = torch.tensor(preset)
    before = {name: it for name, it in vars(optimizer).items() if name in ("grad_scale", "found_inf")}
    scaler.scale(param.sum()).backward()
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "step", fail)
        with pytest.raises(MemoryError):
            scaler.step(optimizer)
    assert {name: it for name, it in vars(optimizer).items() if name in ("grad_scale", "found_inf")} == before
    assert not isinstance(optimizer, AdamW) or optimizer.handed_over() == NOTHING._replace(**before)
    scaler.step(optimizer)  # once more, with the same grads
    scaler.update()
    iterate(scaler_of_reference, same, reference)
    assert torch.equal(param, same)


WAITS = torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.is_nonzero, torch.ops.aten.equal


class Watch(TorchDispatchMode):
    """Raises at an op for which the host would wait for a GPU, and notes which ops ran."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.seen.append(str(function))
        if function.overloadpacket in WAITS:
            raise AssertionError(f"the host waits for the device: {function}")
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("options", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("unscales", [False, True])
@each_fused_optimizer
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


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@each_fused_optimizer
def test_cuda_never_waits_in_a_hundred_steps(make):
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    (param, optimizer), scaler = one_param(make, "cuda"), GradScaler()
    iterate(scaler, param, optimizer)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(100):
            scaler.scale(param.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert scaler.get_scale() == 2.0**16


@pytest.mark.exhaustive
def test_a_compiled_step_hands_its_verdict_back():
    (param, optimizer), scaler = one_param(OPTIMIZERS["our AdamW"]), GradScaler("cpu", init_scale=8.0)
    optimizer.step = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager")
    assert [iterate(scaler, param, optimizer, bad) for bad in (None, float("nan"), None)] == [8.0, 4.0, 4.0]
    assert optimizer.state[param]["step"].item() == 2.0
    torch.compiler.reset()


def test_watch_raises_where_the_host_waits():
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
        assert kernels == ["mpkernels.adamw_by_plan_.default"]
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
    assert optimizer.handed_over() == NOTHING


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


def test_our_step_leaves_the_grads_scaled_and_torchs_fused_step_does_not():
    """Our step only reads the grads. torch's fused step writes them back unscaled."""
    for name, kept in (("our AdamW", 2048.0), ("torch's AdamW, fused", 2.0)):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer, scaler = OPTIMIZERS[name]([weight]), GradScaler("cpu", init_scale=1024.0)
        scaler.scale(2 * weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert weight.grad.tolist() == [kept, kept]
