"""A function that takes a model refuses anything else, by name."""

import pytest
import torch

import mpkernels
from mpkernels.amp import accumulate, find_nonfinite, to_mixed
from mpkernels.optim import AdamW

TAKE_A_MODEL = {
    "memory_report": mpkernels.memory_report,
    "compare_memory": lambda it: mpkernels.compare_memory(it, lambda model: model(torch.ones(1, 2)).sum()),
    "tune": mpkernels.tune,
    "advise": mpkernels.doctor.advise,
    "accumulate": lambda it: accumulate([], 1, AdamW([torch.ones(1, requires_grad=True)]), model=it),
    "to_mixed": to_mixed,
    "find_nonfinite": find_nonfinite,
    "overflow_report": lambda it: AdamW([torch.ones(1, requires_grad=True)]).overflow_report(it),
    "fuse": mpkernels.nn.fuse,
    "unfuse": mpkernels.nn.unfuse,
}


@pytest.mark.parametrize(
    "value",
    [AdamW([torch.ones(1, requires_grad=True)]), torch.nn.Linear, [], "model"],
    ids=["optimizer", "class", "list", "str"],
)
@pytest.mark.parametrize("name", TAKE_A_MODEL)
def test_an_argument_that_is_no_model_is_refused(name, value):
    with pytest.raises(TypeError, match=f"^{name}: model must be a torch.nn.Module, got {type(value).__name__}$"):
        TAKE_A_MODEL[name](value)


def test_memory_report_and_advise_name_what_else_is_wrong():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"^memory_report: optimizer must be a torch.optim.Optimizer, got function$"):
        mpkernels.memory_report(model, lambda model: model(torch.ones(1, 2)).sum())
    for call, name in ((mpkernels.memory_report, "memory_report"), (mpkernels.compare_memory, "compare_memory")):
        with pytest.raises(TypeError, match=f"^{name}: loss must be a function of the model, as in .*, got Tensor$"):
            call(model, loss=torch.ones(1, 2))
    with pytest.raises(
        ValueError, match=r"^memory_report: model must have memory, .*; leave loss out, or call to_empty$"
    ):
        mpkernels.memory_report(torch.nn.Linear(2, 2, device="meta"), loss=lambda model: model(torch.ones(1, 2)).sum())
    with pytest.raises(TypeError, match=r"^advise: dtype must be a torch.dtype, got 'bf17'$"):
        mpkernels.doctor.advise(model, "bf17")
    with pytest.raises(TypeError, match=r"^advise: optimizer must be a torch.optim.Optimizer, got float$"):
        mpkernels.doctor.advise(model, optimizer=1e-3)
