"""FSDP2 as Accelerate, Hugging Face's Trainer and Lightning set it up, in two processes, against the real libraries.

Accelerate chooses FSDP2 only where it finds an accelerator: on CPUs the tests tell it to."""

import logging
import os
import tempfile
import warnings
from functools import partial
from unittest import mock

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard

from mpkernels.optim import AdamW
from tests import libraries
from tests.distributed.sharding import part_of, wholes
from tests.hard_grads import same_bits
from tests.networks import assert_close, batch, network
from tests.processes import in_processes, spawn

for library in ("accelerate", "lightning", "transformers"):
    pytest.importorskip(library, reason="needs the extra integrations")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    from tests.integrations import test_integration_transformers as huggingface

LR, MAX_NORM, STEPS = 1e-2, 0.1, 4
make_state = AcceleratorState.__init__


def with_fsdp(state, *args, fsdp_plugin=None, **options):
    make_state(state, *args, fsdp_plugin=fsdp_plugin, **options)
    if fsdp_plugin is not None:
        state.fsdp_plugin = fsdp_plugin
        state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def by_accelerate(make, clips, folder=None):
    """Return trained weights and norms. With ``folder``, save and load a checkpoint midway, to take steps twice."""
    libraries.reset_accelerate()
    options = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 100, "state_dict_type": "SHARDED_STATE_DICT"}
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **options))
    model = network()
    model, optimizer = accelerator.prepare(model, make(model.parameters(), lr=LR))
    norms = []

    def step(seed):
        inputs, targets = batch(seed)
        accelerator.backward((model(inputs) - targets).square().mean())
        norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM).full_tensor() if clips else None
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.optimizer.grad_norm if norm is None else norm)

    for seed in range(STEPS):
        if seed == STEPS // 2 and folder is not None:
            accelerator.save_state(folder)
            for again in range(seed, STEPS):
                step(again)
            ends = wholes(model)
            accelerator.load_state(folder)
        step(seed)
    if folder is not None:
        assert all(map(same_bits, ends, wholes(model)))
    return model, torch.stack(norms[:STEPS])


def accelerate(rank, folder):
    """Accelerate's ``prepare`` replaces the parameters in the optimizer's groups by DTensors."""
    ours, our_norms = by_accelerate(partial(AdamW, max_norm=MAX_NORM), clips=False, folder=folder)
    theirs, their_norms = by_accelerate(torch.optim.AdamW, clips=True)
    torch.testing.assert_close(our_norms, their_norms, rtol=1e-5, atol=0)
    models = [network(), network()]
    for it, sharded in zip(models, (ours, theirs), strict=True):
        for param, value in zip(it.parameters(), wholes(sharded), strict=True):
            param.data.copy_(value)
    assert_close(*models, STEPS, LR)


def trainer(rank, folder):
    """Hugging Face's Trainer uses FSDP2 by its fsdp_config."""
    losses = []
    for kind in (AdamW, torch.optim.AdamW):
        libraries.reset_accelerate()
        net = huggingface.model()
        net.lm_head.weight = torch.nn.Parameter(net.lm_head.weight.detach().clone())  # Accelerate refuses tied ones
        net.config.tie_word_embeddings = False
        wrapped = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        options = {"fsdp": "full_shard auto_wrap", "fsdp_config": wrapped, "bf16": True}
        done = huggingface.trained(folder, net, options, optimizer_cls_and_kwargs=(kind, {"lr": huggingface.LR}))
        assert isinstance(done.optimizer.optimizer, kind)
        assert all(hasattr(param, "placements") for param in net.parameters())
        losses.append(huggingface.losses(done))
    assert losses[0][-1] < losses[0][0] - 0.5
    torch.testing.assert_close(*losses, rtol=0, atol=0.02)


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = network()

    def configure_model(self):
        if not hasattr(self.model[0].weight, "placements"):
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, seed, number):
        inputs, targets = batch(int(seed))
        return (self.model(inputs.bfloat16()).float() - targets).square().mean()

    def configure_optimizers(self):
        return AdamW(self.model.parameters(), lr=LR, max_norm=MAX_NORM)


def by_lightning(epochs, **resumed):
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    run = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        precision="bf16-true",
        max_epochs=epochs,
        **dict.fromkeys(quiet, False),
    )
    run.fit(Module(), torch.utils.data.DataLoader(range(STEPS), batch_size=1), **resumed)
    return run


def lightning(rank, folder):
    """Masters survive Lightning's checkpoint, bit for bit."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    by_lightning(1).save_checkpoint(folder)
    runs = [by_lightning(2, ckpt_path=folder), by_lightning(2)]
    states = [run.optimizers[0].state for run in runs]
    assert len(states[0]) == len(states[1]) == 6
    for ours, theirs in zip(*(it.values() for it in states), strict=True):
        assert theirs["remainder"].placements == ours["remainder"].placements
        assert int(theirs["step"]) == 2 * STEPS
        assert all(same_bits(part_of(ours[key]), part_of(theirs[key])) for key in theirs)


def on_rank(check, rank):
    names = ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ |= {name: str(number) for both, number in zip(names, (rank, 2), strict=True) for name in both}
    os.environ |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "as torchrun sets it"}  # Lightning knows torchrun by this
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # they are read, though the group is there already
    warnings.simplefilter("ignore")
    with mock.patch.object(AcceleratorState, "__init__", with_fsdp), tempfile.TemporaryDirectory() as folder:
        distributed.broadcast_object_list(folders := [folder], 0)
        check(rank, folders[0] + "/it")
        distributed.barrier()


@in_processes
@pytest.mark.parametrize("check", [accelerate, trainer, lightning], ids=lambda it: it.__name__)
def test_two_processes(tmp_path, check):
    spawn(partial(on_rank, check), tmp_path)
