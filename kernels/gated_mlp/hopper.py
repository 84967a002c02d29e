"""The fused route on Hopper (SM90), by the kernels of hopper_forward.py and hopper_backward.py.

Which of them serves a call is in hopper_configuration.py, with the choices that there are, and launching in
launching.py.

Tensors: M tokens, H hidden size, I intermediate size, M2I = [M, 2*I] with the gate in the first I columns.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..cute import compiling
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
    choice: str = "",
) -> tuple[Tensor, Tensor | None]:
    """`h = act(x Wg^T + bg) * (x Wu^T + bu)`, and `[gate | up]` where a gradient needs it."""
    (tokens, hidden), inner = x_MH.shape, w_gate_IH.shape[0]
    if want_gate_up:
        hopper_products.compile_all(x_MH.dtype, x_MH.device, tokens, hidden, inner, choice)
    biases = b_gate_I, b_up_I
    return launching.dual_gemm_act(_family(choice), x_MH, w_gate_IH, w_up_IH, *biases, activation, want_gate_up)


def gemm_dact(
    dout_MH: Tensor, w_down_HI: Tensor, gate_up_M2I: Tensor, activation: str, *, want_h: bool, choice: str = ""
) -> tuple[Tensor, Tensor | None]:
    """`dh = dout Wd`, then `[d_gate | d_up]` from it, and `h` again where the down projection's gradient needs it."""
    return launching.gemm_dact(_family(choice), dout_MH, w_down_HI, gate_up_M2I, activation, want_h)


def is_compiled(problem: Problem, tokens: int, choice: str = "") -> bool:
    """Whether a call and its gradients would compile nothing."""
    fused, products = _needed(problem, tokens, choice)
    return all(compiling.is_compiled(each, ARCH) for each in (*fused, *products))


def differs(problem: Problem, tokens: int, choice: str) -> bool:
    """Whether a call or its gradients would launch other kernels than without the choice."""
    return _needed(problem, tokens, choice) != _needed(problem, tokens, "")


def _needed(problem: Problem, tokens: int, choice: str) -> tuple[Any, ...]:
    sizes = tokens, problem.hidden, problem.inner
    products = hopper_products.needed(problem.dtype, problem.device, *sizes, choice)
    return launching.needed(_family(choice), problem, tokens), products


def with_choice(choice: str) -> types.SimpleNamespace:
    """The two functions of the fused route, with the work cut up in that way."""
    functions = (dual_gemm_act, gemm_dact)
    return types.SimpleNamespace(**{each.__name__: functools.partial(each, choice=choice) for each in functions})


@functools.cache
def _clusters(device: torch.device, size: Size) -> int:
    """How many clusters the GPU holds at once: one CTA per multiprocessor."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count if size is Size.SMALL else clusters_of(device)


def compile_ahead(device: torch.device, dtype: torch.dtype, activation: str, biased: bool, choice: str = "") -> None:
    """Every kernel of a self-check, side by side; that of a choice leaves the products to the backend's own."""
    products = () if choice else every_product(dtype)
    launching.compile_ahead(_family(choice), device, dtype, activation, biased, *products)


@functools.cache
def _family(choice: str) -> launching.Family:
    return launching.Family(
        sizes=tuple(Size),
        size_of=size_of,
        configurations=functools.partial(configurations, choice=choice),
        most=_clusters,
        arch=lambda device: ARCH,
        takes_biases=True,
    )
