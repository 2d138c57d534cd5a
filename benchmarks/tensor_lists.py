"""The lists of tensors that ops and steps are measured on, as optimizers get them."""

from mpkernels.bench.settings import DTYPES, HUNDRED, ONE_50M, THOUSAND, Place, Setting, Sizes


def gpt2_shapes(width: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of GPT-2 small's 148 parameters, which have width 768 in the original."""
    vocabulary, positions, layers = 50257, 1024, 12
    norm = [(width,), (width,)]
    attention = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    mlp = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return ((vocabulary, width), (positions, width), *(norm + attention + norm + mlp) * layers, *norm)


LISTS = {
    "cpu": [Sizes("1x2^25", ((2**25,),)), Sizes("gpt2-half-width", gpt2_shapes(width=384))],
    "cuda": [ONE_50M, Sizes("1x1e9", ((10**9,),)), Sizes("gpt2", gpt2_shapes(width=768))],
}
LISTS_ANYWHERE = [
    HUNDRED,
    THOUSAND,
    Sizes("1x2^20-in-cache", ((2**20,),)),
    Sizes("1000x10-host-cost", ((10,),) * 1000, clock="host"),  # so few elements that the host's time decides
]


def lists(place: Place) -> list[Setting]:
    return [Setting(place, dtype, sizes) for sizes in [*LISTS[place.device], *LISTS_ANYWHERE] for dtype in DTYPES]
