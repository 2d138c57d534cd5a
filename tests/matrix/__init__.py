"""Tool x drop-in: what tools of others make of optimizers, GradScaler, LinearAct. Each cell is right, bit for bit, or
refused with a way out. ``table`` has the cells, ``drop_ins`` the columns; each other module has tools of a kind: to add
one, write it as a function of a run there and give it a row."""
