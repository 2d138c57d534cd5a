"""Races of the selector whose winner is known before."""

from mpkernels.selector.timing import Race


def won_by(winner):
    return lambda trial, names, device: Race(dict.fromkeys(names, 2.0) | {winner: 1.0}, {})


def run_by_all(trial, names, device):
    """Plain torch wins."""
    for name in names:
        trial.run(name)
    return won_by("torch")(trial, names, device)
