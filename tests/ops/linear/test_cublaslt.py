"""Products that cublasLt ends, under emulation: which they are, what they are, and what computes where it won't."""

import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mpkernels.ops.linear.activations import ACTIVATIONS
from tests import ROOT
from tests.linear_cases import TORCH, assert_as_near, before_a_layer, layer, torchs_dact
from tests.ops.linear.test_linear_cuda import beside_alignment, dact, every_second, forward, transposed
from tests.targets import EMULATED, TARGETS, emulated_variable

B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
HALVES = pytest.mark.parametrize("dtype", [B16, F16], ids=str)
SHAPES = pytest.mark.parametrize("shape", [(16, 24, 32), (1, 8, 8), (3, 16, 8), (130, 8, 264), (7, 40, 72)], ids=str)
ENDED = ("none", "gelu_tanh")


def ended(*arguments):
    return getattr(torch.ops, EMULATED).linear_act_by_cublaslt(*arguments)


def ended_dact(*arguments, wants_h=False):
    return getattr(torch.ops, EMULATED).linear_dact_by_cublaslt(*arguments, wants_h)


def launches(function, *arguments):
    counter = emulated_variable("emulation_launches")
    before = counter.value
    return function(*arguments), counter.value - before


@SHAPES
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("activation", ENDED)
@HALVES
def test_error_contract(emulated, dtype, activation, bias, shape):
    x, weight, b, _ = layer(*shape, dtype, bias=bias)
    y, z = ended(x, weight, b, activation, True)
    wide = [None if it is None else it.double() for it in (x, weight, b)]
    exact, theirs = (torch.nn.functional.linear(*each) for each in (wide, (x, weight, b)))
    function, results = TORCH[activation], [y, z] if activation != "none" else [y]
    reach = torch.nn.functional.linear(*(None if it is None else it.abs() for it in wide))
    assert_as_near(("y", "z"), results, (function(exact), exact), (function(theirs), theirs), (reach, reach))


@SHAPES
@HALVES
def test_error_contract_of_dact(emulated, dtype, shape):
    given = before_a_layer(*shape, dtype)
    dz = ended_dact(*given, "gelu_tanh", None)[0]
    exact, theirs = torchs_dact(*(it.double() for it in given), "gelu_tanh"), torchs_dact(*given, "gelu_tanh")
    reach = (given[0].double().abs() @ given[1].double().abs()) * 2
    assert_as_near(("dz",), (dz,), exact, theirs, (reach,))


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [B16, F16, F32], ids=str)
def test_one_product_where_it_serves(emulated, dtype, activation, bias, save):
    x, weight, b, _ = layer(16, 24, 32, dtype, bias=bias)
    (y, z), count = launches(ended, x, weight, b, activation, save)
    assert count == (1 if activation == "none" or (activation in ENDED and dtype != F32) else 2)
    assert z.shape == (y.shape if save and ACTIVATIONS[activation].saves == "z" else (0,))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [B16, F16, F32], ids=str)
def test_one_product_of_dact_where_it_serves(emulated, dtype, activation):
    dy, weight, z = before_a_layer(16, 24, 32, dtype)
    saved = z if ACTIVATIONS[activation].saves else z.new_empty(0)
    for bias_dtype, wants_h in itertools.product((None, dtype, F32), (False, True)):
        makes_h = wants_h and ACTIVATIONS[activation].saves == "z"
        serves = activation == "gelu_tanh" and dtype != F32 and bias_dtype is None and not makes_h
        before = emulated_variable("emulation_launches").value
        ended_dact(dy, weight, saved, activation, bias_dtype, wants_h=wants_h)
        assert (emulated_variable("emulation_launches").value - before == 1) == serves


def with_a_gap(matrix):
    return torch.cat([matrix, matrix[:, :1].repeat(1, 8)], 1)[:, :-8]


LAYOUTS = (torch.clone, transposed, with_a_gap, lambda it: with_a_gap(it.t()).t())


@SHAPES
@HALVES
def test_layouts_change_no_bit(emulated, dtype, shape):
    x, weight, bias, _ = layer(*shape, dtype)
    dy, _, z = before_a_layer(*shape, dtype)
    wanted, wanted_dz = ended(x, weight, bias, "gelu_tanh", True), ended_dact(dy, weight.t(), z, "gelu_tanh", None)[0]
    served = 0
    for of_x, of_weight in itertools.product(LAYOUTS, repeat=2):
        got, count = launches(ended, of_x(x), of_weight(weight), bias, "gelu_tanh", True)
        (dz, *_), of_dact = launches(ended_dact, of_x(dy), of_weight(weight.t()), with_a_gap(z), "gelu_tanh", None)
        served += count == 1
        assert count == 2 or all(map(torch.equal, got, wanted))
        assert of_dact == 2 or torch.equal(dz, wanted_dz)
    fit = 4 if shape[0] % 8 == 0 else 3 if shape[0] == 1 else 2  # of x's, whose columns are so long, or with a gap
    assert served == fit * len(LAYOUTS)


def test_what_does_not_fit_goes_the_other_way(emulated):
    x, weight, bias, _ = layer(16, 24, 32, B16)
    row = bias.unsqueeze(0)
    for each in (
        (beside_alignment(x), weight, bias),
        (x, beside_alignment(weight), bias),
        (x, weight, beside_alignment(row)[0]),
        (x, weight, every_second(row)[0]),
        (x, weight, bias[:1].expand(32)),
        layer(16, 24, 33, B16)[:3],
        layer(16, 20, 32, B16)[:3],
    ):
        (y, z), count = launches(ended, *each, "gelu_tanh", True)
        assert count == 2
        assert all(map(torch.equal, (y, z), forward(*each, "gelu_tanh", True)))
    dy, weight, z = before_a_layer(16, 24, 32, B16)
    for saved in (transposed(z), every_second(z), z[:1].expand(z.shape), beside_alignment(z)):
        (dz, *_), count = launches(ended_dact, dy, weight, saved, "gelu_tanh", None)
        assert count == 2
        assert torch.equal(dz, dact(dy, weight, saved, "gelu_tanh", None)[0])


def fail_at_each_call(monkeypatch, status):
    """Of a call for a shape that is new: what it said, or whether product and pass have computed."""
    failure = emulated_variable("emulation_calls_to_failure")
    monkeypatch.setattr(emulated_variable("emulation_cublaslt_failure"), "value", status)
    for call in itertools.count(1):
        x, weight, bias, _ = layer(16 * status, 24, 8 * call, B16)
        failure.value = call
        try:
            got = ended(x, weight, bias, "gelu_tanh", True)
        except RuntimeError as error:
            yield str(error).splitlines()[0]
        else:
            if failure.value > 0:
                failure.value = 0
                return
            ways = (way(x, weight, bias, "gelu_tanh", True) for way in (forward, ended))  # if it was a destructor
            yield any(all(map(torch.equal, got, way)) for way in ways)


def test_each_status_is_an_error(emulated, monkeypatch):
    ended(*layer(8, 8, 8, B16)[:3], "gelu_tanh", True)  # there is a handle
    said = {it for it in fail_at_each_call(monkeypatch, 14) if isinstance(it, str)}
    steps = "DescCreate", "DescSetAttribute", "PreferenceCreate", "PreferenceSetAttribute", "AlgoGetHeuristic", ""
    wanted = {f"cublasLtMatmul{step}: cublasLt fails with status 14" for step in steps}
    assert said == wanted | {"cublasLtMatrixLayoutCreate: cublasLt fails with status 14"}


@pytest.mark.parametrize("status", [7, 8, 15])
def test_what_it_refuses_goes_the_other_way(emulated, monkeypatch, status):
    ended(*layer(8, 8, 8, B16)[:3], "gelu_tanh", True)
    refused = [*fail_at_each_call(monkeypatch, status)]
    assert len(refused) > 10
    assert all(it is True for it in refused)


def test_no_algorithm(emulated, monkeypatch):
    x, weight, bias, _ = layer(24, 8, 80, F16)
    monkeypatch.setattr(emulated_variable("emulation_cublaslt_algorithms"), "value", 0)
    assert launches(ended, x, weight, bias, "gelu_tanh", True)[1] == 2
    monkeypatch.undo()
    monkeypatch.setattr(emulated_variable("emulation_cublaslt_proposed"), "value", 15)
    assert launches(ended, x, weight, bias, "gelu_tanh", True)[1] == 2
    monkeypatch.undo()
    assert launches(ended, x, weight, bias, "gelu_tanh", True)[1] == 1


def test_threads_share_what_is_known(emulated):
    cases = [layer(8 * n, 16, 8 * n, dtype)[:3] for n in range(1, 9) for dtype in (B16, F16)] * 4
    wanted = [ended(*case, "gelu_tanh", True) for case in cases]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda case: ended(*case, "gelu_tanh", True), cases))
    for one, other in zip(got, wanted, strict=True):
        assert all(map(torch.equal, one, other))


def test_a_process_without_cublaslt(emulated):
    """In one of its own, since what is found is kept."""
    done = subprocess.run([sys.executable, "-m", __name__], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def start_without_cublaslt():
    assert TARGETS["cpu-cuda"].why_missing() is None
    emulated_variable("emulation_cublaslt_functions").value = 10  # of 11
    with TARGETS["cpu-cuda"].active():
        assert launches(ended, *layer(16, 24, 32, B16)[:3], "none", True)[1] == 1  # torch's product, bias and all
        assert launches(ended, *layer(16, 24, 32, B16)[:3], "gelu_tanh", True)[1] == 2


if __name__ == "__main__":
    start_without_cublaslt()
