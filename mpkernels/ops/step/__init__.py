"""Ops of optimizers' steps. The files of rules/ specify an optimizer each; all other files name no rule."""
