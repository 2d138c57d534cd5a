"""The stand-in does what CUDA's documentation says of its runtime, and holds back all that it leaves open."""

import ctypes
import errno
import importlib.util
import os
import threading
from contextlib import contextmanager

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("standin_attach") is None, reason="CUDA is the real one")

INVALID_VALUE, INVALID_HANDLE, ILLEGAL_STATE, NOT_READY, NO_PEER, IS_PEER = 1, 400, 401, 600, 217, 704
UNSUPPORTED, INVALIDATED, MERGE, UNMATCHED, UNJOINED, ISOLATION, IMPLICIT, CAPTURED, WRONG_THREAD = range(900, 909)
MODES = GLOBAL, THREAD_LOCAL, RELAXED = range(3)  # of cudaStreamCaptureMode
D2H = 2


def cuda(function, *arguments):
    """Return the error. Integers are pointers, unless they are wrapped."""
    library = ctypes.CDLL("libcudart.so.13")
    wrapped = [ctypes.c_void_p(it) if isinstance(it, int) else it for it in arguments]
    error = getattr(library, f"cuda{function}")(*wrapped)
    library.cudaGetLastError()
    return error


def made(function, *arguments):
    handle = ctypes.c_void_p()
    assert cuda(function, ctypes.byref(handle), *arguments) == 0
    return handle.value


def is_lazy():
    import standin_attach

    with open(os.path.join(os.path.dirname(standin_attach.__file__), "settings")) as file:
        return "order lazy" in file.read()


@pytest.fixture
def lazy():
    if not is_lazy():
        pytest.skip("work may be done early in this order")


@pytest.fixture
def ones():
    it = torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    return it


@pytest.fixture
def streams():
    """Three that don't wait for the legacy stream."""
    return [made("StreamCreateWithFlags", ctypes.c_uint(1)) for _ in range(3)]


# ---- memory


def test_the_host_reaches_no_device_memory(ones):
    libc, (_, end) = ctypes.CDLL(None, use_errno=True), os.pipe()
    assert libc.write(end, ctypes.c_void_p(ones.data_ptr()), 4) == -1
    assert ctypes.get_errno() == errno.EFAULT


def test_new_memory_is_nan():
    assert torch.empty(1000, device="cuda").isnan().any() or torch.cuda.memory_reserved() > 0
    address = made("Malloc", ctypes.c_size_t(64))
    host = (ctypes.c_float * 16)()
    assert cuda("Memcpy", host, address, ctypes.c_size_t(64), D2H) == 0
    assert all(it != it for it in host)
    assert cuda("Free", address) == 0


def test_memory_comes_back_and_ends():
    def free_bytes():
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        assert cuda("MemGetInfo", ctypes.byref(free), ctypes.byref(total)) == 0
        return free.value

    before, address = free_bytes(), ctypes.c_void_p()
    assert cuda("Malloc", ctypes.byref(address), ctypes.c_size_t(before + 1)) == 2
    taken = made("Malloc", ctypes.c_size_t(1 << 20))
    assert free_bytes() <= before - (1 << 20)
    assert cuda("Free", taken) == 0
    assert free_bytes() == before
    assert cuda("Free", taken) == INVALID_VALUE


def test_no_copy_goes_beyond_an_allocation_or_another_way():
    address, host = made("Malloc", ctypes.c_size_t(100)), ctypes.create_string_buffer(200)
    assert cuda("Memcpy", host, address, ctypes.c_size_t(101), D2H) == INVALID_VALUE
    assert cuda("Memcpy", address, host, ctypes.c_size_t(100), D2H) == INVALID_VALUE
    assert cuda("Free", address) == 0


def test_pinned_memory_arrives_when_the_stream_comes_to_it(ones, lazy):
    early = ones.to("cpu", non_blocking=True)
    assert early.is_pinned()
    assert early.isnan().all()
    torch.cuda.synchronize()
    assert early.tolist() == [1.0] * 4


def test_pinned_memory_is_read_late_and_pageable_memory_at_once(lazy):
    pinned, pageable = torch.ones(4).pin_memory(), torch.ones(4)
    copies = [it.to("cuda", non_blocking=True) for it in (pinned, pageable)]
    pinned.fill_(7), pageable.fill_(7)
    assert [it.tolist() for it in copies] == [[7.0] * 4, [1.0] * 4]


# ---- streams and events


def test_a_stream_that_does_not_wait_sees_what_was(ones, lazy):
    side = torch.cuda.Stream()
    ones.fill_(3)
    with torch.cuda.stream(side):
        assert (ones + 0).tolist() == [1.0] * 4
        side.wait_stream(torch.cuda.default_stream())
        assert (ones + 0).tolist() == [3.0] * 4


@pytest.mark.parametrize(("flags", "waits"), [(0, True), (1, False)])
def test_blocking_streams_wait_for_the_legacy_stream(ones, flags, waits, lazy):
    side = torch.cuda.ExternalStream(made("StreamCreateWithFlags", ctypes.c_uint(flags)))
    ones.fill_(3)
    with torch.cuda.stream(side):
        assert (ones + 0).tolist() == [3.0 if waits else 1.0] * 4


def test_an_event_is_done_after_its_stream(ones, lazy):
    fresh, event, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    assert fresh.query()  # never recorded
    event.record()
    assert not event.query()
    last.record()
    last.synchronize()
    assert event.query()
    assert event.elapsed_time(last) >= 0


def test_who_polls_gets_an_answer(ones):
    event = torch.cuda.Event()
    event.record()
    assert any(event.query() for _ in range(20))


def test_handles_that_are_gone_are_invalid(streams):
    event = made("EventCreate")
    assert cuda("EventDestroy", event) == 0
    assert cuda("EventQuery", event) == INVALID_HANDLE
    assert cuda("StreamDestroy", streams[0]) == 0
    assert cuda("StreamSynchronize", streams[0]) == INVALID_HANDLE


# ---- captures


@contextmanager
def capture(stream, mode, ends=0):
    assert cuda("StreamBeginCapture", stream, ctypes.c_int(mode)) == 0
    yield
    assert cuda("StreamEndCapture", stream, ctypes.byref(ctypes.c_void_p())) == ends


def malloc():
    address = ctypes.c_void_p()
    error = cuda("Malloc", ctypes.byref(address), ctypes.c_size_t(512))
    return error


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
}


@pytest.mark.parametrize("call", UNSAFE)
@pytest.mark.parametrize("where", ["here", "in another thread", "relaxed"])
@pytest.mark.parametrize("mode", MODES)
def test_unsafe_calls_end_a_capture(streams, mode, where, call):
    """cudaThreadExchangeStreamCaptureMode: forbidden in a thread that captures, but not relaxed; while another captures
    globally; and never in a thread that is relaxed itself."""
    how = {"here": lambda it: it(), "in another thread": in_a_thread, "relaxed": relaxed}[where]
    is_refused = mode == GLOBAL if where == "in another thread" else mode != RELAXED and where == "here"
    with capture(streams[0], mode, ends=INVALIDATED if is_refused else 0):
        assert (how(UNSAFE[call]) == UNSUPPORTED) == is_refused


@pytest.mark.parametrize("mode", MODES)
def test_an_event_is_not_asked_while_a_capture_forbids_it(streams, mode):
    event = made("EventCreate")
    is_refused = mode != RELAXED
    with capture(streams[0], mode, ends=INVALIDATED if is_refused else 0):
        assert cuda("EventQuery", event) == (UNSUPPORTED if is_refused else 0)


@pytest.mark.parametrize("mode", MODES)
def test_no_capture_is_waited_for(streams, mode):
    event = made("EventCreate")
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


def test_captures_are_bounded(streams):
    first, second, third = streams
    event = made("EventCreate")
    assert cuda("StreamBeginCapture", 0, ctypes.c_int(GLOBAL)) == UNSUPPORTED  # the legacy stream
    with capture(first, RELAXED):
        assert cuda("StreamBeginCapture", first, ctypes.c_int(RELAXED)) == ILLEGAL_STATE
    assert cuda("EventRecord", event, second) == 0
    with capture(first, RELAXED, ends=INVALIDATED):  # nothing outside is waited for
        assert cuda("StreamWaitEvent", first, event, ctypes.c_uint(0)) == ISOLATION
    with capture(first, RELAXED, ends=INVALIDATED), capture(second, RELAXED, ends=INVALIDATED):
        assert cuda("EventRecord", event, first) == 0
        assert cuda("StreamWaitEvent", second, event, ctypes.c_uint(0)) == MERGE
    with capture(first, RELAXED, ends=UNJOINED):
        assert cuda("EventRecord", event, first) == 0
        assert cuda("StreamWaitEvent", third, event, ctypes.c_uint(0)) == 0
        assert cuda("EventRecord", made("EventCreate"), third) == 0
        memory = made("Malloc", ctypes.c_size_t(8))
        assert cuda("MemsetAsync", memory, ctypes.c_int(0), ctypes.c_size_t(8), third) == 0
    with capture(first, RELAXED, ends=INVALIDATED):
        cuda("EventRecord", event, first), cuda("StreamWaitEvent", third, event, ctypes.c_uint(0))
        assert cuda("StreamEndCapture", third, ctypes.byref(ctypes.c_void_p())) == UNMATCHED
    with capture(first, GLOBAL):
        assert in_a_thread(lambda: cuda("StreamEndCapture", first, ctypes.byref(ctypes.c_void_p()))) == WRONG_THREAD
    blocking = made("StreamCreate")
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
    assert noise.tolist() != before  # another offset of the generator


# ---- devices


def test_peers_are_let_in_once():
    if torch.cuda.device_count() < 2:
        pytest.skip("one device")
    can = ctypes.c_int()
    assert cuda("DeviceCanAccessPeer", ctypes.byref(can), ctypes.c_int(0), ctypes.c_int(1)) == 0
    assert cuda("DeviceEnablePeerAccess", ctypes.c_int(1), ctypes.c_uint(0)) in (
        (0, IS_PEER) if can.value else (NO_PEER,)
    )
    assert cuda("DeviceEnablePeerAccess", ctypes.c_int(1), ctypes.c_uint(0)) == (IS_PEER if can.value else NO_PEER)
    assert torch.ones(3, device="cuda:1").to("cuda:0").add(1).tolist() == [2.0] * 3


def test_a_stream_of_another_device_is_refused():
    if torch.cuda.device_count() < 2:
        pytest.skip("one device")
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="cuda:1") + torch.ones(3, device="cuda:0")
