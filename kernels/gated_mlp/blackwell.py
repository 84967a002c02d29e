"""The fused route on Blackwell data-centre GPUs (SM100, SM103), by the kernels of blackwell_forward.py and
blackwell_backward.py, which have run on no GPU yet.

Which of them serves a call is in blackwell_configuration.py, and launching in launching.py.

Tensors: M tokens, H hidden size, I intermediate size, M2I = [M, 2*I] with the gate in the first I columns.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import launching
from .blackwell_configuration import Size, configurations, size_of

if TYPE_CHECKING:
    from .choose import Problem


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
    """`h = act(x Wg^T) * (x Wu^T)`, and `[gate | up]` where a gradient needs it.

    The kernel adds no biases: b_gate_I and b_up_I must be None.
    """
    return launching.dual_gemm_act(FAMILY, x_MH, w_gate_IH, w_up_IH, b_gate_I, b_up_I, activation, want_gate_up)


def gemm_dact(
    dout_MH: Tensor, w_down_HI: Tensor, gate_up_M2I: Tensor, activation: str, *, want_h: bool
) -> tuple[Tensor, Tensor | None]:
    """`dh = dout Wd`, then `[d_gate | d_up]` from it, and `h` again where the down projection's gradient needs it."""
    return launching.gemm_dact(FAMILY, dout_MH, w_down_HI, gate_up_M2I, activation, want_h)


def is_compiled(problem: Problem, tokens: int) -> bool:
    """Whether a call and its gradients would compile nothing."""
    return launching.is_compiled(FAMILY, problem, tokens)


def compile_ahead(device: torch.device, dtype: torch.dtype, activation: str, biased: bool) -> None:
    """Every kernel of a self-check, side by side."""
    launching.compile_ahead(FAMILY, device, dtype, activation, biased)


@functools.cache
def _arch(device: torch.device) -> str:
    """The device's own: code for sm_100a does not run on SM103, nor the other way round."""
    return ARCHS[torch.cuda.get_device_capability(device)]


@functools.cache
def _ctas(device: torch.device, size: Size) -> int:
    """How many CTAs the GPU holds at once: one per multiprocessor, whatever the size."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


ARCHS = {(10, 0): "sm_100a", (10, 3): "sm_103a"}
"""What is compiled for which compute capability."""
FAMILY = launching.Family(
    sizes=tuple(Size), size_of=size_of, configurations=configurations, most=_ctas, arch=_arch, takes_biases=False
)
