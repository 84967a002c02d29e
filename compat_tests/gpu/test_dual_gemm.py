"""The fused route's Triton kernels on the GPU: what must hold of every fused backend, biases, and a real model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fusepatch
from fusepatch.kernels.gated_mlp import choose
from gpu.fused_cases import (
    DEVICE,
    NAMES,
    FusedCases,
    assert_nothing_outside,
    data,
    run,
    why_not,
)
from gpu.graphs import assert_a_step_is_captured_and_replayed_after_warmup
from support import is_within_parity, relative_error, tiny_llama_mlp

dual_gemm = pytest.importorskip("fusepatch.kernels.gated_mlp.dual_gemm")
TRITON_GEMM = next((backend for backend in choose.BACKENDS if backend.name == "triton_gemm"), None)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not("triton_gemm")), reason=why_not("triton_gemm"))]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    """One memory of self-checks for the whole file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusepatch.settings._default_cache_dir", lambda: tmp_path_factory.getbasetemp() / "cache")
        yield


class TestTritonGemm(FusedCases):
    BACKEND = TRITON_GEMM
    KERNELS = dual_gemm


def test_the_shared_cases_have_one_for_each_tile() -> None:
    assert dual_gemm.tile_of(72, 20488) is dual_gemm.LARGE
    assert dual_gemm.tile_of(4099, 1352) is dual_gemm.LARGE
    assert dual_gemm.tile_of(257, 1352) is dual_gemm.SMALL


# ------------------------------------------------------------------------------------------------- launched directly


@pytest.mark.parametrize("tile", ["SMALL", "LARGE"])
@pytest.mark.parametrize("tokens", [1, 257, 4099])
def test_nothing_is_written_outside_of_the_results(tokens: int, tile: str) -> None:
    how = dual_gemm.Run(DEVICE, torch.bfloat16, "silu", getattr(dual_gemm, tile))

    def forward(given: dict[str, Tensor], h: Tensor, gate_up: Tensor) -> None:
        weights = given["gate_weight"], given["up_weight"]
        dual_gemm._forward(how, given["x"], *weights, (None, None), h, gate_up)

    def backward(given: dict[str, Tensor], gate_up: Tensor, d_gate_up: Tensor, h: Tensor) -> None:
        dual_gemm._backward(how, given["dout"], given["down_weight"], gate_up, d_gate_up, h)

    assert_nothing_outside(forward, backward, tokens)


def test_both_tiles_agree() -> None:
    given = data(257, 200, 1352)
    found = []
    for tile in (dual_gemm.SMALL, dual_gemm.LARGE):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dual_gemm, "tile_of", lambda tokens, inner, tile=tile: tile)
            found.append(run(TRITON_GEMM, given))
    for name, result in found[0].items():
        assert relative_error(result, found[1][name]) < 1e-3, name


# ------------------------------------------------------------------------------------------------- through the library


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPATCH_GATED_MLP_BACKEND", "triton_gemm")


def _step(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    leaf = x.detach().requires_grad_()
    out = module(leaf)
    out.backward(x.flip(0))
    return {"out": out.detach(), "x": leaf.grad, **{name: p.grad.clone() for name, p in module.named_parameters()}}


@pytest.mark.parametrize("bias", [False, True], ids=["", "biased"])
def test_a_real_module_runs_fused_and_within_parity(named: None, bias: bool) -> None:
    mlp = tiny_llama_mlp(torch.bfloat16, hidden_size=1024, intermediate_size=3072, mlp_bias=bias).cuda()
    x = torch.randn(4, 1024, 1024, device="cuda", dtype=torch.bfloat16)
    stock = _step(mlp, x)
    with fusepatch.accelerated("gated_mlp", strict=True):
        patched = _step(mlp, x)
        assert fusepatch.status().targets[0].total("calls") == {"fused": 1}
    exact = _step(mlp.float(), x.float())
    for name, expected in exact.items():
        errors = relative_error(patched[name], expected), relative_error(stock[name], expected)
        assert is_within_parity(*errors), (name, errors)


def test_training_step_is_captured_and_replayed_after_warmup(named: None) -> None:
    mlp = tiny_llama_mlp(torch.bfloat16, hidden_size=1024, intermediate_size=3072).cuda()
    fusepatch.accelerate("gated_mlp", strict=True)
    assert_a_step_is_captured_and_replayed_after_warmup(mlp, 2048, "fused")


def test_names_are_those_of_the_op() -> None:
    given = data(8, 72, 136)
    plain = run(TRITON_GEMM, given)["out"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEPATCH_GATED_MLP_BACKEND", "triton_gemm")
        assert torch.equal(fusepatch.ops.gated_mlp(*(given[name] for name in NAMES)), plain)
