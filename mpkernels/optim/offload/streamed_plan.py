"""The plan of a step whose states visit the GPU: bucket after bucket arrives, is stepped and leaves."""

import re
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpkernels._shared.parameters import put_on, real
from mpkernels.distributed.parts import part_of, parts_in, parts_of
from mpkernels.distributed.shares import Parts
from mpkernels.ops.grads.overflow import overflow_
from mpkernels.ops.step.int8 import QUANTIZED
from mpkernels.ops.step.skip_and_clip import write_outcome
from mpkernels.optim.offload.buckets import in_buckets, in_order_of
from mpkernels.optim.offload.copies import BUCKET, shaped, uninterrupted
from mpkernels.optim.offload.slots import LINE, Block, Pair, Slots
from mpkernels.optim.optimizer_rule import OptimizerRule
from mpkernels.optim.plan import Group, Plan, State
from mpkernels.optim.step_plan import Verdict
from mpkernels.overflow.ledger import Ledger

_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")


class Span(NamedTuple):
    """Neighbours among a plan's parameters. Or one of them alone, from element ``begin`` to ``end`` in memory."""

    first: int
    last: int
    begin: int = 0
    end: int | None = None

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self.end is not None:
            return [_flat(tensors[self.first])[self.begin : self.end]]
        return list(tensors[self.first : self.last])


class _Bucket(NamedTuple):
    span: Span
    plan: Plan
    brought: list[Pair]
    sent: list[Pair]


class StreamedPlan(Plan):
    """The parameters of one device that have a grad. Their own states, on the host, are stepped in slots."""

    def __init__(
        self,
        rule: OptimizerRule,
        all_rows: Sequence[tuple[Group, Tensor, State]],
        places: list[int],
        ledger: Ledger,
        parts: Parts | None,
        blocks: Mapping[Tensor, Block],
        slots: Slots,
    ) -> None:
        super().__init__(rule, all_rows, places, ledger, parts)
        rows, self._slots = [all_rows[i] for i in places], slots
        self._blocks = [blocks[param] for param in self._wholes]
        spans = list(_spans(self._parts, self._blocks))
        slots.fit([size for _, size in spans])
        self._buckets = [self._bucket(rows, span, slots.memory[i % slots.COUNT]) for i, (span, _) in enumerate(spans)]
        self._cut = {span.first: tuple(self._parts[span.first].shape) for span, _ in spans if span.end is not None}
        self._on_host = [part_of(it) for block in self._blocks for it in block.state.values()]
        self._addresses = self._addresses_now()
        self._strides = [real(part).stride() for part in self._parts]
        self._rehearsed: list[Any] = []  # kinds of arguments

    def _bucket(self, rows: Sequence[tuple[Group, Tensor, State]], span: Span, slot: Tensor) -> _Bucket:
        here, used = [], 0
        brought: list[Pair] = []
        for (group, param, _), block in zip(rows[span.first : span.last], self._blocks[span.first :], strict=False):
            if span.end is None:
                state = {key: shaped(slot[used + at :], part_of(block.state[key])) for key, at in block.offsets.items()}
                brought.append((slot[used : used + block.memory.numel()], block.memory))
                used += block.memory.numel()
                weight = param
            else:
                part = self._parts[span.first].detach()
                weight = _flat(part)[span.begin : span.end]
                state, brought = _cut(block.state, part.numel(), span.begin, span.end, slot)
            here.append((group, weight, state))
        brought = _joined(brought)
        is_unfinished = span.end is not None and span.end < self._parts[span.first].numel() and "step" in state
        sent = brought[:-1] if is_unfinished else brought  # all pieces begin with the count that the last one sends
        return _Bucket(span, Plan(self._rule, here, list(range(len(here)))), brought, sent)

    def look_and_step(self, *_: Any) -> bool:
        """Return False: the look at the grads comes before all buckets, not in a call that also steps."""
        return False

    @property
    def has_moved(self) -> bool:
        """Tell whether a parameter has moved, or one that is cut, or a state, has got other memory."""
        return super().has_moved or self._addresses != self._addresses_now()

    @property
    def first_has_moved(self) -> bool:
        """Tell the same of the first parameter, and of all states. Another that has moved is noticed in a rehearsal."""
        return super().first_has_moved or self._addresses != self._addresses_now()

    def _addresses_now(self) -> list[int]:
        cut = parts_of([self._wholes[i] for i in self._cut])
        return list(map(Tensor.data_ptr, [*cut, *self._on_host]))

    def step(
        self, grads: list[Any], verdict: Verdict, max_norm: float | None = None, skipped_steps: Tensor | None = None
    ) -> None:
        """Give the device a step, or a skip, and don't wait for it. If this raises, no parameter there has moved."""
        here = self._grads_here(grads)
        if list(map(Tensor.stride, here)) != self._strides:
            here = list(map(in_order_of, self._parts, here))
        grads_by_bucket = [bucket.span.of(here) for bucket in self._buckets]
        kinds = self._kinds_of(here)
        if kinds != self._rehearsed:
            self._rehearse(here, grads_by_bucket, max_norm)
            self._rehearsed = kinds
        scale, found_inf, total_sumsq = (None if it is None else put_on(self.device, it) for it in verdict[:3])
        is_skipped = write_outcome(scale, found_inf, total_sumsq, None, None)
        if is_skipped is not None and self.report is not None:
            overflow_(here, is_skipped.float(), scale, False, self.report)
        with uninterrupted():
            try:
                known = Verdict(scale, found_inf, total_sumsq, verdict.outcome)
                self._visit(grads_by_bucket, known, max_norm, skipped_steps)
            finally:
                self._slots.end()
            torch.autograd.graph.increment_version([self._wholes[i] for i in self._cut])

    def _visit(
        self, grads: list[list[Tensor]], verdict: Verdict, max_norm: float | None, skipped_steps: Tensor | None
    ) -> None:
        """Bring, step and send each bucket. The first one's step writes the outcome and counts a skip."""
        slots, buckets = self._slots, self._buckets
        slots.begin()
        for i, bucket in enumerate(buckets[: slots.COUNT]):
            slots.bring(i, bucket.brought)
        for i, bucket in enumerate(buckets):
            slots.await_arrival(i)
            bucket.plan.step(grads[i], verdict, max_norm, skipped_steps)
            verdict, skipped_steps = verdict._replace(outcome=None), None
            slots.send(i, bucket.sent)
            if i + slots.COUNT < len(buckets):
                slots.bring(i + slots.COUNT, buckets[i + slots.COUNT].brought)

    def _kinds_of(self, here: list[Tensor]) -> list[Any]:
        """Return what decides whether a step takes its arguments, as far as that may change. torch itself refuses a
        grad on another device than its parameter."""
        options = [x for group in self.groups for x in (*self._rule.hyperparameters(group), group["maximize"])]
        return [
            *map(_DTYPE, here),
            *map(_SHAPE, here),
            *map(Tensor.data_ptr, parts_of(self._wholes)),
            *((x.shape, x.dtype, x.device) if isinstance(x, Tensor) else type(x) for x in options),
        ]

    def _rehearse(self, here: list[Tensor], grads_by_bucket: list[list[Tensor]], max_norm: float | None) -> None:
        """Have each bucket's step check its arguments. These steps are skipped, so they change nothing."""
        for i, shape in self._cut.items():  # a piece doesn't show it
            for name, it in (("grads", here[i]), ("params", self._parts[i])):
                if it.shape != shape:
                    got = tuple(it.shape)
                    raise ValueError(f"{self._ops.rule.op}: {name}[{i}] must have the states' shape {shape}, got {got}")
        skip = Verdict(found_inf=torch.ones((), dtype=torch.float32, device=self.device))
        for bucket, grads in zip(self._buckets, grads_by_bucket, strict=True):
            try:
                bucket.plan.step(grads, skip, max_norm)
            except (RuntimeError, TypeError, ValueError) as error:  # which counts from the bucket's first parameter
                raise type(error)(_counted_from(bucket.span.first, str(error))) from error
        self._slots.follow()  # the reference writes to slots what they hold


def _counted_from(first: int, error: str) -> str:
    return re.sub(r"\[(\d+)\]", lambda it: f"[{int(it[1]) + first}]", error)


def _flat(tensor: Tensor) -> Tensor:
    """Return a dense tensor's elements in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _spans(parts: Sequence[Tensor], blocks: Sequence[Block]) -> Iterator[tuple[Span, int]]:
    """Yield what makes a bucket, and how many bytes of a slot it takes."""
    sizes = [block.memory.numel() for block in blocks]
    for places in in_buckets(range(len(parts)), sizes, BUCKET):
        first, last = places[0], places[-1] + 1
        size = sum(sizes[first:last])
        if size <= BUCKET or not _may_be_cut(parts[first], blocks[first].state):
            yield Span(first, last), size
            continue
        elements = parts[first].numel()
        each = -(-size // elements)  # bytes, rounded up
        most = max(1, (BUCKET - LINE * len(blocks[first].offsets)) // (each * QUANTIZED)) * QUANTIZED
        for begin in range(0, elements, most):
            count = min(most, elements - begin)
            yield Span(first, last, begin, begin + count), count * each + LINE * len(blocks[first].offsets)


def _may_be_cut(part: Tensor, state: State) -> bool:
    """Return whether parameter and states fill their memory in the same order."""
    return not part.is_complex() and all(
        it.stride() == part.stride() for key, it in parts_in(state).items() if key not in ("scales", "step")
    )


def _cut(whole: State, elements: int, begin: int, end: int, slot: Tensor) -> tuple[State, list[Pair]]:
    """Return the states in a slot of a piece of a parameter, and what is copied there: the count of steps last."""
    state: State = {}
    pairs: list[Pair] = []
    used = 0
    for key, host in parts_in(whole).items():
        if key == "scales":
            blocks = host.view(-1, -(-elements // QUANTIZED))
            hosts = list(blocks[:, begin // QUANTIZED : -(-end // QUANTIZED)].unbind())
        else:
            hosts = [host.view(1)] if key == "step" else [_flat(host)[begin:end]]
        count = sum(it.numel() for it in hosts)
        state[key] = slot[used:][: count * host.itemsize].view(host.dtype).data
        pairs += zip(state[key].split(hosts[0].numel()), hosts, strict=True)
        used += -(-count * host.itemsize // LINE) * LINE
    return state, pairs


def _joined(pairs: Sequence[Pair]) -> list[Pair]:
    """Return as few pairs as possible: neighbours become one. In a slot, all are neighbours."""
    joined: list[Pair] = []
    for there, host in pairs:
        if joined and _are_neighbours(joined[-1][1], host):
            size = (joined[-1][0].numel() + there.numel(),)
            joined[-1] = joined[-1][0].as_strided(size, (1,)), joined[-1][1].as_strided(size, (1,))
        elif there.numel():
            joined.append((there, host))
    return joined


def _are_neighbours(one: Tensor, other: Tensor) -> bool:
    is_same = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return is_same and one.storage_offset() + one.numel() == other.storage_offset()
