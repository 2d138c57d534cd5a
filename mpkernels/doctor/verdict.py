"""One sentence: can you train here, and what to do next."""

from collections.abc import Sequence

from mpkernels.doctor.selftest import Result


def of(tests: Sequence[Result], to_install: Sequence[str], gpu: str | None) -> str:
    """Return it. ``to_install`` has what brings better kernels, ``gpu`` the name of the one that torch sees."""
    wrong = [it for it in tests if it.problem]
    if wrong:
        first = f"{wrong[0].op} on {wrong[0].device}, {wrong[0].kernel}"
        return (
            f"Don't train with this build: {len(wrong)} of {len(tests)} kernels are wrong, first {first}. "
            'Next: train under `with mpkernels.backend("reference")`, and report `python -m mpkernels doctor --json`.'
        )
    on_gpu = [it for it in tests if it.device == "cuda"]
    if gpu is not None and not on_gpu:
        state = f"Training on {gpu} works, but every op runs on the slow reference there"
    elif not tests:
        state = "Training works, but every op runs on the slow reference"
    else:
        place = gpu or "the CPU (torch sees no GPU)"
        state = f"Ready to train on {place}: all {len(tests)} kernels agree with the reference"
    next_step = f"install {to_install[0]}" if to_install else "`python -m mpkernels bench --quick` measures the gain"
    return f"{state}. Next: {next_step}."
