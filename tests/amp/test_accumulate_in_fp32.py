"""accumulate(grad_dtype=torch.float32): grads of 16-bit parameters add up in fp32."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mpkernels
from mpkernels.amp import GradScaler, accumulate, clip_grad_norm_
from mpkernels.nn import LinearAct
from mpkernels.optim import AdamW, Masters
from tests.amp.test_grad_scaler import INIT
from tests.hard_grads import same_bits
from tests.networks import B16, F16, batch, network
from tests.optim.optimizers import each_optimizer

F32 = torch.float32
MICROS = 64


def loss_of(model, micro_batch):
    inputs, targets = micro_batch
    return (model(inputs.to(next(model.parameters()).dtype)).float() - targets).square().mean()


def summands(model, batches, scale=1.0, every=None):
    """Return each batch's 16-bit grads, with the weight and scale that accumulate gives its loss."""
    losses = [loss_of(model, it) * (1 / (every or len(batches))) * scale for it in batches]
    return [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]


def sums(model, batches, scale=1.0, every=None):
    """Return the sums of grads by one fp32 addition after the other."""
    totals = [torch.zeros_like(param, dtype=F32) for param in model.parameters()]
    for grads in summands(model, batches, scale, every):
        for total, grad in zip(totals, grads, strict=True):
            total += grad
    return totals


def give(model, grads):
    for param, grad in zip(model.parameters(), grads, strict=True):
        param.grad, param.grad_dtype = None, F32
        param.grad = grad


def trained(model, optimizer, batches, every, **options):
    for micro in accumulate(batches, every, optimizer, **options):
        micro.backward(loss_of(model, micro.batch))


def grads_of_steps(optimizer):
    """Return a list to which each step appends copies of its grads."""
    grads_at_steps = []
    optimizer.register_step_pre_hook(
        lambda *_: grads_at_steps.append([p.grad.clone() for group in optimizer.param_groups for p in group["params"]])
    )
    return grads_at_steps


@pytest.mark.parametrize("dtype", [B16, F16], ids=str)
def test_many_batches_add_up_without_loss(dtype):
    """Sums in 16 bits would each be off by more than all of fp32's roundings together."""
    batches = [batch(seed) for seed in range(MICROS)]
    found = {}
    for width in (None, F32):
        model = network(dtype)
        optimizer = AdamW(model.parameters())
        grads_at_steps = grads_of_steps(optimizer)
        trained(model, optimizer, batches, MICROS, grad_dtype=width)
        found[width] = grads_at_steps.pop()
    parts = [torch.stack(it).double() for it in zip(*summands(network(dtype), batches), strict=True)]
    for part, narrow, wide in zip(parts, found[None], found[F32], strict=True):
        bound = MICROS * 2.0**-24 * part.abs().sum(0)
        assert ((wide - part.sum(0)).abs() <= bound).all()
        assert ((narrow - part.sum(0)).abs() > bound).any()
    assert all(map(same_bits, found[F32], sums(network(dtype), batches)))


@each_optimizer
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("clips", [None, "loop", "step"])
def test_a_step_takes_the_sums(line, scaled, clips):
    """For each rule, and each kind of master and state, a step does what it would do if the sums were its grads."""
    step_options = {"max_norm": 0.1} if clips == "step" else {}
    for dtype, master, state_dtype in ((B16, "split", F32), (F16, "split", torch.int8), (B16, "fp32", B16)):
        model, twin = network(dtype), network(dtype)
        optimizer, reference = (
            line.ours(it.parameters(), master=master, state_dtype=state_dtype, **step_options) for it in (model, twin)
        )
        scaler, twin_scaler = (GradScaler("cpu", enabled=scaled, **INIT) for _ in range(2))
        batches = [batch(seed) for seed in range(6)]
        limit = 0.1 if clips == "loop" else None
        trained(model, optimizer, batches, 3, scaler=scaler, max_norm=limit, grad_dtype=F32)
        for group in (batches[:3], batches[3:]):
            give(twin, sums(twin, group, twin_scaler.scale(torch.ones(())).item() if scaled else 1.0))
            if clips == "loop":
                twin_scaler.unscale_(reference)
                clip_grad_norm_(line.taken(twin.parameters()), 0.1)
            twin_scaler.step(reference)
            twin_scaler.update()
        assert all(map(same_bits, model.parameters(), twin.parameters()))
        assert optimizer.grad_norm is reference.grad_norm or same_bits(optimizer.grad_norm, reference.grad_norm)


def test_masters_around_another_optimizer_take_the_sums():
    model, twin = network(B16), network(B16)
    optimizer, reference = (Masters(torch.optim.SGD(it.parameters(), lr=0.1), max_norm=0.1) for it in (model, twin))
    batches = [batch(seed) for seed in range(3)]
    trained(model, optimizer, batches, 3, grad_dtype=F32)
    give(twin, sums(twin, batches))
    reference.step()
    assert all(map(same_bits, model.parameters(), twin.parameters()))


@pytest.mark.parametrize("dtype", [F32, torch.float64], ids=str)
def test_wider_parameters_are_left_as_they_are(dtype):
    results = []
    for width in (None, F32):
        model = network(dtype)
        optimizer = torch.optim.AdamW(model.parameters())
        for micro in accumulate([batch(seed) for seed in range(4)], 2, optimizer, grad_dtype=width):
            assert all(param.grad_dtype == dtype for param in model.parameters())
            micro.backward(loss_of(model, micro.batch))
        results.append(list(model.parameters()))
    assert all(map(same_bits, *results))


def test_grads_take_4_bytes_an_element_within_a_group_only():
    model = network(B16)
    model[1:3].float()  # the norm
    optimizer = AdamW(model.parameters())
    count = sum(param.numel() for param in model.parameters())
    before = [param.grad_dtype for param in model.parameters()]
    for micro in accumulate(range(4), 2, optimizer, grad_dtype=F32):
        model[3](model[2](model[0](torch.ones(1, 20, dtype=B16)).float()).to(B16)).sum().backward()
        assert sum(param.grad.nbytes for param in model.parameters()) == 4 * count
        assert mpkernels.memory_report(model, optimizer).predicted["gradients"] == 4 * count
        micro.backward(model[0].bias.sum())
    assert [param.grad_dtype for param in model.parameters()] == before


@pytest.mark.parametrize("leave", ["break", "error"])
def test_grads_of_a_group_that_is_left_are_rounded_once(leave):
    model = network(B16)
    optimizer = AdamW(model.parameters())
    batches = [batch(seed) for seed in range(3)]
    batches_of_4 = accumulate([*batches, batches[0]], 4, optimizer, grad_dtype=F32)
    want = [total.to(B16) for total in sums(model, batches, every=4)]
    with pytest.raises(KeyError) if leave == "error" else pytest.MonkeyPatch.context():
        for i, micro in enumerate(batches_of_4):
            micro.backward(loss_of(model, micro.batch))
            if i == 2 and leave == "break":
                break
            if i == 2:
                raise KeyError
    batches_of_4.close()
    assert all(param.grad_dtype == B16 for param in model.parameters())
    assert all(map(same_bits, [param.grad for param in model.parameters()], want))


def test_sums_begin_with_the_grads_from_before():
    model = network(B16)
    before = [torch.randn_like(param) for param in model.parameters()]
    for param, grad in zip(model.parameters(), before, strict=True):
        param.grad = grad.clone()
    optimizer = AdamW(model.parameters())
    grads_at_steps = grads_of_steps(optimizer)
    want = [grad.float() for grad in before]
    batches = [batch(seed) for seed in range(2)]
    for grads in summands(model, batches):
        for total, grad in zip(want, grads, strict=True):
            total += grad
    trained(model, optimizer, batches, 2, grad_dtype=F32)
    assert all(map(same_bits, grads_at_steps[0], want))


class Twice(torch.nn.Module):
    """A weight that is used twice, the second time inside a checkpoint."""

    def __init__(self):
        super().__init__()
        self.layer = LinearAct(20, 20, activation="gelu", dtype=B16)
        self.last = torch.nn.Linear(20, 5, dtype=B16)

    def forward(self, x):
        return self.last(checkpoint(self.layer, self.layer(x), use_reentrant=False))


@pytest.mark.parametrize("compiles", [False, True])
def test_grads_are_at_least_as_exact_as_in_16_bits(compiles):
    """The weight is used twice, by our own layer, which then doesn't round its grads either."""
    torch.manual_seed(0)
    model = Twice()
    exact = copy.deepcopy(model).double()
    batches = [batch(seed) for seed in range(16)]
    for each in batches:
        (loss_of(exact, each) / 16).backward()
    errors = {}
    for width in (None, F32):
        twin = copy.deepcopy(model)
        optimizer = AdamW(twin.parameters())
        grads_at_steps = grads_of_steps(optimizer)
        run = torch.compile(twin, backend="aot_eager") if compiles else twin
        trained(run, optimizer, batches, 16, grad_dtype=width)
        assert all(grad.dtype == (width or B16) for grad in grads_at_steps[0])
        pairs = zip(grads_at_steps[0], exact.parameters(), strict=True)
        errors[width] = sum((grad.double() - param.grad).square().sum() for grad, param in pairs) ** 0.5
    assert errors[F32] < errors[None]


def test_torchs_adamw_refuses_fp32_grads_of_16_bit_parameters():
    """The docs say that torch's own AdamW takes only grads of the parameters' dtype."""
    model = network(B16)
    with pytest.raises(RuntimeError, match="dtype"):
        trained(model, torch.optim.AdamW(model.parameters()), [batch(0)], 1, grad_dtype=F32)


@pytest.mark.parametrize("wrong", [B16, F16, torch.float64, "float64", 32], ids=str)
def test_another_dtype_is_refused(wrong):
    with pytest.raises(ValueError, match=r"accumulate: grad_dtype must be torch.float32 or None, got "):
        accumulate([], 2, AdamW(network(B16).parameters()), grad_dtype=wrong)


@pytest.mark.parametrize("options", [{"guard": False}, {"max_norm": 1.0}])
def test_released_grads_are_refused(options):
    optimizer = AdamW(network(B16).parameters(), **options)
    release = optimizer.release_grads()
    with pytest.raises(ValueError, match="accumulate: grad_dtype must be left out with release_grads, which"):
        accumulate([], 2, optimizer, grad_dtype=F32)
    release.remove()
    accumulate([], 2, optimizer, grad_dtype=F32)
