"""Runs ``python -m mpkernels ...`` in forks of a process that has imported the package: importing torch is slow."""

import json
import os
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path

from tests import ROOT


def run(*words, cwd=None, env=None):
    """Run as subprocess.run does, with captured text."""
    server = _server()
    with tempfile.TemporaryDirectory() as folder:
        request = {"words": list(map(str, words)), "cwd": str(cwd or Path.cwd()), "env": dict(env or os.environ)}
        server.stdin.write(json.dumps(request | {"folder": folder}) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        texts = [Path(folder, name).read_text() for name in ("stdout", "stderr")]
    return subprocess.CompletedProcess(words, status, *texts)


@cache
def _server():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", "tests.commands"], cwd=ROOT, **pipes)  # ends where its stdin does


def _serve():
    import torch

    import mpkernels.__main__

    def work(request):
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        if threads := os.environ.get("OMP_NUM_THREADS"):
            torch.set_num_threads(int(threads))
        sys.argv = ["mpkernels", *request["words"]]
        return mpkernels.__main__.main()

    for line in sys.stdin:
        request = json.loads(line)
        if (child := os.fork()) == 0:
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(Path(request["folder"], name), os.O_WRONLY | os.O_CREAT), number)
            os._exit(_status_of(work, request))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _status_of(work, request):
    """Return the exit status that Python would have."""
    try:
        status = work(request)
    except SystemExit as end:
        status = end.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status or 0


if __name__ == "__main__":
    _serve()
