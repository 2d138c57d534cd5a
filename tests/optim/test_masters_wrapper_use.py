"""Masters is an optimizer as users and libraries expect one, and refuses what it can't be put around."""

import copy
import pickle
import warnings
import weakref

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import mpkernels
from mpkernels import checkpoint
from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW, Masters
from mpkernels.optim.masters import true_weight
from tests.cases import same_bits
from tests.networks import B16, F16, network, one_thread, train
from tests.optim.wrapped import every, give_grads, groups, parameters

__all__ = ["one_thread"]  # a fixture that each test uses


def around(kind=torch.optim.SGD, dtype=B16, **options):
    beyond = {key: options.pop(key) for key in ("max_norm", "guard") if key in options}
    return Masters(kind(groups(parameters(dtype)), **{"lr": 0.1, **options}), **beyond)


def step(optimizer, seed=0, dtype=B16, **options):
    give_grads(every(optimizer), seed, dtype, **options)
    optimizer.step()


def test_groups_state_and_defaults_are_the_wrapped_ones():
    optimizer = around(momentum=0.9)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is optimizer.wrapped.param_groups
    step(optimizer)
    assert optimizer.state is optimizer.wrapped.state
    assert optimizer.defaults is optimizer.wrapped.defaults
    assert optimizer.state[every(optimizer)[0]].keys() == {"momentum_buffer", "remainder"}
    optimizer.wrapped.param_groups[0]["lr"] = 0.5
    assert optimizer.param_groups[0]["lr"] == 0.5
    before = list(map(id, every(optimizer)))
    step(optimizer)
    assert list(map(id, every(optimizer))) == before


def test_a_parameter_takes_two_bytes_more_than_its_state():
    param = torch.nn.Parameter(torch.zeros(1000, dtype=B16))
    optimizer = Masters(torch.optim.SGD([param], lr=0.1, momentum=0.9))
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert sum(it.nbytes for it in optimizer.state[param].values()) == 1000 * (4 + 2)


def test_one_group_at_a_time_has_fp32_weights():
    seen, alive = [], []

    class Looking(torch.optim.SGD):
        def step(self, closure=None):
            alive.append(sum(it() is not None for it in seen))
            params = [it for group in self.param_groups for it in group["params"]]
            seen.extend(weakref.ref(it) for it in params if it.shape != (4, 3))
            assert {it.dtype for it in params} == {torch.float32}
            assert {it.grad.dtype for it in params} == {torch.float32}
            assert not any("remainder" in self.state[it] for it in params)
            super().step(closure)

    optimizer = around(Looking)
    step(optimizer)
    assert alive == [0, 0]
    assert len(seen) == 3


@pytest.mark.parametrize("of", ["masters", "wrapped"])
@pytest.mark.parametrize("make", [lambda it: StepLR(it, 1, 0.5), lambda it: OneCycleLR(it, 0.5, total_steps=9)])
def test_schedulers_take_masters_and_the_wrapped_optimizer(of, make):
    optimizer, bare = around(momentum=0.9), torch.optim.SGD(groups(parameters(torch.float32)), lr=0.1, momentum=0.9)
    schedulers = make(optimizer if of == "masters" else optimizer.wrapped), make(bare)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(3):
            for it, scheduler in zip((optimizer, bare), schedulers, strict=True):
                step(it, seed)
                scheduler.step()
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
    for param, other in zip(every(optimizer), every(bare), strict=True):
        assert same_bits(true_weight(param, optimizer.state[param]).float(), other)


def test_a_group_can_be_added():
    optimizer = around(momentum=0.9)
    step(optimizer)
    param = torch.nn.Parameter(torch.ones(3, dtype=B16))
    optimizer.add_param_group({"params": param, "lr": 1e-4})
    assert optimizer.param_groups[2]["momentum"] == 0.9
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert torch.equal(true_weight(param, optimizer.state[param]), torch.full((3,), 1 - 1e-4))
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        optimizer.add_param_group({"params": param})
    with pytest.raises(ValueError, match="Masters: optimizer must have differentiable=False, got True"):
        optimizer.add_param_group({"params": torch.nn.Parameter(torch.ones(3)), "differentiable": True})
    assert len(optimizer.param_groups) == 3


def test_states_that_a_class_makes_as_a_group_comes_are_widened():
    class Early(torch.optim.SGD):
        def add_param_group(self, param_group):
            super().add_param_group(param_group)
            for param in self.param_groups[-1]["params"]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param)

    optimizer = around(Early, momentum=0.9)
    step(optimizer)
    param = torch.nn.Parameter(torch.ones(3, dtype=B16))
    optimizer.add_param_group({"params": [param]})
    step(optimizer, 1)
    for param in every(optimizer):
        assert optimizer.state[param]["momentum_buffer"].dtype == torch.float32


def test_zero_grad_resets():
    optimizer = around()
    give_grads(every(optimizer), 0, B16)
    optimizer.zero_grad(set_to_none=False)
    assert all(not param.grad.any() for param in every(optimizer))
    optimizer.zero_grad()
    assert all(param.grad is None for param in every(optimizer))


def test_hooks_run_around_the_step_and_around_each_group():
    optimizer, calls = around(), []
    optimizer.register_step_pre_hook(lambda it, *_: calls.append(("before", it is optimizer)))
    optimizer.register_step_post_hook(lambda it, *_: calls.append(("after", it is optimizer)))
    optimizer.wrapped.register_step_pre_hook(lambda it, *_: calls.append(it.param_groups[0]["params"][0].dtype))
    step(optimizer)
    assert calls == [("before", True), torch.float32, torch.float32, ("after", True)]


def test_hooks_around_state_dicts_see_the_whole():
    optimizer, seen = around(), []
    optimizer.register_state_dict_pre_hook(lambda it: seen.append(it is optimizer))
    optimizer.register_state_dict_post_hook(lambda it, saved: saved | {"more": len(saved["state"])})
    optimizer.register_load_state_dict_pre_hook(lambda it, saved: seen.append(saved.pop("more")))
    optimizer.register_load_state_dict_post_hook(lambda it: seen.append(it is optimizer))
    step(optimizer)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert seen == [True, 3, True]
    assert saved["more"] == 3


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, GradScaler], ids=lambda it: it.__module__)
def test_a_hook_never_sees_a_scaled_grad(kind):
    """torch's scaler unscales no fp16 grads, whoever asks."""
    optimizer, scaler, seen = around(), kind("cpu", init_scale=64.0), []
    optimizer.register_step_pre_hook(lambda it, *_: seen.append(every(it)[0].grad.clone()))
    give_grads(every(optimizer), 0, B16)
    grad = every(optimizer)[0].grad.clone()
    scaler.scale(torch.ones(()))
    give_grads(every(optimizer), 0, B16, scale=64.0)
    scaler.step(optimizer)
    assert torch.equal(seen[0], grad)


@pytest.mark.parametrize("dtype", [B16, F16], ids=str)
def test_the_user_may_unscale_and_clip(dtype):
    optimizer, scaler = around(dtype=dtype), GradScaler("cpu", init_scale=64.0)
    bare = torch.optim.SGD(groups(parameters(torch.float32)), lr=0.1)
    scaler.scale(torch.ones(()))
    give_grads(every(optimizer), 0, dtype, scale=64.0)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(every(optimizer), 1.0)
    for param, other in zip(every(optimizer), every(bare), strict=True):
        other.grad = param.grad.float()
    scaler.step(optimizer)
    scaler.update()
    bare.step()
    for param, other in zip(every(optimizer), every(bare), strict=True):
        assert same_bits(param, other.to(param.dtype))


def test_a_closure_is_called_once_before_all_groups():
    optimizer, calls = around(), []

    def closure():
        assert torch.is_grad_enabled()
        calls.append(1)
        give_grads(every(optimizer), 0, B16)
        return 7.0

    before = every(optimizer)[0].detach().clone()
    assert optimizer.step(closure) == 7.0
    assert calls == [1]
    assert not torch.equal(every(optimizer)[0], before)


def test_its_text_shows_both():
    text = repr(around(torch.optim.Muon, max_norm=1.0))
    assert text.startswith("Masters (max_norm: 1.0, guard: None) around\nMuon (\nParameter Group 0\n")


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["copy", "pickle"]
)
def test_a_copy_goes_on_alike(duplicate):
    optimizer = around(momentum=0.9, max_norm=1.0)
    step(optimizer)
    other = duplicate(optimizer)
    for it in (optimizer, other):
        step(it, 1)
    for param, twin in zip(every(optimizer), every(other), strict=True):
        assert param is not twin
        assert same_bits(param, twin)
        assert all(map(same_bits, optimizer.state[param].values(), other.state[twin].values()))
    assert other.max_norm == 1.0
    assert other.grad_norm == optimizer.grad_norm


@pytest.mark.parametrize("dtype", [B16, F16], ids=str)
def test_what_is_written_to_a_weight_wins(dtype):
    optimizer = around(dtype=dtype)
    for seed in range(3):
        step(optimizer, seed, dtype)
    param = every(optimizer)[0]
    param.data.fill_(3.0)
    optimizer.param_groups[0]["lr"] = 0.0
    step(optimizer, 3, dtype)
    assert (param == 3.0).all()


def test_an_error_in_the_wrapped_step_leaves_groups_and_masters_in_place():
    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure=None):
            super().step(closure)
            if self.fails:
                raise RuntimeError("no more")

    optimizer = around(Failing, momentum=0.9, max_norm=0.1)
    step(optimizer)
    params, lists = every(optimizer), [group["params"] for group in optimizer.param_groups]
    Failing.fails = True
    give_grads(params, 1, B16)
    grads = [param.grad for param in params]
    with pytest.raises(RuntimeError, match="no more"):
        optimizer.step()
    assert all(it is other for it, other in zip(every(optimizer), params, strict=True))
    assert all(group["params"] is it for group, it in zip(optimizer.param_groups, lists, strict=True))
    assert all(param.grad is grad for param, grad in zip(params, grads, strict=True))
    assert set(optimizer.state) == set(params)
    assert all("remainder" in optimizer.state[param] for param in params[:3])


def test_a_load_that_fails_leaves_all_as_it_was():
    optimizer = around(momentum=0.9)
    step(optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    saved["state"][0]["remainder"] = torch.zeros(2, dtype=B16)
    with pytest.raises(
        ValueError, match=r"Masters.load_state_dict: state\[0\]\['remainder'\] must have its parameter's"
    ):
        optimizer.load_state_dict(saved)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({**before, "param_groups": before["param_groups"][:1]})
    for number, state in optimizer.state_dict()["state"].items():
        assert all(map(same_bits, state.values(), before["state"][number].values()))
    step(optimizer, 1)


def test_what_the_wrapped_optimizer_loads_by_itself_is_widened():
    """torch rounds it to the parameter's dtype, which can't be undone; it keeps the remainders."""
    optimizer = around(momentum=0.9)
    step(optimizer)
    weights = [true_weight(param, optimizer.state[param]).clone() for param in every(optimizer)]
    optimizer.wrapped.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.0
    step(optimizer, 1)
    for param, weight in zip(every(optimizer), weights, strict=True):
        assert optimizer.state[param]["momentum_buffer"].dtype == torch.float32
        assert same_bits(true_weight(param, optimizer.state[param]), weight)


@pytest.mark.parametrize("master", ["split", "fp32"])
def test_checkpoints_go_between_our_adamw_and_masters_around_torchs(master):
    ours, other = AdamW(groups(parameters(B16)), master=master), Masters(torch.optim.AdamW(groups(parameters(B16))))
    for seed in range(3):
        step(ours, seed)
    for param, twin in zip(every(ours), every(other), strict=True):
        twin.data.copy_(param)
    other.load_state_dict(copy.deepcopy(ours.state_dict()))
    again = AdamW(groups(parameters(B16)))
    again.load_state_dict(copy.deepcopy(other.state_dict()))
    for optimizer in (ours, again, other):
        for param, twin in zip(every(ours), every(optimizer), strict=True):
            twin.data.copy_(param)
        for group in optimizer.param_groups:
            group |= {"lr": 0.0, "weight_decay": 0.0}
        step(optimizer, 3)
    for param, twin, third in zip(every(ours), every(other), every(again), strict=True):
        weights = [
            true_weight(it, optimizer.state[it]) for it, optimizer in ((param, ours), (twin, other), (third, again))
        ]
        assert same_bits(weights[0], weights[1])
        assert same_bits(weights[0], weights[2])


def test_weights_that_loaded_masters_were_not_made_for_win_with_one_warning():
    ours, other = (
        AdamW(groups(parameters(B16)), master="fp32"),
        Masters(torch.optim.AdamW(groups(parameters(B16)), lr=0.0)),
    )
    step(ours)
    other.load_state_dict(copy.deepcopy(ours.state_dict()))
    for group in other.param_groups:
        group |= {"lr": 0.0, "weight_decay": 0.0}
    before = [param.detach().clone() for param in every(other)]  # which are not those of ours
    with pytest.warns(
        UserWarning, match="3 parameters are not the weights that the loaded masters were made for"
    ) as it:
        step(other, 1)
    assert len(it) == 1
    step(other, 2)
    assert all(map(torch.equal, every(other), before))


def test_a_model_that_turns_fp32_needs_no_masters_any_more():
    model = network(B16)
    optimizer = Masters(torch.optim.Adam(model.parameters()))
    train(model, optimizer, 2)
    model.float()
    train(model, optimizer, 2)
    assert not any("remainder" in optimizer.state[param] for param in model.parameters())


def test_a_file_holds_model_and_masters(tmp_path):
    model = network(B16)
    optimizer = Masters(torch.optim.Adam(model.parameters()))
    train(model, optimizer, 2)
    checkpoint.save(tmp_path / "last.pt", model=model, optimizer=optimizer)
    again = network(B16, seed=7)
    resumed = Masters(torch.optim.Adam(again.parameters()))
    checkpoint.load(tmp_path / "last.pt", model=again, optimizer=resumed)
    for it in ((model, optimizer), (again, resumed)):
        train(*it, 2, first=2)
    for param, twin in zip(model.parameters(), again.parameters(), strict=True):
        assert same_bits(true_weight(param, optimizer.state[param]), true_weight(twin, resumed.state[twin]))


def test_metrics_follow_it():
    optimizer, scaler = around(max_norm=1.0), GradScaler("cpu", init_scale=2.0)
    metrics = mpkernels.Metrics(optimizer, scaler)
    scaler.scale(torch.ones(()))
    give_grads(every(optimizer), 0, B16, scale=2.0)
    scaler.step(optimizer)
    assert metrics.read() == {"grad_norm": float(optimizer.grad_norm), "skipped_steps": 0.0, "loss_scale": 2.0}


def test_fp32_alone_is_not_looked_at():
    param = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = Masters(torch.optim.SGD([param], lr=1.0))
    param.grad = torch.full((4, 3), float("nan"))
    optimizer.step()
    assert param.isnan().all()
    assert (optimizer.grad_norm, optimizer.skipped_steps, optimizer.step_was_skipped) == (None, None, None)


def test_hooks_of_ddp_stay_on_the_parameter():
    """Which lie on the node that accumulates a grad; a parameter whose dtype changes gets another node."""
    param = torch.nn.Parameter(torch.ones(3, dtype=B16))
    optimizer, calls = Masters(torch.optim.SGD([param], lr=0.1)), []
    node = param.view_as(param).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: calls.append(1))
    for _ in range(2):
        param.sum().backward()
        optimizer.step()
    assert calls == [1, 1]


def test_torch_compile_runs_a_step_as_it_is_written():
    compiled, plain = around(momentum=0.9), around(momentum=0.9)
    run = torch.compile(compiled.step, backend="eager")
    for seed in range(3):
        give_grads(every(compiled), seed, B16)
        run()
        step(plain, seed)
    assert all(map(same_bits, every(compiled), every(plain)))
    give_grads(every(compiled), 3, B16)
    with pytest.raises(RuntimeError, match="Masters: step must not be part of a full graph"):
        torch.compile(lambda: compiled.step(), backend="eager", fullgraph=True)()


class OfClosures(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


PARAMS = [torch.nn.Parameter(torch.ones(3, dtype=B16))]
REFUSED = {
    "a class": (
        lambda: torch.optim.SGD,
        TypeError,
        "must be a torch.optim.Optimizer, got the class torch.optim.sgd.SGD",
    ),
    "no optimizer": (lambda: PARAMS, TypeError, "must be a torch.optim.Optimizer, got builtins.list"),
    "ours": (lambda: AdamW(PARAMS), ValueError, "must have no masters yet, got mpkernels.optim.adamw.AdamW, which has"),
    "masters": (
        lambda: Masters(torch.optim.SGD(PARAMS)),
        ValueError,
        "must not hold another one, got mpkernels.optim.masters_wrapper.Masters",
    ),
    "LBFGS": (
        lambda: torch.optim.LBFGS(PARAMS),
        ValueError,
        "must step without a closure, got torch.optim.lbfgs.LBFGS",
    ),
    "closures": (lambda: OfClosures(PARAMS), ValueError, "must step without a closure"),
    "differentiable": (
        lambda: torch.optim.SGD([torch.ones(3, requires_grad=True)], differentiable=True),
        ValueError,
        "must have differentiable=False, got True",
    ),
}


@pytest.mark.parametrize(("make", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_what_it_can_not_be_put_around_is_refused(make, error, text):
    with pytest.raises(error, match=f"^Masters: optimizer {text}"):
        Masters(make())


def test_a_wrapper_of_another_optimizer_is_refused():
    outer = torch.optim.SGD(PARAMS)
    outer.inner = torch.optim.SGD(PARAMS)
    with pytest.raises(ValueError, match=r"^Masters: optimizer must not hold another one, got torch.optim.sgd.SGD"):
        Masters(outer)


def test_options_are_checked_as_adamws():
    sgd = torch.optim.SGD(PARAMS)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'maxnorm'. Did you mean 'max_norm'"):
        Masters(sgd, maxnorm=1.0)
    for options in ({"max_norm": 0.0}, {"max_norm": 1.0, "guard": False}):
        with pytest.raises(ValueError, match="max_norm"):
            Masters(sgd, **options)


@pytest.mark.parametrize("options", [{"guard": False}, {}, {"max_norm": 1.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, B16, F16], ids=str)
def test_a_sparse_grad_is_handed_over_where_the_class_takes_one(dtype, options):
    param, other = (torch.nn.Parameter(torch.ones(4, 3, dtype=it)) for it in (dtype, torch.float32))
    rows = torch.tensor([[1, 3, 1]])  # one of them twice
    values = torch.arange(1.0, 10.0).view(3, 3)
    param.grad, other.grad = (
        torch.sparse_coo_tensor(rows, values.to(it.dtype), (4, 3), check_invariants=True) for it in (param, other)
    )
    optimizer = Masters(torch.optim.SGD([param], lr=0.1), **options)
    norm = other.grad.to_dense().norm()
    if "max_norm" in options:
        other.grad = other.grad * float(1.0 / (norm.double() + 1e-6))
    optimizer.step()
    torch.optim.SGD([other], lr=0.1).step()
    torch.testing.assert_close(true_weight(param, optimizer.state[param]).float(), other.detach())
    if "max_norm" in options:
        torch.testing.assert_close(optimizer.grad_norm, norm)


def test_an_inf_in_a_sparse_grad_is_found():
    param = torch.nn.Parameter(torch.ones(4, 3, dtype=B16))
    optimizer = Masters(torch.optim.SGD([param], lr=0.1))
    rows, values = torch.tensor([[1]]), torch.full((1, 3), float("inf"), dtype=B16)
    param.grad = torch.sparse_coo_tensor(rows, values, (4, 3), check_invariants=True)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert (param == 1).all()


def test_complex_parameters_are_clipped_and_stepped():
    param, other = (torch.nn.Parameter(torch.ones(3, dtype=torch.complex64)) for _ in range(2))
    param.grad = torch.full((3,), 3 + 4j, dtype=torch.complex64)
    optimizer = Masters(torch.optim.SGD([param], lr=0.1), max_norm=1.0)
    optimizer.step()
    other.grad = param.grad.clone()
    torch.nn.utils.clip_grad_norm_([other], 1.0)
    torch.optim.SGD([other], lr=0.1).step()
    torch.testing.assert_close(param, other)
    assert optimizer.grad_norm == pytest.approx(75**0.5)
