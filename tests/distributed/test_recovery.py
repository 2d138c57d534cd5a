"""After kill -9 of one process, torchrun restarts all, and training continues from the last complete checkpoint."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT
from tests.processes import needs_gloo

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]


def start(folder, output):
    command = [sys.executable, *TORCHRUN, str(ROOT / "examples" / "fsdp2.py"), str(folder)]
    return subprocess.Popen(
        command, stdout=output, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def losses(text):
    return re.findall(r"step +(\d+)  loss ([\d.]+)  scale (\d+)", text)


def workers_of(launcher):
    return [int(it) for it in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]


@pytest.mark.exhaustive
@needs_gloo
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the processes in /proc")
def test_killed_training_goes_on_on_the_same_curve(tmp_path):
    outputs = [tmp_path / "whole.txt", tmp_path / "killed.txt"]
    with outputs[0].open("w") as output:
        assert start(tmp_path / "whole", output).wait() == 0
    with outputs[1].open("w") as output:
        launcher = start(tmp_path / "killed", output)
        while "step 10" not in outputs[1].read_text():
            assert launcher.poll() is None
            time.sleep(0.02)
        time.sleep(random.random() * 0.15)
        for worker in random.sample(workers_of(launcher), 1):
            os.kill(worker, signal.SIGKILL)
        assert launcher.wait() == 0
    whole, killed = (losses(it.read_text()) for it in outputs)
    assert [int(step) for step, *_ in whole] == list(range(5, 45, 5))
    assert set(killed) == set(whole)
    assert re.search(r"goes on from step \d+", outputs[1].read_text())
