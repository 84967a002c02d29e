"""The Hopper kernels on the GPU: through the op, launched directly, through a real model, and their self-check."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusepatch
from fusepatch import ops, selfcheck
from fusepatch.kernels import backends
from fusepatch.kernels.gated_mlp import check, choose, hopper, op
from support import is_within_parity, relative_error, tiny_llama_mlp

CUDA = torch.device("cuda", 0)
HOPPER = next((backend for backend in choose.BACKENDS if backend.name == "hopper"), None)
REFERENCE = choose.REFERENCE


def _why_not() -> str:
    if HOPPER is None:
        return "FUSEPATCH_GATED_MLP_BACKEND can't name the hopper backend"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(CUDA) != (9, 0):
        return "no Hopper GPU"
    missing = backends.missing(HOPPER)
    return f"not importable: {', '.join(missing)}" if missing else ""


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_why_not()), reason=_why_not())]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    """One memory of self-checks for the whole file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusepatch.settings._default_cache_dir", lambda: tmp_path_factory.getbasetemp() / "cache")
        yield


def _calls() -> dict[str, int]:
    return fusepatch.status().targets[0].total("calls")


# --------------------------------------------------------------------------------------------------- through the op

NAMES = ("x", "gate_weight", "up_weight", "down_weight")


def _data(tokens: int, hidden: int, inner: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """x and dout are rows of wider tensors; everything has unit scale at every place."""
    shapes = ((tokens, hidden + 24), (inner, hidden), (inner, hidden), (hidden, inner), (tokens, hidden + 8))
    scales = (1.0, hidden**-0.5, hidden**-0.5, inner**-0.5, 1.0)
    made = [(torch.randn(*shape, device="cuda") * scale).to(dtype) for shape, scale in zip(shapes, scales, strict=True)]
    made[0], made[-1] = made[0][:, :hidden], made[-1][:, :hidden]
    return dict(zip((*NAMES, "dout"), made, strict=True))


def _run(
    backend: choose.Backend,
    data: dict[str, Tensor],
    activation: str = "silu",
    *,
    dtype: torch.dtype | None = None,
    wanted: tuple[str, ...] = NAMES,
    packed: bool = False,
) -> dict[str, Tensor]:
    cast = {name: tensor.detach() if dtype is None else tensor.detach().to(dtype) for name, tensor in data.items()}
    leaves = {name: cast[name].requires_grad_(name in wanted) for name in NAMES}
    if packed:
        leaves["gate_weight"] = torch.cat([leaves["gate_weight"], leaves.pop("up_weight")]).detach().requires_grad_()
    weights = [leaves.get(name) for name in NAMES]
    out = op.run_gated_mlp(backend, *weights, None, None, None, activation)
    graded = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    found = (
        dict(zip(graded, torch.autograd.grad(out, list(graded.values()), cast["dout"]), strict=True)) if graded else {}
    )
    if packed:
        found["gate_weight"], found["up_weight"] = found["gate_weight"].chunk(2)
    return {"out": out.detach(), **found}


def _assert_like_reference(data: dict[str, Tensor], activation: str = "silu", **options: object) -> None:
    """Every result's error against fp64 is at most 1.25 x that of plain PyTorch in the same dtype."""
    exact = _run(REFERENCE, data, activation, dtype=torch.float64, **options)
    plain, ours = _run(REFERENCE, data, activation, **options), _run(HOPPER, data, activation, **options)
    for name, expected in exact.items():
        assert ours[name].dtype is plain[name].dtype
        errors = relative_error(ours[name], expected), relative_error(plain[name], expected)
        assert is_within_parity(*errors), (name, errors)


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
@pytest.mark.parametrize("tokens", [1, 7, 64, 257, 4099])
def test_against_fp64(tokens: int, packed: bool) -> None:
    _assert_like_reference(_data(tokens, 200, 1352), packed=packed)


@pytest.mark.parametrize(
    ("dtype", "activation"),
    [
        (torch.bfloat16, "gelu"),
        (torch.bfloat16, "gelu_tanh"),
        (torch.float16, "silu"),
        (torch.float16, "gelu"),
        (torch.float16, "gelu_tanh"),
    ],
    ids=str,
)
def test_every_dtype_and_activation_against_fp64(dtype: torch.dtype, activation: str) -> None:
    _assert_like_reference(_data(4099, 136, 1352, dtype), activation)


def test_many_small_tiles_per_block() -> None:
    """An odd number of stores per tile: the epilogue's buffers must alternate from one tile to the next too."""
    assert hopper.size_of(72, 136, 20488) is hopper.Size.SMALL
    data = _data(72, 136, 20488)
    for _ in range(3):
        _assert_like_reference(data)


def test_a_long_sum_against_fp64() -> None:
    assert hopper.size_of(2055, 2056, 3080) is hopper.Size.DEEP
    _assert_like_reference(_data(2055, 2056, 3080))


@pytest.mark.parametrize("tokens", [64, 4099])
def test_every_choice_of_wanted_gradients(tokens: int) -> None:
    """Each gives the gradients that all together give, bit for bit."""
    data = _data(tokens, 72, 1352)
    everything = _run(HOPPER, data)
    for count in range(5):
        for wanted in itertools.combinations(NAMES, count):
            for name, gradient in _run(HOPPER, data, wanted=wanted).items():
                assert torch.equal(gradient, everything[name]), (wanted, name)


ROUNDING = 4e-3
"""Of results in bf16. cuBLAS takes another kernel where the layout is another, and that adds in another order."""

GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded scalar": lambda dout: dout[:1, :1].expand_as(dout),
    "expanded row": lambda dout: dout[:1].expand_as(dout),
    "columns": lambda dout: dout.t().contiguous().t(),
    "odd stride": lambda dout: torch.cat([dout, dout[:, :3]], 1)[:, : dout.shape[1]],
    "off 16 bytes": lambda dout: torch.cat([dout.flatten()[:1], dout.flatten()])[1:].view_as(dout),
}


@pytest.mark.parametrize("layout", GRADIENTS)
@pytest.mark.parametrize("tokens", [1, 257])
def test_any_layout_of_the_incoming_gradient(tokens: int, layout: str) -> None:
    data = _data(tokens, 72, 1352)
    strange = GRADIENTS[layout](data["dout"])
    plain = _run(HOPPER, {**data, "dout": strange.contiguous().clone()})
    for name, gradient in _run(HOPPER, {**data, "dout": strange}).items():
        assert relative_error(gradient, plain[name]) < ROUNDING, name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", ["columns", "odd stride", "off 16 bytes"])
def test_any_layout_of_the_operands(name: str, layout: str) -> None:
    data = _data(257, 72, 1352)
    plain = _run(HOPPER, {key: tensor.contiguous() for key, tensor in data.items()})
    strange = GRADIENTS[layout](data[name])
    for key, result in _run(HOPPER, {**data, name: strange}).items():
        assert relative_error(result, plain[key]) < ROUNDING, key


def test_no_tokens() -> None:
    data = _data(0, 72, 1352)
    found = _run(HOPPER, data)
    assert found["out"].shape == (0, 72)
    assert not found["down_weight"].any()


def test_a_second_backward_pass_doubles_the_gradients() -> None:
    data = _data(257, 72, 1352)
    leaves = [data[name].contiguous().requires_grad_() for name in NAMES]
    out = op.run_gated_mlp(HOPPER, *leaves, None, None, None, "silu")
    out.backward(data["dout"], retain_graph=True)
    once = [leaf.grad.clone() for leaf in leaves]
    out.backward(data["dout"])
    assert all(torch.equal(leaf.grad, 2 * gradient) for leaf, gradient in zip(leaves, once, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_bits(reentrant: bool) -> None:
    data = _data(257, 72, 1352)
    leaves = [data[name].contiguous().requires_grad_() for name in NAMES]

    def run(*tensors: Tensor) -> Tensor:
        return op.run_gated_mlp(HOPPER, *tensors, None, None, None, "silu")

    plain = torch.autograd.grad(run(*leaves), leaves, data["dout"])
    checkpoint(run, *leaves, use_reentrant=reentrant).backward(data["dout"])
    assert all(torch.equal(leaf.grad, gradient) for leaf, gradient in zip(leaves, plain, strict=True))


def test_the_backward_pass_gives_the_forwards_h_bit_for_bit() -> None:
    for activation in choose.ACTIVATIONS:
        data = _data(4099, 136, 1352)
        weights = data["gate_weight"], data["up_weight"]
        h, gate_up = hopper.dual_gemm_act(data["x"], *weights, None, None, activation, want_gate_up=True)
        alone, nothing = hopper.dual_gemm_act(data["x"], *weights, None, None, activation, want_gate_up=False)
        _, again = hopper.gemm_dact(data["dout"], data["down_weight"], gate_up, activation, want_h=True)
        assert nothing is None
        assert torch.equal(h, alone)
        assert torch.equal(h, again)


def test_two_streams_at_once() -> None:
    data = _data(4099, 200, 1352)
    expected = _run(HOPPER, data)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for stream in streams * 4:
        with torch.cuda.stream(stream):
            results.append(_run(HOPPER, data))
    torch.cuda.synchronize()
    assert all(torch.equal(result[name], expected[name]) for result in results for name in expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_device_that_is_not_the_current_one() -> None:
    data = _data(257, 72, 1352)
    there = {name: tensor.to("cuda:1") for name, tensor in data.items()}
    expected, found = _run(HOPPER, data), _run(HOPPER, there)
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(found[name].to(CUDA), expected[name]) for name in expected)


# ------------------------------------------------------------------------------------------------- launched directly


@pytest.mark.parametrize("tokens", [1, 257, 4099])
def test_nothing_is_written_outside_of_the_results(tokens: int) -> None:
    hidden, inner = 72, 1352
    data = _data(tokens, hidden, inner)
    size = hopper.size_of(tokens, hidden, inner)
    buffers = [
        torch.full((tokens + 2, width), 7.0, device="cuda", dtype=torch.bfloat16) for width in (inner, 2 * inner)
    ]
    h, gate_up = (buffer[1:-1] for buffer in buffers)
    clusters = hopper._clusters(CUDA, size)
    forward = hopper._forward(torch.bfloat16, "silu", True, size)
    forward(data["x"], data["gate_weight"], data["up_weight"], h, gate_up, clusters)
    kept = gate_up.clone()
    h.fill_(float("nan"))
    gate_up.fill_(float("nan"))
    backward = hopper._backward(torch.bfloat16, "silu", True, size)
    backward(data["dout"], data["down_weight"], kept, gate_up, h, clusters)
    for buffer in buffers:
        assert (buffer[0] == 7).all()
        assert (buffer[-1] == 7).all()
        assert torch.isfinite(buffer).all()


def test_offsets_beyond_32_bits() -> None:
    tokens, hidden, inner = 2**17 + 3, 64, 2**13 + 8
    assert tokens * 2 * inner > 2**31
    data = _data(tokens, hidden, inner)
    weights = data["gate_weight"], data["up_weight"]
    h, gate_up = hopper.dual_gemm_act(data["x"], *weights, None, None, "silu", want_gate_up=True)
    d_gate_up, again = hopper.gemm_dact(data["dout"], data["down_weight"], gate_up, "silu", want_h=True)
    assert torch.equal(h, again)
    del again
    tail = slice(-5, None)
    h_tail, gate_up_tail = hopper.dual_gemm_act(data["x"][tail], *weights, None, None, "silu", want_gate_up=True)
    d_tail, _ = hopper.gemm_dact(data["dout"][tail], data["down_weight"], gate_up_tail, "silu", want_h=True)
    for whole, part in ((h, h_tail), (gate_up, gate_up_tail), (d_gate_up, d_tail)):
        assert relative_error(whole[tail], part) < 1e-3


# ------------------------------------------------------------------------------------------------- through the library


def _admitted_mlp() -> torch.nn.Module:
    return tiny_llama_mlp(torch.bfloat16, hidden_size=1024, intermediate_size=3072).cuda()


def test_an_admitted_size_runs_fused_and_within_parity() -> None:
    mlp = _admitted_mlp()
    x = torch.randn(4, 4096, 1024, device="cuda", dtype=torch.bfloat16)

    def step(module: torch.nn.Module, x: Tensor) -> dict[str, Tensor]:
        module.zero_grad()
        leaf = x.detach().requires_grad_()
        out = module(leaf)
        out.backward(x.flip(0))
        return {"out": out.detach(), "x": leaf.grad, **{name: p.grad.clone() for name, p in module.named_parameters()}}

    stock = step(mlp, x)
    with fusepatch.accelerated("gated_mlp", strict=True):
        patched = step(mlp, x)
        assert _calls() == {"fused": 1}
    exact = step(mlp.float(), x.float())
    for name, expected in exact.items():
        errors = relative_error(patched[name], expected), relative_error(stock[name], expected)
        assert is_within_parity(*errors), (name, errors)


def test_training_step_is_captured_and_replayed_after_warmup() -> None:
    mlp = _admitted_mlp()
    x = torch.randn(16384, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    fusepatch.accelerate()
    assert fusepatch.warmup(mlp, 16384).native == 1
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        mlp(x).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    mlp.zero_grad(set_to_none=True)
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    before = _calls()["fused"]
    with torch.cuda.graph(graph):
        out = mlp(x)
        out.sum().backward()
    assert _calls()["fused"] == before + 1
    captured = x.grad
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    replayed = out.clone(), captured.clone()
    x.grad = None
    fresh = mlp(x)
    fresh.sum().backward()
    assert torch.equal(replayed[0], fresh)
    assert torch.equal(replayed[1], x.grad)


def test_a_direct_call_of_the_op_gets_it_at_any_size() -> None:
    data = _data(8, 72, 136)
    plain = _run(HOPPER, data)["out"]
    assert torch.equal(ops.gated_mlp(*(data[name] for name in NAMES)), plain)


# ------------------------------------------------------------------------------------------------------- self-check


def test_selfcheck_passes() -> None:
    case = selfcheck.Check("fusepatch.kernels.gated_mlp.check", "hopper fused bfloat16 silu")
    assert selfcheck.verdict(case, CUDA).outcome is selfcheck.Outcome.PASSED


class _Steps:
    def reference(self) -> None: ...

    def kernel(self, case: str) -> None: ...


FAULTS: dict[str, tuple[str, Callable[[Tensor, Tensor | None], object]]] = {
    "a tile of h left out": ("dual_gemm_act", lambda h, _: h[-64:, -32:].fill_(float("nan"))),
    "d_gate a little off": ("gemm_dact", lambda d_gate_up, _: d_gate_up[:, : d_gate_up.shape[1] // 2].mul_(1.02)),
    "h of the backward pass shifted": ("gemm_dact", lambda _, h: None if h is None else h.copy_(h.roll(1, 0))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_selfcheck_sees_a_fault(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    name, spoil = FAULTS[fault]
    right = getattr(hopper, name)

    def wrong(*arguments: object, **flags: bool) -> tuple[Tensor, Tensor | None]:
        results = right(*arguments, **flags)
        spoil(*results)
        return results

    monkeypatch.setattr(hopper, name, wrong)
    monkeypatch.setattr(check, "_FUSED_SHAPES", ((200, 136, 1352),))
    assert check._fused(HOPPER, CUDA, torch.bfloat16, "silu", _Steps())
