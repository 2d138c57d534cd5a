"""torch's chunked ``linear_cross_entropy`` beside ``fuse``: one keeps no logits, the other half of what MLPs keep.

    python examples/linear_cross_entropy.py     # torch 2.13 or newer

With a large vocabulary, logits are most of what a forward keeps for its backward. torch computes loss and grads in
chunks, and keeps none of them. ``fuse`` keeps one hidden tensor of each MLP in place of two. Neither knows of the
other, and the loss stays what it was. On a GPU, ``python -m mpkernels doctor`` lists the widths at which ``fuse`` does
so.
"""

import torch
from torch.nn import functional

from mpkernels.nn import fuse
from mpkernels.optim import AdamW

VOCABULARY, WIDTH, TOKENS = 4096, 64, 512


def mlp() -> list[torch.nn.Module]:
    up, down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
    return [torch.nn.LayerNorm(WIDTH), up, torch.nn.GELU("tanh"), down]


def step(fused: bool, chunked: bool) -> tuple[float, int]:
    """Return the loss, and how many bytes the forward keeps for the backward."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, WIDTH), *mlp(), *mlp(), *mlp(), *mlp())
    head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
    if fused:
        fuse(model)
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = AdamW(parameters, lr=1e-3)
    tokens = torch.randint(VOCABULARY, (TOKENS + 1,))
    options = torch.nn.LinearCrossEntropyOptions() if chunked else None

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda it: kept.append(it) or it, lambda it: it):
        loss = functional.linear_cross_entropy(model(tokens[:-1]), head.weight, tokens[1:], options=options)
    sizes = {it.untyped_storage().data_ptr(): it.untyped_storage().nbytes() for it in kept}
    for parameter in parameters:
        sizes.pop(parameter.untyped_storage().data_ptr(), None)
    loss.backward()
    optimizer.step()
    return loss.item(), sum(sizes.values())


def main() -> dict[tuple[bool, bool], tuple[float, int]]:
    """Return loss and bytes by (fused, chunked)."""
    results = {(fused, chunked): step(fused, chunked) for chunked in (False, True) for fused in (False, True)}
    for (fused, chunked), (loss, size) in results.items():
        way = f"{'fused' if fused else 'plain'} MLPs, {'chunked' if chunked else 'whole'} loss"
        print(f"{way:25} keep {size / 2**20:4.1f} MiB, loss {loss:.4f}")
    return results


if __name__ == "__main__":
    main()
