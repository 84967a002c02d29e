"""The fused route's Triton kernels, run by Triton's interpreter on a CPU, against the reference in fp64.

Collected by test_interpreted.py, in a process of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.language import bfloat16
from triton.runtime import interpreter

from fusepatch.decline import Route
from fusepatch.kernels.gated_mlp import check, choose, dual_gemm, op, reference
from fusepatch.kernels.gated_mlp.dual_gemm import Tile
from support import relative_error

# The interpreter truncates to bf16 where the hardware rounds to nearest: twice the error, and checked on the GPU.
BOUND = {torch.float16: 1e-3, torch.bfloat16: 1.2e-2}
CASES = list(itertools.product(BOUND, choose.ACTIVATIONS))
(TRITON_GEMM,) = (backend for backend in choose.BACKENDS if backend.name == "triton_gemm")


@pytest.fixture(autouse=True)
def products_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bf16 as 16-bit integers, and multiplies those."""
    plain = interpreter.InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), interpreter.tl.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.fixture(params=["small", "large"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tile:
    """Each way of cutting the work up, whatever its size."""
    found = {"small": dual_gemm.SMALL, "large": dual_gemm.LARGE}[request.param]
    monkeypatch.setattr(dual_gemm, "tile_of", lambda tokens, inner: found)
    return found


def make(tokens: int, hidden: int, inner: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """x and dout are rows of wider tensors."""
    torch.manual_seed(0)
    shapes = {"x": (tokens, hidden + 24), "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    shapes |= {"dout": (tokens, hidden + 8), "gate_bias": (1, inner), "up_bias": (1, inner)}
    scales = {"gate": hidden**-0.5, "up": hidden**-0.5, "down": inner**-0.5}
    made = {name: (torch.randn(*shape) * scales.get(name, 1.0)).to(dtype) for name, shape in shapes.items()}
    made |= {name: made[name][:, :hidden] for name in ("x", "dout")}
    return made | {name: made[name][0] for name in ("gate_bias", "up_bias")}


def forward(kernels: Any, t: dict[str, Tensor], activation: str, *, biased: bool, want_gate_up: bool = True) -> Any:
    biases = (t["gate_bias"], t["up_bias"]) if biased else (None, None)
    return kernels.dual_gemm_act(t["x"], t["gate"], t["up"], *biases, activation, want_gate_up=want_gate_up)


def double(t: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in t.items()}


@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize(("dtype", "activation"), CASES, ids=str)
def test_both_passes(tile: Tile, dtype: torch.dtype, activation: str, biased: bool) -> None:
    """Odd tails in every direction, and more than one tile in each."""
    t = make(tile.rows + 5, 2 * tile.depth + 8, tile.columns + 24, dtype)
    before = {name: tensor.clone() for name, tensor in t.items()}
    h, gate_up = forward(dual_gemm, t, activation, biased=biased)
    for ours, exact in zip((h, gate_up), forward(reference, double(t), activation, biased=biased), strict=True):
        assert ours.dtype is dtype
        assert relative_error(ours, exact) < BOUND[dtype]
    h_alone, nothing = forward(dual_gemm, t, activation, biased=biased, want_gate_up=False)
    assert nothing is None
    assert torch.equal(h_alone, h)

    d_gate_up, again = dual_gemm.gemm_dact(t["dout"], t["down"], gate_up, activation, want_h=True)
    wide = t["dout"].double(), t["down"].double(), gate_up.double()
    exact, _ = reference.gemm_dact(*wide, activation, want_h=False)
    assert relative_error(d_gate_up, exact) < BOUND[dtype]
    assert torch.equal(again, h)
    d_alone, nothing = dual_gemm.gemm_dact(t["dout"], t["down"], gate_up, activation, want_h=False)
    assert nothing is None
    assert torch.equal(d_alone, d_gate_up)
    assert all(torch.equal(t[name], before[name]) for name in t), "an input was written to"


@pytest.mark.parametrize(
    ("tokens", "hidden", "inner"),
    # The last has more rows of tiles than one group.
    [(1, 8, 8), (1, 64, 64), (64, 8, 136), (65, 72, 8), (3, 128, 200), (130, 16, 72), (1100, 8, 136)],
)
def test_sizes(tile: Tile, tokens: int, hidden: int, inner: int) -> None:
    t = make(tokens, hidden, inner, torch.float16)
    h, gate_up = forward(dual_gemm, t, "silu", biased=False)
    for ours, exact in zip((h, gate_up), forward(reference, double(t), "silu", biased=False), strict=True):
        assert relative_error(ours, exact) < BOUND[torch.float16]
    d_gate_up, _ = dual_gemm.gemm_dact(t["dout"], t["down"], gate_up, "silu", want_h=False)
    exact, _ = reference.gemm_dact(t["dout"].double(), t["down"].double(), gate_up.double(), "silu", want_h=False)
    assert relative_error(d_gate_up, exact) < BOUND[torch.float16]


def test_no_tokens() -> None:
    t = make(0, 72, 136, torch.float16)
    h, gate_up = forward(dual_gemm, t, "silu", biased=True)
    d_gate_up, again = dual_gemm.gemm_dact(t["dout"], t["down"], gate_up, "silu", want_h=True)
    assert [tuple(found.shape) for found in (h, gate_up, d_gate_up, again)] == [(0, 136), (0, 272), (0, 272), (0, 136)]


def test_nothing_is_written_outside_of_the_results(tile: Tile) -> None:
    """Where neighbours lie right beside each result: the halves of one tensor do, and rows of a larger one."""
    tokens, inner = tile.rows + 3, tile.columns + 8
    t = make(tokens, 72, inner, torch.float16)
    buffers = [torch.full((tokens + 2, width), 7.0, dtype=torch.float16) for width in (inner, 2 * inner)]
    h, gate_up = (buffer[1:-1] for buffer in buffers)
    run = dual_gemm.Run(h.device, h.dtype, "silu", tile)
    dual_gemm._forward(run, t["x"], t["gate"], t["up"], (None, None), h, gate_up)
    kept = gate_up.clone()
    h.fill_(float("nan"))
    gate_up.fill_(float("nan"))
    dual_gemm._backward(run, t["dout"], t["down"], kept, gate_up, h)
    for buffer in buffers:
        assert (buffer[0] == 7).all()
        assert (buffer[-1] == 7).all()
        assert torch.isfinite(buffer).all()


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded scalar": lambda t: t[:1, :1].expand_as(t),
    "expanded row": lambda t: t[:1].expand_as(t),
    "columns": lambda t: t.t().contiguous().t(),
    "odd stride": lambda t: torch.cat([t, t[:, :3]], 1)[:, : t.shape[1]],
    "off 16 bytes": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view_as(t),
}


@pytest.mark.parametrize("name", ["x", "gate", "down", "dout"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(name: str, layout: str) -> None:
    def run(t: dict[str, Tensor]) -> list[Tensor]:
        h, gate_up = forward(dual_gemm, t, "silu", biased=True)
        return [h, gate_up, *dual_gemm.gemm_dact(t["dout"], t["down"], gate_up, "silu", want_h=True)]

    t = make(7, 72, 136, torch.float16)
    t[name] = LAYOUTS[layout](t[name])
    plain = {key: tensor.contiguous().clone() for key, tensor in t.items()}
    assert all(torch.equal(ours, expected) for ours, expected in zip(run(t), run(plain), strict=True))


@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
def test_through_the_op_from_a_packed_weight(biased: bool) -> None:
    """The halves of one tensor are read where they lie."""
    t = make(7, 72, 136, torch.float16)
    packed = torch.cat([t["gate"], t["up"]])
    bias = torch.cat([t["gate_bias"], t["up_bias"]]) if biased else None

    def run(backend: choose.Backend, dtype: torch.dtype) -> dict[str, Tensor]:
        given = {"x": t["x"], "gate_up": packed, "down": t["down"], "bias": bias}
        leaves = {name: each.to(dtype).detach().requires_grad_() for name, each in given.items() if each is not None}
        weights = leaves["gate_up"], None, leaves["down"], leaves.get("bias"), None, None
        out = op.run_gated_mlp(backend, leaves["x"], *weights, "gelu")
        return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), t["dout"].to(dtype)), strict=True))

    exact, ours = run(choose.REFERENCE, torch.float64), run(TRITON_GEMM, torch.float16)
    for name, expected in exact.items():
        assert relative_error(ours[name], expected) < 2e-3, name


# -------------------------------------------------------------------------------------------------------------- rules


def test_capture_waits_for_every_kernel_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dual_gemm, "_compiled", set())
    t = make(9, 72, 136, torch.float16)
    problem = choose.Problem(Route.FUSED, torch.device("cpu"), torch.float16, 72, 136, "silu", bias=False)
    forward(dual_gemm, t, "silu", biased=False, want_gate_up=False)
    assert not dual_gemm.is_compiled(problem, 9), "the backward pass is not compiled yet"
    forward(dual_gemm, t, "silu", biased=False)
    assert dual_gemm.is_compiled(problem, 9)
    assert dual_gemm.is_compiled(problem._replace(hidden=1024), 10), "sizes are not compiled in"
    for other in ({"bias": True}, {"activation": "gelu"}, {"dtype": torch.bfloat16}, {"device": torch.device("meta")}):
        assert not dual_gemm.is_compiled(problem._replace(**other), 9)
    assert not dual_gemm.is_compiled(problem._replace(inner=2**15), 2**15)


@pytest.mark.parametrize(
    ("tokens", "inner", "expected"),
    [
        (1, 2**20, "SMALL"),
        (64, 17408, "SMALL"),
        (65, 17408, "LARGE"),
        (128, 14336, "SMALL"),
        (256, 14336, "LARGE"),
        (512, 3072, "SMALL"),
        (1024, 3072, "LARGE"),
    ],
)
def test_which_tiles_serve_which_sizes(tokens: int, inner: int, expected: str) -> None:
    assert dual_gemm.tile_of(tokens, inner) is getattr(dual_gemm, expected)


# ---------------------------------------------------------------------------------------------------------- self-check


class _Steps:
    def __init__(self) -> None:
        self.cases: list[str] = []

    def reference(self) -> None: ...

    def kernel(self, case: str) -> None:
        self.cases.append(case)


def _differences(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    monkeypatch.setattr(check, "_FUSED_SHAPES", ((7, 72, 136),))
    steps, cpu = _Steps(), torch.device("cpu")
    plain, biased = (check._fused(TRITON_GEMM, cpu, torch.float16, "silu", steps, each) for each in (False, True))
    return [*plain, *biased], steps.cases


def test_the_self_check_accepts_what_is_right_with_biases_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    differences, cases = _differences(monkeypatch)
    assert differences == []
    assert len({*cases}) == 4
    assert sum("biased" in case for case in cases) == 2


def test_the_self_check_sees_that_a_bias_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = dual_gemm.dual_gemm_act

    def wrong(x: Tensor, gate: Tensor, up: Tensor, b_gate: Any, b_up: Any, *rest: Any, **flags: bool) -> Any:
        return right(x, gate, up, b_gate, None if b_up is None else torch.zeros_like(b_up), *rest, **flags)

    monkeypatch.setattr(dual_gemm, "dual_gemm_act", wrong)
    differences, _ = _differences(monkeypatch)
    assert differences
    assert all("biased" in text for text in differences)
