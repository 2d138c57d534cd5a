"""The kernel ops, as functions. Each has a schema, a reference and its kernels; see _registry."""

from mpkernels.ops.grads.grad_stats import GradStats, grad_stats
from mpkernels.ops.grads.overflow import overflow_
from mpkernels.ops.grads.unscale import unscale_
from mpkernels.ops.grads.update_scale import update_scale_
from mpkernels.ops.linear.linear_act import _linear_act  # noqa: F401  declared; called by linear alone
from mpkernels.ops.linear.linear_dact import linear_dact
from mpkernels.ops.linear.linear_gated import _linear_dgated, _linear_gated  # noqa: F401  declared; called by linear alone
from mpkernels.ops.step.rules.adam import adam_
from mpkernels.ops.step.rules.adamw import adamw_
from mpkernels.ops.step.rules.lion import lion_
from mpkernels.ops.step.rules.sgd import sgd_

__all__ = [
    "GradStats",
    "adam_",
    "adamw_",
    "grad_stats",
    "linear_dact",
    "lion_",
    "overflow_",
    "sgd_",
    "unscale_",
    "update_scale_",
]
