"""Overflows: the facts that a skipped step keeps, the report on them, and a search for the first inf or NaN."""
