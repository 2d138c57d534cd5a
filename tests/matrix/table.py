"""The matrix: the expected result of each tool (row) with each kind of drop-in (column of ``drop_ins.COLUMNS``)."""

import re

import pytest
import torch

from tests.matrix.drop_ins import COLUMNS, DropIn

REFUSED = {
    "release": ("RuntimeError", r"^\w+.release_grads: params\[0\] .* leave it out, or end it by the remove\(\)"),
    "of-each": ("ValueError", r"^\w+: max_norm and guard need the grads of all parameters, and torchao's CPUOffload"),
    "subclass": ("TypeError", r"^\w+: params\[\d\] must be a plain tensor, got a Int8QuantizedTraining"),
    "no-linear": ("NotImplementedError", "only support nn.Linear"),  # torch's own words, and peft's
    "peft": ("ValueError", r"^Target module LinearAct\(.* is not supported. Currently, only .*`torch.nn.Linear`"),
}

ONE_PROCESS = """
tool                              fp32   split  copy   scaler  others  layer
hooks                             right  right  right  right   right   right
deepcopy                          right  right  right  right   right   right
pickle                            right  right  right  right   right   right
deepcopy then a write             right  right  right  right   right   right
a write then pickle               right  right  right  right   right   right
a write then state dict           right  right  right  right   right   right
a write through data              right  right  right  right   right   right
a write through data set anew     right  right  right  right   right   right
weights swapped and back          right  right  right  right   right   right
checkpoint model first            right  right  right  right   right   right
checkpoint optimizer first        right  right  right  right   right   right
checkpoint then a write           right  right  right  right   right   right
state dict as tensors that live   right  right  right  right   right   right
swapped tensors                   right  right  right  right   right   right
state cleared                     right  right  right  right   right   right
shared memory                     right  right  right  right   right   right
an optimizer of each in backward  right  right  right  .       right   right
compiled                          right  right  right  right   right   right
functorch                         right  right  right  right   right   right
zero grad to zeros                right  right  right  right   right   right
lr scheduler                      right  right  right  right   right   right
averaged model                    right  right  right  right   right   right
prune                             right  right  right  right   right   right
prune made permanent              right  right  right  right   right   right
weight norm                       right  right  right  right   right   right
weight norm of old                right  right  right  right   right   right
parametrization                   right  right  right  right   right   right
parametrization removed           right  right  right  right   right   right
tied weights                      right  right  right  right   right   right
frozen and thawed                 right  right  right  right   right   right
a group added                     right  right  right  right   right   right
sharpness aware                   right  right  right  right   right   right
turned to fp32                    right  right  right  right   right   right
turned to bf16                    right  right  right  ours    right   right
quantize dynamic                  right  right  right  right   right   right
quantize dynamic of the layer     .      .      .      .       .       right
"""

TWO_PROCESSES = """
tool                                  fp32     split    copy     scaler  others   layer
ddp                                   right    right    right    right   right    right
ddp with views                        right    right    right    right   right    right
ddp no sync                           right    right    right    right   right    right
ddp midway                            right    right    right    right   right    right
ddp checkpoint on one rank            right    right    right    right   right    right
ddp with gradient release             release  release  release  .       release  .
a write broadcast by hand             right    right    right    right   right    right
post local sgd                        right    right    right    .       right    right
zero                                  right    right    right    right   right    right
zero max norm                         right    right    right    ours    right    .
zero checkpoint                       right    right    right    right   right    right
fsdp1                                 right    right    right    right   right    right
fsdp1 orig params                     right    right    right    right   right    right
fsdp1 shard grad op                   right    right    right    right   right    right
fsdp1 no shard                        right    right    right    right   right    right
fsdp1 mixed precision                 right    .        .        .       fp32     .
fsdp1 no shard max norm               right    right    right    ours    right    .
fsdp1 max norm                        right    right    right    ours    right    .
fsdp1 orig params max norm            right    right    right    ours    right    .
fsdp1 clip grad norm                  right    right    right    right   right    right
fsdp1 sharded grad scaler             .        .        .        right   .        .
fsdp1 full checkpoint                 right    right    right    right   right    right
fsdp1 sharded checkpoint              right    right    right    right   right    right
fsdp1 orig params sharded checkpoint  right    right    right    right   right    right
fsdp1 to one process                  wide     wide     wide     wide    wide     .
fsdp1 from one process                wide     wide     wide     wide    wide     .
fsdp1 after the optimizer             right    right    right    right   right    right
fsdp1 own state dict                  right    right    right    right   right    right
fsdp2                                 wide     wide     wide     right   wide     right
tensor parallel                       wide     wide     wide     .       wide     no-linear
dcp of ddp                            right    right    right    right   right    right
dcp of fsdp1                          right    right    right    right   right    right
dcp of fsdp1 orig params              right    right    right    right   right    right
dcp of fsdp2                          wide     wide     wide     right   wide     right
"""

OTHER_LIBRARIES = """
tool                            fp32      split     copy      scaler  others    layer
peft lora                       right     right     right     right   right     right
peft lora of all linear         right     right     right     right   right     right
peft lora of a parameter        right     right     right     right   right     right
peft lora merged                right     right     right     right   right     right
peft dora                       right     right     right     right   right     right
peft ia3                        right     right     right     right   right     right
peft lora of the layer          .         .         .         .       .         peft
peft dora of the layer          .         .         .         .       .         peft
peft ia3 of the layer           .         .         .         .       .         peft
torchao float8                  right     right     right     right   right     right
torchao int8                    right     right     right     right   right     right
torchao int8 of any weight      right     right     right     right   right     right
torchao int8 training           subclass  subclass  subclass  .       subclass  right
torchao cpu offload             right     of-each   of-each   .       fp32      right
trainer resumed                 right     right     right     .       right     right
accelerate save and load state  right     right     right     right   right     right
lightning resumed               right     right     right     right   right     right
fabric save and load            right     right     right     right   right     right
"""


def _ours(drop_in: DropIn) -> bool:
    return drop_in.is_ours


def _wide(drop_in: DropIn) -> bool:
    """Leave 8-bit moments out: if a process gets another part of a weight, they are encoded again in other blocks."""
    return _ours(drop_in) and drop_in.options["state_dtype"] != torch.int8


# The words for a right result, and for which drop-ins of the column they stand.
RIGHT = {"right": lambda _: True, "ours": _ours, "wide": _wide, "fp32": lambda it: it.dtype == torch.float32}


def cells(table: str) -> list[tuple[str, DropIn, str]]:
    """Return (tool, drop-in, expectation) for each cell. ``.`` marks a cell that isn't tried."""
    header, *rows = [line.split() for line in table.splitlines() if line]
    assert header[1:] == list(COLUMNS)
    found = []
    for row in rows:
        name, words = " ".join(row[: -len(COLUMNS)]), row[-len(COLUMNS) :]
        for drop_ins, word in zip(COLUMNS.values(), words, strict=True):
            is_tried = RIGHT.get(word, lambda _, word=word: word != ".")
            found += [(name, it, word) for it in drop_ins if is_tried(it)]
    return found


def parametrize(table: str) -> pytest.MarkDecorator:
    found = cells(table)
    ids = [f"{name}: {drop_in}" for name, drop_in, _ in found]
    return pytest.mark.parametrize(("tool", "drop_in", "wanted"), found, ids=ids)


def asked_for(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    """Return tool and drop-in of each cell that runs of the module whose fixture asks."""
    cells = [it.callspec.params for it in request.session.items if it.parent is request.node]
    return [(cell["tool"], cell["drop_in"].name) for cell in cells]


def check(verdict: tuple[str, str], wanted: str) -> None:
    kind, text = verdict
    if wanted in RIGHT:
        assert kind == "right", text
    else:
        error, sentence = REFUSED[wanted]
        assert kind == error, text
        assert re.search(sentence, text)
