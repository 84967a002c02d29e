"""The fused route on Hopper (SM90): which kernel serves a call, and how it is launched.

The kernels are those of hopper_forward.py and hopper_backward.py, which import the CuTe DSL; this module does so only
where a kernel has to be compiled, since that import alone takes most of a first step's time.

Tensors: M tokens, H hidden size, I intermediate size, M2I = [M, 2*I] with the gate in the first I columns.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import tma
from ..cute import compiling
from .hopper_configuration import (
    Backward,
    Forward,
    Size,
    backward_configuration,
    configurations,
    forward_configuration,
    size_of,
)

if TYPE_CHECKING:
    from ..cute.artefacts import Launch
    from .choose import Problem

_ARCH = "sm_90a"

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
    assert (b_gate_I is None) == (b_up_I is None), "both or neither, as op.py checks"
    tokens, inner = x_MH.shape[0], w_gate_IH.shape[0]
    h_MI = torch.empty((tokens, inner), dtype=x_MH.dtype, device=x_MH.device)
    gate_up_M2I = torch.empty((tokens, 2 * inner), dtype=x_MH.dtype, device=x_MH.device) if want_gate_up else None
    if tokens:
        size = size_of(tokens, x_MH.shape[1], inner)
        biased = b_gate_I is not None
        launch = _forward(x_MH.dtype, activation, want_gate_up, size, biased)
        operands = tma.operand(x_MH), tma.operand(w_gate_IH), tma.operand(w_up_IH)
        launch(*operands, _vector(b_gate_I), _vector(b_up_I), h_MI, gate_up_M2I, _clusters(x_MH.device, size))
        if want_gate_up:
            _compile_the_rest(x_MH.dtype, activation, size, biased)
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
        launch(tma.operand(dout_MH), tma.operand(w_down_HI), tma.operand(gate_up_M2I), d_gate_up_M2I, h_MI, clusters)
    return d_gate_up_M2I, h_MI


def is_compiled(problem: Problem, tokens: int) -> bool:
    """Whether every kernel that a call and its gradients may launch is there, so that CUDA-graph capture may start."""
    size = size_of(tokens, problem.hidden, problem.inner)
    needed = configurations(problem.dtype, problem.activation, size, biased=problem.bias)
    return all(compiling.is_compiled(each, _ARCH) for each in needed)


def _vector(bias_I: Tensor | None) -> Tensor | None:
    """Elements side by side: the kernel reads them one by one, wherever they start."""
    return None if bias_I is None else bias_I.contiguous()


# --------------------------------------------------------------------------------------------------------- launching


@functools.cache
def _forward(dtype: torch.dtype, activation: str, keep_gate_up: bool, size: Size, biased: bool = False) -> Launch:
    return _compiled(forward_configuration(dtype, activation, keep_gate_up, size, biased=biased))


@functools.cache
def _backward(dtype: torch.dtype, activation: str, want_h: bool, size: Size) -> Launch:
    return _compiled(backward_configuration(dtype, activation, want_h, size))


def _compiled(configuration: Forward | Backward) -> Launch:
    return compiling.compiled(configuration, build, _ARCH)


def build(configuration: Forward | Backward, options: str) -> Any:
    """Compiles a configuration of either kernel."""
    kernel = "hopper_forward" if isinstance(configuration, Forward) else "hopper_backward"
    return importlib.import_module(f"{__package__}.{kernel}").build(configuration, options)


@functools.cache
def _compile_the_rest(dtype: torch.dtype, activation: str, size: Size, biased: bool) -> None:
    """What a call with gradients did not need itself.

    Were it left to the first call that does, a pass without gradients and its recomputation under checkpointing could
    be told different things about capture.
    """
    for configuration in configurations(dtype, activation, size, biased=biased):
        _compiled(configuration)


@functools.cache
def _clusters(device: torch.device, size: Size) -> int:
    """How many clusters the GPU holds at once: one CTA per multiprocessor."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count if size is Size.SMALL else count // 2
