"""If torch lacks one of the private names that _torch_private reads, the package still imports and works."""

import os
import re
import sys
import traceback

import pytest
import torch
from torch.torch_version import TorchVersion as Version

from tests import ROOT

FENCE = "mpkernels._torch_private"
SOURCE = "".join(path.read_text() for path in sorted((ROOT / "mpkernels" / "_torch_private").glob("*.py")))
LOOKED_UP = re.findall(r'look_up\(\s*"([\w.]+)", "([\w.]+)"', SOURCE)
NAMES = sorted({name for _, name in LOOKED_UP})
AT_IMPORT = re.findall(r'^\w.* = look_up\(\s*"[\w.]+", "([\w.]+)"', SOURCE, re.MULTILINE)
NAMES += re.findall(r'getattr\(\w[\w.]*, "(_\w+)"', SOURCE)


def test_all_names_are_found_in_the_source():
    assert len(NAMES) > len(AT_IMPORT) > 20
    assert "torch._C." not in SOURCE  # only look_up may read it


@pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="older ones lack some")
def test_this_torch_has_every_name():
    """Otherwise a substitute would be in use unnoticed. CONTRIBUTING.md says what to do when torch has renamed one."""
    from mpkernels._torch_private.finding import look_up  # here: the test below must begin without it

    missing = {f"{module}.{name}" for module, name in LOOKED_UP if look_up(module, name, None) is None}
    assert missing <= ({"torch._C._cuda_getCurrentRawStream"} if torch.version.cuda is None else set())


def hide(name):
    """Hide a name from _torch_private alone, because torch itself needs it. Return a list, to which the name of each
    module that asks for it is added."""
    import builtins

    found, askers = builtins.getattr, []

    def without(it, attribute, *otherwise):
        asker = sys._getframe(1).f_globals.get("__name__", "")
        if attribute == name.rpartition(".")[2] and asker.rpartition(".")[0] == FENCE:
            askers.append(asker)
            if otherwise:
                return otherwise[0]
            raise AttributeError(attribute)
        return found(it, attribute, *otherwise)

    builtins.getattr = without
    return askers


def train():
    import torch

    import mpkernels
    from mpkernels.amp import GradScaler, Policy, clip_grad_norm_, to_mixed
    from mpkernels.nn import LinearAct
    from mpkernels.optim import AdamW

    torch.set_num_threads(1)
    model = torch.nn.Sequential(LinearAct(6, 8, activation="relu"), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
    plain = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
    plain.load_state_dict({f"{int(k[0]) + (k[0] > '0')}{k[1:]}": v for k, v in model.state_dict().items()})
    for net, optimizer in ((model, AdamW(model.parameters())), (plain, torch.optim.AdamW(plain.parameters()))):
        scaler = GradScaler("cpu", init_scale=8.0)
        for seed in range(3):
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
            optimizer.zero_grad()
            scaler.scale(net(inputs).square().mean()).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    Policy.best("cpu")
    mpkernels.memory_report(model, AdamW(model.parameters()), lambda net: net(torch.ones(4, 6)).sum())
    mixed = to_mixed(model)
    with torch.no_grad():
        mixed(torch.ones(4, 6))


@pytest.mark.exhaustive
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_without_any_one_name_the_package_works():
    """The process has imported torch and nothing of ours. Each name is hidden in a fork of it."""
    import subprocess

    code = "import torch._dynamo, tests.test_torch_private as it; it.try_without_each()"  # torch.optim would import it
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == NAMES


def try_without_each():
    failed = []
    for name in NAMES:
        if (child := os.fork()) == 0:
            try:
                askers = hide(name)
                train()
                assert askers or name not in AT_IMPORT
            except BaseException:
                print(f"without {name}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            failed.append(name)
        print(name)
    sys.exit(f"without {', '.join(failed)} it doesn't work" if failed else 0)
