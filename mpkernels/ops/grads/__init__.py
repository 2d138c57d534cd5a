"""Ops over lists of grads: unscale, norms and checks, the overflow report, the update of the loss scale."""
