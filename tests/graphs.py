"""CUDA graphs, and a stand-in for them on the CPU, for the reference and Triton's interpreter: ops of a captured step
aren't run but kept, and a replay runs them with the same arguments. So a replay shows what the host has decided during
the capture, and a captured result reads as NaN on the host."""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpkernels.ops import _dispatcher
from tests.targets import CUDA


@contextmanager
def captured(target):
    """Capture the code inside the context. The yielded graph can be replayed afterwards."""
    if target.device == CUDA:
        one = torch.ones(1, 1, device=CUDA)
        torch.mm(one, one)  # makes torch's handle of cuBLAS, which can't be made in a capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            yield graph
        return
    graph = _Graph()
    with graph, _interpreted_kernels_kept(graph):
        yield graph


class _Graph(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.steps = []
        self.kept = []  # keeps tensors alive, whose memory belongs to the graph
        self.on_host = set()  # addresses of memory whose numbers the host knows during the capture

    @torch.no_grad()
    def replay(self):
        for step in self.steps:
            step()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.kept.append((args, kwargs))
        if op.namespace == _dispatcher.NAMESPACE:
            kernel = _dispatcher.forced[-1][op.name().partition("::")[2], "cpu"]
            with self:
                return kernel(*args, **kwargs)
        if op.namespace != "aten" or self._is_for_host(op, args, kwargs):
            return self._compute_on_host(op, args, kwargs)
        if op is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing: the host asks for a value")
        if op._schema.is_mutable:
            self.steps.append(lambda: op(*args, **kwargs))
            return args[0] if op._schema.returns else None
        return self._keep_op(op, args, kwargs)

    def _is_for_host(self, op, args, kwargs):
        """Return whether an op's result stays on the host: that of torch.tensor, which no graph may copy to a
        device, or a number computed from such a result."""
        tensors = _tensors((args, kwargs))
        is_host = op is torch.ops.aten.lift_fresh.default or all(_memory(tensor) in self.on_host for tensor in tensors)
        return bool(tensors) and is_host

    def _compute_on_host(self, op, args, kwargs):
        results = op(*args, **kwargs)
        self.on_host.update(map(_memory, _tensors(results)))
        self.kept.append(results)
        return results

    @torch.no_grad()
    def _keep_op(self, op, args, kwargs):
        results = op(*args, **kwargs)
        argument_memory = set(map(_memory, _tensors((args, kwargs))))
        new = [i for i, result in enumerate(_tensors(results)) if _memory(result) not in argument_memory]
        self.kept.append(results)

        def compute():
            again = _tensors(op(*args, **kwargs))
            for i in new:
                _tensors(results)[i].copy_(again[i])

        self.steps.append(compute)
        for i in new:
            _tensors(results)[i].fill_(float("nan") if _tensors(results)[i].is_floating_point() else 85)
        return results


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _memory(tensor):
    return tensor.untyped_storage().data_ptr()


@contextmanager
def _interpreted_kernels_kept(graph):
    try:
        from triton.runtime.interpreter import GridExecutor
    except ImportError:
        yield
        return
    run = GridExecutor.__call__

    def keep(self, *args, **kwargs):
        uploads = [(tensor, tensor.clone()) for tensor in _tensors(args) if _memory(tensor) in graph.on_host]

        def launch():
            for on_device, on_host in uploads:
                on_device.copy_(on_host)
            run(self, *args, **kwargs)

        graph.steps.append(launch)

    GridExecutor.__call__ = keep
    try:
        yield
    finally:
        GridExecutor.__call__ = run
