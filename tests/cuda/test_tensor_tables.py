"""The tables of addresses by which Triton's kernels find tensors: kept on the device while a list stays the same, and a
new one for each captured graph."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cuda.training import CUDA, on_side

_tensor_table = pytest.importorskip("mpkernels.ops._tensor_table", exc_type=ImportError)


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """Return the dict of kept tables, empty at first."""
    monkeypatch.setattr(_tensor_table, "_captured", {})
    monkeypatch.setattr(_tensor_table, "_kept", {})
    return _tensor_table._kept


@pytest.fixture
def grads():
    """Return as many grads as a large model has."""
    return [torch.ones(1 + i % 5, device=CUDA) for i in range(200)]


def captured(function):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    others = [torch.full((size,), -1).pin_memory() for size in (16, 512) for _ in range(100)]  # in memory that is free
    graph.replay()
    torch.cuda.synchronize()
    del others
    return results


def rows(size):
    return _tensor_table._rows_on(CUDA, (size, 0, 8, 0), [2])


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_rows_are_reused_by_the_stream_that_copied_them_and_by_graphs():
    first = rows(9)
    assert first.tolist() == [9, 0, 8, 0, 0, 0]
    assert rows(9) is first
    assert captured(lambda: [rows(9), rows(9)]) == [first, first]
    assert [*_tensor_table._captured.values()] == [first]  # the graph still reads it
    one, other = captured(lambda: [rows(10), rows(10)])
    assert one is not other  # a replay fills both
    assert one.tolist() == other.tolist() == [10, 0, 8, 0, 0, 0]
    with torch.cuda.stream(on_side()):
        assert rows(9) is not first
        assert rows(9) is rows(9)


@pytest.mark.parametrize("is_warm", [False, True])
def test_captured_calls_pass_their_words_by_value(grads, is_warm):
    """That serves any number of tensors. A capture can't take pinned memory, and no table is kept for a call."""
    addresses = [2**62 + 16 * i for i in range(200)]  # more bits than a float holds
    eager = _tensor_table.build(grads, addresses, call_words=[7]) if is_warm else None
    tables = captured(lambda: [_tensor_table.build(grads, addresses, call_words=[call]) for call in range(50)])
    for call, table in enumerate(tables):
        assert table.call.tolist() == [*addresses, *[0] * 201, call]
        assert table.rows.tolist() == tables[0].rows.tolist()
        assert eager is None or table.rows is eager.rows
    assert len({table.call.data_ptr() for table in tables}) == 50  # each is written by its own replay
    assert len(_tensor_table._captured) == (1 if is_warm else 0)
    assert eager is None or _tensor_table.build(grads, addresses).rows is eager.rows


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.append(op.name())
        return op(*args, **(kwargs or {}))


def test_words_are_written_in_few_launches(grads):
    ops = Counting()

    def build():
        with ops:
            _tensor_table.build(grads, [16] * 200)

    captured(build)
    assert 0 < len(ops.names) <= 8
