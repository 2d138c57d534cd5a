"""DTensors of tensor and sequence parallelism, of several meshes, and beside plain parameters."""

import math
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from mpkernels.amp import GradScaler, clip_grad_norm_, clipping, inf_check
from mpkernels.distributed.parts import settled_grads
from mpkernels.optim import AdamW
from tests.distributed.sharding import WORLD, mesh_of, part_of, wholes
from tests.hard_grads import same_bits
from tests.networks import B16
from tests.processes import in_processes, run_checks, spawn

LR, STEPS = 1e-2, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.first, self.last = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.last(nn.functional.gelu(self.first(self.norm(x)))) + 0


def tensor_parallel(mesh):
    return parallelize_module(Block(), mesh, {"first": ColwiseParallel(), "last": RowwiseParallel()})


def sequence_parallel(mesh):
    plan = {
        "norm": SequenceParallel(),
        "first": ColwiseParallel(input_layouts=Shard(1)),
        "last": RowwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(Block(), mesh, plan)


def tensor_parallel_within_fsdp2(_):
    """Apply FSDP2 over one dimension of the mesh, tensor parallelism over the other."""
    mesh = mesh_of("two dimensions")
    return fully_shard(tensor_parallel(mesh["columns"]), mesh=mesh["rows"])


def trained(model, scaler, spoils, **options):
    """Train with an eps of 1, so that an update changes by at most lr times the change of its grad."""
    optimizer, outcomes = AdamW(model.parameters(), lr=LR, eps=1.0, max_norm=0.05, **options), []
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(step))
        scaler.scale(model(inputs).square().mean()).backward()
        if step == 1 and spoils:
            part_of(model.last.weight.grad).view(-1)[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        outcomes += [optimizer.grad_norm, optimizer.skipped_steps, torch.tensor(scaler.get_scale())]
    return outcomes


def parallel_layers_train_as_one_process(rank):
    """A grad is a sum of at most 16 x 32 products in another order; a weight moves by lr times its grad, and rounds."""
    for make in (tensor_parallel, sequence_parallel, tensor_parallel_within_fsdp2):
        alone, model = Block(), make(mesh_of("fsdp2"))
        want = trained(alone, GradScaler("cpu", init_scale=64.0), True)
        outcomes = trained(model, GradScaler("cpu", init_scale=64.0), rank == WORLD - 1)
        for a, b in zip(outcomes, want, strict=True):
            torch.testing.assert_close(a, b, rtol=512 * 2**-24, atol=0)
        for a, b in zip(wholes(model), wholes(alone), strict=True):
            bound = STEPS * (LR * 512 * 2**-24 + 2 * 2**-24 * b.abs().max())
            assert (a - b).abs().max() <= bound, make


def released_grads_step_the_same(rank):
    """Released grads step in the backward as in the step. With a norm, grads are summed before they become bf16."""
    for make in (tensor_parallel, sequence_parallel):
        for options in ({"guard": False}, {"max_norm": 0.05}):
            models = [make(mesh_of("fsdp2")) for _ in range(2)]
            optimizers = [AdamW(it.parameters(), lr=LR, **options) for it in models]
            release = optimizers[0].release_grads()
            for step in range(STEPS):
                inputs = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(step))
                for model, optimizer in zip(models, optimizers, strict=True):
                    model(inputs).square().mean().backward()
                    for param in model.parameters() if model is models[1] and not release.steps_alone else ():
                        (grad,) = settled_grads([param])
                        param.grad = grad.bfloat16().float()
                    optimizer.step()
                    optimizer.zero_grad()
            assert all(map(same_bits, *map(wholes, models))), (make, options)


def params_on(*placed, dtype=torch.float32):
    """Return parameters of ones with grads of threes. ``placed``: (mesh, placements), or None for a plain one."""
    params = []
    for it in placed:
        values = torch.ones(6, 8, dtype=dtype), torch.full((6, 8), 3.0, dtype=dtype)
        param, grad = values if it is None else (distribute_tensor(value, *it) for value in values)
        params.append(nn.Parameter(param))
        params[-1].grad = grad
    return params


def with_a_hook(params):
    optimizer = AdamW(params, max_norm=1e9)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def two_meshes_skip_and_clip_together(rank):
    """Processes that share no mesh with the one that finds an inf skip with it, and the norm counts each part once."""
    mesh = mesh_of("two dimensions")
    placed = (mesh["rows"], [Shard(0)]), (mesh["columns"], [Shard(0)]), (mesh, [Replicate(), Shard(1)])
    norm = math.sqrt(3 * 48 * 9.0)
    for optimizer_of in (AdamW, with_a_hook, lambda params: torch.optim.AdamW(params, fused=True)):
        params = params_on(*placed)
        optimizer, scaler = optimizer_of(params), GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        if rank == 3:
            part_of(params[1].grad)[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        assert all((part_of(param) == 1).all() for param in params)
    for norm_type, total_norm in ((2, norm), (1, 3 * 48 * 3.0), (3, 3 * (3 * 48) ** (1 / 3)), (math.inf, 3.0)):
        params = params_on(*placed)
        assert clip_grad_norm_(params, 1.0, norm_type).item() == pytest.approx(total_norm, rel=2**-22)
        assert part_of(params[0].grad).flatten()[0].item() == pytest.approx(3.0 / total_norm, rel=2**-20, abs=1e-6)
    optimizer = AdamW(params_on(*placed), max_norm=1.0)
    optimizer.step()
    assert type(optimizer.grad_norm) is torch.Tensor
    assert optimizer.grad_norm.item() == pytest.approx(norm, rel=2**-23)


def an_error_while_grads_are_read_is_raised_by_all(rank):
    """If unscale_ or clip_grad_norm_ fails in one process, all raise, and none clips."""
    for module, name in ((inf_check, "unscale_list_"), (clipping, "stats_by_device")):
        params, scaler = params_on((mesh_of("fsdp2"), [Shard(0)]), None), GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        optimizer, text = AdamW(params), "of this process" if rank == 1 else "has failed in another process"
        fails = mock.patch.object(module, name, side_effect=torch.OutOfMemoryError(text))
        with fails if rank == 1 else nullcontext(), pytest.raises(RuntimeError, match=text):
            scaler.unscale_(optimizer) if module is inf_check else clip_grad_norm_(params, 1.0)
        assert module is inf_check or all((part_of(it.grad) == 3).all() for it in params)


def a_compiled_step_runs_as_written_or_is_refused(rank):
    """A full graph is refused. Otherwise torch.compile leaves the step as it is written."""
    full = torch.compile(AdamW(params_on((mesh_of("fsdp2"), [Shard(0)]))).step, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="AdamW: step of DTensors must not be part of a full graph"):
        full()
    for options in ({"guard": False}, {"max_norm": 0.05}):
        models = [tensor_parallel(mesh_of("fsdp2")) for _ in range(2)]
        optimizers = [AdamW(it.parameters(), lr=LR, **options) for it in models]
        steps = torch.compile(optimizers[0].step, backend="aot_eager"), optimizers[1].step
        for number in range(STEPS):
            inputs = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(number))
            for model, step in zip(models, steps, strict=True):
                model.zero_grad()
                model(inputs).square().mean().backward()
                step()
        assert all(map(same_bits, *map(wholes, models))), options


def a_report_names_the_place_in_the_whole(rank):
    """A report's index is that in the whole parameter, and ``gather`` says which process holds it."""
    for by_scaler in (False, True):
        params = params_on((mesh_of("fsdp2"), [Shard(0)]), None)
        optimizer, scaler = AdamW(params, guard=True), GradScaler("cpu", init_scale=1.0, enabled=by_scaler)
        scaler.scale(torch.ones(()))
        if rank == 2:
            part_of(params[0].grad)[1, 5] = math.nan  # the second of rows 4 and 5
        scaler.step(optimizer)
        scaler.update()
        own_report = (scaler if by_scaler else optimizer).overflow_report()
        assert [it.first for it in own_report.culprits] == ([(5, 5)] if rank == 2 else [])
        report = own_report.gather()
        assert [(it.first, it.rank, it.nans) for it in report.culprits] == [((5, 5), 2, 1)]
        assert "[5, 5]" in str(report)
        assert own_report
        assert report


def an_error_in_one_process_is_raised_by_all(rank):
    """If one process fails, all raise, none has stepped, and the next step works."""
    for scaled in (False, True):
        params = params_on((mesh_of("fsdp2"), [Shard(0)]), None, dtype=B16)
        optimizer, scaler = AdamW(params, lr=0.1, max_norm=1.0), GradScaler("cpu", init_scale=4.0, enabled=scaled)
        for failing_place in ("_state_of", "_plans_for"):
            scaler.scale(torch.ones(()))
            before = [part_of(it).clone() for it in params], scaler.get_scale()
            if rank == 1:

                def fail(*_):
                    raise torch.OutOfMemoryError("of this process")

                setattr(optimizer, failing_place, fail)
                optimizer._foundations = None
            text = "of this process" if rank == 1 else "step has failed in another process"
            with pytest.raises(RuntimeError, match=text):
                scaler.step(optimizer)
            vars(optimizer).pop(failing_place, None)
            assert all(map(same_bits, map(part_of, params), before[0]))
            assert scaler.get_scale() == before[1]
            assert not hasattr(optimizer, "grad_scale")
            scaler.step(optimizer)
            scaler.update()
            assert all((part_of(it) < before).all() for it, before in zip(params, before[0], strict=True))
            assert optimizer.skipped_steps.item() == 0


CHECKS = (
    *(parallel_layers_train_as_one_process, released_grads_step_the_same),
    *(a_compiled_step_runs_as_written_or_is_refused, two_meshes_skip_and_clip_together),
    *(a_report_names_the_place_in_the_whole, an_error_in_one_process_is_raised_by_all),
    an_error_while_grads_are_read_is_raised_by_all,
)


@in_processes
def test_four_processes(tmp_path):
    spawn(partial(run_checks, CHECKS), tmp_path, WORLD)
