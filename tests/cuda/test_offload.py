"""offload=True: what it computes is to the bit what the same optimizer computes without, whoever is late."""

import random
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from mpkernels.amp import GradScaler, accumulate
from mpkernels.optim.offload import plan as plan_of_offload
from mpkernels.parameters import real
from tests.cases import same_bits
from tests.cuda.training import CUDA, on_side
from tests.networks import B16, F16
from tests.optim.optimizers import OPTIMIZERS

F32, INT8 = torch.float32, torch.int8
SHAPES = (24, 32), (32,), (7, 5), (), (0, 3), (300,), (64, 9)


@pytest.fixture(autouse=True)
def _several_buckets(monkeypatch):
    """Of small parameters, more than there are slices."""
    monkeypatch.setattr(plan_of_offload, "BUCKET", 800)


def parameters(dtype, place=CUDA, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype).to(place)) for shape in shapes]


def loss_of(params, seed, poisons=False, without=()):
    """Return a loss whose grads are random numbers, as late as the device's."""
    generator, terms = torch.Generator().manual_seed(seed), []
    for i, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator)
        if poisons and i == 2:
            grad[3, 1] = torch.inf
        if i not in without:
            terms.append((param * grad.to(param.dtype).to(param.device)).sum().float().to(params[0].device))
    return torch.stack(terms).sum()


def take_step(optimizer, scaler, loss):
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def trained(optimizer, params, scaler=None, bad_step=2, steps=4):
    for step in range(steps):
        optimizer.zero_grad()
        take_step(optimizer, scaler, loss_of(params, step, step == bad_step))
    return optimizer


def all_of(optimizer, norm=True):
    """Return all that a user can see of it, on the host. The weights come by the current stream."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found = [real(param.detach().cpu()) for param in params]
    saved = optimizer.state_dict()["state"]
    found += [real(torch.as_tensor(it).cpu()) for i in sorted(saved) for _, it in sorted(saved[i].items())]
    told = optimizer.grad_norm if norm else None, optimizer.skipped_steps
    return [*found, *(it if it is None else it.cpu() for it in told)]


def are_same(found, wanted):
    pairs = list(zip(found, wanted, strict=True))
    return all(mine is its or same_bits(mine, its) for mine, its in pairs)


def assert_same(ours, theirs, norm=True):
    assert are_same(all_of(ours, norm), all_of(theirs, norm))
    assert all(it.device.type == "cpu" for state in ours.state.values() for it in state.values())


SCALERS = {
    "no scaler": lambda: None,
    "ours": lambda: GradScaler("cuda", init_scale=8.0),
    "torch's": lambda: torch.amp.GradScaler("cuda", init_scale=8.0),
}
KEPT = [(F32, "split", F32), (B16, "split", INT8), (B16, "fp32", B16), (F16, "split", F32)]
of_each_kept = pytest.mark.parametrize(("dtype", "master", "state_dtype"), KEPT, ids=str)
RULES = [OPTIMIZERS["AdamW"], OPTIMIZERS["SGD, momentum"]]


@pytest.mark.parametrize("scaler", SCALERS)
@of_each_kept
@pytest.mark.parametrize("line", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("limits", [{}, {"max_norm": 1.0}, {"guard": False}], ids=str)
def test_bits(line, dtype, master, state_dtype, scaler, limits):
    if scaler == "torch's" and dtype != F32:
        pytest.skip("torch's scaler refuses such grads")
    options = {"master": master, "state_dtype": state_dtype, **limits}
    is_checked = scaler != "no scaler" or "max_norm" in limits or (dtype != F32 and not limits)
    bad_step = 2 if is_checked else -1
    ours, theirs = (
        trained(line.ours(params, offload=offload, **options), params, SCALERS[scaler](), bad_step)
        for offload, params in ((True, parameters(dtype)), (False, parameters(dtype)))
    )
    assert_same(ours, theirs)
    assert ours.skipped_steps is None or ours.skipped_steps == (bad_step == 2)


@pytest.mark.parametrize("scaler", ["no scaler", "ours"])
@of_each_kept
@pytest.mark.parametrize("limits", [{}, {"max_norm": 1.0}, {"guard": False}], ids=str)
def test_bits_of_released_grads(dtype, master, state_dtype, scaler, limits):
    """Their norm is found on the host, where sums have another order."""
    options = {"master": master, "state_dtype": state_dtype, **limits}
    is_checked = scaler != "no scaler" or "max_norm" in limits or (dtype != F32 and not limits)
    bad_step, found = 2 if is_checked else -1, []
    for offload in (True, False):
        params, its_scaler = parameters(dtype), SCALERS[scaler]()
        optimizer = OPTIMIZERS["AdamW"].ours(params, offload=offload, **options)
        if offload:
            optimizer.release_grads(its_scaler)
        found.append(trained(optimizer, params, its_scaler, bad_step))
        assert not offload or all(param.grad is None for param in params)
    assert_same(*found, norm=False)
    if "max_norm" in limits:
        assert torch.allclose(found[0].grad_norm, found[1].grad_norm, rtol=2.0**-22, equal_nan=True)


def test_a_released_grad_that_never_was_on_the_way_counts():
    params, theirs = parameters(B16), parameters(B16)
    ours = OPTIMIZERS["AdamW"].ours(params, offload=True)
    ours.release_grads()
    optimizer = OPTIMIZERS["AdamW"].ours(theirs)
    for step in range(3):
        loss_of(theirs, step).backward()
        for param, its in zip(params, theirs, strict=True):
            param.grad = its.grad.clone()
        ours.step(), optimizer.step(), optimizer.zero_grad()
    assert_same(ours, optimizer, norm=False)


@of_each_kept
@pytest.mark.parametrize("by", ["accumulate", "backwards", "backwards under accumulate()"])
def test_released_grads_add_up_in_fp32(dtype, master, state_dtype, by):
    options = {"master": master, "state_dtype": state_dtype}
    params, theirs = parameters(dtype), parameters(dtype)
    wanted = OPTIMIZERS["AdamW"].ours(theirs, **options)
    for micro in accumulate(range(6), 3, wanted, grad_dtype=torch.float32):
        micro.backward(3 * loss_of(theirs, micro.batch))
    ours = OPTIMIZERS["AdamW"].ours(params, offload=True, **options)
    release = ours.release_grads()
    if by == "accumulate":
        for micro in accumulate(range(6), 3, ours, grad_dtype=torch.float32):
            micro.backward(3 * loss_of(params, micro.batch))
    else:
        for step in range(6):
            with release.accumulate() if step % 3 < 2 and "under" in by else nullcontext():
                (3 * loss_of(params, step) * (1 / 3)).backward()
            assert all(param.grad is None for param in params)
            if step % 3 == 2:
                ours.step()
    assert_same(ours, wanted, norm=False)


def test_a_backward_that_has_failed_is_forgotten():
    params, theirs = parameters(B16), parameters(B16)
    ours, optimizer = OPTIMIZERS["AdamW"].ours(params, offload=True), OPTIMIZERS["AdamW"].ours(theirs)
    ours.release_grads()
    loss_of(params, 7, without=(1, 3)).backward()
    ours.zero_grad()
    trained(ours, params), trained(optimizer, theirs)
    assert_same(ours, optimizer, norm=False)


class Two:
    """The same optimizer with and without offload, which must not part."""

    def __init__(self, random, line, dtype, scaled, released, **options):
        self.random, self.line, self.options, self.seed, self.released = random, line, options, 0, released
        self.params = [parameters(dtype), parameters(dtype)]
        self.optimizers = [self.made(i) for i in range(2)]
        self.scalers = [GradScaler("cuda", init_scale=8.0, growth_interval=2) if scaled else None for _ in range(2)]

    def made(self, i):
        optimizer = self.line.ours(self.params[i][:7], offload=i == 0, **self.options)
        for param in self.params[i][7:]:
            optimizer.add_param_group({"params": [param], "lr": 1e-3})
        if self.released and i == 0:
            optimizer.release_grads()
        return optimizer

    def each(self, function):
        for i, optimizer in enumerate(self.optimizers):
            function(i, optimizer, self.params[i])

    def step(self, poisons=False):
        self.seed += 1
        without = self.random.sample(range(7), self.random.choice((0, 0, 2)))
        self.each(lambda i, it, params: take_step(it, self.scalers[i], loss_of(params, self.seed, poisons, without)))
        self.each(lambda i, it, params: it.zero_grad())

    def overflow(self):
        self.step(poisons=self.scalers[0] is not None)

    def accumulates(self):
        self.seed += 1
        options = {"grad_dtype": torch.float32} if self.released else {}
        for i, optimizer in enumerate(self.optimizers):
            for micro in accumulate(range(2), 2, optimizer, scaler=self.scalers[i], **options):
                micro.backward(loss_of(self.params[i], self.seed + micro.batch))

    def writes_to_a_weight(self):
        place, factor = self.random.choice((0, 2, 5)), self.random.choice((0.5, 1.1))
        with torch.no_grad():
            self.each(lambda i, it, params: params[place].mul_(factor))

    def gives_a_weight_other_memory(self):
        def give(i, it, params):
            params[0].data = params[0].data.clone() + 1

        self.each(give)

    def loads_its_own(self):
        self.each(lambda i, it, params: it.load_state_dict(it.state_dict()))

    def begins_anew_from_the_others(self):
        """New optimizers load what the other one has saved."""
        saved = [it.state_dict() for it in self.optimizers]
        if self.released:
            self.optimizers[0]._release.remove()
        self.optimizers = [self.made(i) for i in range(2)]
        self.each(lambda i, it, params: it.load_state_dict(saved[1 - i]))

    def changes_its_groups(self):
        master, state_dtype = self.random.choice(("split", "fp32")), self.random.choice((F32, B16, INT8))
        lr = self.random.choice((1e-2, 1e-3))
        self.each(lambda i, it, params: it.param_groups[0].update(master=master, state_dtype=state_dtype, lr=lr))

    def gets_another_group(self):
        def add(i, it, params):
            params.append(nn.Parameter(torch.linspace(-1, 1, 40 + self.seed).to(params[0].dtype).to(CUDA)))
            it.add_param_group({"params": params[-1:], "lr": 1e-3})

        if len(self.params[0]) < 10:
            self.seed += 1
            self.each(add)

    def is_asked(self):
        self.each(lambda i, it, params: it.state_dict())


ACTS = [it for it in vars(Two) if not it.startswith("_") and it not in ("made", "each")]


@pytest.mark.filterwarnings("ignore:.*are not the weights that the loaded masters were made for")  # if they aren't
@pytest.mark.parametrize("seed", range(200))
def test_random_schedules(seed):
    drawn = random.Random(seed)
    dtype = drawn.choice((F32, B16, B16, F16))
    options = {
        "master": drawn.choice(("split", "fp32")),
        "state_dtype": drawn.choice((F32, B16, INT8)),
        "max_norm": drawn.choice((None, 1.0)),
    }
    line, released = drawn.choice(list(OPTIMIZERS.values())), drawn.random() < 0.4
    two = Two(drawn, line, dtype, drawn.random() < 0.5, released, **options)
    for name in ["step", *drawn.choices(["step", "step", "overflow", *ACTS], k=8), "step"]:
        getattr(two, name)()
        assert_same(*two.optimizers, norm=not released)
        if two.scalers[0] is not None and two.scalers[0]._scale is not None:
            assert two.scalers[0].get_scale() == two.scalers[1].get_scale()


def late_clone(params):
    return [param.detach().clone() for param in params]


def values(tensors):
    return [it.cpu() for it in tensors]


def test_who_still_reads_the_old_weights_reads_them():
    """The grads have long left, so nothing else makes a copy to a weight wait for the stream that the step is on."""
    params = parameters(F32)
    optimizer = OPTIMIZERS["AdamW"].ours(params, offload=True)
    optimizer.release_grads()
    trained(optimizer, params, bad_step=-1)
    wanted = values(params)
    loss_of(params, 9).backward()
    read = late_clone(params)
    optimizer.step()
    for lane in optimizer._offload.twins._lanes:
        lane.wait()
    assert all(map(same_bits, values(read), wanted))
    assert not torch.equal(params[0].detach().cpu(), wanted[0])


def test_a_step_on_another_stream_leaves_what_the_first_one_brings():
    """The twins of the second step are the memory from which the first one's weights are still copied."""
    params = parameters(F32, shapes=[(8, 8)])
    optimizer = OPTIMIZERS["SGD"].ours(params, offload=True)
    optimizer.release_grads()
    loss_of(params, 0).backward()
    optimizer.step()
    first = late_clone(params)
    read = torch.cuda.current_stream().record_event()
    with torch.cuda.stream(torch.cuda.Stream(CUDA)):
        params[0].grad = torch.ones(8, 8).to(CUDA)
        optimizer._offload.arrived.take(params[0])  # as a backward does that needs no new weight, and waits for none
        torch.cuda.current_stream().wait_event(read)
        optimizer.step()
    theirs = parameters(F32, shapes=[(8, 8)])
    its = OPTIMIZERS["SGD"].ours(theirs)
    loss_of(theirs, 0).backward()
    its.step()
    assert same_bits(first[0].cpu(), theirs[0].detach().cpu())


def test_a_freed_grad_is_not_written_over_before_it_has_left():
    params, theirs = parameters(F32, shapes=[(64, 64)]), parameters(F32, shapes=[(64, 64)])
    ours, its = OPTIMIZERS["SGD"].ours(params, offload=True), OPTIMIZERS["SGD"].ours(theirs)
    ours.release_grads()
    for optimizer, of_it in ((ours, params), (its, theirs)):
        loss_of(of_it, 3).backward()
        if optimizer is ours:
            others = [torch.full((64, 64), 7.0, device=CUDA) for _ in range(8)]
            torch.cuda.current_stream().synchronize()
            del others
        optimizer.step()
    assert_same(ours, its, norm=False)


@pytest.mark.parametrize("released", [False, True])
def test_streams_that_take_turns(released):
    params, theirs = parameters(B16), parameters(B16)
    ours = OPTIMIZERS["AdamW"].ours(params, offload=True)
    if released:
        ours.release_grads()
    for step in range(6):
        with torch.cuda.stream(on_side()):
            take_step(ours, None, loss_of(params, step))
            ours.zero_grad()
            done = torch.cuda.current_stream().record_event()
        torch.cuda.current_stream().wait_event(done)
    its = trained(OPTIMIZERS["AdamW"].ours(theirs), theirs, bad_step=-1, steps=6)
    assert_same(ours, its, norm=False)
