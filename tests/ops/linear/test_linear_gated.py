"""linear_gated: every kernel against fp64 in its error, layouts, sizes, and numbers that are not finite."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import mpkernels
from mpkernels.ops.linear.activations import ACTIVATIONS
from mpkernels.ops.linear.linear_gated import _linear_dgated, _linear_gated
from tests.block_cases import BLOCKS, arguments, assert_contract, results
from tests.linear_cases import TORCH, before_a_layer, integers, relative_error, transposed
from tests.ops.linear.pretended_cpu import products_in_halves
from tests.ops.linear.test_linear_act import DTYPES, HALVES, kinds, specials

B16, F32 = torch.bfloat16, torch.float32


def operands(rows, features, outputs, last, dtype, device):
    """Return x, both weights and biases, dy and the next layer's weight: whole numbers, whose sums are exact."""
    shapes = (rows, features), (2 * outputs, features), (2 * outputs,), (rows, last), (last, outputs)
    x, weight, bias, dy, out = (integers(*it, dtype=dtype, device=device, seed=i) for i, it in enumerate(shapes))
    return [x, *weight.chunk(2), *bias.chunk(2)], dy, out


def assert_exact(given, dy, out, activation="relu2"):
    for save in (True, False):
        got, want = (op(*given, activation, save) for op in (_linear_gated, _linear_gated.reference))
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert all(it.is_contiguous() for it in got)
    z = _linear_gated.reference(*given, activation, True)[1].clamp(-8, 8)
    for call in ((dy, out, z, activation, True), (dy[:, :1].expand(-1, len(given[1])), None, z, activation, False)):
        got, want = (op(*call) for op in (_linear_dgated, _linear_dgated.reference))
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert all(it.is_contiguous() for it in got)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_exact_at_the_edges_of_tiles(target, dtype):
    for sizes in ((63, 33, 65, 31), (65, 32, 64, 16), (129, 48, 136, 8), (64 * 9 + 1, 1, 129, 3), (1, 3, 1, 1)):
        assert_exact(*operands(*sizes, dtype, target.device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_exact_with_any_strides(target, dtype):
    given, dy, out = operands(33, 32, 48, 24, dtype, target.device)
    x, gate, up, gate_bias, up_bias = given
    apart = up.clone()
    for weights in ((gate, up), (up, gate), (gate, apart), (transposed(gate), apart), (gate, gate)):
        assert_exact([x, *weights, gate_bias, up_bias], dy, out)
    for strange in (up[:1].expand(48, -1), up[:, :1].expand(-1, 32)):  # their memory begins where gate's ends
        assert_exact([x, gate, strange, gate_bias, up_bias], dy, out)
    both = torch.cat((gate, up)).t().contiguous().t()
    assert_exact([transposed(x), *both.chunk(2), gate_bias, None], transposed(dy), transposed(out))
    assert_exact([x, gate[:1].expand(48, -1), up, None, up_bias[:1].expand(48)], dy[:1].expand(33, -1), out)
    wide = torch.cat((x, x, x), 1)[:, 1:33], torch.cat((gate, gate), 1)[:, ::2]
    assert_exact([*wide, up, None, None], dy, out)
    z = _linear_gated.reference(*given, "relu", True)[1]
    for strange in (transposed(z), torch.cat((z, z), 1)[:, ::2], z[:1].expand(33, -1)):
        got, want = (op(dy, out, strange, "relu", True) for op in (_linear_dgated, _linear_dgated.reference))
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [(0, 5, 3, 2), (4, 0, 3, 2), (4, 5, 0, 2), (4, 5, 3, 0), (0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_may_be_empty_in_any_dimension(target, sizes, dtype):
    given, dy, out = operands(*sizes, dtype, target.device)
    z = _linear_gated.reference(*given, "silu", True)[1]
    for op, call in (_linear_gated, (*given, "silu", True)), (_linear_dgated, (dy, out, z, "silu", True)):
        for got, want in zip(op(*call), op.reference(*call), strict=True):
            assert got.shape == want.shape
            roundings = 2 if target.device.type == "cuda" else 1  # torch's exp on a GPU is not the CPU's, nor ours
            assert relative_error(got, want) <= roundings * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["none", "relu", "relu2"])
def test_infs_and_nans_come_out_as_in_fp64(target, activation, dtype):
    """Other activations have a slope that becomes 0 only by rounding. inf times such a slope depends on it."""
    gate = specials(dtype).unsqueeze(1)
    one, half = torch.ones(1, 1, dtype=dtype), torch.full((1, 1), 0.5, dtype=dtype)
    h, _ = (
        it.cpu()
        for it in _linear_gated(*(it.to(target.device) for it in (gate, one, half)), None, None, activation, True)
    )
    wide = gate.double()
    assert torch.equal(kinds(h), kinds((TORCH[activation](wide) * (wide * 0.5)).to(dtype)))
    z = torch.cat((gate, torch.full_like(gate, 2.0)), 1).to(target.device)
    dz, again = (it.cpu() for it in _linear_dgated(torch.ones_like(gate).to(target.device), None, z, activation, True))
    leaf = wide.requires_grad_()
    (TORCH[activation](leaf) * 2).sum().backward()
    assert torch.equal(kinds(dz[:, :1]), kinds(leaf.grad.to(dtype)))
    assert torch.equal(kinds(dz[:, 1:]), kinds(TORCH[activation](wide).detach().to(dtype)))
    assert torch.equal(kinds(again), kinds((TORCH[activation](wide) * 2).detach().to(dtype)))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("in_halves", [0, 1], ids=["in fp32", "in halves"])
@pytest.mark.parametrize("name", ["gated mlp", "gated mlp stacked", "gated"])
def test_errors_stay_within_the_contract_on_every_cpu(name, in_halves, activation, dtype):
    *leaves, dy = arguments(name, dtype, (130, 75, 97, 66))
    with products_in_halves(bool(in_halves)):
        assert_contract(name, activation, leaves, dy)


@pytest.mark.each_value_once
@pytest.mark.parametrize("dtype", [*HALVES, F32], ids=str)
@pytest.mark.parametrize("name", ["gated mlp", "gated mlp stacked"])
def test_several_blocks_of_rows_give_the_references_result(name, dtype):
    """With so many outputs, a block has 32 rows."""
    *leaves, dy = arguments(name, dtype, (70, 3, 70_001, 2))
    given = BLOCKS[name].ours, "silu", leaves, dy
    with mpkernels.backend("native"):
        got = results(*given)
    with mpkernels.backend("reference"):
        want = results(*given)
    for mine, references in zip(got, want, strict=True):
        assert relative_error(mine, references) <= 8 * torch.finfo(dtype).eps  # sums over 70,001 features


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_h_is_rounded_once(target, dtype):
    """The products are exact, and so is z."""
    given, dy, out = operands(64, 8, 48, 8, dtype, target.device)
    h, z = _linear_gated(*given, "silu", True)
    gate, up = z.double().chunk(2, 1)
    assert relative_error(h, torch.nn.functional.silu(gate) * up) < 0.3 * torch.finfo(dtype).eps  # eps / sqrt(12)
    _, h_again = _linear_dgated(dy, out, z, "silu", True)
    torch.testing.assert_close(h_again, h, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.kernels("reference", "triton")  # the others leave 16-bit products to torch, on some CPUs
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_dz_is_rounded_once(target, dtype):
    """The product dh, from which dz is made, is not rounded to 16 bits."""
    dy, weight, _ = before_a_layer(130, 75, 97, dtype, target.device)
    z = before_a_layer(130, 75, 2 * 97, dtype, target.device, seed=1)[2]
    got = _linear_dgated(dy, weight, z, "sigmoid", True)
    leaf = z.double().requires_grad_()
    gate, up = leaf.chunk(2, 1)
    h = gate.sigmoid() * up
    h.backward(dy.double() @ weight.double())
    for mine, exact in zip((*got[0].chunk(2, 1), got[1]), (*leaf.grad.chunk(2, 1), h.detach()), strict=True):
        assert relative_error(mine, exact) < 1.05 * relative_error(exact.to(dtype), exact)  # the rest are fp32's errors


def test_autocast_changes_nothing_in_the_ops(target):
    given, dy, out = operands(5, 7, 9, 3, F32, target.device)
    calls = (
        (_linear_gated, (*given, "silu", True)),
        (_linear_dgated, (dy, out, torch.ones(5, 18).to(dy), "silu", True)),
    )
    for op, call in calls:
        want = op(*call)
        with torch.autocast(target.device.type, B16):
            assert all(map(torch.equal, op(*call), want))


def test_the_counted_flops_are_the_products():
    given, dy, out = operands(5, 7, 9, 3, F32, "cpu")
    with FlopCounterMode(display=False) as counter:
        _linear_gated(*given, "silu", True)
    assert counter.get_total_flops() == 2 * 2 * 5 * 7 * 9
    with FlopCounterMode(display=False) as counter:
        _linear_dgated(dy, out, torch.ones(5, 18), "silu", True)
    assert counter.get_total_flops() == 2 * 5 * 3 * 9
