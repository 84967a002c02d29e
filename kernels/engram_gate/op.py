"""The Engram gate as a differentiable op: `engram_gate`, and `engram_gate_weight`, which makes its weight.

    out = x + sigmoid(sqrt'(<rms(x) * weight, rms(key)> / sqrt(D))) * value      reference.py has each term

Beside the inputs four numbers per token and stream are saved, in fp32. Nothing that was saved, and no incoming
gradient, is ever written to, so a second backward pass with `retain_graph=True` is right. A gradient of a gradient
raises.

Tensors: M tokens, S streams, D width of a stream. kv [..., (S+1)*D] packs the S keys and then the one value, as one
projection returns them; its gradient is one tensor of that shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..autograd import differentiable_once, tie
from ..backends import Backend, load
from .choose import WIDTH_MULTIPLE, Problem, for_op
from .reference import ZERO_DOTS, wide_dtype

# ---------------------------------------------------------------------------------------------------- public ops


def engram_gate(
    x: Tensor,
    kv: Tensor,
    weight: Tensor,
    token_mask: Tensor | None = None,
    *,
    eps: float,
    residual: bool = True,
    zero_dot: str = "copysign",
) -> Tensor:
    """`x + gate * value`, with one gate per token and stream from the RMS-normalised x and key.

    x [..., S, D], kv [..., (S+1)*D] with the S keys first, weight [S, D] (the product of both norms' weights:
    `engram_gate_weight`), token_mask [...] bool, True for the tokens that are gated; the others keep x bit for bit.
    Returns [..., S, D] in the dtype of x. x and kv have one floating dtype; weight has that or fp32 (with fp64: fp64).
    D must be a multiple of 8.

    `residual=False` returns `gate * value` alone, and 0 for masked tokens. `zero_dot` is how the sign of a dot product
    of exactly 0 is taken: `copysign` by its sign bit (DeepSeek-V4.1), `sign` as 0, so that the gate is 0.5 (Hugging
    Face, TileKernels). Raises ValueError for shapes, dtypes, devices or options that do not fit.
    """
    call = _check(x, kv, weight, token_mask, eps, residual, zero_dot)
    return run_engram_gate(call, x, kv, None, weight, token_mask)


def engram_gate_weight(query_weight: Tensor, key_weight: Tensor, streams: int, *, zero_centred: bool = False) -> Tensor:
    """The weight [S, D] of `engram_gate`, in fp32 (fp64 for fp64): the product of the two norms' weights.

    query_weight and key_weight hold S*D elements each. `zero_centred` is for norms that multiply by `1 + weight`, as
    those of Qwen4-Exp do. Plain PyTorch, so that the product rule gives each norm its gradient.
    """
    for name, tensor in (("query_weight", query_weight), ("key_weight", key_weight)):
        _require(name, tensor)
    if query_weight.numel() != key_weight.numel() or streams < 1 or query_weight.numel() % streams:
        raise ValueError(
            f"query_weight and key_weight must hold {streams} streams each, got {_shapes(query_weight, key_weight)}"
        )
    query, key = (t.to(wide_dtype(t.dtype)).reshape(streams, -1) for t in (query_weight, key_weight))
    return (1 + query) * (1 + key) if zero_centred else query * key


# ------------------------------------------------------------------- the same, for callers that chose a backend


@dataclass(frozen=True)
class Call:
    """What of a call is no tensor."""

    backend: Backend
    eps: float
    residual: bool
    zero_dot: str


def run_engram_gate(
    call: Call, x: Tensor, key: Tensor, value: Tensor | None, weight: Tensor, token_mask: Tensor | None
) -> Tensor:
    """`engram_gate` of key [..., S*D] and value [..., D], or of both packed in key where value is None.

    The inputs were checked.
    """
    # Read here and not inside apply(), where grad mode is always off.
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, key, value, weight)):
        # What needs a gradient and is not saved (see _EngramGate.forward): no first derivative reads it.
        needs = _Needs.of(call, x.requires_grad, key.requires_grad, value, weight.requires_grad)
        unsaved = (weight,) if weight.requires_grad and not needs.saves_weight else ()
        if value is not None and value.requires_grad and not needs.past_gate:
            unsaved = (*unsaved, value)
        out_MSD: Tensor = _EngramGate.apply(call, tie(*unsaved), x, key, value, weight, token_mask)  # type: ignore[no-untyped-call]
    else:
        out_MSD, _ = _forward(call, x, key, value, weight, token_mask)
    # Out here, since autograd lets nobody write to a view that was made inside a Function.
    return out_MSD.view(x.shape)


@dataclass(frozen=True)
class _Needs:
    """Which gradients are wanted. In packed form one tensor is key and value."""

    x: bool
    key: bool
    value: bool
    weight: bool

    @staticmethod
    def of(call: Call, x: bool, key: bool, value: Tensor | bool | None, weight: bool) -> _Needs:
        return _Needs(x, key, key if value is None else bool(getattr(value, "requires_grad", value)), weight)

    @property
    def past_gate(self) -> bool:
        """Whether a gradient goes through the gate: those read x, key and value."""
        return self.x or self.key or self.weight

    @property
    def saves_weight(self) -> bool:
        return self.x or self.key


def _forward(
    call: Call, x: Tensor, key: Tensor, value: Tensor | None, weight: Tensor, token_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out [M, S, D] and saved [M, S, 4]."""
    streams, width = x.shape[-2:]
    key_MSD, value_MD = _keys_and_value(key, value, streams, width)
    tokens = key_MSD.shape[0]
    x_MSD = _tokens(x, streams, width)
    out_MSD = torch.empty(tokens, streams, width, dtype=x.dtype, device=x.device)
    saved_MS4 = torch.empty(tokens, streams, 4, dtype=wide_dtype(x.dtype), device=x.device)
    mask_M = None if token_mask is None else token_mask.reshape(-1).contiguous()
    load(call.backend).engram_forward(
        x_MSD, key_MSD, value_MD, weight.contiguous(), mask_M, call.eps, call.residual, call.zero_dot,
        out_MSD=out_MSD, saved_MS4=saved_MS4,
    )  # fmt: skip
    return out_MSD, saved_MS4


class _EngramGate(Function):
    """Inputs: call, a tie to what is not saved (for second derivatives), x, key, value, weight, token_mask."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        tied: Tensor | None,
        x: Tensor,
        key: Tensor,
        value: Tensor | None,
        weight: Tensor,
        token_mask: Tensor | None,
    ) -> Tensor:
        _, _, need_x, need_key, need_value, need_weight, _ = ctx.needs_input_grad
        needs = _Needs.of(call, need_x, need_key, None if value is None else need_value, need_weight)
        out_MSD, saved_MS4 = _forward(call, x, key, value, weight, token_mask)
        ctx.call, ctx.needs, ctx.packed = call, needs, value is None
        ctx.shapes = (x.shape, key.shape, None if value is None else value.shape)
        ctx.weight_dtype = weight.dtype
        # One slot per tensor, None where no wanted gradient reads it, so that updating one in place raises in exactly
        # the cases in which autograd's own formula would.
        ctx.save_for_backward(
            x if needs.past_gate else None,
            key if needs.past_gate else None,
            value if needs.past_gate else None,
            weight if needs.saves_weight else None,
            saved_MS4,
            tied,
        )
        return out_MSD

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, saved: tuple[Any, ...], grad_out: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        needs: _Needs = ctx.needs
        x, key, value, weight, saved_MS4, _ = saved
        x_shape, key_shape, value_shape = ctx.shapes
        streams, width = x_shape[-2:]
        grad_out_MSD = _tokens(grad_out, streams, width)
        key_MSD, value_MD = (None, None) if key is None else _keys_and_value(key, value, streams, width)

        def new(*shape: int, dtype: torch.dtype = grad_out.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=grad_out.device)

        grad_x = new(*x_shape) if needs.x else None
        grad_key = new(*key_shape) if needs.key else None
        grad_value = new(*value_shape) if not ctx.packed and needs.value else None
        grad_weight = new(streams, width, dtype=ctx.weight_dtype) if needs.weight else None
        if ctx.packed and grad_key is not None:
            grad_key_MSD, grad_value_MD = _keys_and_value(grad_key, None, streams, width)
        else:
            grad_key_MSD = None if grad_key is None else _tokens(grad_key, streams, width)  # type: ignore[assignment]
            grad_value_MD = None if grad_value is None else _rows(grad_value)  # type: ignore[assignment]
        load(call.backend).engram_backward(
            grad_out_MSD,
            None if x is None else _tokens(x, streams, width),
            key_MSD,
            value_MD,
            None if weight is None else weight.contiguous(),
            saved_MS4,
            call.residual,
            grad_x_MSD=None if grad_x is None else _tokens(grad_x, streams, width),
            grad_key_MSD=grad_key_MSD,
            grad_value_MD=grad_value_MD,
            grad_weight_SD=grad_weight,
        )
        return None, None, grad_x, grad_key, grad_value, grad_weight, None


def _keys_and_value(key: Tensor, value: Tensor | None, streams: int, width: int) -> tuple[Tensor, Tensor]:
    """key [M, S, D] and value [M, D], which are halves of one tensor where value is None."""
    key_rows = _rows(key)
    value_MD = key_rows[:, streams * width :] if value is None else _rows(value)
    return split_keys(key_rows[:, : streams * width], streams), value_MD


def split_keys(rows: Tensor, streams: int) -> Tensor:
    """`rows [M, S*D]` of any row stride as `[M, S, D]`."""
    keys_MSD: Tensor = rows.unflatten(1, (streams, -1))  # type: ignore[no-untyped-call]
    return keys_MSD


def _tokens(t: Tensor, streams: int, width: int) -> Tensor:
    """`t [..., S, D]` or `[..., S*D]` as `[M, S, D]` that is dense within a token: a view where it can be one."""
    tokens = t.numel() // (streams * width)
    found = t.reshape(tokens, streams, width)
    is_dense = found.stride()[1:] == (width, 1) or (streams == 1 and found.stride(2) == 1)
    return found if is_dense and _rows_are_apart(found) else found.contiguous()


def _rows(t: Tensor) -> Tensor:
    """`t [..., W]` as `[M, W]` rows of unit inner stride: a view where the layout allows it, else a copy."""
    rows = t.reshape(t.numel() // t.shape[-1], t.shape[-1])
    return rows if rows.stride(1) == 1 and _rows_are_apart(rows) else rows.contiguous()


def _rows_are_apart(t: Tensor) -> bool:
    return t.shape[0] <= 1 or t.stride(0) >= t[0].numel()


# ---------------------------------------------------------------------------------------------------- bad input


def _check(
    x: Tensor, kv: Tensor, weight: Tensor, token_mask: Tensor | None, eps: float, residual: bool, zero_dot: str
) -> Call:
    """Raises TypeError or ValueError for what does not fit, else chooses the backend."""
    tensors = {"x": x, "kv": kv, "weight": weight, **({} if token_mask is None else {"token_mask": token_mask})}
    for name, tensor in tensors.items():
        _require(name, tensor)
    if x.dim() < 2 or 0 in x.shape[-2:]:
        raise ValueError(f"x must be [..., S, D] with at least one stream, got {list(x.shape)}")
    *lead, streams, width = x.shape
    expected = {"kv": [*lead, (streams + 1) * width], "weight": [streams, width], "token_mask": lead}
    for name, tensor in tensors.items():
        if name != "x" and list(tensor.shape) != expected[name]:
            raise ValueError(
                f"{name} is {list(tensor.shape)}, but must be {expected[name]} beside x {list(x.shape)} [..., S, D]"
            )
    for name, tensor in tensors.items():
        if tensor.device != x.device:
            raise ValueError(f"all tensors must be on one device, got {name} on {tensor.device} and x on {x.device}")
    check_options(x.dtype, weight.dtype, width, eps, residual, zero_dot)
    if kv.dtype != x.dtype:
        raise ValueError(f"x and kv must have one dtype, got {x.dtype} and {kv.dtype}")
    if token_mask is not None and token_mask.dtype != torch.bool:
        raise ValueError(f"token_mask must be bool, got {token_mask.dtype}")
    problem = Problem(x.device, x.dtype, weight.dtype, streams, width, residual, zero_dot, token_mask is not None)
    return Call(for_op(problem, math.prod(lead)), eps, residual, zero_dot)


def check_options(
    dtype: torch.dtype, weight_dtype: torch.dtype, width: int, eps: float, residual: bool, zero_dot: str
) -> None:
    """Raises TypeError or ValueError for what no kernel computes."""
    if not dtype.is_floating_point or weight_dtype not in (dtype, wide_dtype(dtype)):
        raise ValueError(
            f"x must be of a floating dtype and weight of the same or of {wide_dtype(dtype)}, got {dtype} and "
            f"{weight_dtype}"
        )
    if width % WIDTH_MULTIPLE:
        raise ValueError(f"the width D of a stream must be a multiple of {WIDTH_MULTIPLE}, got {width}")
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"eps must be a number, got {type(eps).__name__}")
    if not SMALLEST_EPS <= eps < math.inf:
        raise ValueError(f"eps must be finite and at least {SMALLEST_EPS}, got {eps}")
    if not isinstance(residual, bool):
        raise TypeError(f"residual must be a bool, got {type(residual).__name__}")
    if zero_dot not in ZERO_DOTS:
        raise ValueError(f"zero_dot must be one of {', '.join(ZERO_DOTS)}, got {zero_dot!r}")


SMALLEST_EPS = 1e-30
"""A row of zeros has rstd 1 / sqrt(eps); the product of two, and the square of one, must be finite in fp32."""


def _require(name: str, tensor: object) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    return tensor


def _shapes(*tensors: Tensor) -> str:
    return " and ".join(str(list(tensor.shape)) for tensor in tensors)
