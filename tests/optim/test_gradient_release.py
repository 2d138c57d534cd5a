"""release_grads frees each grad inside the backward: steps are the same, and grads are never all in memory."""

import pytest
import torch

from mpkernels import find_max_batch_size
from mpkernels.amp import GradScaler, accumulate
from mpkernels.optim import AdamW, Masters
from tests.hard_grads import same_bits
from tests.networks import B16, backward, network
from tests.optim.optimizers import Tuned, all_same_bits


def deep_network(layers=8, width=64):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))


def loss_of(model, seed):
    generator = torch.Generator().manual_seed(seed)
    return model(torch.randn(32, 64, generator=generator)).square().mean()


def watch_grads(model):
    """Return a list that gets the bytes of all grads together whenever a grad has come."""
    grad_bytes = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(
            lambda _: grad_bytes.append(sum(each.grad.nbytes for each in model.parameters() if each.grad is not None))
        )
    return grad_bytes


def adamws(*models, **options):
    return [AdamW(model.parameters(), lr=1e-2, **options) for model in models]


def same_weights(*models):
    return all_same_bits(*(it.parameters() for it in models))


def grad_dtypes(model):
    return {param.grad.dtype for param in model.parameters()}


def round_grads(model):
    for param in model.parameters():
        param.grad = param.grad.bfloat16().float()


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", enabled=False)], ids=["none", "disabled"])
def test_without_clipping_steps_are_the_same_and_one_grad_lives_at_a_time(scaler):
    models = ours, plain = deep_network(), deep_network()
    optimizers = adamws(*models)
    grad_bytes = watch_grads(ours)
    optimizers[0].release_grads(scaler=scaler)
    for seed in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss_of(model, seed).backward()
            optimizer.step()
            assert model is plain or not any(param.grad is not None for param in model.parameters())
            optimizer.zero_grad()
    assert same_weights(*models)
    assert max(grad_bytes) == ours[0].weight.nbytes


@pytest.mark.parametrize("how", ["clipped", "guarded", "scaled"])
def test_a_step_that_must_know_all_grads_keeps_them_in_16_bits(how):
    """The reference rounds its grads to bf16 likewise; an inf skips the step in both."""
    models = ours, plain = deep_network(), deep_network()
    optimizers = adamws(*models, **{"clipped": {"max_norm": 0.1}, "guarded": {"guard": True}, "scaled": {}}[how])
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=how == "scaled") for _ in range(2)]
    grad_bytes = watch_grads(ours)
    release = optimizers[0].release_grads(scaler=scalers[0])
    for seed in range(6):
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            scaler.scale(loss_of(model, seed)).backward()
            if seed == 3:
                with torch.no_grad():
                    model[2].weight.grad[0, 0] = float("inf")
            if model is plain:
                round_grads(model)
            scaler.step(optimizer)
            scaler.update()
            assert model is plain or all(it.grad is None and it.grad_dtype == it.dtype for it in model.parameters())
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert same_weights(*models)
    assert optimizers[0].skipped_steps.item() == 1
    everything = sum(param.nbytes for param in ours.parameters())
    assert max(grad_bytes) == everything / 2 + ours[0].weight.nbytes / 2  # the one that has just come is fp32
    release.remove()
    loss_of(ours, 0).backward()
    assert ours[0].weight.grad.dtype == torch.float32


@pytest.mark.parametrize("options", [{}, {"max_norm": 1e9}], ids=["at once", "until the step"])
def test_released_grads_add_up_within_accumulate(options):
    models = ours, plain = deep_network(), deep_network()
    optimizers = adamws(*models, **options)
    release = optimizers[0].release_grads()
    for step in range(3):
        with release.accumulate():
            loss_of(ours, 2 * step).backward()
        loss_of(ours, 2 * step + 1).backward()
        for seed in (2 * step, 2 * step + 1):
            loss_of(plain, seed).backward()
        if options:
            round_grads(plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert same_weights(*models)


def test_schedulers_checkpoints_and_options_of_groups_reach_the_released_steps():
    models, optimizers = (network(), network()), []
    for model in models:
        groups = [{"params": model[0].parameters()}, {"params": model[3].parameters(), "lr": 0.1, "amsgrad": True}]
        optimizers.append(AdamW(groups, lr=1e-2))
    optimizers[0].release_grads()
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]
    for seed in range(4):
        for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
            if seed == 2:
                optimizer.load_state_dict(optimizer.state_dict())
            backward(model, seed)
            optimizer.step()
            scheduler.step()
    assert same_weights(*models)


def test_release_grads_refuses_a_number_as_scaler_and_differentiable_steps():
    with pytest.raises(TypeError, match=r"^Tuned: release_grads takes a GradScaler, got int"):
        Tuned(network(B16).parameters()).release_grads(2**16)
    with pytest.raises(ValueError, match=r"^Tuned: release_grads needs differentiable=False"):
        Tuned(network().parameters(), differentiable=True).release_grads()


def test_a_second_call_ends_the_first_beside_a_frozen_parameter():
    model, plain = deep_network(), deep_network()
    model[1].weight.requires_grad_(False)
    [optimizer] = adamws(model)
    optimizer.release_grads()
    optimizer.release_grads(scaler=torch.amp.GradScaler("cpu"))  # ends the first: no step within the backward
    loss_of(model, 0).backward()
    assert same_weights(model, plain)
    assert model[0].weight.grad.dtype == B16


@pytest.mark.parametrize("end", ["zero_grad", "remove"])
def test_grads_are_fp32_again_after_zero_grad_and_remove_or_accumulate(end):
    """No step comes between the two backwards."""
    model = deep_network()
    [optimizer] = adamws(model, max_norm=1.0)
    release = optimizer.release_grads()
    loss_of(model, 0).backward()
    with release.accumulate():
        assert grad_dtypes(model) == {B16}  # those that have come stay narrow
    optimizer.zero_grad()
    if end == "remove":
        release.remove()
        loss_of(model, 1).backward()
    else:
        with release.accumulate():
            loss_of(model, 1).backward()
    assert grad_dtypes(model) == {torch.float32}


@pytest.mark.parametrize(("options", "kept"), [({}, True), ({"max_norm": 1.0}, B16)], ids=["at once", "until the step"])
def test_grads_stay_after_remove(options, kept):
    """After an accumulation that fails, grads are released again."""
    model = deep_network()
    [optimizer] = adamws(model, **options)
    release = optimizer.release_grads()
    with pytest.raises(KeyError), release.accumulate():
        raise KeyError
    loss_of(model, 0).backward()
    assert {param.grad is None or param.grad.dtype for param in model.parameters()} == {kept}
    optimizer.step()
    assert all(param.grad is None for param in model.parameters())
    release.remove()
    for _ in range(2):
        loss_of(model, 1).backward()
    optimizer.step()
    assert grad_dtypes(model) == {torch.float32}
    assert optimizer.state[model[0].weight]["step"].item() == 2


@pytest.mark.parametrize("width", [torch.float32, None])
def test_remove_between_backward_and_step_widens_the_grads(width):
    """Grads that were kept in 16 bits become as wide as those of the next backward."""
    model = deep_network(2)
    for param in model.parameters():
        param.grad_dtype = width
    [optimizer] = adamws(model, max_norm=1.0)
    release = optimizer.release_grads()
    loss_of(model, 0).backward()
    narrow = [param.grad for param in model.parameters()]
    release.remove()
    assert all(same_bits(param.grad, grad.float()) for param, grad in zip(model.parameters(), narrow, strict=True))
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    assert grad_dtypes(model) == {torch.float32}
    assert {param.grad_dtype for param in model.parameters()} == {width}
    assert not same_bits(model[0].weight.grad, model[0].weight.grad.bfloat16().float())


def test_a_group_that_is_popped_takes_its_options_along():
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(3)]
    groups = [{"params": [param], "lr": 0.1 * (i + 1)} for i, param in enumerate(params)]
    optimizer = AdamW(groups, weight_decay=0)
    optimizer.release_grads()
    for _ in range(2):
        sum(params).backward()
        optimizer.step()
        optimizer.param_groups = optimizer.param_groups[1:]
    assert params[0].item() == pytest.approx(0.9)  # left with its group
    assert params[1].item() == pytest.approx(1 - 2 * 0.2)


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, GradScaler])
def test_a_scaler_that_release_grads_was_not_given_is_refused(kind, unscaled):
    layer = torch.nn.Linear(3, 2)
    optimizer, scaler = AdamW(layer.parameters()), kind("cpu")
    optimizer.release_grads()
    scaler.scale(layer(torch.ones(1, 3)).sum()).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"AdamW.release_grads: scaler must be .* call release_grads\(scaler=scaler"):
        scaler.step(optimizer)


def test_grads_can_be_clipped_after_remove():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([weight], guard=False)
    optimizer.release_grads().remove()
    for micro in accumulate([1.0], 1, optimizer, max_norm=1.0):
        micro.backward(weight.sum())
    assert (weight < 1).all()


@pytest.mark.parametrize("released_first", [False, True])
@pytest.mark.parametrize("master", ["split", "fp32"])
def test_the_first_backward_after_a_load_steps_a_deep_model(master, released_first):
    """The first step compares all masters with their weights, some of which the backward still needs."""
    models = [deep_network(4).to(B16) for _ in range(2)]
    ours, plain = adamws(*models, master=master, guard=False)
    models[1](torch.ones(8, 64, dtype=B16)).float().square().mean().backward()
    plain.step()
    if released_first:
        ours.release_grads()
    models[0].load_state_dict(models[1].state_dict())
    ours.load_state_dict(plain.state_dict())
    if not released_first:
        ours.release_grads()
    for seed in range(2):
        for model, optimizer in zip(models, (ours, plain), strict=True):
            optimizer.zero_grad()
            model(torch.full((8, 64), 1.0 + seed, dtype=B16)).float().square().mean().backward()
            optimizer.step()
    assert same_weights(*models)


@pytest.mark.parametrize("releases", [True, False])
@pytest.mark.parametrize("kind", [AdamW, lambda params, lr: Masters(torch.optim.AdamW(params, lr))])
def test_a_new_optimizer_ends_what_an_earlier_one_does_in_the_backward(kind, releases):
    """As where a notebook's cell runs again: nobody holds the earlier optimizer any more, but its hooks would step."""
    models = model, plain = network(), network()
    AdamW(model.parameters(), lr=0.5).release_grads()
    with pytest.warns(UserWarning, match=r"^(AdamW|Masters): params have an earlier optimizer whose release_grads\(\)"):
        optimizers = [kind(model.parameters(), lr=0.25)]
    optimizers.append(kind(plain.parameters(), lr=0.25))
    if releases:
        optimizers[0].release_grads()
    for seed in range(3):
        for trained, optimizer in zip(models, optimizers, strict=True):
            backward(trained, seed)
            optimizer.step()
            optimizer.zero_grad()
    assert same_weights(*models)


def test_while_grads_are_released_find_max_batch_size_refuses_the_model(recwarn):
    """Its own steps would end the release, or be the optimizer's. After remove, a new optimizer has nothing to end."""
    model = network()
    release = AdamW(model.parameters()).release_grads()
    with pytest.raises(
        ValueError, match=r"^find_max_batch_size: model must keep its grads, got one after release_grads"
    ):
        find_max_batch_size(model, (20,), max_batch=2)
    assert release.is_on
    release.remove()
    AdamW(model.parameters())
    assert not recwarn.list
