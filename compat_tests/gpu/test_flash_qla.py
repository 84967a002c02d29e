"""The gated delta rule on Hopper through FLA's registry, by FlashQLA's kernels and ours, on the GPU.

Errors are relative L2 against the definition in fp64, beside those of FLA's own Triton kernels on the same rounded
inputs. TileLang compiles a kernel within seconds, about 18 of them for this file, since all of it has 4 heads of q and
k and 8 of v: two minutes where nothing of it is in TileLang's cache on disk.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from recurrences import results_on_gpu as results
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusepatch
from fusepatch.decline import Reason
from fusepatch.kernels.linear_attention import arguments, flash_qla, prepare_per_head, reference
from fusepatch.kernels.linear_attention import check as selfchecked
from fusepatch.kernels.linear_attention.gated_delta_rule import choose
from fusepatch.kernels.linear_attention.problem import Call
from support import relative_error

pytestmark = pytest.mark.gpu

HEADS, VALUE_HEADS = 4, 8
FACTOR, FLOOR = 1.25, 1e-4
"""How much of FLA's own error, and beyond it, is within parity."""
FACTOR_OF_FEW = 2.0
"""Of A_log and dt_bias, one number per head each: with as few as here, the ratio of two errors is chance."""


class _Steps:
    def reference(self) -> None:
        pass

    def kernel(self, case: str) -> None:
        print(case)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One memory of self-checks for the whole file; FLA's kernels untuned, as tuning them takes minutes."""
    for package in ("fla", "flash_qla", "tilelang"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install flash-linear-attention flash-qla")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("made for SM90")
    import triton

    if tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:3]) < (3, 7, 1):
        pytest.skip("FLA's own kernels, with which ours are compared, are wrong on Hopper with Triton before 3.7.1")
    if flash_qla.drift():
        pytest.skip(flash_qla.drift()[0])
    pytest.importorskip("fla.layers")  # with all kernels, so that none is tuned
    from fusepatch.parity_check.surroundings import untuned_fla

    with pytest.MonkeyPatch.context() as patch, untuned_fla():
        patch.setattr("fusepatch.settings._default_cache_dir", lambda: tmp_path_factory.getbasetemp() / "cache")
        patch.setenv("FLA_FLASH_QLA", "0")
        patch.setenv("FLA_TILELANG", "0")
        yield


@pytest.fixture(scope="module", autouse=True)
def checked(cache: None) -> list[str]:
    """What the self-check says, in this process: so TileLang has compiled when it runs in one of its own."""
    return selfchecked.run("flash_qla gated_delta_rule bfloat16", torch.device("cuda", 0), _Steps())


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend is asked for by name."""
    monkeypatch.setenv("FUSEPATCH_GATED_DELTA_RULE_BACKEND", "flash_qla")


def chunk(**given: Any) -> tuple[Tensor, Tensor | None]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(**given)


OPTIONS = {
    "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
    "state_v_first": True,
}  # fmt: skip


def tensors(
    batch: int = 1,
    tokens: int = 300,
    groups: int = 2,
    sequences: int | None = None,
    rates: tuple[float, float] = (-2, 2),
) -> dict[str, Tensor]:
    """Raw inputs as FLA's layer makes them; `rates` is between which logarithms the heads' decays lie."""
    generator = torch.Generator("cuda").manual_seed(0)
    values = VALUE_HEADS

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    return {
        "q": normal(batch, tokens, values // groups, 128),
        "k": normal(batch, tokens, values // groups, 128),
        "v": normal(batch, tokens, values, 128),
        "g": normal(batch, tokens, values),
        "beta": normal(batch, tokens, values),
        "A_log": torch.linspace(*rates, values, device="cuda"),
        "dt_bias": normal(values, dtype=torch.float32) - 2,
        "initial_state": normal(sequences or batch, values, 128, 128, dtype=torch.float32),
    }


def by_definition(output_final_state: bool, **given: Any) -> tuple[Tensor, Tensor | None]:
    request = arguments.read(False, **given)
    assert isinstance(request, arguments.Request), request
    return reference.run(request.call, request.inputs, output_final_state)


def counted() -> tuple[dict[str, int], dict[str, int]]:
    (target,) = (each for each in fusepatch.status().targets if each.name == "gated_delta_rule/fla")
    return target.total("calls"), target.total("declines")


def table_of(
    ours: dict[str, Tensor], stock: dict[str, Tensor], exact: dict[str, Tensor], floor: float = FLOOR
) -> tuple[list[str], str]:
    """Which are beyond the bound, and all errors in lines."""
    rows, over = ["tensor         ours      FLA       ratio"], []
    for name, expected in exact.items():
        mine, theirs = relative_error(ours[name], expected), relative_error(stock[name], expected)
        rows.append(f"{name:14} {mine:.3e} {theirs:.3e} {mine / max(theirs, 1e-12):.3f}")
        factor = FACTOR_OF_FEW if name in ("A_log", "dt_bias") else FACTOR
        if not mine <= factor * theirs + floor:
            over.append(name)
    return over, "\n".join(rows)


def check(given: dict[str, Tensor], **options: Any) -> None:
    options = OPTIONS | options
    exact = results(by_definition, given, torch.float64, **options)
    stock = results(chunk, given, **options)
    fusepatch.accelerate("gated_delta_rule")
    ours = results(chunk, given, **options)
    assert counted() == ({"fused": 1}, {})
    over, table = table_of(ours, stock, exact)
    print(table)
    assert not over, f"{over} beyond the bound:\n{table}"


def test_the_self_check_passes(checked: list[str]) -> None:
    assert not checked


CASES: dict[str, dict[str, Any]] = {
    "a batch and a tail": {"batch": 2, "tokens": 333},
    "one token": {"tokens": 1},
    "sixty-three tokens": {"tokens": 63},
    "whole chunks": {"tokens": 256},
    "in pieces": {"tokens": 1200},
    "in pieces that hardly decay": {"tokens": 1200, "rates": (-7, -4)},
    "in pieces that are forgotten": {"tokens": 1200, "rates": (1, 4)},
    "a batch in pieces": {"batch": 2, "tokens": 1100},
}


@pytest.mark.parametrize("case", CASES)
def test_within_parity(case: str) -> None:
    given = tensors(**CASES[case])
    pieces = flash_qla._chunks_per_piece(*given["v"].shape[:3], given["v"].device)
    assert (pieces is not None) is ("in pieces" in case)
    check(given)


def test_negative_eigenvalues_and_the_other_layout_of_states() -> None:
    check(tensors(batch=2, tokens=200), allow_neg_eigval=True, state_v_first=False)


@pytest.mark.parametrize("ends", [[0, 1, 65, 200, 500], [0, 0, 64, 64, 500]], ids=str)
def test_sequences_of_a_row(ends: list[int]) -> None:
    given = tensors(tokens=500, sequences=len(ends) - 1)
    check(given, cu_seqlens=torch.tensor(ends, device="cuda"))


@pytest.mark.parametrize("tokens", [300, 1200])
def test_without_initial_state_and_bias(tokens: int) -> None:
    given = tensors(tokens=tokens)
    del given["initial_state"], given["dt_bias"]
    check(given)


def test_little_is_written_after_what_is_remembered() -> None:
    """The last row's state lies far below exp(-10) of the first one's, and is all there is to read."""
    given = tensors(tokens=1200, rates=(-2.8, -2.6))
    given["g"].zero_()
    given["dt_bias"].zero_()
    given["v"][:, 256:] = 0
    options = OPTIONS | {"output_final_state": True}
    with torch.no_grad():
        exact = by_definition(**{n: t.double() for n, t in given.items()}, **options)
        stock = chunk(**given, **options)
        fusepatch.accelerate("gated_delta_rule")
        ours = chunk(**given, **options)
    assert counted() == ({"fused": 1}, {})
    for index in range(VALUE_HEADS):
        mine, theirs = (relative_error(state[:, index], exact[1][:, index]) for _, state in (ours, stock))
        assert mine <= FACTOR * theirs + 1e-2, (index, mine, theirs)


def test_our_kernels_against_fp64() -> None:
    """Forward and backward alone, in bf16: what each stores is the exact number, rounded once."""
    given = tensors(tokens=333)
    call = Call(128**-0.5, True, "softplus", 0.0, True, True)
    flat = [given[name].flatten(0, 1) for name in ("q", "k", "g", "beta")]
    raw = prepare_per_head.Raw(*flat, given["A_log"], given["dt_bias"])
    generator = torch.Generator("cuda").manual_seed(2)
    wide, narrow = (333, VALUE_HEADS, 128), (333, VALUE_HEADS)
    incoming = prepare_per_head.Incoming(
        *(torch.randn(wide, generator=generator, device="cuda").bfloat16() for _ in range(2)),
        *(torch.randn(narrow, generator=generator, device="cuda") for _ in range(2)),
    )
    prepared = prepare_per_head.prepare(call, raw)
    found = prepare_per_head.backward(call, incoming, prepared, raw)
    q, k, g, beta, A_log, dt_bias = leaves = [t.double().requires_grad_() for t in raw if t is not None]
    made = (
        *(reference.l2_normalise(t) for t in (q, k)),
        reference.log_gate(call, g.unsqueeze(0), A_log, dt_bias).squeeze(0),
        reference.write_strength(call, beta),
    )
    for name, actual, expected in zip(("q", "k", "g", "beta"), prepared, made, strict=False):
        once = relative_error(expected.to(actual.dtype), expected)
        assert relative_error(actual, expected) <= 1.01 * once + 2e-6, name
    used = [t.repeat_interleave(2, 1) for t in made[:2]] + list(made[2:])
    exact = torch.autograd.grad(used, leaves, [t.double() for t in incoming])
    for name, actual, expected in zip(prepare_per_head.Raw._fields, found, exact, strict=True):
        once = relative_error(expected.to(actual.dtype), expected)
        # q and k are read back as they were rounded, as FLA's own norm reads them.
        allowed = 3e-3 if name in ("q", "k") else 1e-5
        assert relative_error(actual, expected) <= 1.01 * once + allowed, name


def test_any_layout_gives_the_same_bits() -> None:
    given = tensors(batch=2, tokens=100)
    strided = {n: t.transpose(1, -1).contiguous().transpose(1, -1) if n in "qkv" else t for n, t in given.items()}
    fusepatch.accelerate("gated_delta_rule")
    plain, other = results(chunk, given, **OPTIONS), results(chunk, strided, **OPTIONS)
    assert counted() == ({"fused": 2}, {})
    assert all(torch.equal(t, other[name]) for name, t in plain.items())


def test_the_same_bits_each_time_and_on_another_stream() -> None:
    given = tensors(tokens=1200)
    fusepatch.accelerate("gated_delta_rule")
    first = results(chunk, given, **OPTIONS)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        second = results(chunk, given, **OPTIONS)
    torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(t, second[name]) for name, t in first.items())


@pytest.mark.parametrize("kind", ["a batch", "pieces", "sequences"])
def test_a_cuda_graph_replays_both_passes(kind: str) -> None:
    given = tensors(batch=2 if kind == "a batch" else 1, tokens=1200 if kind == "pieces" else 300)
    del given["initial_state"]
    leaves = {name: t.clone().requires_grad_() for name, t in given.items()}
    grad = torch.randn_like(given["v"])
    ends = torch.tensor([0, 100, 300], device="cuda") if kind == "sequences" else None

    def step() -> tuple[Tensor, ...]:
        out, _ = chunk(**leaves, **OPTIONS, cu_seqlens=ends)
        return out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad)

    fusepatch.accelerate("gated_delta_rule")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    assert counted() == ({"fused": 2}, {})
    (target,) = (each for each in fusepatch.status().targets if each.name == "gated_delta_rule/fla")
    assert target.total("captured") == {"fused": 1}
    with torch.no_grad():
        for t in leaves.values():
            t.mul_(0.5)
        if ends is not None:
            ends[1] = 177  # read again by each replay
    for t in captured:
        t.fill_(math.nan)
    graph.replay()
    eager = step()
    assert all(torch.equal(a, b) for a, b in zip(captured, eager, strict=True))


def test_a_cold_kernel_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    fusepatch.accelerate("gated_delta_rule")
    given = tensors(tokens=64)
    request = arguments.read(False, **{n: t.requires_grad_() for n, t in given.items()}, **OPTIONS)
    assert isinstance(request, arguments.Request)
    assert not isinstance(choose.choose(request.problem, 64, 1), Reason)
    monkeypatch.setattr(flash_qla, "_warm", set())
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        found = choose.choose(request.problem, 64, 1)
        torch.zeros(1, device="cuda")
    assert found is Reason.CAPTURE_COLD


def test_gradients_twice_and_not_of_gradients() -> None:
    leaves = {name: t.requires_grad_() for name, t in tensors(tokens=1200).items()}
    fusepatch.accelerate("gated_delta_rule")
    out, _ = chunk(**leaves, **OPTIONS)
    first, second = (torch.autograd.grad(out.sum(), list(leaves.values()), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    (grad,) = torch.autograd.grad(out.sum(), [leaves["q"]], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.autograd.grad(grad.sum(), [leaves["q"]])


def test_nothing_waits_for_the_device() -> None:
    given = tensors(tokens=500, sequences=2)
    ends = torch.tensor([0, 100, 500], device="cuda")
    fusepatch.accelerate("gated_delta_rule")
    results(chunk, given, **OPTIONS, cu_seqlens=ends)
    leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, _ = chunk(**leaves, **OPTIONS, cu_seqlens=ends, output_final_state=True)
        torch.autograd.grad(out.sum(), list(leaves.values()))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counted() == ({"fused": 2}, {})


@pytest.mark.parametrize("use_reentrant", [None, True, False], ids=["", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("negative", [False, True], ids=["", "negative eigenvalues"])
def test_flas_layer(negative: bool, use_reentrant: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the layer with the definition in place of its op, all else as it is."""
    from fla.layers import GatedDeltaNet

    torch.manual_seed(0)
    layer = GatedDeltaNet(
        hidden_size=512, head_dim=128, num_heads=HEADS, num_v_heads=VALUE_HEADS, expand_v=1, allow_neg_eigval=negative
    )
    layer = layer.to("cuda", torch.bfloat16).train()
    x = torch.randn(1, 1100, 512, device="cuda").bfloat16().requires_grad_()

    def step() -> dict[str, Tensor]:
        layer.zero_grad()
        x.grad = None
        out = (
            layer(x)[0] if use_reentrant is None else checkpoint(lambda t: layer(t)[0], x, use_reentrant=use_reentrant)
        )
        out.square().mean().backward()
        return {"out": out.detach(), "x": x.grad, **{name: p.grad.clone() for name, p in layer.named_parameters()}}

    stock = step()
    fusepatch.accelerate("gated_delta_rule")
    ours = step()
    assert counted() == ({"fused": 1 if use_reentrant is None else 2}, {})
    fusepatch.restore()
    monkeypatch.setenv("FUSEPATCH_GATED_DELTA_RULE_BACKEND", "reference")
    fusepatch.accelerate("gated_delta_rule")
    over, table = table_of(ours, stock, step(), floor=1e-3)  # bf16 tensors lie between, whose roundings all have
    print(table)
    assert not over, f"{over} beyond the bound:\n{table}"


def test_what_is_not_promised_runs_the_librarys_code() -> None:
    given = tensors(tokens=100)
    given["beta"] = given["beta"].sigmoid()
    fusepatch.accelerate("gated_delta_rule")
    chunk(**given, **(OPTIONS | {"use_beta_sigmoid_in_kernel": False}))
    assert counted() == ({"original": 1}, {"unbounded": 1})
