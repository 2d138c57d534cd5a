"""offload: states and masters on the host, behind weights on a GPU.

``Offload`` (offload.py) is what the optimizer asks. The host steps (on_host.py), or the GPU does (streaming.py).

**offload=True.** A parameter on a GPU has a *twin* on the host, in its dtype, which holds what the weight holds
(twins.py). States, masters, checkpoints and the plans of a step take the twin in the parameter's place, and so lie on
the host without a further change. The optimizer's one plan (plan.py) is made of plans over twins, one for each
*bucket*: neighbours with some 64 MiB of grads.

A step: 1. The verdict is found where the grads are, as without offload: on the GPU. Then the host waits for it. 2. If
the step is skipped, nothing is copied. 3. Each bucket's step is rehearsed, which checks all and writes nothing. 4. For
bucket after bucket: its grads come through one of three pinned slices, the CPU steps, and its weights go back. Grads,
steps and weights of different buckets overlap: each direction has a stream of its own. 5. The current stream waits for
the weights; the host doesn't.

``release_grads`` sends each grad to the host inside the backward, and frees it (grads.py). Then the whole model's grads
wait in pinned memory, further grads of a parameter are added up in fp32, and the verdict is found on the host.

Without ``release_grads``, grads are sent in the step. Sent earlier, they would miss later writes that torch's version
counter misses: by ``param.grad.data.clamp_()``, all_reduce, other kernels and replayed graphs.

Twins are pinned, so weights go back without a copy to yet another buffer: that would take 4 bytes of the host's memory
traffic a parameter, where a step with 8-bit moments takes 16. The pinned memory is the twins' own.

**offload="stream".** States lie in pinned memory: those of a parameter in one block, blocks in the order of parameters.
``optimizer.state`` shows views of it. A plan (streamed_plan.py) of the parameters of one GPU holds a plan for each
bucket, over tensors in a *slot*: one of three pieces of the GPU's memory.

A step: 1. The verdict is found over all grads, as without offload. The host doesn't wait for it. 2. Each bucket's step
is rehearsed, if arguments are of other kinds than last time. 3. The report on all grads is filled, should the step be
skipped. 4. A bucket arrives once the one before it in its slot has left; the current stream steps it; it leaves. Each
direction has a stream of its own. A skipped step changes nothing, so what leaves is what has arrived.

Only the current stream reads grads and writes weights, so they need no care. A parameter with more states than a bucket
is cut in its order of memory, between blocks of 8-bit states. Its pieces share a count of steps, which the last brings
back. Whoever reads ``optimizer.state`` waits until it has come back.
"""

from typing import Any

from mpkernels.optim.offload.offload import Offload, beside, has_grads_on_host, home_of, weights_and_masters
from mpkernels.optim.offload.on_host import OnHost
from mpkernels.optim.offload.streaming import Streaming

__all__ = ["Offload", "beside", "has_grads_on_host", "home_of", "offloaded", "weights_and_masters"]


def offloaded(option: Any) -> Offload:
    """Return what an optimizer with this option keeps."""
    return Streaming() if option == "stream" else OnHost()
