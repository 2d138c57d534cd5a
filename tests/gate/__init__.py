"""The compile gate: every kernel, compiled for every chip without a GPU, is no worse than table.json has it.

`python -m tests.gate` checks, `python -m tests.gate --update` rewrites the table.
"""
