"""``mpkernels doctor``: what this machine has, which kernels it runs, whether they are right, what would help."""

from mpkernels.doctor.advice import Advice, advise

__all__ = ["Advice", "advise"]
