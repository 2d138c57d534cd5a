"""offload=True: what a step copies, keeps and waits for, what breaks it off, and what it refuses."""

import copy
import importlib.util
import io
import pickle
import signal
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import mpkernels
from mpkernels.amp import GradScaler, accumulate
from mpkernels.distributed.parts import part_of
from mpkernels.optim import AdamW
from mpkernels.optim.offload import plan as plan_of_offload
from mpkernels.optim.offload.plan import OffloadedPlan
from mpkernels.optim.plan import Plan
from tests.cases import same_bits
from tests.cuda.test_offload import F32, INT8, all_of, are_same, assert_same, loss_of, parameters, take_step, trained
from tests.cuda.test_processes import fake_processes
from tests.cuda.training import CUDA
from tests.networks import B16

SQUARE = [(64, 64)] * 6  # a bucket each
ROOT = Path(mpkernels.__file__).parent


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch):
    monkeypatch.setattr(plan_of_offload, "BUCKET", 64 * 64 * 2)


def offloaded(dtype=B16, shapes=SQUARE, released=False, place=CUDA, **options):
    params = parameters(dtype, place, shapes)
    optimizer = AdamW(params, lr=0.01, offload=True, **options)
    if released:
        optimizer.release_grads()
    return params, optimizer


def size(tensors):
    return sum(it.numel() * it.itemsize for it in tensors)


class Copies(TorchDispatchMode):
    """Counts what is copied between a device and the host, in copies of more than a few numbers."""

    def __init__(self):
        super().__init__()
        self.bytes = {"cuda": 0, "cpu": 0}  # by where they go

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function is torch.ops.aten.copy_.default:
            to, source = arguments[:2]
            if to.device.type != source.device.type and to.numel() > 8:
                assert (to if to.device.type == "cpu" else source).is_pinned()
                self.bytes[to.device.type] += size([to])
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("dtype", [F32, B16])
@pytest.mark.parametrize("state_dtype", [F32, INT8])
def test_grads_and_weights_alone_travel(dtype, state_dtype, released):
    params, optimizer = offloaded(dtype, released=released, max_norm=1.0, state_dtype=state_dtype)
    trained(optimizer, params)
    optimizer.zero_grad()
    loss = loss_of(params, 9)
    with Copies() as in_backward:
        loss.backward()
    with Copies() as in_step:
        optimizer.step()
    weights = size(params)
    assert in_backward.bytes == {"cuda": 0, "cpu": weights if released else 0}
    assert in_step.bytes == {"cuda": weights, "cpu": 0 if released else weights}


@pytest.mark.parametrize("released", [False, True])
def test_a_skipped_step_brings_nothing_back(released):
    params, optimizer = offloaded(released=released, max_norm=1.0)
    trained(optimizer, params)
    optimizer.zero_grad()
    loss_of(params, 9, poisons=True).backward()
    before = all_of(optimizer)[:-2]
    with Copies() as copies:
        optimizer.step()
    assert copies.bytes == {"cuda": 0, "cpu": 0}
    assert all(map(same_bits, all_of(optimizer)[:-2], before))


@pytest.mark.parametrize("released", [False, True])
def test_the_device_keeps_the_weights_alone(released):
    """And released grads only until they have left."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    params, optimizer = offloaded(released=released, max_norm=1.0, shapes=[(128, 128)] * 12)
    weights, few = size(params), 16384  # numbers
    trained(optimizer, params)
    optimizer.zero_grad()
    assert torch.cuda.memory_allocated() - before <= weights + few
    terms = [param.float().sum() for param in params]
    torch.cuda.reset_peak_memory_stats()
    for term in terms:  # a backward as of a deep network: not all grads at once
        term.backward()
    optimizer.step()
    of_grads = 2 * size(params[:1]) if released else weights
    of_backward = 6 * size(params[:1])  # what autograd computes with
    assert torch.cuda.max_memory_allocated() - before <= weights + of_grads + of_backward + few


def test_pinned_memory_is_allocated_once(monkeypatch):
    found, pinned = [], torch.empty

    def empty(*arguments, **options):
        if options.get("pin_memory"):
            found.append(arguments[0])
        return pinned(*arguments, **options)

    monkeypatch.setattr(torch, "empty", empty)
    params, optimizer = offloaded(max_norm=1.0)
    trained(optimizer, params)
    assert found == [64 << 20, 8192, 8192, 8192]  # of twins, and three slices
    trained(optimizer, params)
    assert len(found) == 4


class Watch:
    """Notes what is on its way whenever a bucket is stepped."""

    def __init__(self, monkeypatch, optimizer):
        self.notes, step = [], Plan.step
        (self.lane,) = optimizer._offload.twins._lanes
        self.slices = optimizer._offload._slices

        def noted(plan, grads, verdict, *rest):
            if verdict.found_inf is None:  # no rehearsal
                is_asked = len(self.notes) in (1, 2, 3)  # who polls gets an answer in the end
                self.notes.append((sorted(self.slices._events), is_asked and self.lane.stream.query()))
            step(plan, grads, verdict, *rest)

        monkeypatch.setattr(Plan, "step", noted)


def test_copies_run_beside_the_steps_of_other_buckets(monkeypatch):
    """While the host steps a bucket, the next two are on their way, and nobody has waited for what was stepped."""
    if importlib.util.find_spec("standin_attach") is None:
        pytest.skip("on a device that is there, copies may be done early")
    params, optimizer = offloaded(guard=False)
    trained(optimizer, params, bad_step=-1)
    watch = Watch(monkeypatch, optimizer)
    waits = []
    for kind in (torch.cuda.Event, torch.cuda.Stream):
        synchronize = kind.synchronize
        monkeypatch.setattr(kind, "synchronize", lambda it, to=synchronize: (waits.append(it), to(it)))
    optimizer.zero_grad()
    loss_of(params, 9).backward()
    optimizer.step()
    assert [on_the_way for on_the_way, _ in watch.notes] == [[1, 2], [2, 3], [3, 4], [4, 5], [5], []]
    if Path(importlib.util.find_spec("standin_attach").origin).with_name("settings").read_text().startswith("lazy"):
        assert not any(done for _, done in watch.notes)  # of the weights that go back
    assert len(waits) == 1 + len(SQUARE)  # for the last step's weights, and for the grads of each bucket


@pytest.mark.parametrize("released", [False, True])
def test_the_report_is_that_of_the_same_optimizer_without(released):
    params, theirs = parameters(B16), parameters(B16)
    found = []
    for it, options in ((params, {"offload": True}), (theirs, {})):
        optimizer, scaler = AdamW(it, lr=0.01, **options), GradScaler("cuda", init_scale=4.0)
        if options and released:
            optimizer.release_grads(scaler)
        trained(optimizer, it, scaler, bad_step=3)
        found.append((str(scaler.overflow_report()), optimizer.overflow_report().as_dict(), scaler.get_scale()))
        assert optimizer.step_was_skipped
    assert found[0] == found[1]
    assert "params[2]" in found[0][0] or "1" in found[0][0]


def traced(run, number):
    """Run this, and press Ctrl-C at the line of ours of this number, of those where it isn't held back. Return whether
    there was one."""
    left = number

    def at_line(frame, event, argument):
        nonlocal left
        if event == "line" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return at_line

    def at_call(frame, event, argument):
        return at_line if Path(frame.f_code.co_filename).is_relative_to(ROOT / "optim") else None

    sys.settrace(at_call)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
        torch.set_grad_enabled(True)  # which no_grad does not, if it is the line of its end
    return False


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_ctrl_c_at_each_line_leaves_nothing_half_done(released, scaled):
    (params, optimizer), (theirs, its) = offloaded(released=released, shapes=SQUARE[:3]), offloaded(shapes=SQUARE[:3])
    scalers = [GradScaler("cuda", init_scale=4.0) if scaled else None for _ in range(2)]
    trained(optimizer, params, scalers[0]), trained(its, theirs, scalers[1])
    optimizer.zero_grad(), its.zero_grad()
    before = all_of(optimizer, norm=False)
    for scaler, it in zip(scalers, (params, theirs), strict=True):
        loss = loss_of(it, 9)
        (loss if scaler is None else scaler.scale(loss)).backward()
    its.step() if scalers[1] is None else scalers[1].step(its)
    wanted = all_of(its, norm=False)
    run = optimizer.step if scalers[0] is None else partial(scalers[0].step, optimizer)
    number = breaks = 0
    while True:
        number += 1
        if not traced(run, number):
            break
        breaks += 1
        found = all_of(optimizer, norm=False)
        is_done = are_same(found, wanted)
        assert is_done or are_same(found, before), number
        if is_done and scalers[0] is None:
            break
    assert breaks > 50
    assert are_same(all_of(optimizer, norm=False), wanted)


@pytest.mark.parametrize("bucket", [0, 2, 5])
@pytest.mark.parametrize("released", [False, True])
def test_ctrl_c_among_the_buckets_comes_after_the_last(monkeypatch, bucket, released):
    params, optimizer = offloaded(released=released)
    theirs, its = offloaded()
    trained(optimizer, params), trained(its, theirs)
    step, count = Plan.step, 0

    def pressed(plan, grads, verdict, *rest):
        nonlocal count
        if verdict.found_inf is None:
            if count == bucket:
                signal.raise_signal(signal.SIGINT)
            count += 1
        step(plan, grads, verdict, *rest)

    for it in (optimizer, its):
        it.zero_grad()
    loss_of(params, 9).backward(), loss_of(theirs, 9).backward()
    its.step()
    monkeypatch.setattr(Plan, "step", pressed)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert count == len(SQUARE)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_same(optimizer, its, norm=False)


def test_what_no_bucket_takes_moves_none():
    """The last one's grad has another shape than its state."""
    params, optimizer = offloaded()
    trained(optimizer, params)
    before = all_of(optimizer, norm=False)
    for spoil in ("state", "grad"):
        loss_of(params, 9).backward()
        state = optimizer.state[params[-1]]
        kept = state["exp_avg"]
        if spoil == "state":
            state["exp_avg"] = torch.zeros(3)
        else:
            params[-1].grad = None
            params[-1].grad_dtype = None
            params[-1].grad = params[-1].detach().double()
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            optimizer.step()
        state["exp_avg"] = kept
        assert are_same(all_of(optimizer, norm=False), before)
        optimizer.zero_grad()


def moved(params, place=None, dtype=None):
    for param in params:
        param.data = param.data.to(place or param.device, dtype or param.dtype)


@pytest.mark.parametrize("master", ["split", "fp32"])
@pytest.mark.parametrize(
    "way", [{"place": "cpu"}, {"place": torch.device("cuda", 1)}, {"dtype": F32}, {"dtype": torch.float16}], ids=str
)
def test_a_model_that_moves(way, master):
    """To the host and back, as where a sampler is given the GPU; to another device or dtype for good."""
    if torch.cuda.device_count() < 2 and way.get("place") not in ("cpu", None):
        pytest.skip("there are no two CUDA devices")
    found = []
    for offload in (True, False):
        params = parameters(B16)
        optimizer = AdamW(params, lr=0.01, offload=offload, master=master)
        trained(optimizer, params)
        optimizer.zero_grad()
        if offload or "place" not in way:
            moved(params, **way)
        if way.get("place") == "cpu":
            if offload:
                loss_of(params, 8).backward()
                optimizer.step()
                moved(params, CUDA)
            else:
                optimizer.zero_grad()
                loss_of(params, 8).backward()
                optimizer.step()
        optimizer.zero_grad()
        trained(optimizer, params, bad_step=-1)
        found.append(optimizer)
    if way.get("place") != "cpu":
        assert_same(*found, norm=False)


def pickled(it):
    return pickle.loads(pickle.dumps(it))


def saved_and_loaded(it):
    file = io.BytesIO()
    torch.save(it, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, saved_and_loaded], ids=lambda it: it.__name__)
def test_a_copy_goes_on_alone(duplicate):
    params, optimizer = offloaded()
    trained(optimizer, params)
    optimizer.zero_grad()
    other = duplicate(optimizer)
    others = other.param_groups[0]["params"]
    assert (other.offload, repr(other)) == (True, repr(optimizer))
    for it, its in ((optimizer, params), (other, others)):
        trained(it, its, bad_step=1)
    assert_same(optimizer, other)


def test_a_loader_may_put_states_on_the_device():
    params, optimizer = offloaded()
    theirs, its = offloaded()
    trained(optimizer, params), trained(its, theirs)
    for state in optimizer.state.values():
        state.update({key: it.to(CUDA) for key, it in state.items()})
    optimizer.zero_grad(), its.zero_grad()
    trained(optimizer, params), trained(its, theirs)
    assert_same(optimizer, its)


@pytest.mark.parametrize("places", [("cpu", CUDA), (CUDA, "cpu"), (CUDA, torch.device("cuda", 1))], ids=str)
@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_parameters_in_several_places(devices, places, released, scaled):
    found = []
    for offload in (True, False):
        params = [it for place in places for it in parameters(B16, place)]
        optimizer = AdamW(params, lr=0.01, offload=offload, max_norm=1.0)
        scaler = GradScaler("cuda", init_scale=4.0) if scaled else None
        if offload and released:
            optimizer.release_grads()
        trained(optimizer, params, scaler)
        found.append(optimizer)
    assert_same(*found, norm=False)


@pytest.mark.parametrize("place", ["cpu", CUDA])
def test_tensors_for_the_learning_rate(place):
    found = []
    for offload in (True, False):
        params = parameters(B16)
        optimizer = AdamW(params, lr=torch.tensor(0.01, device=place), betas=(0.8, 0.9), offload=offload)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(4):
            optimizer.zero_grad()
            take_step(optimizer, None, loss_of(params, step))
            schedule.step()
        found.append(optimizer)
    assert_same(*found)


def test_weights_with_gaps_in_other_orders_and_complex_ones():
    found = []
    for offload in (True, False):
        base = torch.linspace(-1, 1, 600, device=CUDA).to(B16)
        tensors = [base[:200].view(10, 20).t(), base[200:400:2], base[400:].view(20, 10)[:, ::3]]
        params = [nn.Parameter(it) for it in tensors]
        params.append(nn.Parameter(torch.linspace(-1, 1, 12, device=CUDA).to(torch.complex64)))
        optimizer = AdamW(params, lr=0.01, offload=offload, state_dtype=INT8)
        for step in range(3):
            for i, param in enumerate(params):
                grad = torch.full_like(param, 0.1 * (step + 1 + i))
                param.grad = grad.t().contiguous().t() if grad.ndim == 2 and step == 1 else grad
            optimizer.step()
        found.append(optimizer)
    assert_same(*found)


@pytest.mark.parametrize("released", [False, True])
def test_fsdp2(released):
    """In a single process, whose parameters are DTensors on a mesh of GPUs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.Linear(32, 4)).to(CUDA)
    twin, results = copy.deepcopy(model), []
    with fake_processes(1), warnings.catch_warnings(action="ignore"):
        for it, offload in ((model, True), (twin, False)):
            it = fully_shard(it.bfloat16())
            optimizer = AdamW(it.parameters(), lr=0.01, max_norm=1.0, offload=offload, state_dtype=INT8)
            if offload and released:
                optimizer.release_grads()
            for step in range(4):
                x = torch.randn(8, 24, generator=torch.Generator().manual_seed(step)).to(CUDA, B16)
                loss = it(x).float().square().mean() * (float("inf") if step == 2 else 1)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            saved = optimizer.state_dict()
            optimizer.load_state_dict(saved)
            with torch.no_grad():
                next(iter(it.parameters())).mul_(0.5)
            it(x).float().square().mean().backward()
            optimizer.step()
            states = [part_of(value) for state in optimizer.state.values() for value in state.values()]
            assert all(value.device.type == ("cpu" if offload else "cuda") for value in states)
            results.append([part_of(param.detach()).cpu() for param in it.parameters()] + [x.cpu() for x in states])
            results[-1].append(optimizer.skipped_steps.cpu())
    assert all(map(same_bits, *results))


def test_closures_and_steps_without_grads():
    params, optimizer = offloaded()
    theirs, its = parameters(B16, shapes=SQUARE), None
    its = AdamW(theirs, lr=0.01)
    optimizer.step()
    for step in range(3):
        for it, of_it in ((optimizer, params), (its, theirs)):

            def closure(it=it, of_it=of_it, step=step):
                it.zero_grad()
                loss = loss_of(of_it, step)
                loss.backward()
                return loss

            assert it.step(closure) is not None
    assert_same(optimizer, its)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_is_refused():
    params, optimizer = offloaded()
    trained(optimizer, params)
    graph = torch.cuda.CUDAGraph()
    says = r"offload=True can't be captured in a CUDA graph.*leave offload out"
    with pytest.raises(RuntimeError, match=says), torch.cuda.graph(graph):
        optimizer.step()


def test_a_replayed_backward_is_stepped():
    """Nothing counts what a graph writes to grads, so they are copied at each step."""
    params, optimizer = offloaded(guard=False)
    theirs, its = parameters(B16, shapes=SQUARE), None
    its = AdamW(theirs, lr=0.01, guard=False)
    factor = torch.ones((), device=CUDA, dtype=B16)
    for it, of_it in ((optimizer, params), (its, theirs)):
        for param in of_it:
            param.grad = torch.zeros_like(param)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for param in of_it:
                param.grad.copy_(param * factor)
        for step in range(3):
            factor.fill_(step + 1)
            graph.replay()
            it.step()
    assert_same(optimizer, its)


def test_a_compiled_step_runs_as_written_or_is_refused():
    (params, optimizer), (theirs, its) = offloaded(), offloaded()
    for it, of_it in ((optimizer, params), (its, theirs)):
        trained(it, of_it)
        it.zero_grad()
        loss_of(of_it, 9).backward()
    with pytest.raises(Exception, match="offload=True must not be part of a full graph: the host steps"):
        torch.compile(optimizer.step, backend="eager", fullgraph=True)()
    torch.compile(optimizer.step, backend="eager")(), its.step()
    assert_same(optimizer, its)


def test_the_refusals():
    params, optimizer = offloaded(released=True)
    scaler = GradScaler("cuda", init_scale=4.0)
    scaler.scale(loss_of(params, 0)).backward()
    with pytest.raises(RuntimeError, match=r"that release_grads has sent to the host; leave unscale_ .* out"):
        scaler.unscale_(optimizer)
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="max_norm must be given to AdamW"):
        accumulate([0], 1, optimizer, max_norm=1.0)
    theirs = torch.amp.GradScaler("cuda", init_scale=4.0)
    theirs.scale(loss_of(params, 0)).backward()
    with pytest.raises(RuntimeError, match=r"torch's GradScaler doesn't look for them; use mpkernels.amp.GradScaler"):
        theirs.step(optimizer)


def test_a_write_to_a_weight_that_nobody_counts_is_undone():
    """As docs/differences.md says: what is written otherwise is seen."""
    params, optimizer = offloaded(guard=False)
    trained(optimizer, params, bad_step=-1)
    optimizer.zero_grad()
    weight = params[0]
    for write, is_seen in ((lambda: weight.data.fill_(5), False), (lambda: weight.detach().fill_(5), True)):
        write()
        loss_of(params, 9).backward()
        optimizer.step()
        assert bool((weight.float() > 4).all()) is is_seen


def test_a_write_to_a_grad_that_nobody_counts_is_seen():
    params, optimizer = offloaded()
    theirs, its = parameters(B16, shapes=SQUARE), None
    its = AdamW(theirs, lr=0.01)
    for it, of_it in ((optimizer, params), (its, theirs)):
        for step in range(2):
            it.zero_grad()
            loss_of(of_it, step).backward()
            for param in of_it:
                param.grad.data.clamp_(-0.1, 0.1)
            it.step()
    assert_same(optimizer, its)


def test_memory_is_given_back():
    import gc
    import weakref

    params, optimizer = offloaded(released=True)
    trained(optimizer, params)
    plan, twin = optimizer._plans[0], optimizer._offload.home(params[0])
    assert isinstance(plan, OffloadedPlan)
    optimizer._release.remove()
    dead = weakref.ref(optimizer), weakref.ref(plan), weakref.ref(twin)
    del optimizer, plan, twin
    gc.collect()
    assert [it() for it in dead] == [None] * 3


@pytest.mark.parametrize("way", ["process_group", "ZeRO"])
@pytest.mark.parametrize("released", [False, True])
def test_processes_that_agree(way, released):
    from torch import distributed
    from torch.distributed.optim import ZeroRedundancyOptimizer

    found = []
    with fake_processes(1):
        for offload in (True, False):
            params = parameters(B16, shapes=SQUARE)
            options = {"lr": 0.01, "offload": offload, "max_norm": 1.0}
            if way == "ZeRO":
                optimizer = ZeroRedundancyOptimizer(params, AdamW, **options)
                inner = optimizer.optim
            else:
                inner = optimizer = AdamW(params, process_group=distributed.group.WORLD, **options)
            if offload and released:
                inner.release_grads()
            trained(optimizer, params)
            found.append([*map(torch.Tensor.cpu, params), inner.skipped_steps.cpu()])
            states = [it for state in inner.state.values() for it in state.values()]
            assert all(it.device.type == ("cpu" if offload else "cuda") for it in states)
    assert are_same(*found)
