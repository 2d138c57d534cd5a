"""``mpkernels doctor``, through the real command."""

import itertools
import json
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from mpkernels import __version__, doctor, optim
from mpkernels.doctor import machine, selftest
from mpkernels.doctor.command import verdict
from mpkernels.doctor.samples import SAMPLES
from mpkernels.ops import _registry
from tests import commands


def mpkernels(*words, cwd=None, code=""):
    if not code:
        return commands.run(*words, cwd=cwd)
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=cwd, check=False)


def test_every_op_has_samples():
    assert SAMPLES.keys() == _registry._ops.keys()


def test_it_finds_this_machine_well():
    run = mpkernels("doctor", "--json")
    assert (run.returncode, run.stderr) == (0, "")
    found = json.loads(run.stdout)
    assert found["machine"]["torch"] == torch.__version__
    assert {(it["op"], it["device"]) for it in found["self-test"]} >= {(op, "cpu") for op in SAMPLES}
    assert [it["problem"] for it in found["self-test"] if it["problem"]] == []
    assert found["kernels"]["unscale_"]["cpu"][0] == "native"
    assert len(found["offload"]) == (5 if torch.cuda.is_available() else 0)
    assert all("is faster" in it or it.endswith("GB/s") for it in found["offload"].values())


def test_prose_names_what_serves_each_op():
    run = mpkernels("doctor")
    assert run.returncode == 0
    assert all(op in run.stdout for op in SAMPLES)
    assert "agree with the reference" in run.stdout
    assert run.stdout.splitlines()[-1].startswith("Ready to train on ")


@pytest.mark.parametrize(("count", "text"), [(1, "H100, sm_90, 80 GiB"), (2, "2 of H100, sm_90, 80 GiB")])
def test_gpus_are_counted_where_there_are_several(monkeypatch, count, text):
    chip = SimpleNamespace(name="H100", major=9, minor=0, total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    assert machine.gpu() == text


def test_version_prints_the_version():
    run = mpkernels("--version")
    assert (run.returncode, run.stdout, run.stderr) == (0, f"mpkernels {__version__}\n", "")


def test_without_a_command_it_prints_them():
    run, asked = mpkernels(), mpkernels("--help")
    assert (run.returncode, run.stdout, run.stderr) == (0, asked.stdout, "")
    assert all(f"    {name} " in run.stdout for name in ("demo", "doctor", "bench"))


BROKEN = """
    import sys
    from mpkernels.__main__ import main
    from mpkernels.ops import _registry, _dispatcher

    def broken(grads, found_inf, inv_scale):
        {body}

    with _dispatcher.force({{("unscale_", "cpu"): broken}}):
        sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("pass", "sample 0: off by"),
        ("_registry._ops['unscale_'].reference(grads, found_inf * 1, inv_scale)", "sample 1: off by 1 "),
        ("raise RuntimeError('no such luck')", "sample 0: RuntimeError: no such luck"),
        ("[grad.fill_(float('nan')) for grad in grads]", "sample 0: an inf or NaN that the reference has not"),
    ],
    ids=["idle", "blind", "raises", "nan"],
)
def test_a_broken_kernel_is_found(body, says):
    run = mpkernels("doctor", code=textwrap.dedent(BROKEN.format(body=body)))
    assert run.returncode == 1
    assert f"FAILED: unscale_ on cpu, native: {says}" in run.stdout
    assert run.stdout.splitlines()[-1].startswith("Don't train with this build: 1 of ")


def test_infs_and_nans_must_be_those_of_the_reference():
    values = [float("inf"), -float("inf"), float("nan"), 7.0, 0.0]
    for a, b in itertools.product(values, values):
        want, got = torch.tensor([1.0, a]), torch.tensor([1.0, b])
        is_same = a == b or (a != a and b != b)
        assert (selftest._difference([want], [got], 0.0) == "") == is_same, (a, b)


GOOD, WRONG = (selftest.Result("adamw_", "cpu", "native", problem, 0.1) for problem in ("", "off by 1"))
ON_GPU = GOOD._replace(device="cuda")


@pytest.mark.parametrize(
    ("tests", "to_install", "gpu", "says"),
    [
        ([GOOD], [], None, "Ready to train on the CPU (torch sees no GPU): all 1 kernels agree with the reference."),
        ([GOOD, ON_GPU], [], "H100", "Ready to train on H100: all 2 kernels agree with the reference. Next: `python"),
        ([GOOD, ON_GPU], ["triton: for its kernels"], "H100", "the reference. Next: install triton: for its kernels."),
        ([GOOD], ["triton: for it"], "H100", "Training on H100 works, but every op runs on the slow reference there."),
        ([], ["a C++ compiler"], None, "works, but every op runs on the slow reference. Next: install a C++ compiler."),
        (
            [GOOD, WRONG],
            [],
            None,
            "Don't train with this build: 1 of 2 kernels are wrong, first adamw_ on cpu, native.",
        ),
        ([WRONG], ["triton"], "H100", "report `python -m mpkernels doctor --json`."),
    ],
)
def test_the_last_line_says_whether_to_train_and_what_to_do(tests, to_install, gpu, says):
    sentence = verdict(tests, to_install, gpu)
    assert says in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("op", SAMPLES)
def test_samples_pass_on_every_target(target, op):
    """The tolerances hold for all kernels, also for those that this machine's doctor can't run."""
    for sample in SAMPLES[op]:
        want_arguments, got_arguments = sample.arguments(torch.device("cpu")), sample.arguments(target.device)
        want = _registry._ops[op].reference(*want_arguments)
        got = _registry._ops[op](*got_arguments)
        assert selftest._difference((want_arguments, want), (got_arguments, got), sample.tolerance) == ""


def test_advice_names_layer_size_and_remedy():
    model = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(50257, 100),
            "good": torch.nn.Linear(64, 8),
            "head": torch.nn.Linear(768, 50257),
            "image": torch.nn.Conv2d(3, 64, 3),
            "heads": torch.nn.MultiheadAttention(120, 10),
        }
    )
    assert [str(each) for each in doctor.advise(model)] == [
        "embed (Embedding): embedding_dim=100 is no multiple of 8; 104 is",
        "head (Linear): out_features=50257 is no multiple of 8; 50304 is",
        "image (Conv2d): in_channels / groups=3 is no multiple of 8; 8 is",
        "heads (MultiheadAttention): embed_dim / num_heads=12 is no multiple of 8; 16 is",
    ]
    assert doctor.advise(torch.nn.Linear(12, 12), torch.float32) == []


@pytest.mark.parametrize("lr", [1e-2, 1e-4, 1e-5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_advice_names_weights_that_a_step_does_not_move(lr, dtype):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)  # lr is 0 now; advice is about the one it was
    found = doctor.advise(model, optimizer=optimizer)
    before = [param.clone() for param in model.parameters()]
    optimizer.param_groups[0]["lr"] = lr
    for param in model.parameters():
        param.grad = torch.randn_like(param).sign()
    optimizer.step()
    pairs = zip(before, model.named_parameters(), strict=True)
    still = [name for old, (name, new) in pairs if 2 * (old != new).sum() < new.numel()]
    assert bool(still) == (lr < 1e-2)
    wanted = (
        f"param_groups[0]: lr={lr:g} is too small to move most values in {len(still)} of 4 16-bit parameters, such as "
        f"{''.join(still[:1])}; optimizers of mpkernels.optim keep fp32 masters"
    )
    assert [str(it) for it in found] == [wanted] * bool(still)


def test_no_advice_on_weights_with_masters_or_steps_of_another_size():
    model = torch.nn.Linear(64, 64).bfloat16()
    params = list(model.parameters())
    for optimizer in (
        optim.AdamW(params, lr=1e-9),
        optim.Masters(torch.optim.NAdam(params, lr=1e-9)),
        torch.optim.SGD(params, lr=1e-9),
        torch.optim.AdamW(torch.nn.Linear(64, 64).parameters(), lr=1e-9),
        torch.optim.AdamW(torch.nn.Linear(64, 64, device="meta", dtype=torch.bfloat16).parameters(), lr=1e-9),
    ):
        assert doctor.advise(model, optimizer=optimizer) == []


def test_a_bad_option_is_refused_in_a_line():
    run = mpkernels("doctor", "--jason")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.endswith("unrecognized arguments: --jason\n")
    assert run.stderr.count("\n") == 1
