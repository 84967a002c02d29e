"""The kernels as operators of torch: schema, fake implementation and dispatch, and what they are given by a mode."""

from __future__ import annotations

import pytest
import torch
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
    with pytest.raises(StopIteration):
        FUSED.act_mul(rand(M, INNER), rand(M, INNER), "silu", "nobody")
