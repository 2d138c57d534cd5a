"""Every private name of torch's that this package reads: why, and what happens if a torch lacks it.

A missing name has a safe substitute here: all works, though some of it slower, or with an error that says so. Each file
is about one part of torch; ``finding`` looks the names up for all files. CONTRIBUTING.md says what to do when torch
renames one.

GradScaler also overrides its parent's own methods (``_unscale_grads_``, ``_check_inf_per_device``,
``_lazy_init_scale_growth_tracker``), calls ``_check_scale_growth_tracker``, and keeps its books (``_enabled``,
``_scale``, ``_growth_interval``, ``_per_optimizer_states``), as torch's ShardedGradScaler does.
"""
