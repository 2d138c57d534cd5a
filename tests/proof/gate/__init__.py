"""The compile gate compiles every kernel for every chip, without a GPU. No kernel may be worse than in table.json.

`python -m tests.proof.gate` checks, `python -m tests.proof.gate --update` rewrites the table.
"""
