import torch

from mpkernels.ops.step.rules.rmsprop import rmsprop_
from mpkernels.optim.engine import Engine
from mpkernels.optim.optimizer_rule import OptimizerRule


class RMSprop(Engine):
    _rule = OptimizerRule(rmsprop_, lambda group: (group["lr"], group["alpha"], group["eps"]))

    def __init__(self, params, lr=1e-2, alpha=0.99, eps=1e-8, master="split", state_dtype=torch.float32):
        self._take_options(master, state_dtype, max_norm=None, guard=None, process_group=None)
        super().__init__(params, {"lr": lr, "alpha": alpha, "eps": eps, "maximize": False})
