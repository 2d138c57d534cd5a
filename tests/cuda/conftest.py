import signal

import pytest
import torch


@pytest.fixture(autouse=True)
def _cuda():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    yield
    torch.cuda.set_stream(torch.cuda.default_stream())  # a failed capture leaves its own stream behind


@pytest.fixture(autouse=True)
def _ctrl_c():
    """Let Ctrl-C raise: a process in a shell's background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("there are no two CUDA devices")
    return [torch.device("cuda", index) for index in range(2)]
