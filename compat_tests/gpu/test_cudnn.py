"""The backend `cudnn` on the GPU, SM90 too: results, through a real module after a warm-up, and its declines."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor, nn

import fusepatch
from fusepatch import selfcheck
from fusepatch.kernels.gated_mlp import choose, cudnn
from gpu.fused_cases import DEVICE, assert_like_reference, data, run, why_not
from support import is_within_parity, relative_error, tiny_llama_mlp

CUDNN = next((backend for backend in choose.BACKENDS if backend.name == "cudnn"), None)


def _why_not() -> str:
    found = why_not("cudnn")
    if not found and torch.cuda.is_available() and (cudnn.drift() or cudnn.why_not() is not None):
        return f"not the frontend or the cuDNN that it needs: {cudnn.drift()}"
    return found


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_why_not()), reason=_why_not())]
TOKENS, HIDDEN, INNER = 264, 512, 1536


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    """One memory of self-checks for the whole file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusepatch.settings._default_cache_dir", lambda: tmp_path_factory.getbasetemp() / "cache")
        yield


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPATCH_GATED_MLP_BACKEND", "cudnn")


def _mlp() -> nn.Module:
    return tiny_llama_mlp(torch.bfloat16, hidden_size=HIDDEN, intermediate_size=INNER).cuda()


def _calls() -> dict[str, int]:
    return fusepatch.status().targets[0].total("calls")


@pytest.mark.parametrize("tokens", [1, 7, TOKENS])
def test_against_fp64(tokens: int) -> None:
    assert_like_reference(CUDNN, data(tokens, HIDDEN, INNER, apart=0))


@pytest.mark.parametrize("wanted", [("x",), ("gate_weight", "up_weight"), ("down_weight",), ()], ids=str)
def test_wanted_gradients(wanted: tuple[str, ...]) -> None:
    given = data(TOKENS, HIDDEN, INNER, apart=0)
    everything = run(CUDNN, given)
    for name, result in run(CUDNN, given, wanted=wanted).items():
        assert relative_error(result, everything[name]) < 4e-3, name


def test_an_expanded_incoming_gradient() -> None:
    given = data(TOKENS, HIDDEN, INNER, apart=0)
    strange = given["dout"][:1, :1].expand_as(given["dout"])
    plain = run(CUDNN, {**given, "dout": strange.contiguous().clone()})
    for name, result in run(CUDNN, {**given, "dout": strange}).items():
        assert relative_error(result, plain[name]) < 4e-3, name


def test_selfcheck_passes() -> None:
    case = selfcheck.Check("fusepatch.kernels.gated_mlp.check", "cudnn fused bfloat16 silu")
    assert selfcheck.verdict(case, DEVICE) == selfcheck.Verdict(selfcheck.Outcome.PASSED)


def _step(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    leaf = x.detach().requires_grad_()
    out = module(leaf)
    out.backward(x.flip(0))
    return {"out": out.detach(), "x": leaf.grad, **{name: p.grad.clone() for name, p in module.named_parameters()}}


def test_a_real_module_after_a_warm_up(named: None) -> None:
    mlp = _mlp()
    x = torch.randn(4, TOKENS // 4, HIDDEN, device="cuda", dtype=torch.bfloat16)
    stock = _step(mlp, x)
    with fusepatch.accelerated("gated_mlp"):
        _step(mlp, x)
        assert _calls() == {"original": 1}, "a number of tokens is admitted by warmup() alone"
        assert fusepatch.warmup(mlp, TOKENS).native == 1
        patched = _step(mlp, x)
        with torch.no_grad():
            mlp(x)
        assert _calls() == {"original": 1, "fused": 2}
        assert "3*M*I" in str(fusepatch.status())
    exact = _step(mlp.float(), x.float())
    for name, expected in exact.items():
        errors = relative_error(patched[name], expected), relative_error(stock[name], expected)
        assert is_within_parity(*errors), (name, errors)


def _plans() -> dict[str, int]:
    """How many plans the frontend keeps, by cache."""
    module = importlib.import_module("cudnn.gemm.ops.swiglu_mlp")
    return {name: len(getattr(module, name)) for name in cudnn.INTERFACE if name.endswith("_CACHE")}


def test_after_a_warm_up_no_call_makes_a_plan_or_stops_the_device(named: None) -> None:
    mlp = _mlp()
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    with fusepatch.accelerated("gated_mlp"):
        fusepatch.warmup(mlp, TOKENS)
        before, plans = _calls(), _plans()
        assert sum(plans.values()) > 4
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            mlp(x).backward(x)
            with torch.no_grad():
                mlp(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert _calls().get("fused", 0) == before.get("fused", 0) + 2
        assert _plans() == plans


def test_another_stream_and_capture_are_declined(named: None) -> None:
    mlp = _mlp()
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    with fusepatch.accelerated("gated_mlp"), torch.no_grad():
        fusepatch.warmup(mlp, TOKENS)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            mlp(x)
        torch.cuda.current_stream().wait_stream(side)
        assert _calls() == {"original": 1}
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            mlp(x)
        declines = fusepatch.status().targets[0].total("declines")
        assert "fused" not in _calls()
        assert declines.get("size-not-admitted") == 1
