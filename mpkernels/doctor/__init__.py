"""``mpkernels doctor``: what this machine has, which kernels it runs, whether they are right, what would help."""

from mpkernels.doctor.tensor_core_sizes import Advice, advise

__all__ = ["Advice", "advise"]
