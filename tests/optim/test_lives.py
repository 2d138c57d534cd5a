"""In random lives, a step that isn't skipped is plain torch's, and a skipped one leaves no trace."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import OptState

from tests.hard_grads import same_bits
from tests.lives import Life
from tests.optim.optimizers import saved_numbers, true_weights

# After these acts, a parameter's master may be another, until a step has moved it.
CHANGES_MASTERS = "model_is_converted", "one_is_written", "states_are_loaded"


class Judged(Life):
    """A life whose steps are compared with plain torch's, which begin from the same weights and states in fp32."""

    _is_sure = True

    def _tell(self, name, *rest):
        self._is_sure = self._is_sure and name not in CHANGES_MASTERS
        super()._tell(name, *rest)

    def _now(self):
        return [it.float().clone() for it in true_weights(nn.ParameterList(self._params), self._optimizer)]

    def _scale_of_grads(self):
        states = vars(self._scaler).get("_per_optimizer_states", {})
        is_unscaled = states.get(id(self._optimizer), {}).get("stage") is OptState.UNSCALED
        return 1.0 if is_unscaled else self._scaler.get_scale()

    def _step_in_plain_torch(self, grads):
        twins = [nn.Parameter(it.clone()) for it in self._now()]
        number_of, optimizer = {it: i for i, it in enumerate(self._params)}, None
        for group in self._optimizer.param_groups:
            params = [twins[number_of[it]] for it in group["params"]]
            if optimizer is None:
                optimizer = self._line.theirs(params)
            else:
                optimizer.add_param_group({"params": params})
        optimizer.load_state_dict(copy.deepcopy(self._optimizer.state_dict()))
        for twin, grad in zip(twins, grads, strict=True):
            twin.grad = grad
        optimizer.step()
        return [it.detach() for it in twins]

    def _take_step(self):
        scale = self._scale_of_grads()
        grads = [None if it.grad is None else it.grad.float() / scale for it in self._params]
        norm = torch.stack([torch.zeros(()), *(it.norm() for it in grads if it is not None)]).norm()
        before, states = self._now(), saved_numbers(self._optimizer)
        if norm.isfinite():
            factor = min(1.0, (self._optimizer.max_norm or norm) / (norm.item() + 1e-6))
            wanted = self._step_in_plain_torch([None if it is None else it * factor for it in grads])
            super()._take_step()
            close = partial(are_close, ulps=8 * self._line.rounded / self._line.lr)
            if self._is_sure and not all(map(close, self._now(), wanted, before)):
                pytest.fail("the step is not plain torch's")
            self._is_sure = self._is_sure or not any(it is None for it in grads)
        else:
            super()._take_step()
            now = saved_numbers(self._optimizer)
            are_same = *map(same_bits, self._now(), before), *(same_bits(now[it], states[it]) for it in states)
            if self._is_sure and not all(are_same):
                pytest.fail("the skipped step has left a trace")


def are_close(now, wanted, before, ulps):
    """Allow for the roundings of one step, and of one coefficient of clipping. ``ulps``: of fp32, in an update's."""
    bound = 2**-21 * (wanted.abs().max() + ulps * (wanted - before).abs().max())
    return bool(((now - wanted).abs() <= bound).all())


@pytest.mark.parametrize("seed", range(40))
def test_steps_are_torchs_and_skips_leave_no_trace(seed):
    for _ in Judged(seed, state_dtypes=[torch.float32]).acts():
        pass
