"""The fused route in Triton: one source for SM90 and SM100, with biases; the activation in the epilogues of its GEMMs.

Operands and results go through tensor descriptors, which the hardware (TMA) reads and writes by coordinates: what lies
beyond an edge is read as zero and not written, rows may be further apart than they are long, and addresses are 64-bit.
The halves of [gate | up] are two descriptors, so that a tile at the edge of one can't reach into the other.

Element-wise maths is fp32. gate and up are rounded before the activation, as in reference.py; dh is not rounded.

Tensors: M tokens, H hidden size, I intermediate size, M2I = [M, 2*I] with the gate in the first I columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# By its full name: a test runs a broken copy of this file, which is in no package.
from fusepatch.kernels import tma
from fusepatch.kernels.device import made_current
from fusepatch.kernels.gated_mlp.pointwise import _ACTIVATION, _activate

if TYPE_CHECKING:
    from fusepatch.kernels.gated_mlp.choose import Problem

# --------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _place(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """First row and column of this program's tile: down GROUP rows of tiles, then to the next column of tiles."""
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    first = program // (GROUP * column_tiles) * GROUP
    high = min(row_tiles - first, GROUP)
    place = program % (GROUP * column_tiles)
    return (first + place % high) * ROWS, place // high * COLUMNS


@triton.jit(do_not_specialize=["tokens", "hidden", "inner"])
def _forward_kernel(
    x, w_gate, w_up, b_gate, b_up, h_out, gate_out, up_out, tokens, hidden, inner,
    activation: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row, column = _place(tokens, inner, ROWS, COLUMNS, GROUP)
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, hidden, DEPTH):
        x_tile = x.load([row, k])
        gate = tl.dot(x_tile, w_gate.load([column, k]).T, gate)
        up = tl.dot(x_tile, w_up.load([column, k]).T, up)
    if b_gate is not None:
        gate += b_gate.load([0, column]).to(tl.float32)
        up += b_up.load([0, column]).to(tl.float32)
    gate_rounded, up_rounded = gate.to(h_out.dtype), up.to(h_out.dtype)
    if gate_out is not None:
        gate_out.store([row, column], gate_rounded)
        up_out.store([row, column], up_rounded)
    act, _ = _activate(gate_rounded.to(tl.float32), activation)
    h_out.store([row, column], (act * up_rounded.to(tl.float32)).to(h_out.dtype))


@triton.jit
def _finish(dh, gate_in, up_in, d_gate_out, d_up_out, h_out, row, column, activation: tl.constexpr):
    """From some columns of dh those of d_gate, d_up and, where wanted, h."""
    gate = gate_in.load([row, column]).to(tl.float32)
    up = up_in.load([row, column]).to(tl.float32)
    act, derivative = _activate(gate, activation)
    d_gate_out.store([row, column], (dh * up * derivative).to(d_gate_out.dtype))
    d_up_out.store([row, column], (dh * act).to(d_up_out.dtype))
    if h_out is not None:
        h_out.store([row, column], (act * up).to(h_out.dtype))


@triton.jit(do_not_specialize=["tokens", "hidden", "inner"])
def _backward_kernel(
    dout, w_down, gate_in, up_in, d_gate_out, d_up_out, h_out, tokens, hidden, inner,
    activation: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row, column = _place(tokens, inner, ROWS, COLUMNS, GROUP)
    dh = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, hidden, DEPTH):
        dh = tl.dot(dout.load([row, k]), w_down.load([k, column]), dh)
    # In halves: beside the whole of dh, gate, up and what is made of them do not fit into the registers.
    left, right = tl.split(tl.permute(tl.reshape(dh, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
    _finish(left, gate_in, up_in, d_gate_out, d_up_out, h_out, row, column, activation)
    _finish(right, gate_in, up_in, d_gate_out, d_up_out, h_out, row, column + COLUMNS // 2, activation)


# ----------------------------------------------------------------------------------------------- the fused kernels


def dual_gemm_act(
    x_MH: Tensor,
    w_gate_IH: Tensor,
    w_up_IH: Tensor,
    b_gate_I: Tensor | None,
    b_up_I: Tensor | None,
    activation: str,
    *,
    want_gate_up: bool,
) -> tuple[Tensor, Tensor | None]:
    """`h = act(x Wg^T + bg) * (x Wu^T + bu)`, and `[gate | up]` where a gradient needs it."""
    tokens, inner = x_MH.shape[0], w_gate_IH.shape[0]
    h_MI = torch.empty((tokens, inner), dtype=x_MH.dtype, device=x_MH.device)
    gate_up_M2I = torch.empty((tokens, 2 * inner), dtype=x_MH.dtype, device=x_MH.device) if want_gate_up else None
    if tokens:
        biases = tuple(None if bias is None else tma.operand(bias.unsqueeze(0)) for bias in (b_gate_I, b_up_I))
        run = Run(x_MH.device, x_MH.dtype, activation, tile_of(tokens, inner))
        _forward(run, tma.operand(x_MH), tma.operand(w_gate_IH), tma.operand(w_up_IH), biases, h_MI, gate_up_M2I)
        if gate_up_M2I is not None:
            _compile_the_rest(run, biases, h_MI, gate_up_M2I)
    return h_MI, gate_up_M2I


def gemm_dact(
    dout_MH: Tensor, w_down_HI: Tensor, gate_up_M2I: Tensor, activation: str, *, want_h: bool
) -> tuple[Tensor, Tensor | None]:
    """`dh = dout Wd`, then `[d_gate | d_up]` from it, and `h` again where the down projection's gradient needs it."""
    tokens, inner = dout_MH.shape[0], w_down_HI.shape[1]
    dtype, device = dout_MH.dtype, dout_MH.device
    d_gate_up_M2I = torch.empty((tokens, 2 * inner), dtype=dtype, device=device)
    h_MI = torch.empty((tokens, inner), dtype=dtype, device=device) if want_h else None
    if tokens:
        run = Run(device, dtype, activation, tile_of(tokens, inner))
        _backward(run, tma.operand(dout_MH), tma.operand(w_down_HI), tma.operand(gate_up_M2I), d_gate_up_M2I, h_MI)
    return d_gate_up_M2I, h_MI


def is_compiled(problem: Problem, tokens: int) -> bool:
    """Whether every kernel that a call and its gradients may launch is there, so that CUDA-graph capture may start."""
    run = Run(problem.device, problem.dtype, problem.activation, tile_of(tokens, problem.inner))
    return {(run, kind) for kind in _kinds(problem.bias)} <= _compiled


# ------------------------------------------------------------------------------------------------------------- rules


@dataclass(frozen=True)
class Tile:
    """How the work is cut up: a program makes `rows` x `columns` of a result, adding `depth` of the sum at a time."""

    rows: int
    columns: int
    warps: int
    stages: int
    depth: int = 64
    """128 bytes: one row of what TMA lays out in shared memory for the tensor cores."""
    group: int = 8
    """Rows of tiles that neighbouring programs share a column of weights over, for the L2 cache."""


SMALL = Tile(64, 64, warps=4, stages=4)
"""Little work: larger tiles would leave multiprocessors idle, or lie mostly beyond M."""
LARGE = Tile(128, 128, warps=8, stages=4)
"""The forward pass's two accumulators, and the backward pass's one with what is made of it, stay in registers on SM90
with every activation; four stages fill the shared memory beside them."""
_ENOUGH_TILES = 128
"""Large ones: about one for each multiprocessor, of which an H200 has 132 and a B200 148. Argued, not measured."""


def tile_of(tokens: int, inner: int) -> Tile:
    """By the number of tiles alone: what serves a call must be the same for a pass and its recomputation."""
    enough = tokens > 64 and -(-tokens // LARGE.rows) * -(-inner // LARGE.columns) >= _ENOUGH_TILES
    return LARGE if enough else SMALL


# --------------------------------------------------------------------------------------------------------- launching


@dataclass(frozen=True)
class Run:
    """What of a launch is compiled in."""

    device: torch.device
    dtype: torch.dtype
    activation: str
    tile: Tile


_Biases = tuple[Tensor | None, ...]
"""Those of gate and up, each [1, I]."""
_compiled: set[tuple[Run, tuple[bool, ...]]] = set()


def _kinds(biased: bool) -> tuple[tuple[bool, ...], ...]:
    """Both forward kernels, each with its biases or without, and both backward kernels."""
    return (False, True, biased), (False, False, biased), (True, True), (True, False)


def _forward(
    run: Run, x_MH: Tensor, w_gate_IH: Tensor, w_up_IH: Tensor, biases: _Biases, h_MI: Tensor,
    gate_up_M2I: Tensor | None, compile_only: bool = False,
) -> None:  # fmt: skip
    tile = run.tile
    reads: list[TensorDescriptor | None] = [_described(x_MH, tile.rows, tile.depth)]
    reads += [_described(weight, tile.columns, tile.depth) for weight in (w_gate_IH, w_up_IH)]
    reads += [None if bias is None else _described(bias, 1, tile.columns) for bias in biases]
    h = _described(h_MI, tile.rows, tile.columns)
    halves = _described_halves(gate_up_M2I, tile.rows, tile.columns)
    sizes = (*x_MH.shape, h_MI.shape[1])
    _launch(_forward_kernel, run, (*reads, h, *halves), sizes, compile_only)
    _compiled.add((run, (False, gate_up_M2I is not None, biases[0] is not None)))


def _backward(
    run: Run, dout_MH: Tensor, w_down_HI: Tensor, gate_up_M2I: Tensor, d_gate_up_M2I: Tensor, h_MI: Tensor | None,
    compile_only: bool = False,
) -> None:  # fmt: skip
    tile, half = run.tile, run.tile.columns // 2
    reads = (_described(dout_MH, tile.rows, tile.depth), _described(w_down_HI, tile.depth, tile.columns))
    halves = (*_described_halves(gate_up_M2I, tile.rows, half), *_described_halves(d_gate_up_M2I, tile.rows, half))
    h = None if h_MI is None else _described(h_MI, tile.rows, half)
    sizes = (*dout_MH.shape, w_down_HI.shape[1])
    _launch(_backward_kernel, run, (*reads, *halves, h), sizes, compile_only)
    _compiled.add((run, (True, h_MI is not None)))


def _compile_the_rest(run: Run, biases: _Biases, h_MI: Tensor, gate_up_M2I: Tensor) -> None:
    """What a call with gradients did not need itself; results that are there stand in for tensors that are not yet.

    Were it left to the first call that does, a pass without gradients and its recomputation under checkpointing could
    be told different things about capture.
    """
    if {(run, kind) for kind in _kinds(biases[0] is not None)} <= _compiled:
        return
    _forward(run, h_MI, h_MI, h_MI, biases, h_MI, None, compile_only=True)
    for h in (h_MI, None):
        _backward(run, h_MI, h_MI, gate_up_M2I, gate_up_M2I, h, compile_only=True)


def _launch(kernel: Any, run: Run, tensors: tuple[Any, ...], sizes: tuple[int, ...], compile_only: bool) -> None:
    tile, (tokens, _, inner) = run.tile, sizes
    grid = (triton.cdiv(tokens, tile.rows) * triton.cdiv(inner, tile.columns),)
    options = {"activation": _ACTIVATION[run.activation], "num_warps": tile.warps, "num_stages": tile.stages}
    options["maxnreg"] = 255  # all that there are for a thread: left to itself, a newer ptxas spills to stay below 128
    options |= {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "GROUP": tile.group}
    with made_current(run.device):
        if not compile_only:
            kernel[grid](*tensors, *sizes, **options)
        elif run.device.type == "cuda":
            kernel.run(*tensors, *sizes, grid=grid, warmup=True, **options)._init_handles()


def _described(t: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """`t [rows, columns]` to be read or written in tiles of so many."""
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, columns])


def _described_halves(t_M2I: Tensor | None, rows: int, columns: int) -> tuple[TensorDescriptor | None, ...]:
    if t_M2I is None:
        return None, None
    inner = t_M2I.shape[1] // 2
    return _described(t_M2I[:, :inner], rows, columns), _described(t_M2I[:, inner:], rows, columns)
