"""Products that follow the backward kernel on Hopper (SM90), where they are faster than cuBLAS's: by hopper_product.py.

Each returns None in place of a result where cuBLAS is to multiply; hopper_configuration.py has the rule, and those of
each `choice`. With `columns` given, a tile has that many, and there is no None: what the self-check asks for.

Tensors: M tokens, H hidden size, I intermediate size, M2I = [M, 2*I] with the gate in the first I columns.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import tma
from ..cute import compiling
from . import launching
from .hopper_configuration import ARCH, COLUMNS, Kind, Product, clusters_of, columns_for, product, products_for

if TYPE_CHECKING:
    from ..cute.artefacts import Launch


def serves(name: str, device: torch.device, tokens: int, hidden: int, inner: int, *, choice: str = "") -> bool:
    """Whether the function of that name returns a result for these sizes."""
    return columns_for(Kind(name), tokens, hidden, inner, clusters_of(device), choice=choice) is not None


def dx(
    d_gate_up_M2I: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    *,
    columns: int | None = None,
    choice: str = "",
) -> Tensor | None:
    """`d_gate Wg + d_up Wu` [M, H], rounded once; with no up_weight both are in the first, [2*I, H]."""
    (tokens, inner_2), hidden = d_gate_up_M2I.shape, gate_weight.shape[1]
    inner = inner_2 // 2
    launch = _kernel(Kind.DX, d_gate_up_M2I.dtype, d_gate_up_M2I.device, tokens, hidden, inner, columns, choice)
    if launch is None:
        return None
    dx_MH = d_gate_up_M2I.new_empty(tokens, hidden)
    w_gate_IH, w_up_IH = _halves(gate_weight, 0) if up_weight is None else (gate_weight, up_weight)
    weights = tma.operand(w_gate_IH), tma.operand(w_up_IH)
    launch(*weights, *_halves(d_gate_up_M2I, 1), dx_MH, None, clusters_of(dx_MH.device))
    return dx_MH


def d_weights(
    d_gate_up_M2I: Tensor, x_MH: Tensor, *, packed: bool, columns: int | None = None, choice: str = ""
) -> tuple[Tensor | None, Tensor | None]:
    """`d_gate^T x` and `d_up^T x`, both [I, H]; with `packed` they are one [2*I, H], and the second is None."""
    inner, (tokens, hidden) = d_gate_up_M2I.shape[1] // 2, x_MH.shape
    launch = _kernel(Kind.D_WEIGHTS, x_MH.dtype, x_MH.device, tokens, hidden, inner, columns, choice)
    if launch is None:
        return None, None
    if packed:
        joined = x_MH.new_empty(2 * inner, hidden)
        d_gate_IH, d_up_IH = _halves(joined, 0)
    else:
        d_gate_IH, d_up_IH = x_MH.new_empty(inner, hidden), x_MH.new_empty(inner, hidden)
    launch(tma.operand(x_MH), None, *_halves(d_gate_up_M2I, 1), d_gate_IH, d_up_IH, clusters_of(x_MH.device))
    return (joined, None) if packed else (d_gate_IH, d_up_IH)


def d_down(dout_MH: Tensor, h_MI: Tensor, *, columns: int | None = None, choice: str = "") -> Tensor | None:
    """`dout^T h` [H, I]."""
    inner, (tokens, hidden) = h_MI.shape[1], dout_MH.shape
    launch = _kernel(Kind.D_DOWN, h_MI.dtype, h_MI.device, tokens, hidden, inner, columns, choice)
    if launch is None:
        return None
    d_down_HI = h_MI.new_empty(hidden, inner)
    launch(tma.operand(dout_MH), None, tma.operand(h_MI), None, d_down_HI, None, clusters_of(h_MI.device))
    return d_down_HI


VARIANTS = {kind.value: COLUMNS[kind] for kind in Kind}
"""Each function by its name, with the columns of every kernel that it may launch."""


@functools.lru_cache(maxsize=4096)
def compile_all(
    dtype: torch.dtype, device: torch.device, tokens: int, hidden: int, inner: int, choice: str = ""
) -> None:
    """Compiles what the products of a call may launch. Cheap from the second time on."""
    for kind in Kind:
        _kernel(kind, dtype, device, tokens, hidden, inner, None, choice)


def needed(
    dtype: torch.dtype, device: torch.device, tokens: int, hidden: int, inner: int, choice: str = ""
) -> tuple[Product, ...]:
    """Every kernel that the products of a call may launch."""
    return products_for(dtype, tokens, hidden, inner, clusters_of(device), choice=choice)


def with_choice(choice: str) -> types.SimpleNamespace:
    """The functions that `gradients` and compilers call, by the rule of a choice."""
    functions = (serves, dx, d_weights, d_down)
    return types.SimpleNamespace(**{each.__name__: functools.partial(each, choice=choice) for each in functions})


@functools.lru_cache(maxsize=4096)
def _kernel(
    kind: Kind,
    dtype: torch.dtype,
    device: torch.device,
    tokens: int,
    hidden: int,
    inner: int,
    columns: int | None,
    choice: str = "",
) -> Launch | None:
    if columns is None:
        columns = columns_for(kind, tokens, hidden, inner, clusters_of(device), choice=choice)
    return None if columns is None else compiling.compiled(product(kind, dtype, columns), launching.build, ARCH)


def _halves(both: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The gate's and up's."""
    half = both.shape[dim] // 2
    return both.narrow(dim, 0, half), both.narrow(dim, half, half)
