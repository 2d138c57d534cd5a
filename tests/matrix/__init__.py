"""Tool x drop-in: what others' tools make of AdamW, GradScaler and LinearAct. Each cell is right, bit for bit, or refused
with a way out. ``tests/test_matrix.py`` has the table; a module here has the tools of a kind."""
