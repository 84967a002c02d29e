"""The Engram gate in plain PyTorch: the readable definition of what every kernel of this folder computes.

For each token and stream, with x, key and weight of D elements and one value that the token's streams share:

    rstd_x = 1 / sqrt(mean(x^2) + eps), rstd_key likewise
    dot    = sum(x * weight * key) * rstd_x * rstd_key / sqrt(D)
    gate   = sigmoid(sign(dot) * sqrt(max(|dot|, 1e-6)))
    out    = x + gate * value, or gate * value alone

Where the weights of both norms are given apart, query = x * rstd_x * weight and key * rstd_key * key_weight are rounded
to the dtype of x, and so are their product, its sum and dot: Hugging Face's layer has these roundings. Near dot = 0 the
root magnifies what they do to dot, so that a gradient without them is as far off, and elsewhere. The backward pass
reads the product of both weights as ever.

A masked token has gate 0: its output is x bit for bit (or 0), and neither its key nor its value is looked at. Runs on
any device, for any floating dtype. Maths is fp32 (fp64 for fp64), and each result is rounded once.

Tensors: M tokens, S streams, D width of a stream; saved [M, S, 4] holds gate, dot, rstd_x, rstd_key, and all four are 0
where the token is masked. Any row stride, unit inner stride; nothing that was read is written.
"""

from __future__ import annotations

import torch
from torch import Tensor

ZERO_DOTS = ("copysign", "sign")
"""What the sign of a zero dot is: its sign bit (so the gate is sigmoid(1e-3) or sigmoid(-1e-3)), or 0 (it is 0.5)."""
SMALLEST_DOT = 1e-6
"""Below this |dot| the square root is held constant, and passes no gradient."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the maths, and of what is saved."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gate_of(dot: Tensor, zero_dot: str) -> Tensor:
    """`sigmoid(sign(dot) * sqrt(max(|dot|, 1e-6)))`, any shape."""
    root = dot.abs().clamp_min(SMALLEST_DOT).sqrt()
    return torch.sigmoid(torch.copysign(root, dot) if zero_dot == "copysign" else root * dot.sign())


def engram_forward(
    x_MSD: Tensor,
    key_MSD: Tensor,
    value_MD: Tensor,
    weight_SD: Tensor,
    mask_M: Tensor | None,
    eps: float,
    residual: bool,
    zero_dot: str,
    *,
    out_MSD: Tensor,
    saved_MS4: Tensor,
    key_weight_SD: Tensor | None = None,
) -> None:
    """Writes the output and what the backward pass needs.

    weight_SD is the product of both norms' weights; or the query's alone, where key_weight_SD is given.
    """
    wide = wide_dtype(x_MSD.dtype)
    x, key, value = (t.to(wide) for t in (x_MSD, key_MSD, value_MD))
    rstd_x, rstd_key = (torch.rsqrt(t.square().mean(-1) + eps) for t in (x, key))
    weight, scale = weight_SD.to(wide), x.shape[-1] ** -0.5
    if key_weight_SD is None:
        dot = (x * weight * key).sum(-1) * rstd_x * rstd_key * scale
    else:

        def rounded(t: Tensor) -> Tensor:
            return t.to(x_MSD.dtype).to(wide)

        query = rounded(x * rstd_x.unsqueeze(-1) * weight)
        normed = rounded(key * rstd_key.unsqueeze(-1) * key_weight_SD.to(wide))
        dot = rounded(rounded(rounded(query * normed).sum(-1)) * scale)
    gate = gate_of(dot, zero_dot)
    saved = torch.stack((gate, dot, rstd_x, rstd_key), -1)
    out = gate.unsqueeze(-1) * value.unsqueeze(1)
    if residual:
        out = x + out
    if mask_M is not None:
        on_M11 = mask_M[:, None, None]
        saved = torch.where(on_M11, saved, torch.zeros_like(saved))
        out = torch.where(on_M11, out, x if residual else torch.zeros_like(out))
    saved_MS4.copy_(saved)
    out_MSD.copy_(out)


def engram_backward(
    grad_out_MSD: Tensor,
    x_MSD: Tensor | None,
    key_MSD: Tensor | None,
    value_MD: Tensor | None,
    weight_SD: Tensor | None,
    saved_MS4: Tensor,
    residual: bool,
    masked: bool,
    *,
    grad_x_MSD: Tensor | None,
    grad_key_MSD: Tensor | None,
    grad_value_MD: Tensor | None,
    grad_weight_SD: Tensor | None,
    partial_PSD: Tensor | None = None,
) -> None:
    """Writes each gradient that is given.

    x, key and value are read for all but grad_value, weight for grad_x and grad_key; else they may be None.
    Kernels alone use `masked`, whether some gates may be those of masked tokens, and `partial_PSD`, which is scratch.
    """
    wide = saved_MS4.dtype
    gate, dot, rstd_x, rstd_key = saved_MS4.unsqueeze(-2).unbind(-1)  # each [M, S, 1]
    grad_out = grad_out_MSD.to(wide)
    # A masked token, whose inputs may be anything; or a gate that is 0 to the last bit, whose slope is 0 too.
    on = gate != 0

    def where_on(t: Tensor) -> Tensor:
        return torch.where(on, t, torch.zeros_like(t))

    if grad_value_MD is not None:
        grad_value_MD.copy_(where_on(gate * grad_out).sum(1))
    if grad_x_MSD is None and grad_key_MSD is None and grad_weight_SD is None:
        return
    assert x_MSD is not None and key_MSD is not None and value_MD is not None
    x, key, value = (t.to(wide) for t in (x_MSD, key_MSD, value_MD))
    width = x.shape[-1]
    grad_gate = (grad_out * value.unsqueeze(1)).sum(-1, keepdim=True)
    root = dot.abs().clamp_min(SMALLEST_DOT).sqrt()
    # gate * (1 - gate), which depends on |dot| alone, without the cancellation of 1 - gate near 1.
    decay = torch.exp(-root)
    slope = decay / (1 + decay).square() * 0.5 / root
    grad_dot = torch.where(dot.abs() < SMALLEST_DOT, torch.zeros_like(dot), grad_gate * slope)
    of_product = grad_dot * rstd_x * (rstd_key * width**-0.5)
    if grad_weight_SD is not None:
        grad_weight_SD.copy_(where_on(of_product * x * key).sum(0))
    if grad_x_MSD is None and grad_key_MSD is None:
        return
    assert weight_SD is not None
    weight, of_norms = weight_SD.to(wide), grad_dot * dot / width
    if grad_x_MSD is not None:
        through_gate = where_on(of_product * weight * key - of_norms * rstd_x * rstd_x * x)
        grad_x_MSD.copy_(grad_out + through_gate if residual else through_gate)
    if grad_key_MSD is not None:
        grad_key_MSD.copy_(where_on(of_product * weight * x - of_norms * rstd_key * rstd_key * key))
