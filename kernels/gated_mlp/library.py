"""The kernels as operators of torch, for what looks at operators: selective checkpointing, FLOP counters, other modes.

Each operator calls the backend that it is given the name of. Calling through one costs tens of microseconds on the
host, so a plain call goes past them (`op.py`); the autograd functions are the same either way, so that a forward pass
inside a mode and its recomputation outside of it save the same tensors.

Tensors: M tokens, H hidden size, I intermediate size, M2I = [M, 2*I] with the gate in the first I columns. An output
that is not wanted is empty, since an operator can't return None.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .choose import BACKENDS, Backend, load


@dataclass(frozen=True)
class Operators:
    """The functions of a backend's module, by way of the operators."""

    backend: str

    def dual_gemm_act(
        self,
        x_MH: Tensor,
        w_gate_IH: Tensor,
        w_up_IH: Tensor,
        b_gate_I: Tensor | None,
        b_up_I: Tensor | None,
        activation: str,
        *,
        want_gate_up: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """As in `reference.py`."""
        h_MI, gate_up_M2I = torch.ops.fusepatch.dual_gemm_act(
            x_MH, w_gate_IH, w_up_IH, b_gate_I, b_up_I, activation, want_gate_up, self.backend
        )
        return h_MI, gate_up_M2I if want_gate_up else None

    def gemm_dact(
        self, dout_MH: Tensor, w_down_HI: Tensor, gate_up_M2I: Tensor, activation: str, *, want_h: bool
    ) -> tuple[Tensor, Tensor | None]:
        """As in `reference.py`."""
        d_gate_up_M2I, h_MI = torch.ops.fusepatch.gemm_dact(
            dout_MH, w_down_HI, gate_up_M2I, activation, want_h, self.backend
        )
        return d_gate_up_M2I, h_MI if want_h else None

    def act_mul(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """As in `reference.py`."""
        product: Tensor = torch.ops.fusepatch.act_mul(gate, up, activation, self.backend)
        return product

    def act_mul_backward(
        self, dh: Tensor, gate: Tensor, up: Tensor, activation: str, *, d_gate: Tensor | None, d_up: Tensor | None
    ) -> None:
        """As in `reference.py`."""
        torch.ops.fusepatch.act_mul_backward(dh, gate, up, activation, d_gate, d_up, self.backend)


@functools.cache
def operators(backend: Backend) -> Operators:
    """The operators that end in the kernels of `backend`."""
    return Operators(backend.name)


@functools.cache
def _named(backend: str) -> Backend:
    return next(each for each in BACKENDS if each.name == backend)


# --------------------------------------------------------------------------------------------------- the operators


@torch.library.custom_op("fusepatch::dual_gemm_act", mutates_args=())
def _dual_gemm_act(
    x_MH: Tensor,
    w_gate_IH: Tensor,
    w_up_IH: Tensor,
    b_gate_I: Tensor | None,
    b_up_I: Tensor | None,
    activation: str,
    want_gate_up: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    h_MI, gate_up_M2I = load(_named(backend)).dual_gemm_act(
        x_MH, w_gate_IH, w_up_IH, b_gate_I, b_up_I, activation, want_gate_up=want_gate_up
    )
    return h_MI, x_MH.new_empty(0) if gate_up_M2I is None else gate_up_M2I


@_dual_gemm_act.register_fake
def _(
    x_MH: Tensor,
    w_gate_IH: Tensor,
    w_up_IH: Tensor,
    b_gate_I: Tensor | None,
    b_up_I: Tensor | None,
    activation: str,
    want_gate_up: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    tokens, inner = x_MH.shape[0], w_gate_IH.shape[0]
    return x_MH.new_empty(tokens, inner), x_MH.new_empty((tokens, 2 * inner) if want_gate_up else (0,))


@torch.library.custom_op("fusepatch::gemm_dact", mutates_args=())
def _gemm_dact(
    dout_MH: Tensor, w_down_HI: Tensor, gate_up_M2I: Tensor, activation: str, want_h: bool, backend: str
) -> tuple[Tensor, Tensor]:
    d_gate_up_M2I, h_MI = load(_named(backend)).gemm_dact(dout_MH, w_down_HI, gate_up_M2I, activation, want_h=want_h)
    return d_gate_up_M2I, dout_MH.new_empty(0) if h_MI is None else h_MI


@_gemm_dact.register_fake
def _(
    dout_MH: Tensor, w_down_HI: Tensor, gate_up_M2I: Tensor, activation: str, want_h: bool, backend: str
) -> tuple[Tensor, Tensor]:
    tokens, inner = dout_MH.shape[0], w_down_HI.shape[1]
    return dout_MH.new_empty(tokens, 2 * inner), dout_MH.new_empty((tokens, inner) if want_h else (0,))


@torch.library.custom_op("fusepatch::act_mul", mutates_args=())
def _act_mul(gate: Tensor, up: Tensor, activation: str, backend: str) -> Tensor:
    product: Tensor = load(_named(backend)).act_mul(gate, up, activation)
    return product


@_act_mul.register_fake
def _(gate: Tensor, up: Tensor, activation: str, backend: str) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("fusepatch::act_mul_backward", mutates_args=("d_gate", "d_up"))
def _act_mul_backward(
    dh: Tensor, gate: Tensor, up: Tensor, activation: str, d_gate: Tensor | None, d_up: Tensor | None, backend: str
) -> None:
    load(_named(backend)).act_mul_backward(dh, gate, up, activation, d_gate=d_gate, d_up=d_up)


# ----------------------------------------------------------------------------------------------------------- FLOPs


@register_flop_formula(torch.ops.fusepatch.dual_gemm_act)
def _(x_shape: tuple[int, int], gate_shape: tuple[int, int], *_: object, **__: object) -> int:
    """Both GEMMs, as FLOP counters have it: multiplications and additions of GEMMs alone."""
    return 2 * 2 * x_shape[0] * x_shape[1] * gate_shape[0]


@register_flop_formula(torch.ops.fusepatch.gemm_dact)
def _(dout_shape: tuple[int, int], down_shape: tuple[int, int], *_: object, **__: object) -> int:
    return 2 * dout_shape[0] * down_shape[0] * down_shape[1]
