"""Tensor parallelism for LinearAct."""

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, parallel
from torch.nn import Module, Parameter

from mpkernels.nn.linear_act import LinearAct

__all__ = ["ColwiseParallel"]


class ColwiseParallel(parallel.ColwiseParallel):
    """``torch.distributed.tensor.parallel.ColwiseParallel`` that takes ``LinearAct``, too.

    >>> parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    Each process holds some rows of the weight and computes their columns of the output, with the same kernels as
    without tensor parallelism. RowwiseParallel has no such form: it sums up after the layer, but the activation needs
    the whole sum.

    Args:
        input_layouts, output_layouts, use_local_output: those of torch's class.
    """

    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:  # torch calls it for each style
        if not isinstance(module, LinearAct):
            return super()._apply(module, device_mesh)
        for name, param in list(module.named_parameters(recurse=False)):
            rows = distribute_tensor(param, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            module.register_parameter(name, Parameter(rows, requires_grad=param.requires_grad))
        around = (
            parallel.PrepareModuleInput(
                input_layouts=self.input_layouts, desired_input_layouts=(Replicate(),), use_local_output=False
            ),
            parallel.PrepareModuleOutput(
                output_layouts=(Shard(-1),),
                desired_output_layouts=self.output_layouts,
                use_local_output=self.use_local_output,
            ),
        )
        for style in around:
            parallel.parallelize_module(module, device_mesh, style)
        return module
