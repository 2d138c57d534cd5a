"""What keeps cublasLt from ending products, under emulation: that it is survived, or told, and noted."""

import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mpkernels import _extension
from mpkernels.doctor import cublaslt
from mpkernels.doctor.selftest import Result
from tests import ROOT
from tests.linear_cases import before_a_layer, layer
from tests.ops.linear.test_cublas import dact, forward
from tests.ops.linear.test_cublaslt import UNALIGNED, launches, notes
from tests.targets import TARGETS, emulated_variable, emulation_library

B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def make_z(rows, columns):
    """And a function that tells whether it is right."""
    x, weight, bias, _ = layer(rows, 24, columns, B16)
    _, z = forward(x, weight, bias, "gelu_tanh", True)
    return lambda: torch.equal(z, forward(x, weight, bias, "none", True)[0])


def make_dz(rows, columns):
    arguments = *before_a_layer(rows, 24, columns, B16), "gelu_tanh"
    dz, _ = dact(*arguments, None)
    return lambda: torch.allclose(dz, dact(*arguments, F32)[0], rtol=2 * torch.finfo(B16).eps, atol=1e-5)


OPS = pytest.mark.parametrize(("op", "make"), [("linear_act", make_z), ("linear_dact", make_dz)])


def fail_at_each_call(make, status, monkeypatch):
    """Of a call for a shape that is new: what it said, or whether it made what it should have made."""
    failure = emulated_variable("emulation_calls_to_failure")
    monkeypatch.setattr(emulated_variable("emulation_cublaslt_failure"), "value", status)
    for call in itertools.count(1):
        failure.value = call
        try:
            is_right = make(16 * status, 8 * call)
        except RuntimeError as error:
            yield str(error).splitlines()[0], None
        else:
            if failure.value > 0:
                failure.value = 0
                return
            yield None, is_right()


STEPS = {
    f"cublasLtMatmul{step}"
    for step in ("DescCreate", "DescSetAttribute", "PreferenceCreate", "PreferenceSetAttribute", "AlgoGetHeuristic", "")
} | {"cublasLtMatrixLayoutCreate"}  # fmt: skip


@OPS
def test_each_status_is_an_error(emulated, monkeypatch, op, make):
    make(8, 8)  # there is a handle
    said = [error for error, _ in fail_at_each_call(make, 14, monkeypatch) if error]
    assert set(said) == {f"{op}: cuBLAS says CUBLAS_STATUS_INTERNAL_ERROR in {step}" for step in STEPS}
    assert "cublasLt could not destroy a descriptor" in notes(monkeypatch)[1]


@OPS
@pytest.mark.parametrize(("status", "name"), [(7, "INVALID_VALUE"), (8, "ARCH_MISMATCH"), (15, "NOT_SUPPORTED")])
def test_each_refusal_is_a_reason(emulated, monkeypatch, status, name, op, make):
    make(8, 8)
    reasons = {f"cublasLt says CUBLAS_STATUS_{name} in {step}" for step in STEPS}
    before = notes(monkeypatch)[1]
    assert set(fail_at_each_call(make, status, monkeypatch)) == {(None, True)}
    after = notes(monkeypatch)[1]
    assert all(after[it] > before.get(it, 0) for it in reasons)


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_a_gelu_is_left_to_it_only_where_that_is_fast(emulated, monkeypatch, capability):
    """Elsewhere product and pass make the same z. A bias alone costs nothing on any chip."""
    monkeypatch.setattr(emulated_variable("emulation_compute_capability"), "value", capability)
    why = "cublasLt ends products in gelu on compute capability 9.x and 10.x alone until others are measured; this is "
    why += f"{capability // 10}.{capability % 10}"
    x, weight, bias, _ = layer(16, 24, 32, B16)
    serves = capability in (90, 100)
    (_, z), count = launches(forward, x, weight, bias, "gelu_tanh", True)
    assert count == (1 if serves else 2)
    assert torch.equal(z, forward(x, weight, bias, "none", True)[0])
    assert launches(dact, *before_a_layer(16, 24, 32, B16), "gelu_tanh", None)[1] == (1 if serves else 2)
    assert launches(forward, x, weight, bias, "none", True)[1] == 1
    notes(monkeypatch)  # which has the doctor read the emulation's
    assert cublaslt.describe([])["fell back"].get(why, 0) == (0 if serves else 2)


def test_a_refusal_is_remembered(emulated, monkeypatch):
    algorithms, why = emulated_variable("emulation_cublaslt_algorithms"), "cublasLt finds no algorithm"
    x, weight, bias, _ = layer(24, 8, 80, F16)
    before = notes(monkeypatch)[1].get(why, 0)
    for algorithms.value in (0, 1):
        (_, z), count = launches(forward, x, weight, bias, "gelu_tanh", True)
        assert count == 2
    assert notes(monkeypatch)[1][why] == before + 2
    (_, same), count = launches(forward, x[:16], weight, bias, "gelu_tanh", True)
    assert count == 1
    assert torch.equal(same, z[:16])
    monkeypatch.setattr(emulated_variable("emulation_cublaslt_failure"), "value", 15)
    emulated_variable("emulation_calls_to_failure").value = 11  # the product itself, of a shape that has an algorithm
    for _ in range(2):
        (_, refused), count = launches(forward, x[:16], weight, bias, "gelu_tanh", True)
        assert count == 2
        assert torch.equal(refused, same)


def test_choices_do_not_pile_up(emulated, monkeypatch):
    """4096 are kept: a refusal is forgotten with them, and the shape asked for again."""
    x, weight, bias, _ = layer(4097, 8, 8, F16)
    monkeypatch.setattr(emulated_variable("emulation_cublaslt_algorithms"), "value", 0)
    assert launches(forward, x[:5], weight, bias, "none", True)[1] == 2
    monkeypatch.undo()
    for gap in range(1, 4097):
        forward(x[::gap][:2], weight, bias, "none", True)
    assert launches(forward, x[:5], weight, bias, "none", True)[1] == 1


def test_threads_share_choices(emulated):
    cases = [layer(8 * n, 16, 8 * n, dtype)[:3] for n in range(1, 9) for dtype in (B16, F16)] * 4
    wanted = [forward(*case, "gelu_tanh", True) for case in cases]

    forced = torch.ops.mpkernels_emulated.linear_act.default
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda case: forced(*case, "gelu_tanh", True), cases))
    for one, other in zip(got, wanted, strict=True):
        assert all(map(torch.equal, one, other))


def test_doctor_says_what_is_proven(emulated, monkeypatch):
    ops = {"linear_act", "linear_dact"}
    unproven = dict.fromkeys(ops, "not proven here: torch sees no GPU")
    assert cublaslt.describe([])["proof"] == unproven or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made, _ = notes(monkeypatch)
    for features in (24, 20):
        forward(*layer(16, features, 32, B16)[:3], "none", True)
        dact(*before_a_layer(16, features, 32, B16), "gelu_tanh", None)
    found = cublaslt.describe([])
    assert found["proof"] == {op: f"proven by the self-test: {made.get(op, 0) + 1} products" for op in ops}
    assert found["fell back"][UNALIGNED] == notes(monkeypatch)[1][UNALIGNED]
    failed = [Result("linear_dact", "cuda", "native", "off", 0), Result("linear_act", "cuda", "triton", "off", 0)]
    proof = cublaslt.describe(failed)["proof"]
    assert proof["linear_dact"] == "not proven here: the self-test of linear_dact failed"
    assert proof["linear_act"] == found["proof"]["linear_act"]


def test_a_process_without_cublaslt(emulated):
    """In one of its own, since what is found is kept: one function after another is there, then no handle, then one."""
    done = subprocess.run([sys.executable, "-m", __name__], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


FUNCTIONS = """
    Create MatmulDescCreate MatmulDescSetAttribute MatmulDescDestroy MatrixLayoutCreate MatrixLayoutDestroy
    MatmulPreferenceCreate MatmulPreferenceSetAttribute MatmulPreferenceDestroy MatmulAlgoGetHeuristic Matmul
"""


def start_without_cublaslt():
    assert TARGETS["cpu-cuda"].why_missing() is None
    _extension.LIBRARY = emulation_library()
    there = emulated_variable("emulation_cublaslt_functions")
    case = *layer(16, 24, 32, B16)[:3], "none", True
    with TARGETS["cpu-cuda"].active():
        for there.value, name in enumerate(FUNCTIONS.split()):
            _, count = launches(forward, *case)
            assert count == 2
            assert _extension.cublaslt_notes()[1].pop(f"the process's cuBLAS has no cublasLt{name}") == 1
        there.value = len(FUNCTIONS.split())
        emulated_variable("emulation_calls_to_failure").value = 8
        with pytest.raises(RuntimeError, match="linear_act: cuBLAS says CUBLAS_STATUS_ALLOC_FAILED in cublasLtCreate"):
            forward(*case)
        _, count = launches(forward, *case)
        assert count == 1
    assert _extension.cublaslt_notes()[0] == {"linear_act": 1}


if __name__ == "__main__":
    start_without_cublaslt()


def test_a_proposal_has_a_status_of_its_own(emulated, monkeypatch):
    x, weight, bias, _ = layer(24, 8, 136, F16)
    monkeypatch.setattr(emulated_variable("emulation_cublaslt_proposed"), "value", 15)
    assert launches(forward, x, weight, bias, "gelu_tanh", True)[1] == 2
    why = "cublasLt says CUBLAS_STATUS_NOT_SUPPORTED in what cublasLtMatmulAlgoGetHeuristic found"
    assert notes(monkeypatch)[1][why] == 1
