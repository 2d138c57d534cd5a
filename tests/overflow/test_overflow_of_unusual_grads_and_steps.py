"""overflow_report on unusual grads and unusual steps, and in copies."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW
from mpkernels.overflow.ledger import Ledgers
from tests.amp.test_grad_scaler import OPTIMIZERS
from tests.networks import B16, network
from tests.overflow.test_overflow_report import INF, NAN, culprits, every_optimizer, iterate, params_of


def test_an_inf_in_a_sparse_grad_is_reported():
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    optimizer, scaler = torch.optim.SGD(embedding.parameters(), lr=0.1), GradScaler("cpu")
    scaler.scale(embedding(torch.tensor([7, 2])).sum()).backward()
    embedding.weight.grad._values()[1, 2] = INF
    scaler.step(optimizer)
    scaler.update()
    (gradient,) = scaler.overflow_report().gradients
    assert (gradient.elements, gradient.infs, gradient.first) == (6, 1, (5,))


def test_complex_transposed_and_empty_grads_are_reported():
    params = [
        torch.nn.Parameter(torch.ones(2, 3, dtype=torch.complex64)),
        torch.nn.Parameter(torch.ones(3, 5).t()),
        torch.nn.Parameter(torch.ones(0, 4)),
    ]
    optimizer = AdamW(params, guard=True)
    for param in params:
        param.grad = torch.ones_like(param)
    params[0].grad[1, 1] = complex(0, INF)
    params[1].grad[4, 1] = NAN
    optimizer.step()
    assert [it[1:] for it in culprits(optimizer.overflow_report())] == [(0, 1, (4, 1)), (1, 0, (1, 1))]


@pytest.mark.parametrize("name", ["SGD", "our AdamW"])
def test_the_place_in_a_transposed_grad_is_reported_by_its_indices(name):
    (param,) = params_of((3, 5))
    optimizer, scaler = OPTIMIZERS[name]([param]), GradScaler("cpu")
    scaler.scale(param.sum()).backward()
    param.grad = param.grad.t().contiguous().t()
    param.grad[2, 1] = INF
    scaler.step(optimizer)
    assert culprits(scaler.overflow_report())[0][3] == (2, 1)


def test_released_grads_are_reported():
    model, scaler = network(B16), GradScaler("cpu", init_scale=8.0)
    optimizer = AdamW(model.named_parameters())
    optimizer.release_grads(scaler)
    output = model(torch.ones(2, 20, dtype=B16))
    output.register_hook(lambda grad: grad * INF)
    scaler.scale(output.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(param.grad is None for param in model.parameters())
    assert [it.name for it in scaler.overflow_report().culprits][:2] == ["3.bias", "3.weight"]


@pytest.mark.exhaustive
def test_a_compiled_step_is_reported():
    model = network(B16)
    optimizer = AdamW(model.named_parameters())
    step = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager")
    for step_number, bad in enumerate((1.0, INF, 1.0)):
        optimizer.zero_grad()
        (model(torch.ones(2, 20, dtype=B16)) * bad).sum().backward()
        step()
        assert bool(optimizer.overflow_report()) == (bad == INF or step_number == 2)
        if step_number == 0:
            assert str(optimizer.overflow_report()) == (
                "No step has looked for an inf or NaN; compiled ones, if there were any, have skipped nothing."
            )
    assert {it.name for it in optimizer.overflow_report().culprits} == {name for name, _ in model.named_parameters()}
    assert optimizer.step_was_skipped is optimizer.grad_norm is optimizer.skipped_steps is None
    torch.compiler.reset()


@pytest.mark.exhaustive
def test_after_a_compiled_step_the_norm_is_the_last_eager_one_and_skips_are_counted():
    model = network(B16)
    optimizer = AdamW(model.parameters())

    def backward(factor):
        optimizer.zero_grad()
        (model(torch.ones(2, 20, dtype=B16)) * factor).sum().backward()

    backward(1.0)
    optimizer.step()
    norm = optimizer.grad_norm.clone()
    step = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager")
    for bad in (INF, 2.0, INF):
        backward(bad)
        step()
    assert (optimizer.grad_norm, bool(optimizer.step_was_skipped), optimizer.skipped_steps) == (norm, False, 2)
    torch.compiler.reset()


@every_optimizer
def test_copies_start_without_a_report(make):
    (param,) = params_of((3,))
    optimizer, scaler = make([param]), GradScaler("cpu")
    iterate(scaler, optimizer, bad=[(param, 0, INF)])
    for twin in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert not twin.overflow_report()
        iterate(twin, optimizer, bad=[(param, 1, INF)])
        assert culprits(twin.overflow_report())[0][3] == (1,)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert not hasattr(twin, "overflow_report") or not twin.overflow_report()
    assert scaler.state_dict().keys() == torch.amp.GradScaler("cpu").state_dict().keys()
    assert optimizer.state_dict()["state"].keys() <= {0}
    scaler.load_state_dict(scaler.state_dict())
    assert not scaler.overflow_report()


@every_optimizer
def test_the_report_takes_memory_once(make):
    params = params_of((3,), (4,))
    optimizer, scaler = make(params), GradScaler("cpu")
    iterate(scaler, optimizer)
    ledger = getattr(optimizer, "_ledger", None) or scaler._ledgers._entries[id(optimizer)].ledger
    (before,) = ledger.records()
    for bad in ([], [(params[0], 0, INF)], []):
        iterate(scaler, optimizer, bad=bad)
    (after,) = ledger.records()
    assert after.report.data_ptr() == before.report.data_ptr()


def test_grads_on_several_devices_are_reported():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    params = [*params_of((3,)), *params_of((4,), device="cuda")]
    for make in OPTIMIZERS.values():
        optimizer, scaler = make(params), GradScaler("cuda", init_scale=8.0)
        scaler.scale(sum(param.sum().cuda() for param in params)).backward()
        params[0].grad[1] = INF
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        report = scaler.overflow_report()
        assert [(it.infs, it.largest) for it in report.gradients] == [(1, 1.0), (0, 1.0)]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_parameters_that_were_replaced_are_freed(make):
    """Gaussian splatting replaces parameters when it prunes and adds points between steps."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer, scaler, replaced = make([weight]), GradScaler("cpu"), []
    for _ in range(4):
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        replaced.append(weakref.ref(weight))
        state = optimizer.state.pop(weight)
        weight = optimizer.param_groups[0]["params"][0] = torch.nn.Parameter(weight.detach().clone())
        optimizer.state[weight] = state
    gc.collect()
    assert [it() is None for it in replaced] == [True, True, True, False]  # the last step took the last one


def test_a_grad_with_gaps_is_taken_in_the_order_of_its_indices():
    param = torch.nn.Parameter(torch.zeros(3, 4))
    param.grad = torch.zeros(4, 6).t()[::2]
    param.grad[1, 2] = INF
    optimizer, scaler = torch.optim.SGD([param]), GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    (culprit,) = scaler.overflow_report().culprits
    assert culprit.first == (1, 2)


@pytest.mark.parametrize("bad", [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_an_inf_on_one_device_records_the_grads_of_all(target, bad):
    """Each device has its own found_inf."""
    param, ledgers = torch.nn.Parameter(torch.ones(2, device=target.device)), Ledgers()
    grad, scale = torch.tensor([1.0, INF], device=target.device), torch.full((), 4.0, device=target.device)
    optimizer = torch.optim.SGD([param])
    found_infs = {
        place: torch.full((), found, device=target.device) for place, found in zip(("a", "b"), bad, strict=True)
    }
    ledgers.take_up(optimizer, None)
    ledgers.fill(optimizer, {target.device: ([param], [grad])}, found_infs, scale, unscaled=False)
    ((_, (record,)),) = ledgers.records()
    assert (record.report[0, 0].item() > 0) == any(bad)


@pytest.mark.parametrize("name", ["SGD", "our AdamW"])
def test_a_longer_or_shorter_list_of_parameters_has_its_own_report(name):
    """The lists begin with the same parameters."""
    params = params_of(2, 3, 4)
    optimizer, scaler = OPTIMIZERS[name](params[:2]), GradScaler("cpu")
    for stepped in (params[:1], params[:2], params, params[:2]):
        if stepped is params:
            optimizer.add_param_group({"params": params[2:]})
        optimizer.zero_grad()
        scaler.scale(sum(it.sum() for it in stepped)).backward()
        stepped[-1].grad[1] = INF
        scaler.step(optimizer)
        scaler.update()
        report = scaler.overflow_report()
        assert [it.shape for it in report.gradients] == [tuple(it.shape) for it in stepped]
        assert [it.shape for it in report.culprits] == [tuple(stepped[-1].shape)]
