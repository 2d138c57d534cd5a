"""The stand-in does what CUDA's documentation says of its runtime, as late as the documentation allows."""

import ctypes
import errno
import importlib.util
import os
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

ATTACHED = importlib.util.find_spec("standin_attach")
pytestmark = pytest.mark.skipif(ATTACHED is None, reason="CUDA is the real one")

OUT_OF_MEMORY, INVALID_VALUE, NO_PEER, INVALID_HANDLE, ILLEGAL_STATE, IS_PEER = 2, 1, 217, 400, 401, 704
UNSUPPORTED, INVALIDATED, MERGE, UNMATCHED, UNJOINED, ISOLATION, IMPLICIT, CAPTURED, WRONG_THREAD = range(900, 909)
MODES = GLOBAL, THREAD_LOCAL, RELAXED = range(3)  # of cudaStreamCaptureMode
TO_HOST = 2


def cuda(function, *arguments):
    """Return the error. Integers are pointers, unless they are wrapped."""
    library = ctypes.CDLL("libcudart.so.13")
    wrapped = [ctypes.c_void_p(it) if isinstance(it, int) else it for it in arguments]
    error = getattr(library, f"cuda{function}")(*wrapped)
    library.cudaGetLastError()
    return error


def create(function, *arguments):
    """Return the handle or address that the function makes."""
    handle = ctypes.c_void_p()
    assert cuda(function, ctypes.byref(handle), *arguments) == 0
    return handle.value


def malloc(count=512):
    return cuda("Malloc", ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(count))


def wait(stream, event):
    return cuda("StreamWaitEvent", stream, event, ctypes.c_uint(0))


@pytest.fixture
def _lazy():
    if not Path(ATTACHED.origin).with_name("settings").read_text().startswith("lazy"):
        pytest.skip("work may be done early in this order")


@pytest.fixture
def ones():
    it = torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    return it


@pytest.fixture
def streams():
    """Return three streams that don't wait for the legacy stream."""
    return [create("StreamCreateWithFlags", ctypes.c_uint(1)) for _ in range(3)]


def test_the_host_reaches_no_device_memory(ones):
    libc, (_, end) = ctypes.CDLL(None, use_errno=True), os.pipe()
    assert libc.write(end, ctypes.c_void_p(ones.data_ptr()), 4) == -1
    assert ctypes.get_errno() == errno.EFAULT


def free_bytes():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert cuda("MemGetInfo", ctypes.byref(free), ctypes.byref(total)) == 0
    return free.value


def test_memory_begins_as_nan_is_given_back_and_runs_out():
    before, host = free_bytes(), (ctypes.c_float * 16)()
    address = create("Malloc", ctypes.c_size_t(64))
    assert free_bytes() < before
    assert cuda("Memcpy", host, address, ctypes.c_size_t(64), TO_HOST) == 0
    assert all(it != it for it in host)  # NaN
    assert cuda("Memcpy", host, address, ctypes.c_size_t(65), TO_HOST) == INVALID_VALUE  # beyond the allocation
    assert cuda("Memcpy", address, host, ctypes.c_size_t(64), TO_HOST) == INVALID_VALUE  # in the wrong direction
    assert [cuda("Free", address), free_bytes(), cuda("Free", address)] == [0, before, INVALID_VALUE]
    assert malloc(before + 1) == OUT_OF_MEMORY


@pytest.mark.usefixtures("_lazy")
def test_pinned_memory_arrives_and_is_read_when_the_stream_comes_to_it(ones):
    early = ones.to("cpu", non_blocking=True)
    assert (early.is_pinned(), early.isnan().all()) == (True, True)
    torch.cuda.synchronize()
    assert early.tolist() == [1.0] * 4
    pinned, pageable = torch.ones(4).pin_memory(), torch.ones(4)
    copies = [it.to("cuda", non_blocking=True) for it in (pinned, pageable)]
    pinned.fill_(7), pageable.fill_(7)
    assert [it.tolist() for it in copies] == [[7.0] * 4, [1.0] * 4]


@pytest.mark.usefixtures("_lazy")
@pytest.mark.parametrize(("flags", "waits"), [(0, True), (1, False)])
def test_only_blocking_streams_wait_for_the_legacy_stream(ones, flags, waits):
    side = torch.cuda.ExternalStream(create("StreamCreateWithFlags", ctypes.c_uint(flags)))
    ones.fill_(3)
    with torch.cuda.stream(side):
        assert (ones + 0).tolist() == [3.0 if waits else 1.0] * 4
        side.wait_stream(torch.cuda.default_stream())
        assert (ones + 0).tolist() == [3.0] * 4


@pytest.mark.usefixtures("_lazy")
def test_an_event_is_done_after_its_stream(ones):
    fresh, event, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    assert fresh.query()  # never recorded
    event.record()
    assert not event.query()
    last.record()
    last.synchronize()
    assert event.query()
    assert event.elapsed_time(last) >= 0
    event.record()
    assert any(event.query() for _ in range(20))  # who polls gets an answer


def test_handles_that_are_gone_are_invalid(streams):
    event = create("EventCreate")
    assert [cuda("EventDestroy", event), cuda("EventQuery", event)] == [0, INVALID_HANDLE]
    assert [cuda("StreamDestroy", streams[0]), cuda("StreamSynchronize", streams[0])] == [0, INVALID_HANDLE]


# ---- captures


@contextmanager
def capture(stream, mode, ends=0):
    assert cuda("StreamBeginCapture", stream, ctypes.c_int(mode)) == 0
    yield
    assert cuda("StreamEndCapture", stream, ctypes.byref(ctypes.c_void_p())) == ends


def in_a_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def relaxed(function):
    mode = ctypes.c_int(RELAXED)
    cuda("ThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    error = function()
    cuda("ThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    return error


UNSAFE = {
    "malloc": malloc,
    "free": lambda: cuda("Free", 1 << 40),
    "pinned": lambda: cuda("HostAlloc", ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(64), ctypes.c_uint(0)),
    "free pinned": lambda: cuda("FreeHost", 1 << 40),
    "query": lambda: cuda("EventQuery", create("EventCreate")),
}


@pytest.mark.parametrize("call", UNSAFE)
@pytest.mark.parametrize("how", [lambda it: it(), in_a_thread, relaxed], ids=["here", "in another thread", "relaxed"])
@pytest.mark.parametrize("mode", MODES)
def test_unsafe_calls_end_a_capture(streams, mode, how, call):
    """As cudaThreadExchangeStreamCaptureMode has it, they end a capture of the calling thread that isn't relaxed, and a
    global capture of another thread; from a thread that is relaxed itself, none."""
    refusing = {in_a_thread: [GLOBAL], relaxed: []}.get(how, [GLOBAL, THREAD_LOCAL])
    with capture(streams[0], mode, ends=INVALIDATED if mode in refusing else 0):
        assert (how(UNSAFE[call]) == UNSUPPORTED) == (mode in refusing)


@pytest.mark.parametrize("mode", MODES)
def test_waiting_for_a_capture_ends_it(streams, mode):
    event = create("EventCreate")
    for function, arguments, error in [
        ("StreamSynchronize", [streams[0]], UNSUPPORTED),
        ("StreamQuery", [streams[0]], UNSUPPORTED),
        ("DeviceSynchronize", [], UNSUPPORTED),
        ("EventQuery", [event], CAPTURED),
        ("EventSynchronize", [event], CAPTURED),
    ]:
        with capture(streams[0], mode, ends=INVALIDATED):
            assert cuda("EventRecord", event, streams[0]) == 0
            assert cuda(function, *arguments) == error


def test_what_captures_forbid_is_refused(streams):
    first, second, third = streams
    event, blocking = create("EventCreate"), create("StreamCreate")
    memory = create("Malloc", ctypes.c_size_t(8))
    assert cuda("StreamBeginCapture", 0, ctypes.c_int(GLOBAL)) == UNSUPPORTED  # the legacy stream
    with capture(first, RELAXED):
        assert cuda("StreamBeginCapture", first, ctypes.c_int(RELAXED)) == ILLEGAL_STATE
    cuda("EventRecord", event, second)
    with capture(first, RELAXED, ends=INVALIDATED):
        assert wait(first, event) == ISOLATION
    with capture(first, RELAXED, ends=INVALIDATED), capture(second, RELAXED, ends=INVALIDATED):
        cuda("EventRecord", event, first)
        assert wait(second, event) == MERGE
    with capture(first, RELAXED, ends=UNJOINED):
        cuda("EventRecord", event, first)
        assert wait(third, event) == 0
        assert cuda("MemsetAsync", memory, ctypes.c_int(0), ctypes.c_size_t(8), third) == 0
    with capture(first, RELAXED, ends=INVALIDATED):
        cuda("EventRecord", event, first), wait(third, event)
        assert cuda("StreamEndCapture", third, ctypes.byref(ctypes.c_void_p())) == UNMATCHED
    with capture(first, GLOBAL):
        assert in_a_thread(lambda: cuda("StreamEndCapture", first, ctypes.byref(ctypes.c_void_p()))) == WRONG_THREAD
    assert wait(second, event) == CAPTURED  # of a capture that is over
    with capture(blocking, RELAXED, ends=INVALIDATED):
        assert cuda("StreamSynchronize", 0) == IMPLICIT


def test_what_is_captured_is_done_in_each_replay(ones):
    graph, branch = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        branch.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(branch):
            doubled = ones * 2
        torch.cuda.current_stream().wait_stream(branch)
        noise = torch.rand(4, device="cuda")
        ones += doubled
    assert ones.tolist() == [1.0] * 4
    graph.replay()
    before = noise.tolist()
    graph.replay()
    assert ones.tolist() == [9.0] * 4
    assert noise.tolist() != before  # the generator has gone on


def test_devices_reach_each_other_only_as_peers_and_by_copies():
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one device")
    can = ctypes.c_int()
    cuda("DeviceCanAccessPeer", ctypes.byref(can), ctypes.c_int(0), ctypes.c_int(1))
    first, second = (cuda("DeviceEnablePeerAccess", ctypes.c_int(1), ctypes.c_uint(0)) for _ in range(2))
    assert first in ((0, IS_PEER) if can.value else (NO_PEER,))
    assert second == (IS_PEER if can.value else NO_PEER)
    there = torch.ones(3, device="cuda:1")
    assert there.to("cuda:0").add(1).tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(3, device="cuda:0")
