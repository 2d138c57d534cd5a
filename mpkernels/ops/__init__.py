"""The kernel ops, as functions. Each has a schema, a reference and its kernels; see _registry."""

from mpkernels.ops.grads.grad_stats import GradStats, grad_stats
from mpkernels.ops.grads.overflow import overflow_
from mpkernels.ops.grads.unscale import unscale_
from mpkernels.ops.grads.update_scale import update_scale_
from mpkernels.ops.linear.function import linear_act
from mpkernels.ops.linear.linear_dact import linear_dact
from mpkernels.ops.linear.linear_gated import _linear_dgated, _linear_gated  # noqa: F401  declared; called by linear alone
from mpkernels.ops.step.rules.adamw import adamw_

__all__ = ["GradStats", "adamw_", "grad_stats", "linear_act", "linear_dact", "overflow_", "unscale_", "update_scale_"]
