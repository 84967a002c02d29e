"""The Engram gate's Triton kernels on the GPU: numerics, graphs, what plans may not do, self-check, a small Qwen4-Exp.

Beyond NVIDIA's kernel, which takes width 5120, four streams, a multiple of 64 up to 8192 tokens, and SM100 alone: 1, 7,
301 and 9000 tokens, other widths and numbers of streams.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fusepatch
from fusepatch import ops, selfcheck
from fusepatch.kernels import backends
from fusepatch.kernels.engram_gate import choose, op, reference
from fusepatch.ops import EngramGatePlan
from support import is_within_parity, relative_error

pytestmark = pytest.mark.gpu

TRITON = next(backend for backend in choose.BACKENDS if backend.name == "triton")
CUDA = torch.device("cuda", 0)
NAMES = ("x", "kv", "weight")
Named = dict[str, Tensor]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One memory of self-checks for the whole file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusepatch.settings._default_cache_dir", lambda: tmp_path_factory.getbasetemp() / "cache")
        yield


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels serve where they are named alone, until they were measured."""
    monkeypatch.setenv("FUSEPATCH_ENGRAM_GATE_BACKEND", "triton")


def inputs(tokens: int, streams: int, width: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Named:
    """Random data: keys lean towards x or away by as much as the token says; `dout` too."""
    generator = torch.Generator("cuda").manual_seed(seed)
    normal = functools.partial(torch.randn, generator=generator, device=CUDA)
    x = normal(tokens, streams, width)
    lean = torch.linspace(-1, 1, tokens, device=CUDA).view(-1, 1, 1) if tokens > 1 else 1.0
    kv = torch.cat([(lean * x + normal(tokens, streams, width)).flatten(1), normal(tokens, width)], 1)
    found = {"x": x, "kv": kv, "dout": normal(tokens, streams, width)}
    return {**{n: t.to(dtype) for n, t in found.items()}, "weight": 1 + 0.2 * normal(streams, width)}


def run(
    backend: Any, p: Named, mask: Tensor | None = None, *, residual: bool = True, zero_dot: str = "copysign",
    eps: float = 1e-20, norms: tuple[Tensor, Tensor] | None = None,
) -> Named:  # fmt: skip
    """Output and gradients."""
    leaves = [p[name].detach().requires_grad_() for name in NAMES]
    call = op.Call(backend, eps, residual, zero_dot)
    out = op.run_engram_gate(call, leaves[0], leaves[1], None, leaves[2], mask, norms)
    return {"out": out.detach(), **dict(zip(NAMES, torch.autograd.grad(out, leaves, p["dout"]), strict=True))}


def check(p: Named, mask: Tensor | None = None, **options: Any) -> Named:
    """Holds the kernels to the parity bound on the error of plain PyTorch, and returns what they gave."""
    exact = run(choose.REFERENCE, {n: t.double() for n, t in p.items()}, mask, **options)
    plain, ours = run(choose.REFERENCE, p, mask, **options), run(TRITON, p, mask, **options)
    for name, expected in exact.items():
        assert ours[name].dtype is plain[name].dtype
        error, stock = relative_error(ours[name], expected), relative_error(plain[name], expected)
        assert is_within_parity(error, stock), (name, error, stock)
    return ours


# ------------------------------------------------------------------------------------------------------------ numerics


@pytest.mark.parametrize("tokens", [1, 7, 301, 9000])
def test_the_width_it_is_tuned_for(tokens: int) -> None:
    p = inputs(tokens, 4, 5120)
    mask = torch.arange(tokens, device=CUDA) % 3 != 1 if tokens == 301 else None
    found = check(p, mask)
    if mask is not None:
        assert torch.equal(found["out"][~mask], p["x"][~mask])
        assert torch.equal(found["x"][~mask], p["dout"][~mask])
        assert not found["kv"][~mask].any()


OTHERS = {
    "one stream, the smallest width": (2500, 1, 8),
    "a tail that is partly there": (77, 3, 2840),
    "more streams than registers hold": (65, 6, 280),
    "wider than registers hold": (33, 2, 8200),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_sizes(other: str) -> None:
    check(inputs(*OTHERS[other]), residual=False, zero_dot="sign", eps=1e-6)


def test_float32() -> None:
    check(inputs(65, 4, 5120, torch.float32))


def test_query_and_key_rounded_apart() -> None:
    p = inputs(301, 4, 2048)
    query, key = p["weight"], 2 - p["weight"].flip(0)
    check({**p, "weight": query * key}, residual=False, zero_dot="sign", eps=1e-6, norms=(query, key))


@pytest.mark.parametrize("zero_dot", reference.ZERO_DOTS)
def test_dots_of_zero_and_the_clamp(zero_dot: str) -> None:
    p = {name: t.float() for name, t in inputs(6, 1, 16).items()}
    p["x"].zero_()
    p["kv"].zero_()
    p["kv"][:, 16:] = 1
    p["x"][..., 0] = 4
    sizes = torch.tensor([0.0, -0.0, 0.9e-6, -0.9e-6, 1.1e-6, -1.1e-6])
    p["kv"][:, 0], p["kv"][:, 1] = sizes.cuda(), 4  # of unit mean square, and so turned that the dot is `size`
    p["weight"].fill_(1)
    found = run(TRITON, p, residual=False, zero_dot=zero_dot)
    exact = run(choose.REFERENCE, {n: t.double() for n, t in p.items()}, residual=False, zero_dot=zero_dot)
    assert relative_error(found["out"], exact["out"]) < 1e-6
    assert not found["x"][:4].any() and found["x"][4:].any()
    for name in ("x", "kv"):
        assert relative_error(found[name][4:], exact[name][4:]) < 1e-3


def test_dots_next_to_zero_are_not_those_of_a_sum_in_fp32() -> None:
    """Of random tokens, of which the nearest to 0 make most of the error of the weight's gradient."""
    tokens, streams, width = 4096, 4, 5120
    p = inputs(tokens, streams, width)
    p["kv"].normal_(generator=torch.Generator("cuda").manual_seed(1))
    key, value = op.split_keys(p["kv"][:, : streams * width], streams), p["kv"][:, streams * width :]

    def dots_of(forward: Any) -> Tensor:
        out, saved = torch.empty_like(p["x"]), torch.empty(tokens, streams, 4, device=CUDA)
        forward(p["x"], key, value, p["weight"], None, 1e-20, True, "copysign", out_MSD=out, saved_MS4=saved)
        return saved[..., 1].double()

    exact = torch.cat([
        (x.double() * p["weight"].double() * k.double()).sum(-1)
        / (x.double().norm(dim=-1) * k.double().norm(dim=-1)) * width**0.5
        for x, k in zip(p["x"].split(512), key.split(512), strict=True)
    ])  # fmt: skip
    near = exact.abs() < 9e-4
    assert near.sum() > 2
    ours, plain = (dots_of(backends.load(TRITON).engram_forward)), dots_of(reference.engram_forward)
    assert (ours - exact)[near].norm() < 0.05 * (plain - exact)[near].norm()
    assert ((ours - exact) / exact)[near].abs().max() < 1e-5


def test_masked_tokens_may_hold_anything() -> None:
    p = inputs(9, 4, 5120)
    mask = torch.arange(9, device=CUDA) % 2 == 0
    clean = run(TRITON, p, mask)
    p["kv"][1], p["kv"][3], p["x"][5] = math.nan, math.inf, -0.0
    found = run(TRITON, p, mask)
    assert torch.equal(found["out"].view(torch.int16)[~mask], p["x"].view(torch.int16)[~mask])
    for name in ("out", "x", "kv"):
        assert torch.equal(found[name][mask], clean[name][mask])
    assert torch.equal(found["weight"], clean["weight"])
    assert not found["kv"][~mask].any()


def test_offsets_beyond_32_bits() -> None:
    """2^31 elements and more between the first token and the last, in every tensor."""
    streams, width = 4, 512
    tokens = 2**31 // (streams * width) + 9
    x = torch.zeros(tokens, streams, width, dtype=torch.bfloat16, device=CUDA)
    kv = torch.zeros(tokens, (streams + 1) * width, dtype=torch.bfloat16, device=CUDA)
    p = inputs(7, streams, width)
    x[-7:], kv[-7:] = p["x"], p["kv"]
    out = torch.empty_like(x)
    saved = torch.empty(tokens, streams, 4, device=CUDA)
    call = (p["weight"], None, 1e-20, True, "copysign")
    kernels = backends.load(TRITON)
    split = lambda t: (op.split_keys(t[:, : streams * width], streams), t[:, streams * width :])
    kernels.engram_forward(x, *split(kv), *call, out_MSD=out, saved_MS4=saved)
    expected = run(TRITON, p)
    assert torch.equal(out[-7:], expected["out"])
    del out
    dout = torch.zeros_like(x)
    dout[-7:] = p["dout"]
    grad_x, grad_kv = torch.empty_like(x), torch.empty_like(kv)
    grad_key, grad_value = split(grad_kv)
    kernels.engram_backward(
        dout, x, *split(kv), p["weight"], saved, True, False,
        grad_x_MSD=grad_x, grad_key_MSD=grad_key, grad_value_MD=grad_value, grad_weight_SD=None,
    )  # fmt: skip
    assert torch.equal(grad_x[-7:], expected["x"])
    assert torch.equal(grad_kv[-7:], expected["kv"])


def test_the_same_bits_each_time() -> None:
    p = inputs(1237, 4, 5120)
    first, second = run(TRITON, p), run(TRITON, p)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_two_streams_at_once() -> None:
    p = inputs(1024, 4, 5120)
    expected = run(TRITON, p)
    torch.cuda.synchronize()
    found = []
    for stream in [torch.cuda.Stream() for _ in range(2)] * 3:
        with torch.cuda.stream(stream):
            found.append(run(TRITON, p))
    torch.cuda.synchronize()
    assert all(torch.equal(each[name], expected[name]) for each in found for name in expected)


def test_any_layout() -> None:
    p = inputs(12, 4, 2048)
    expected = run(TRITON, p)
    wide = torch.zeros(12, p["kv"].shape[1] + 8, dtype=torch.bfloat16, device=CUDA)
    wide[:, :-8] = p["kv"]
    odd = torch.zeros(12, p["kv"].shape[1] + 3, dtype=torch.bfloat16, device=CUDA)
    odd[:, 3:] = p["kv"]
    turned = p["x"].transpose(0, 1).contiguous().transpose(0, 1)
    for changed in ({"kv": wide[:, :-8]}, {"kv": odd[:, 3:]}, {"x": turned}, {"dout": turned * 0 + p["dout"]}):
        found = run(TRITON, {**p, **changed})
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_distance_between_tokens_beyond_32_bits() -> None:
    """Of one token, where it means nothing: an argument of another type, by another compiled kernel."""
    p = inputs(1, 4, 5120)
    expected = run(TRITON, p)
    far = {name: p[name].as_strided(p[name].shape, (8 * 2**31, *p[name].stride()[1:])) for name in ("x", "kv")}
    found = run(TRITON, {**p, **far})
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_later_calls_launch_what_the_first_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is not asked again which compiled kernel serves a call, whatever its number of tokens and layout."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("Triton was asked")

    p = inputs(301, 4, 5120)
    expected = run(TRITON, p)
    monkeypatch.setattr("triton.runtime.jit.JITFunction.run", refuse)
    found = run(TRITON, p)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    few = run(TRITON, {name: t if name == "weight" else t[:16] for name, t in p.items()})
    assert all(torch.equal(few[name], expected[name][:16]) for name in ("out", "x", "kv"))
    wide = torch.cat((p["kv"], p["kv"]), 1)[:, : p["kv"].shape[1]]
    found = run(TRITON, {**p, "kv": wide})
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(AssertionError, match="Triton was asked"):
        run(TRITON, inputs(7, 3, 40))  # that no other test asks for


# ------------------------------------------------------------------------------------------------- plans, op and graphs

TOKENS, STREAMS, WIDTH = 301, 4, 5120


def plan_and_tensors(masked: bool = False) -> tuple[EngramGatePlan, Named]:
    plan = EngramGatePlan(TOKENS, STREAMS, WIDTH, CUDA, 1e-20, masked=masked)
    plan.compile()
    p = inputs(TOKENS, STREAMS, WIDTH)
    p["out"], p["saved"] = torch.empty_like(p["x"]), torch.empty(TOKENS, STREAMS, 4, device=CUDA)
    p["grad_x"], p["grad_kv"], p["grad_weight"] = (torch.empty_like(p[name]) for name in NAMES)
    p["workspace"] = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=CUDA)
    poison(p)
    return plan, p


def poison(p: Named) -> None:
    for name in ("out", "saved", "grad_x", "grad_kv", "grad_weight"):
        p[name].fill_(math.nan)
    p["workspace"].fill_(255)


def step(plan: EngramGatePlan, p: Named, **stream: Any) -> None:
    plan.forward(p["x"], p["kv"], p["weight"], out=p["out"], saved=p["saved"], **stream)
    outputs = {name: p[name] for name in ("grad_x", "grad_kv", "grad_weight", "workspace")}
    plan.backward(p["dout"], p["x"], p["kv"], p["weight"], p["saved"], **outputs, **stream)


def holds(p: Named) -> None:
    """What a plan wrote is what the op gives."""
    expected = run(TRITON, p)
    assert torch.equal(p["out"], expected["out"])
    assert all(torch.equal(p[f"grad_{name}"], expected[name]) for name in NAMES)


@contextlib.contextmanager
def nothing_but_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Raises on what a plan may not do: allocate, compile, or wait for the device."""
    import triton

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a plan may not do this")

    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with monkeypatch.context() as patch:
        for name in ("empty", "zeros", "empty_like", "zeros_like", "full", "tensor"):
            patch.setattr(torch, name, refuse)
        for name in ("new_empty", "new_zeros", "item", "tolist", "cpu", "clone", "contiguous"):
            patch.setattr(Tensor, name, refuse)
        patch.setattr(triton, "compile", refuse)
        patch.setattr("triton.runtime.jit.JITFunction._do_compile", refuse, raising=False)
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_a_plan_only_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, p = plan_and_tensors()
    with nothing_but_launches(monkeypatch):
        step(plan, p)  # the first call: compile() has left nothing to do
    holds(p)


def test_the_detectors_detect(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(8, device=CUDA)
    for forbidden in (lambda: torch.empty(3), lambda: x.clone(), lambda: x.item(), lambda: x.nonzero()):
        with pytest.raises((AssertionError, RuntimeError)), nothing_but_launches(monkeypatch):
            forbidden()
    with pytest.raises(AssertionError), nothing_but_launches(monkeypatch):
        x + 1  # allocates without any of those


def test_a_plan_on_another_stream() -> None:
    plan, p = plan_and_tensors()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    step(plan, p, stream=stream)
    torch.cuda.current_stream().wait_stream(stream)
    holds(p)


def test_a_plan_in_a_graph() -> None:
    """Captured cold, after compile() alone; replayed with other inputs and poisoned outputs."""
    plan, p = plan_and_tensors()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(plan, p)
    for seed in (1, 2):
        for name, tensor in inputs(TOKENS, STREAMS, WIDTH, seed=seed).items():
            p[name].copy_(tensor)
        poison(p)
        graph.replay()
        holds(p)


def test_a_plan_refuses_what_does_not_fit() -> None:
    plan, p = plan_and_tensors()
    for name, wrong in (("out", p["x"]), ("saved", p["saved"].half()), ("x", p["x"].cpu()), ("kv", p["kv"][:-1])):
        with pytest.raises(ValueError, match=r"must be|overlaps"):
            step(plan, {**p, name: wrong})
    with pytest.raises(ValueError, match="workspace must be"):
        step(plan, {**p, "workspace": p["workspace"][:-1]})


def test_a_mask_in_a_plan() -> None:
    plan, p = plan_and_tensors(masked=True)
    mask = torch.arange(TOKENS, device=CUDA) % 5 != 0
    plan.forward(p["x"], p["kv"], p["weight"], mask, out=p["out"], saved=p["saved"])
    outputs = {name: p[name] for name in ("grad_x", "grad_kv", "grad_weight", "workspace")}
    plan.backward(p["dout"], p["x"], p["kv"], p["weight"], p["saved"], **outputs)
    expected = run(TRITON, p, mask)
    assert torch.equal(p["out"], expected["out"])
    assert all(torch.equal(p[f"grad_{name}"], expected[name]) for name in NAMES)


def test_the_op_in_a_graph() -> None:
    p = inputs(TOKENS, STREAMS, WIDTH)
    leaves = [p[name].requires_grad_() for name in NAMES]

    def both() -> list[Tensor]:
        out = ops.engram_gate(*leaves, eps=1e-20)
        return [out.detach(), *torch.autograd.grad(out, leaves, p["dout"])]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    with torch.no_grad():
        for name, tensor in inputs(TOKENS, STREAMS, WIDTH, seed=3).items():
            p[name].copy_(tensor)
        for tensor in captured:
            tensor.fill_(math.nan)
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(captured, both(), strict=True))


def test_compiled_code_is_one_graph() -> None:
    p = inputs(65, STREAMS, 2048)
    leaves = [p[name].requires_grad_() for name in NAMES]
    function = lambda x, kv, weight: ops.engram_gate(x, kv, weight, eps=1e-20)
    expected = [function(*leaves), *torch.autograd.grad(function(*leaves), leaves, p["dout"])]
    torch._dynamo.reset()
    out = torch.compile(function, backend="aot_eager", fullgraph=True)(*leaves)
    found = [out, *torch.autograd.grad(out, leaves, p["dout"])]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    torch._dynamo.reset()


# ------------------------------------------------------------------------------------------------ self-check and models


def test_selfcheck_passes() -> None:
    verdict = selfcheck.verdict(selfcheck.Check("fusepatch.kernels.engram_gate.check", "triton bfloat16"), CUDA)
    assert verdict.outcome is selfcheck.Outcome.PASSED, verdict.what


def test_selfcheck_of_cudnns_kernels_passes() -> None:
    if torch.cuda.get_device_capability() != (10, 0):
        pytest.skip("cudnn.engram runs on SM100 alone")
    pytest.importorskip("cudnn")
    check = selfcheck.Check("fusepatch.kernels.engram_gate.check", "cudnn_engram bfloat16")
    verdict = selfcheck.verdict(check, CUDA)
    assert verdict.outcome is selfcheck.Outcome.PASSED, verdict.what


@pytest.mark.parametrize("seed", [0, 1])
def test_a_small_qwen4_exp_is_within_parity(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    qwen4_exp = pytest.importorskip("qwen4_exp")
    from torch import nn

    from fusepatch.parity_check import models
    from fusepatch.parity_check.report import Verdict

    qwen4_exp.on_a_cpu(monkeypatch)  # plain PyTorch around the layer: what is judged is the layer

    def build() -> nn.Module:
        experts = {"num_experts": 2, "num_experts_per_tok": 2, "indexer_budget": 512}
        kinds = ["linear_attention", "full_attention"]
        types = {"num_hidden_layers": 2, "layer_types": kinds, "ple_layer_ids": [1]}
        made = qwen4_exp.config(hidden_size=256, ple_embed_dim=128, **experts, **types)
        model = qwen4_exp.modeling.Qwen4ExpForCausalLM(made)
        models.make_unit_scale(model)
        return model.to(CUDA, torch.bfloat16)

    ids = torch.randint(1, 128, (1, 256), generator=torch.Generator().manual_seed(seed)).to(CUDA)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    report = fusepatch.parity(build, batch, ops="engram_gate", seed=seed)
    assert report.patched_native == 1
    assert report.verdict is Verdict.PASSED, report.reasons
