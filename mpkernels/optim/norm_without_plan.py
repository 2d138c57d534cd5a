"""The norm of grads that no plan looks at."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpkernels._shared.parameters import by_device, put_on, real, sum_of
from mpkernels.distributed.meshes import Parts
from mpkernels.distributed.parts import parts_of
from mpkernels.ops.grads.grad_stats import grad_stats


def look(
    params: Sequence[Tensor], with_grad: Sequence[Tensor], processes: Parts | None, found_inf: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the sum of squares of this process's grads, and whether one holds an inf or NaN or a scaler has found one.
    with_grad: the parameters that have a grad. If this raises, so do the other processes."""
    try:
        shares = [1.0] * len(with_grad) if processes is None else processes.shares(with_grad)
        grads = [real(_numbers(grad)) for grad in parts_of([param.grad for param in with_grad])]
        nothing = torch.zeros((), dtype=torch.float64, device=params[0].device)
        sums, found = [nothing], [nothing if found_inf is None else put_on(nothing.device, found_inf)]
        for device, places in by_device(grads, range(len(grads))).items():
            stats = grad_stats([grads[i] for i in places])
            of_each = torch.tensor([shares[i] for i in places], dtype=torch.float64, device=device)
            sums.append(stats.total_sumsq if processes is None else (stats.sumsq * of_each).sum())
            found.append(stats.found_inf)
    except Exception:
        if processes is not None:
            processes.agree(params, None, None, has_failed=True)
        raise
    return sum_of(sums), sum_of(found)


def _numbers(grad: Tensor) -> Tensor:
    """Return what a sparse grad adds up to, in fp32 if it has 16 bits: sums of fp16 may overflow."""
    if grad.layout != torch.sparse_coo:
        return grad
    return (grad.float() if grad.itemsize == 2 else grad).coalesce().values()
