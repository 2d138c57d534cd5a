"""Tests each tool of other libraries with each of our drop-ins (optimizers, GradScaler, LinearAct). The result is right
bit for bit, or refused with a way out. ``table`` has the cells, ``drop_ins`` the columns; each other module has tools
of a kind. To add a tool, write it there as a function of a run, and give it a row."""
