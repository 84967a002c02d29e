"""The kernels as operators of torch: schema, fake implementation and dispatch, and what they are given by a mode."""

from __future__ import annotations

import pytest
import torch
from plain_products import PlainProducts, with_products
from torch import Tensor
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from fusepatch.kernels.gated_mlp import choose, library, op, reference

M, H, INNER = 5, 8, 12
FUSED = torch.ops.fusepatch


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


@pytest.fixture(autouse=True)
def made() -> None:
    library.operators(choose.REFERENCE)


@pytest.mark.parametrize("want", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokens", [M, 1, 0])
def test_dual_gemm_act(tokens: int, bias: bool, want: bool) -> None:
    biases = (rand(INNER), rand(INNER)) if bias else (None, None)
    args = (rand(tokens, H), rand(INNER, H), rand(INNER, H), *biases, "silu", want, "reference")
    opcheck(FUSED.dual_gemm_act.default, args)
    packed = rand(2 * INNER, H)
    opcheck(
        FUSED.dual_gemm_act.default,
        (rand(tokens, H), packed[:INNER], packed[INNER:], None, None, "gelu", want, "reference"),
    )


@pytest.mark.parametrize("want", [True, False])
@pytest.mark.parametrize("tokens", [M, 1, 0])
def test_gemm_dact(tokens: int, want: bool) -> None:
    opcheck(
        FUSED.gemm_dact.default, (rand(tokens, H), rand(H, INNER), rand(tokens, 2 * INNER), "gelu", want, "reference")
    )
    strided = rand(tokens, 2 * H)[:, :H]
    opcheck(FUSED.gemm_dact.default, (strided, rand(H, INNER), rand(tokens, 2 * INNER), "silu", want, "reference"))


@pytest.mark.parametrize("shape", [(M, INNER), (2, 3, INNER), (0, INNER)])
def test_act_mul(shape: tuple[int, ...]) -> None:
    opcheck(FUSED.act_mul.default, (rand(*shape), rand(*shape), "gelu_tanh", "reference"))
    both = torch.cat((rand(*shape), rand(*shape)), dim=-1)
    opcheck(FUSED.act_mul.default, (*both.chunk(2, dim=-1), "silu", "reference"))


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_act_mul_backward(wanted: tuple[bool, bool]) -> None:
    gradients = [torch.zeros(M, INNER) if want else None for want in wanted]
    opcheck(
        FUSED.act_mul_backward.default,
        (rand(M, INNER), rand(M, INNER), rand(M, INNER), "silu", *gradients, "reference"),
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("frozen", [(), (0,), (1, 2), (3,)], ids=str)
def test_gated_mlp(packed: bool, bias: bool, frozen: tuple[int, ...]) -> None:
    """opcheck compares the gradients in a compiler's graph with those in eager mode; these with the op's own."""
    weights = (rand(2 * INNER, H), None) if packed else (rand(INNER, H), rand(INNER, H) * 2)
    tensors = [rand(M, H), *weights, rand(H, INNER), rand(H) if bias else None]
    for index, tensor in enumerate(tensors):
        if tensor is not None and index not in frozen:
            tensor.requires_grad_()
    opcheck(FUSED.gated_mlp.default, (*tensors, "silu", True, "reference"))
    present = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    out, _ = FUSED.gated_mlp(*tensors, "silu", True, "reference")
    found = torch.autograd.grad(out, present, rand(M, H))
    x, gate, up, down, down_bias = tensors
    assert x is not None and gate is not None and down is not None
    if packed:
        expected = op.gated_mlp_packed(x, gate, down, down_bias=down_bias)
    else:
        expected = op.gated_mlp(x, gate, up, down, down_bias=down_bias)
    assert torch.equal(out, expected)
    gradients = torch.autograd.grad(expected, present, rand(M, H))
    assert all(torch.equal(one, other) for one, other in zip(found, gradients, strict=True))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> PlainProducts:
    made = PlainProducts()
    backend = with_products(monkeypatch, made)
    monkeypatch.setattr(library, "_named", lambda name: backend)
    return made


@pytest.mark.parametrize("packed", [True, False])
def test_products(products: PlainProducts, packed: bool) -> None:
    d_gate_up, weights = rand(M, 2 * INNER), (rand(2 * INNER, H), None) if packed else (rand(INNER, H), rand(INNER, H))
    opcheck(FUSED.product_dx.default, (d_gate_up, *weights, "reference"))
    opcheck(FUSED.product_d_weights.default, (d_gate_up, rand(M, H), packed, "reference"))
    opcheck(FUSED.product_d_down.default, (rand(M, H), rand(M, INNER), "reference"))
    assert {"dx", "d_weights", "d_down"} == set(products.asked)


def test_flops_of_products(products: PlainProducts) -> None:
    with FlopCounterMode(display=False) as counter:
        FUSED.product_dx(rand(M, 2 * INNER), rand(INNER, H), rand(INNER, H), "reference")
        FUSED.product_d_weights(rand(M, 2 * INNER), rand(M, H), False, "reference")
        FUSED.product_d_down(rand(M, H), rand(M, INNER), "reference")
    assert counter.get_total_flops() == 2 * M * H * INNER * 5


def test_gated_mlp_without_gradients() -> None:
    args = (rand(M, H), rand(INNER, H), rand(INNER, H), rand(H, INNER), None, "gelu", False, "reference")
    opcheck(FUSED.gated_mlp.default, args)
    assert FUSED.gated_mlp(*args)[1].numel() == 0
    args[0].requires_grad_()
    with pytest.raises(RuntimeError, match="save=True"):
        FUSED.gated_mlp(*args)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_in_a_mode_the_results_are_the_same(packed: bool, recompute: bool) -> None:
    """And the floating-point operations are those of plain linear layers."""

    def run() -> list[Tensor]:
        x, down = rand(M, H).requires_grad_(), rand(H, INNER).requires_grad_()
        weights = (
            [rand(2 * INNER, H).requires_grad_()] if packed else [rand(INNER, H).requires_grad_() for _ in range(2)]
        )
        function = op.gated_mlp_packed if packed else op.gated_mlp
        out = function(x, *weights, down, recompute=recompute)
        out.sum().backward()
        return [out.detach(), x.grad, down.grad, *(weight.grad for weight in weights)]

    plain = run()
    with FlopCounterMode(display=False) as counter:
        found = run()
    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))
    gemm = 2 * M * H * INNER
    assert counter.get_total_flops() == gemm * (3 + 6 + 2 * recompute)


def test_an_operator_calls_the_backend_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "act_mul", lambda gate, up, activation: gate * 0 + 7)
    assert (FUSED.act_mul(rand(M, INNER), rand(M, INNER), "silu", "reference") == 7).all()
    with pytest.raises(LookupError, match="nobody"):
        FUSED.act_mul(rand(M, INNER), rand(M, INNER), "silu", "nobody")


@pytest.mark.parametrize("kind", ["op", "packed", "operator", "act_mul"])
def test_a_backward_pass_inside_autocast_is_the_one_outside(kind: str) -> None:
    """Autocast is for forward passes; what the kernels read is in one dtype."""

    def run(inside: bool) -> list[Tensor]:
        x, down = rand(M, H).requires_grad_(), rand(H, INNER).requires_grad_()
        gate, up = (rand(INNER, H) * n for n in (1, 2))
        weights = [w.requires_grad_() for w in ((torch.cat((gate, up)),) if kind == "packed" else (gate, up))]
        if kind == "operator":
            out, _ = FUSED.gated_mlp(x, *weights, down, None, "silu", True, "reference")
        elif kind == "act_mul":
            weights = [rand(M, INNER).requires_grad_(), rand(M, INNER).requires_grad_()]
            return list(backward(op.act_mul(*weights), weights, inside))
        else:
            out = (op.gated_mlp_packed if kind == "packed" else op.gated_mlp)(x, *weights, down)
        return list(backward(out, [x, down, *weights], inside))

    def backward(out: Tensor, inputs: list[Tensor], inside: bool) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return torch.autograd.grad(out, inputs, torch.ones_like(out))

    assert all(torch.equal(one, other) for one, other in zip(run(True), run(False), strict=True))
