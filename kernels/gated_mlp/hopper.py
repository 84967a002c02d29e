"""The fused route on Hopper (SM90), by the kernels of hopper_forward.py and hopper_backward.py.

Which of them serves a call is in hopper_configuration.py, and launching in launching.py.

Tensors: M tokens, H hidden size, I intermediate size, M2I = [M, 2*I] with the gate in the first I columns.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import hopper_products, launching
from .hopper_configuration import ARCH, Size, clusters_of, configurations, every_product, size_of

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
    """`h = act(x Wg^T + bg) * (x Wu^T + bu)`, and `[gate | up]` where a gradient needs it."""
    (tokens, hidden), inner = x_MH.shape, w_gate_IH.shape[0]
    if want_gate_up:
        hopper_products.compile_all(x_MH.dtype, x_MH.device, tokens, hidden, inner)
    return launching.dual_gemm_act(_FAMILY, x_MH, w_gate_IH, w_up_IH, b_gate_I, b_up_I, activation, want_gate_up)


def gemm_dact(
    dout_MH: Tensor, w_down_HI: Tensor, gate_up_M2I: Tensor, activation: str, *, want_h: bool
) -> tuple[Tensor, Tensor | None]:
    """`dh = dout Wd`, then `[d_gate | d_up]` from it, and `h` again where the down projection's gradient needs it."""
    return launching.gemm_dact(_FAMILY, dout_MH, w_down_HI, gate_up_M2I, activation, want_h)


def is_compiled(problem: Problem, tokens: int) -> bool:
    """Whether a call and its gradients would compile nothing."""
    sizes = tokens, problem.hidden, problem.inner
    products = hopper_products.is_compiled(problem.dtype, problem.device, *sizes)
    return products and launching.is_compiled(_FAMILY, problem, tokens)


@functools.cache
def _clusters(device: torch.device, size: Size) -> int:
    """How many clusters the GPU holds at once: one CTA per multiprocessor."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count if size is Size.SMALL else clusters_of(device)


def compile_ahead(device: torch.device, dtype: torch.dtype, activation: str, biased: bool) -> None:
    """Every kernel of a self-check, side by side."""
    launching.compile_ahead(_FAMILY, device, dtype, activation, biased, *every_product(dtype))


_FAMILY = launching.Family(
    sizes=tuple(Size),
    size_of=size_of,
    configurations=configurations,
    most=_clusters,
    arch=lambda device: ARCH,
    takes_biases=True,
)
_forward = functools.partial(launching.forward, _FAMILY, ARCH)
_backward = functools.partial(launching.backward, _FAMILY, ARCH)
