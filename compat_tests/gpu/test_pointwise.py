"""The Triton pointwise kernels on the GPU: through the op, through real models, and their self-check."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusepatch
from fusepatch import ops, selfcheck
from fusepatch.kernels.gated_mlp import choose, op, pointwise
from gpu.graphs import assert_a_step_is_captured_and_replayed_after_warmup
from support import is_within_parity, relative_error, tiny_llama, tiny_llama_mlp

pytestmark = pytest.mark.gpu

REFERENCE = choose.REFERENCE
TRITON = choose.BACKENDS[0]
CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    """One memory of self-checks for the whole file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusepatch.settings._default_cache_dir", lambda: tmp_path_factory.getbasetemp() / "cache")
        yield


def _calls() -> dict[str, int]:
    return fusepatch.status().targets[0].total("calls")


LAYOUTS = {
    "flat": lambda a, b, c, **kind: torch.randn(a, b, c, **kind),
    "half of packed": lambda a, b, c, **kind: torch.randn(a, b, 2 * c, **kind)[..., c:],
    "transposed": lambda a, b, c, **kind: torch.randn(b, a, c, **kind).transpose(0, 1),
}


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 1, 8), (3, 5, 331), (2, 129, 11008)])
def test_against_fp64(shape: tuple[int, ...], layout: str, dtype: torch.dtype, activation: str) -> None:
    gate, up, dh = (LAYOUTS[layout](*shape, dtype=dtype, device="cuda") for _ in range(3))
    assert gate.is_contiguous() is (layout == "flat" or shape[:2] == (1, 1))

    def run(backend: choose.Backend, cast: torch.dtype) -> dict[str, Tensor]:
        leaves = [t.detach().to(cast).requires_grad_() for t in (gate, up)]
        h = op.run_act_mul(backend, *leaves, activation)
        return dict(zip(("h", "d_gate", "d_up"), (h, *torch.autograd.grad(h, leaves, dh.to(cast))), strict=True))

    exact, plain, ours = run(REFERENCE, torch.float64), run(REFERENCE, dtype), run(TRITON, dtype)
    for name, expected in exact.items():
        assert ours[name].dtype is dtype
        error, stock = relative_error(ours[name], expected), relative_error(plain[name], expected)
        assert error <= 1.05 * stock + 1e-6, (name, error, stock)


def test_offsets_beyond_32_bits() -> None:
    rows, inner = 2**17 + 3, 2**14 + 8
    assert rows * inner > 2**31
    gate = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    up = torch.randn_like(gate)
    d_up = torch.empty_like(gate)
    h = pointwise.act_mul(gate, up, "silu")
    pointwise.act_mul_backward(up, gate, up, "silu", d_gate=None, d_up=d_up)
    tail = slice(-5, None)
    assert torch.equal(h[tail], pointwise.act_mul(gate[tail], up[tail], "silu"))
    assert torch.equal(d_up[tail], h[tail])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("overrides", [{}, {"hidden_act": "gelu_pytorch_tanh"}, {"mlp_bias": True}], ids=str)
def test_models_run_natively_within_parity(dtype: torch.dtype, overrides: dict[str, object]) -> None:
    ids = torch.randint(0, 128, (2, 1024), device="cuda")

    def step(model: torch.nn.Module) -> dict[str, Tensor]:
        out = model(ids, labels=ids)
        out.loss.backward()
        return {"logits": out.logits.detach(), **{name: p.grad for name, p in model.named_parameters()}}

    def build(cast: torch.dtype) -> torch.nn.Module:
        model = tiny_llama(dtype, hidden_size=1024, intermediate_size=16384, **overrides)
        return model.to(cast).cuda()

    exact, stock = step(build(torch.float32)), step(build(dtype))
    with fusepatch.accelerated("gated_mlp", strict=True):
        patched = step(build(dtype))
        assert _calls() == {"pointwise": 2}
    for name, expected in exact.items():
        if expected.numel() >= 256:
            errors = relative_error(patched[name], expected), relative_error(stock[name], expected)
            assert is_within_parity(*errors), (name, errors)


def test_packed_gradient_is_one_tensor() -> None:
    gate_up = torch.randn(64, 2 * 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ops.act_mul_packed(gate_up).sum().backward()
    expected = gate_up.detach().float().requires_grad_()
    gate, up = expected.chunk(2, -1)
    (torch.nn.functional.silu(gate) * up).sum().backward()
    assert relative_error(gate_up.grad, expected.grad) < 4e-3


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(use_reentrant: bool) -> None:
    gate, up = (torch.randn(64, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    plain = torch.autograd.grad(ops.act_mul(gate, up).sum(), (gate, up))
    out = checkpoint(ops.act_mul, gate, up, use_reentrant=use_reentrant)
    out.sum().backward()
    assert torch.equal(gate.grad, plain[0])
    assert torch.equal(up.grad, plain[1])


def test_two_streams_at_once() -> None:
    gate, up = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    expected = ops.act_mul(gate, up)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for stream in streams * 4:
        with torch.cuda.stream(stream):
            results.append(ops.act_mul(gate, up))
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


def test_training_step_is_captured_and_replayed_after_warmup() -> None:
    mlp = tiny_llama_mlp(torch.bfloat16, hidden_size=1024, intermediate_size=16384).cuda()
    fusepatch.accelerate()
    assert_a_step_is_captured_and_replayed_after_warmup(mlp, 2048, "pointwise")


def test_cold_size_declines_under_capture() -> None:
    mlp = tiny_llama_mlp(torch.bfloat16, hidden_size=1024, intermediate_size=16384).cuda()
    fusepatch.accelerate()
    with torch.no_grad():
        mlp(torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16))
        cold = torch.randn(3000, 1024, device="cuda", dtype=torch.bfloat16)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            mlp(cold)
    assert fusepatch.status().targets[0].total("declines")["capture-cold"] == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_selfcheck_passes(dtype: str, activation: str) -> None:
    check = selfcheck.Check("fusepatch.kernels.gated_mlp.check", f"triton pointwise {dtype} {activation}")
    assert selfcheck.verdict(check, CUDA).outcome is selfcheck.Outcome.PASSED


def test_a_failed_selfcheck_runs_the_original(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("FUSEPATCH_CACHE_DIR", str(tmp_path))
    failed = selfcheck.Verdict(selfcheck.Outcome.FAILED, "planted")
    monkeypatch.setattr(selfcheck, "run", lambda check, device: failed)
    selfcheck.forget()
    choose.TABLE.forget()
    mlp = tiny_llama_mlp(torch.bfloat16, hidden_size=1024, intermediate_size=16384).cuda()
    x = torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16)
    stock = mlp(x)
    fusepatch.accelerate()
    assert torch.equal(mlp(x), stock)
    assert fusepatch.status().targets[0].total("declines") == {"selfcheck-failed": 1}
    selfcheck.forget()
