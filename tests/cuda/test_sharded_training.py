"""FSDP2 on CUDA devices: each process ends with its part of what one process trains, bit for bit. Parts are whole
blocks of 8-bit moments, and whole packs of grad_stats."""

import math
import warnings

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW, Masters
from tests.distributed.sharding import part_of
from tests.hard_grads import same_bits
from tests.networks import B16, F16
from tests.processes import needs_gloo, spawn

STEPS, BAD_STEP = 4, 2
F32 = torch.float32


def adamw(**options):
    return lambda params: AdamW(params, lr=1e-2, max_norm=0.1, **options)


def masters(params):
    return Masters(torch.optim.SGD(params, lr=1e-2, momentum=0.9), max_norm=0.1)


CASES = {  # the weights' dtype, the optimizer, whether a scaler is used
    "fp32, scaled": (F32, adamw(), True),
    "bf16": (B16, adamw(), False),
    "fp16, scaled": (F16, adamw(), True),
    "8-bit moments": (B16, adamw(state_dtype=torch.int8), False),
    "offload": (B16, adamw(offload=True), False),
    "stream": (B16, adamw(offload="stream"), False),
    "Masters": (B16, masters, False),
}


def network(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512)).to("cuda", dtype)


def trained(model, dtype, make, is_scaled, spoils=True):
    """Train each process on the same batches, so that the mean of their grads is each one's.

    ``spoils``: whether this process sees an inf."""
    optimizer, scaler = make(model.parameters()), GradScaler("cuda", init_scale=2.0**10, enabled=is_scaled)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to("cuda", dtype)
        scaler.scale(model(x).float().square().mean()).backward()
        if step == BAD_STEP and spoils:
            part_of(model[0].weight.grad).view(-1)[5] = math.inf
        scaler.step(optimizer)
        scaler.update()
    return float(optimizer.skipped_steps), scaler.get_scale()


def check(rank):
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    world = distributed.get_world_size()
    in_fp32 = MixedPrecisionPolicy(reduce_dtype=F32)  # halves of fp16 may lose a bit
    for name, case in CASES.items():
        alone, model = network(case[0]), network(case[0])
        fully_shard(model, mesh=init_device_mesh("cuda", (world,)), mp_policy=in_fp32)
        assert trained(model, *case, spoils=rank == 0) == trained(alone, *case), name
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            # Not full_tensor: there gloo would read the devices' memory as if it were the host's, a fault of torch's.
            assert same_bits(part_of(ours).detach(), theirs.detach().chunk(world)[rank]), name


@needs_gloo
def test_two_processes_train_as_one_does(tmp_path):
    spawn(check, tmp_path)


@needs_gloo
def test_a_process_alone_trains_as_without_fsdp2(tmp_path):
    """Over NCCL, which serves one process for each GPU; the stand-in has none."""
    has_nccl = torch.cuda.nccl.is_available([torch.ones(1, device="cuda")])
    spawn(check, tmp_path, world=1, backend="nccl" if has_nccl else "gloo")
