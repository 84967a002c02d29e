"""The gated MLP in plain PyTorch: the readable definition of what every kernel of this folder computes.

Runs on any device, for any floating dtype. Element-wise maths is fp32 (fp64 for fp64), rounded once to the I/O dtype
`T`; gate and up are rounded to `T` before the activation, as every library here does, so that the `h` which the
backward pass recomputes is the forward's, bit for bit.

Tensors: M tokens, H hidden size, I intermediate size, M2I = [M, 2*I] with the gate in the first I columns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

_SQRT_HALF = math.sqrt(0.5)
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()


def activate(gate: Tensor, activation: str) -> Tensor:
    """`act(gate)` in the dtype of `gate`: silu(g) = g * sigmoid(g); gelu(g) = g * Phi(g); gelu_tanh as in PyTorch."""
    if activation == "silu":
        return gate * torch.sigmoid(gate)
    if activation == "gelu":
        return gate * 0.5 * (1.0 + torch.erf(gate * _SQRT_HALF))
    if activation == "gelu_tanh":
        return gate * 0.5 * (1.0 + torch.tanh(_SQRT_2_OVER_PI * (gate + _GELU_CUBIC * gate**3)))
    raise ValueError(f"unknown activation {activation!r}")


def activate_derivative(gate: Tensor, activation: str) -> Tensor:
    """`d act(gate) / d gate` in the dtype of `gate`."""
    if activation == "silu":
        s = torch.sigmoid(gate)
        return s * (1.0 + gate * (1.0 - s))
    if activation == "gelu":
        cdf = 0.5 * (1.0 + torch.erf(gate * _SQRT_HALF))
        return cdf + gate * _INV_SQRT_2PI * torch.exp(-0.5 * gate * gate)
    if activation == "gelu_tanh":
        t = torch.tanh(_SQRT_2_OVER_PI * (gate + _GELU_CUBIC * gate**3))
        slope = _SQRT_2_OVER_PI * (1.0 + 3.0 * _GELU_CUBIC * gate * gate)
        return 0.5 * (1.0 + t) + 0.5 * gate * (1.0 - t * t) * slope
    raise ValueError(f"unknown activation {activation!r}")


# ------------------------------------------------------------------------------------------------ the pointwise route


def act_mul(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`act(gate) * up`, any equal shapes."""
    return (activate(_wide(gate), activation) * _wide(up)).to(gate.dtype)


def act_mul_backward(
    dh: Tensor, gate: Tensor, up: Tensor, activation: str, *, d_gate: Tensor | None, d_up: Tensor | None
) -> None:
    """Writes `dh * up * act'(gate)` to d_gate and `dh * act(gate)` to d_up, each where given."""
    dh_wide, gate_wide = _wide(dh), _wide(gate)
    if d_gate is not None:
        d_gate.copy_(dh_wide * _wide(up) * activate_derivative(gate_wide, activation))
    if d_up is not None:
        d_up.copy_(dh_wide * activate(gate_wide, activation))


# ---------------------------------------------------------------------------------------------------- the fused route


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
    gate_up_M2I = x_MH.new_empty(tokens, 2 * inner)
    gate_MI, up_MI = gate_up_M2I[:, :inner], gate_up_M2I[:, inner:]
    gate_MI.copy_(F.linear(x_MH, w_gate_IH, b_gate_I))
    up_MI.copy_(F.linear(x_MH, w_up_IH, b_up_I))
    return act_mul(gate_MI, up_MI, activation), gate_up_M2I if want_gate_up else None


def gemm_dact(
    dout_MH: Tensor, w_down_HI: Tensor, gate_up_M2I: Tensor, activation: str, *, want_h: bool
) -> tuple[Tensor, Tensor | None]:
    """`dh = dout Wd`, then `[d_gate | d_up]` from it, and `h` again where the down projection's gradient needs it."""
    inner = w_down_HI.shape[1]
    gate_MI, up_MI = gate_up_M2I[:, :inner], gate_up_M2I[:, inner:]
    d_gate_up_M2I = torch.empty_like(gate_up_M2I)
    d_gate_MI, d_up_MI = d_gate_up_M2I[:, :inner], d_gate_up_M2I[:, inner:]
    act_mul_backward(dout_MH @ w_down_HI, gate_MI, up_MI, activation, d_gate=d_gate_MI, d_up=d_up_MI)
    return d_gate_up_M2I, act_mul(gate_MI, up_MI, activation) if want_h else None
