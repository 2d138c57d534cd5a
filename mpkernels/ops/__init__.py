"""The kernel ops, as functions. Each has a schema, a reference and its kernels; see _registry."""

from mpkernels.ops.adamw import adamw_
from mpkernels.ops.grad_stats import GradStats, grad_stats
from mpkernels.ops.linear_act import linear_act
from mpkernels.ops.linear_dact import linear_dact
from mpkernels.ops.overflow import overflow_
from mpkernels.ops.unscale import unscale_
from mpkernels.ops.update_scale import update_scale_

__all__ = ["GradStats", "adamw_", "grad_stats", "linear_act", "linear_dact", "overflow_", "unscale_", "update_scale_"]
