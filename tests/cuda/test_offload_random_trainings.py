"""offload: in random trainings, the optimizer stays equal to one without it."""

import random

import pytest
import torch
from torch import nn

from mpkernels.amp import GradScaler, accumulate
from tests.cuda.offloading import F32, INT8, assert_same, buckets_of, in_each_way, loss_of, parameters, take_step
from tests.cuda.training import CUDA
from tests.networks import B16, F16
from tests.optim.optimizers import OF_ANY_SHAPE

_buckets = buckets_of(800)  # more than there are slices


class Two:
    """The same optimizer with and without offload, whose states must stay equal."""

    def __init__(self, random, line, dtype, scaled, released, offload, **options):
        self.random, self.line, self.options, self.seed, self.released = random, line, options, 0, released
        self.offload = offload
        self.params = [parameters(dtype), parameters(dtype)]
        self.optimizers = [self.made(i) for i in range(2)]
        self.scalers = [GradScaler("cuda", init_scale=8.0, growth_interval=2) if scaled else None for _ in range(2)]

    def made(self, i):
        optimizer = self.line.ours(self.params[i][:7], offload=self.offload if i == 0 else False, **self.options)
        for param in self.params[i][7:]:
            optimizer.add_param_group({"params": [param], "lr": 1e-3})
        if self.released and i == 0:
            optimizer.release_grads()
        return optimizer

    def on_both(self, function):
        for i, optimizer in enumerate(self.optimizers):
            function(i, optimizer, self.params[i])

    def step(self, poisons=False):
        self.seed += 1
        without = self.random.sample(range(7), self.random.choice((0, 0, 2)))
        self.on_both(lambda i, it, params: take_step(it, self.scalers[i], loss_of(params, self.seed, poisons, without)))
        self.on_both(lambda i, it, params: it.zero_grad())

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
            self.on_both(lambda i, it, params: params[place].mul_(factor))

    def gives_a_weight_other_memory(self):
        def give(i, it, params):
            params[0].data = params[0].data.clone() + 1

        self.on_both(give)

    def loads_its_own(self):
        self.on_both(lambda i, it, params: it.load_state_dict(it.state_dict()))

    def begins_anew_from_the_others(self):
        """Each new optimizer loads what the other one has saved."""
        saved = [it.state_dict() for it in self.optimizers]
        if self.released:
            self.optimizers[0]._release.remove()
        self.optimizers = [self.made(i) for i in range(2)]
        self.on_both(lambda i, it, params: it.load_state_dict(saved[1 - i]))

    def changes_its_groups(self):
        master, state_dtype = self.random.choice(("split", "fp32")), self.random.choice((F32, B16, INT8))
        lr = self.random.choice((1e-2, 1e-3))
        self.on_both(lambda i, it, params: it.param_groups[0].update(master=master, state_dtype=state_dtype, lr=lr))

    def gets_another_group(self):
        def add(i, it, params):
            params.append(nn.Parameter(torch.linspace(-1, 1, 40 + self.seed).to(params[0].dtype).to(CUDA)))
            it.add_param_group({"params": params[-1:], "lr": 1e-3})

        if len(self.params[0]) < 10:
            self.seed += 1
            self.on_both(add)

    def is_asked(self):
        self.on_both(lambda i, it, params: it.state_dict())


ACTS = [it for it in vars(Two) if not it.startswith("_") and it not in ("made", "on_both")]


@pytest.mark.filterwarnings("ignore:.*are not the weights that the loaded masters were made for")  # if they aren't
@in_each_way
@pytest.mark.parametrize("seed", range(200))
def test_random_trainings_stay_equal(seed, way):
    drawn = random.Random(seed)
    dtype = drawn.choice((F32, B16, B16, F16))
    options = {
        "master": drawn.choice(("split", "fp32")),
        "state_dtype": drawn.choice((F32, B16, INT8)),
        "max_norm": drawn.choice((None, 1.0)),
    }
    line, released = drawn.choice(list(OF_ANY_SHAPE.values())), drawn.random() < 0.4 and way is True
    two = Two(drawn, line, dtype, drawn.random() < 0.5, released, way, **options)
    names = ["step", *drawn.choices(["step", "step", "overflow", *ACTS], k=8), "step"]
    for i, name in enumerate(names):
        getattr(two, name)()
        if i + 1 == len(names) or way is True or seed % 2:  # a look at the states waits for them
            assert_same(*two.optimizers, norm=not released)
        if two.scalers[0] is not None and two.scalers[0]._scale is not None:
            assert two.scalers[0].get_scale() == two.scalers[1].get_scale()
