"""Tells the matrices of a model that Muon is for from the parameters that belong to another optimizer."""

from collections.abc import Iterable

from torch import Tensor, nn

from mpkernels._shared.call_model import refuse_no_model
from mpkernels._shared.parameters import named_in


def split_params(
    model: nn.Module, matrices: str | Iterable[str] = (), others: str | Iterable[str] = ()
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the matrices that Muon is for, and all other parameters, for AdamW for example.

    The others are what isn't 2-D, the weights of ``nn.Embedding`` and ``nn.EmbeddingBag``, and the head's. The head is
    what ``get_output_embeddings`` of a Hugging Face model returns; in any other model the last ``nn.Linear``.

    >>> matrices, others = split_params(model)
    >>> optimizers = Muon(matrices, lr=0.02), AdamW(others, lr=3e-4)

    Args:
        model: the model.
        matrices: names of modules and parameters, as in ``named_modules`` and ``named_parameters``, whose 2-D
            parameters are matrices whatever holds them; ``*`` matches anything.
        others: names of modules and parameters that aren't; these win.
    """
    refuse_no_model("split_params", model)
    kept = named_in("split_params", "matrices", model, matrices)
    left = named_in("split_params", "others", model, others)
    head = _head(model)
    for module in model.modules():
        if module is head or isinstance(module, nn.Embedding | nn.EmbeddingBag):
            left |= set(module.parameters(recurse=False)) - kept
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for param in model.parameters():
        found[param.ndim != 2 or param in left].append(param)
    return found


def _head(model: nn.Module) -> nn.Module | None:
    for module in model.modules():
        if callable(find := getattr(module, "get_output_embeddings", None)):
            return find()  # type: ignore[no-any-return]
    return next((it for it in reversed([*model.modules()]) if isinstance(it, nn.Linear)), None)
