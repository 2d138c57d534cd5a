"""Mixed precision with any optimizer, under torch.amp's names."""

from torch.amp import custom_bwd, custom_fwd, is_autocast_available

from mpkernels.amp.accumulation import accumulate
from mpkernels.amp.autocasting import autocast
from mpkernels.amp.clipping import clip_grad_norm_
from mpkernels.amp.grad_scaler import GradScaler
from mpkernels.amp.mixed import to_full, to_mixed
from mpkernels.amp.policy import Policy, global_policy, set_global_policy
from mpkernels.overflow.first_nonfinite import find_nonfinite
from mpkernels.overflow.report import OverflowReport

__all__ = [
    "GradScaler",
    "OverflowReport",
    "Policy",
    "accumulate",
    "autocast",
    "clip_grad_norm_",
    "custom_bwd",
    "custom_fwd",
    "find_nonfinite",
    "global_policy",
    "is_autocast_available",
    "set_global_policy",
    "to_full",
    "to_mixed",
]
