"""The compile gate: every kernel, compiled for every chip without a GPU, is no worse than table.json has it.

`python -m tests.proof.gate` checks, `python -m tests.proof.gate --update` rewrites the table.
"""
