"""The fused route on Hopper (SM90): which kernel serves a call, and how it is launched.

The kernels are those of hopper_forward.py and hopper_backward.py, which import the CuTe DSL; this module does so on the
first call, so that its rules can be read and tested without.

Tensors: M tokens, H hidden size, I intermediate size, M2I = [M, 2*I] with the gate in the first I columns.
"""

from __future__ import annotations

import functools
import importlib
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..cute.compiling import Launch
    from .choose import Problem

_ENOUGH_TILES = 100
"""Of the large kind, for the 132 multiprocessors of an H200. Large over small, measured: at H 1024, I 3072 forward 1.08
with 64 tiles, 0.74 with 128; backward 1.42 and 1.12, then 0.86 with 256. At H 4096, I 14336 with M 256: 0.68 and 0.96;
with M 128, where half of every cluster is empty, 1.33 and 1.65."""


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
    """`h = act(x Wg^T) * (x Wu^T)`, and `[gate | up]` where a gradient needs it. Takes no biases."""
    assert b_gate_I is None and b_up_I is None, "declined by choose.py"
    tokens, inner = x_MH.shape[0], w_gate_IH.shape[0]
    h_MI = torch.empty((tokens, inner), dtype=x_MH.dtype, device=x_MH.device)
    gate_up_M2I = torch.empty((tokens, 2 * inner), dtype=x_MH.dtype, device=x_MH.device) if want_gate_up else None
    if tokens:
        size = size_of(tokens, x_MH.shape[1], inner)
        launch = _forward(x_MH.dtype, activation, want_gate_up, size)
        clusters = _clusters(x_MH.device, size)
        launch(_operand(x_MH), _operand(w_gate_IH), _operand(w_up_IH), h_MI, gate_up_M2I, clusters)
        if want_gate_up:
            _compile_the_rest(x_MH.dtype, activation, size)
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
        size = size_of(tokens, dout_MH.shape[1], inner)
        launch = _backward(dtype, activation, want_h, size)
        clusters = _clusters(device, size)
        launch(_operand(dout_MH), _operand(w_down_HI), _operand(gate_up_M2I), d_gate_up_M2I, h_MI, clusters)
    return d_gate_up_M2I, h_MI


def is_compiled(problem: Problem, tokens: int) -> bool:
    """Whether every kernel that a call and its gradients may launch is there, so that CUDA-graph capture may start."""
    compiling = importlib.import_module("fusepatch.kernels.cute.compiling")
    size = size_of(tokens, problem.hidden, problem.inner)
    return all(compiling.is_compiled(each) for each in configurations(problem.dtype, problem.activation, size))


# ------------------------------------------------------------------------------------------------------------- rules


class Size(Enum):
    """What decides how the work is cut up."""

    SMALL = "small"
    """Little work: large tiles would leave multiprocessors idle, or lie mostly beyond M."""
    SHALLOW = "shallow"
    """A short K: the backward kernel is bound by what its epilogue moves."""
    DEEP = "deep"


def size_of(tokens: int, hidden: int, inner: int) -> Size:
    """Large tiles have 128 rows, in clusters of 256 whatever M is, x 96 columns of h (192 of dh)."""
    if tokens <= 128 or -(-tokens // 128) * -(-inner // 96) < _ENOUGH_TILES:
        return Size.SMALL
    return Size.SHALLOW if hidden < 2048 else Size.DEEP


def forward_configuration(dtype: torch.dtype, activation: str, keep_gate_up: bool, size: Size) -> Any:
    """The forward kernel of a call."""
    forward, tile = importlib.import_module(f"{__package__}.hopper_forward"), _tile_type()
    if size is Size.SMALL:
        shape = tile(rows=64, columns=128, stages=8, cluster=1, group=8)
    else:
        # 128 x (96 + 96) was the fastest of five shapes at each of three sizes on an H200, the cluster of two gave 3 to
        # 7 %; groups of 4, 8 and 16, and hints to L2, are within 2 % of each other and none is ahead everywhere.
        shape = tile(rows=128, columns=192, stages=5, cluster=2, group=8)
    return forward.Forward(_name(dtype), activation, keep_gate_up, shape)


def backward_configuration(dtype: torch.dtype, activation: str, want_h: bool, size: Size) -> Any:
    """The backward kernel of a call."""
    backward, tile = importlib.import_module(f"{__package__}.hopper_backward"), _tile_type()
    slots, h_buffers = (3, 2) if want_h else (4, 0)
    if size is Size.SMALL:
        shape = tile(rows=64, columns=128, stages=6, cluster=1, group=8)
    else:
        shape = tile(rows=128, columns=192, stages=4, cluster=2, group=4)
    # On an H200, over cuBLAS's GEMM alone: with H 1024, 1.12 so and 1.25 to 1.27 with a lag of 1, which frees slots
    # later; with H 2048, 1.00 with the lag and 1.04 without; from H 4096 on all are within 3 %.
    shallow = size is Size.SHALLOW
    lag = 0 if shallow else 1
    return backward.Backward(_name(dtype), activation, want_h, shape, slots, h_buffers, lag, keep_operands=shallow)


def configurations(dtype: torch.dtype, activation: str, size: Size) -> tuple[Any, ...]:
    """Every kernel that a call of this kind, or its gradients, may need."""
    return tuple(
        make(dtype, activation, flag, size)
        for make in (forward_configuration, backward_configuration)
        for flag in (False, True)
    )


def build(configuration: Any, options: str) -> Launch:
    """Compiles a configuration of either kernel."""
    launch: Launch = importlib.import_module(type(configuration).__module__).build(configuration, options)
    return launch


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tile_type() -> Any:
    return importlib.import_module("fusepatch.kernels.cute.hopper_gemm").Tile


# --------------------------------------------------------------------------------------------------------- launching


@functools.cache
def _forward(dtype: torch.dtype, activation: str, keep_gate_up: bool, size: Size) -> Launch:
    return _compiled(forward_configuration(dtype, activation, keep_gate_up, size))


@functools.cache
def _backward(dtype: torch.dtype, activation: str, want_h: bool, size: Size) -> Launch:
    return _compiled(backward_configuration(dtype, activation, want_h, size))


def _compiled(configuration: Any) -> Launch:
    compiling = importlib.import_module("fusepatch.kernels.cute.compiling")
    launch: Launch = compiling.compiled(configuration, build)
    return launch


@functools.cache
def _compile_the_rest(dtype: torch.dtype, activation: str, size: Size) -> None:
    """What a call with gradients did not need itself.

    Were it left to the first call that does, a pass without gradients and its recomputation under checkpointing could
    be told different things about capture.
    """
    for configuration in configurations(dtype, activation, size):
        _compiled(configuration)


@functools.cache
def _clusters(device: torch.device, size: Size) -> int:
    """How many clusters the GPU holds at once: one CTA per multiprocessor."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count if size is Size.SMALL else count // 2


def _operand(t: Tensor) -> Tensor:
    """`t [rows, columns]` as TMA reads it, with rows that start on 16 bytes: a copy where it lies otherwise."""
    row, column = t.stride()
    if column == 1 and row % 8 == 0 and row >= t.shape[1] and t.data_ptr() % 16 == 0:
        return t
    # Not contiguous(): that returns the tensor itself where it only starts, or lies as one row, in the wrong place.
    return torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t)
