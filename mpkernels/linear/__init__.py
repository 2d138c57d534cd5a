"""Linear layers with an activation, gated layers and MLPs: one stack, of which each is a kind.

A call comes from ``mpkernels.functional``. ``choice.key_of`` makes a key of all that the choice of a kernel depends on.
Under a key that is known, the call goes straight to ``paths``. Under a new one, ``arguments.block`` checks it, and
``choice.kernel_for`` asks the selector, which follows a table (``selector.rule``) unless ``mpkernels.tune`` has timed
the case or ``selector.pin`` forces a kernel.

``paths.by_torch`` computes with torch's own functions. ``paths.by_ours`` takes fp32 parameters' casts from
``cast_cache`` and calls ``ops.linear.function``, one autograd function for all kinds (``ops.linear.kind``):

* the forward is ``kind.begin``, the op ``linear_act`` or ``linear_gated``, which yields h and z; then the dropout; then
  ``linear_act`` once more, for the last layer;
* z is kept, or what tells the activation's slope as well; with ``recompute`` x alone;
* the backward is ``linear_dact`` or ``linear_dgated``, which yields dz and h anew, and ``linear_act_backward`` for each
  layer. A second backward goes by plain torch.

``trial`` makes such a call for ``mpkernels.tune`` to time, and compares it with fp64.
"""
