"""How the fused kernels in the CuTe DSL are launched, on any GPU: what hopper.py and blackwell.py have in common.

The modules with the kernels import the CuTe DSL; this one has them imported only where a kernel has to be compiled,
since that import alone takes most of a first step's time.

Tensors: M tokens, H hidden size, I intermediate size, M2I = [M, 2*I] with the gate in the first I columns.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import tma
from ..cute import compiling
from ..cute.compile_ahead import compile_ahead as side_by_side

if TYPE_CHECKING:
    from ..cute.artefacts import Launch
    from .choose import Problem


@dataclass(frozen=True, eq=False)
class Family:
    """What the kernels for one family of GPUs have of their own."""

    sizes: tuple[Any, ...]
    """What `size_of` may return."""
    size_of: Callable[[int, int, int], Any]
    """What of (M, H, I) decides how the work is cut up. Hashable."""
    configurations: Callable[..., tuple[Any, ...]]
    """`(dtype, activation, size, *, biased)`: the kernels that a call or its gradients may need. Those that write h, h
    with gate and up, d_gate and d_up, and these with h."""
    most: Callable[[torch.device, Any], int]
    """Of the device and size: how many clusters the GPU holds at once."""
    arch: Callable[[torch.device], str]
    """What the device's kernels are compiled for, as `sm_90a`."""
    takes_biases: bool
    """Whether the forward kernel has places for them among its arguments."""


def dual_gemm_act(
    family: Family,
    x_MH: Tensor,
    w_gate_IH: Tensor,
    w_up_IH: Tensor,
    b_gate_I: Tensor | None,
    b_up_I: Tensor | None,
    activation: str,
    want_gate_up: bool,
) -> tuple[Tensor, Tensor | None]:
    """As in `reference.py`, by the forward kernel; nothing is launched where M is 0."""
    assert (b_gate_I is None) == (b_up_I is None), "both or neither, as op.py checks"
    assert b_gate_I is None or family.takes_biases, "choose.py declines them"
    tokens, inner = x_MH.shape[0], w_gate_IH.shape[0]
    dtype, device = x_MH.dtype, x_MH.device
    h_MI = torch.empty((tokens, inner), dtype=dtype, device=device)
    gate_up_M2I = torch.empty((tokens, 2 * inner), dtype=dtype, device=device) if want_gate_up else None
    if tokens:
        size, arch, biased = family.size_of(tokens, x_MH.shape[1], inner), family.arch(device), b_gate_I is not None
        launch = forward(family, arch, dtype, activation, want_gate_up, size, biased)
        operands = tma.operand(x_MH), tma.operand(w_gate_IH), tma.operand(w_up_IH)
        biases = (_vector(b_gate_I), _vector(b_up_I)) if family.takes_biases else ()
        launch(*operands, *biases, h_MI, gate_up_M2I, family.most(device, size))
        if want_gate_up:
            _compile_the_rest(family, arch, dtype, activation, size, biased)
    return h_MI, gate_up_M2I


def gemm_dact(
    family: Family, dout_MH: Tensor, w_down_HI: Tensor, gate_up_M2I: Tensor, activation: str, want_h: bool
) -> tuple[Tensor, Tensor | None]:
    """As in `reference.py`, by the backward kernel; nothing is launched where M is 0."""
    tokens, inner = dout_MH.shape[0], w_down_HI.shape[1]
    dtype, device = dout_MH.dtype, dout_MH.device
    d_gate_up_M2I = torch.empty((tokens, 2 * inner), dtype=dtype, device=device)
    h_MI = torch.empty((tokens, inner), dtype=dtype, device=device) if want_h else None
    if tokens:
        size = family.size_of(tokens, dout_MH.shape[1], inner)
        launch = backward(family, family.arch(device), dtype, activation, want_h, size)
        operands = tma.operand(dout_MH), tma.operand(w_down_HI), tma.operand(gate_up_M2I)
        launch(*operands, d_gate_up_M2I, h_MI, family.most(device, size))
    return d_gate_up_M2I, h_MI


def is_compiled(family: Family, problem: Problem, tokens: int) -> bool:
    """Whether every kernel that a call and its gradients may launch is there, so that CUDA-graph capture may start."""
    arch = family.arch(problem.device)
    return all(compiling.is_compiled(each, arch) for each in needed(family, problem, tokens))


def needed(family: Family, problem: Problem, tokens: int) -> tuple[Any, ...]:
    """Every kernel that a call and its gradients may launch."""
    size = family.size_of(tokens, problem.hidden, problem.inner)
    return family.configurations(problem.dtype, problem.activation, size, biased=problem.bias)


def compile_ahead(
    family: Family, device: torch.device, dtype: torch.dtype, activation: str, biased: bool, *more: Any
) -> None:
    """Compiles every kernel for this dtype and activation side by side, and `more`; cute/compile_ahead.py."""
    found = [each for size in family.sizes for each in family.configurations(dtype, activation, size, biased=biased)]
    side_by_side((*found, *more), build, family.arch(device))


def build(configuration: Any, options: str) -> Any:
    """Compiles a configuration of any of the kernels."""
    return importlib.import_module(f"{__package__}.{configuration.kernel}").build(configuration, options)


@functools.cache
def forward(
    family: Family, arch: str, dtype: torch.dtype, activation: str, keep_gate_up: bool, size: Any, biased: bool = False
) -> Launch:
    """The forward kernel of a call, compiled where it is not yet."""
    return compiling.compiled(family.configurations(dtype, activation, size, biased=biased)[keep_gate_up], build, arch)


@functools.cache
def backward(family: Family, arch: str, dtype: torch.dtype, activation: str, want_h: bool, size: Any) -> Launch:
    """The backward kernel of a call, compiled where it is not yet."""
    return compiling.compiled(family.configurations(dtype, activation, size)[2 + want_h], build, arch)


@functools.cache
def _compile_the_rest(family: Family, arch: str, dtype: torch.dtype, activation: str, size: Any, biased: bool) -> None:
    """What a call with gradients did not need itself.

    Were it left to the first call that does, a pass without gradients and its recomputation under checkpointing could
    be told different things about capture.
    """
    for configuration in family.configurations(dtype, activation, size, biased=biased):
        compiling.compiled(configuration, build, arch)


def _vector(bias_I: Tensor | None) -> Tensor | None:
    """Elements side by side: the kernel reads them one by one, wherever they start."""
    return None if bias_I is None else bias_I.contiguous()
