"""Linear layers with an activation, gated layers and MLPs: one stack computes all of these kinds.

A call comes from ``mpkernels.functional``. ``key_and_case.key_of`` makes a key of all that its computation depends on.
A known key leads to a function that ``compute_block.prepared`` has made. Otherwise ``arguments.block`` checks the call,
and ``key_and_case.kernel_for`` asks the selector, which follows a table (``selector.table``) unless ``mpkernels.tune``
has timed the case or ``selector.pin`` forces a kernel. If no line of the table can fit, later calls need no such key.

``compute_block.by_torch`` calls torch's own functions. Our kernels get casts of fp32 parameters from ``cast_cache`` and
run in an autograd Function for all kinds (``ops.linear.block_kind``): ``ops.linear.trained_block`` if all weights
train, ``ops.linear.autograd_block`` for the rest, such as frozen weights, dropout and torch.compile:

* the forward is ``block_kind.begin``, the op ``linear_act`` or ``linear_gated``, which yields h and z; then the
  dropout; then ``linear_act`` once more, for the last layer;
* z is kept, or h if that tells the activation's slope; with ``recompute`` only x;
* the backward is ``linear_dact`` or ``linear_dgated``, which yields dz and h anew, and ``linear_act_backward`` for each
  layer (``ops.linear.block_gradients``). A second backward goes by plain torch.

``trial`` makes such a call for ``mpkernels.tune`` to time, and compares it with fp64.
"""
