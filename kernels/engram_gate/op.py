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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    problem = _check(x, kv, weight, token_mask, eps, residual, zero_dot)
    if torch.compiler.is_compiling():
        from . import library

        return library.traced(problem, x, kv, weight, token_mask, eps)
    call = Call(for_op(problem, x.shape[:-2].numel()), float(eps), residual, zero_dot)
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


Norms = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Call:
    """What of a call is no tensor."""

    backend: Backend
    eps: float
    residual: bool
    zero_dot: str


def run_engram_gate(
    call: Call,
    x: Tensor,
    key: Tensor,
    value: Tensor | None,
    weight: Tensor,
    token_mask: Tensor | None,
    norms: Norms | None = None,
) -> Tensor:
    """`engram_gate` of key [..., S*D] and value [..., D], or of both packed in key where value is None.

    With `norms`, the weights of the norms of query and key, each [S, D], whose product is `weight`, both are rounded to
    the dtype of x after their norms (reference.py); gradients go to `weight` alone. The inputs were checked.
    """
    # Read here and not inside apply(), where grad mode is always off.
    wants_value = value is not None and value.requires_grad
    if torch.is_grad_enabled() and (x.requires_grad or key.requires_grad or wants_value or weight.requires_grad):
        # What needs a gradient and is not saved (see _EngramGate.forward): no first derivative reads it.
        needs = Needs.of(x.requires_grad, key.requires_grad, value, weight.requires_grad)
        unsaved = (weight,) if weight.requires_grad and not needs.saves_weight else ()
        if value is not None and wants_value and not needs.past_gate:
            unsaved = (*unsaved, value)
        query_weight, key_weight = (None, None) if norms is None else (norm.detach() for norm in norms)
        out: Tensor = _EngramGate.apply(  # type: ignore[no-untyped-call]
            call, tie(*unsaved), x, key, value, weight, token_mask, query_weight, key_weight
        )
        return out
    return _forward(call, x, key, value, weight, token_mask, norms)[0]


class Needs(NamedTuple):
    """Which gradients are wanted. In packed form one tensor is key and value."""

    x: bool
    key: bool
    value: bool
    weight: bool

    @staticmethod
    def of(x: bool, key: bool, value: Tensor | bool | None, weight: bool) -> Needs:
        """For the tensor that is the value, whether one is wanted; None where it is packed in key."""
        return Needs(x, key, key if value is None else bool(getattr(value, "requires_grad", value)), weight)

    @property
    def past_gate(self) -> bool:
        """Whether a gradient goes through the gate: those read x, key and value."""
        return self.x or self.key or self.weight

    @property
    def saves_weight(self) -> bool:
        """Whether a gradient reads the weight."""
        return self.x or self.key


_dispatch_stack = torch._C._len_torch_dispatch_stack


def _forward(
    call: Call,
    x: Tensor,
    key: Tensor,
    value: Tensor | None,
    weight: Tensor,
    token_mask: Tensor | None,
    norms: Norms | None,
) -> tuple[Tensor, Tensor]:
    """`forward` by the chosen kernels; as an operator of torch where a dispatch mode looks on."""
    if _dispatch_stack():
        from . import library

        return library.forward(call, x, key, value, weight, token_mask, norms)
    return forward(load(call.backend), call, x, key, value, weight, token_mask, norms)


def forward(
    kernels: Any,
    call: Call,
    x: Tensor,
    key: Tensor,
    value: Tensor | None,
    weight: Tensor,
    token_mask: Tensor | None,
    norms: Norms | None,
) -> tuple[Tensor, Tensor]:
    """out, of the shape of x, and saved [M, S, 4]."""
    streams = x.shape[-2]
    key_MSD, value_MD = _keys_and_value(key, value, streams)
    # Not a view: autograd lets nobody write to one that was made inside a Function.
    out = _empty_like(x)
    saved_MS4 = torch.empty(key_MSD.shape[0], streams, 4, dtype=wide_dtype(x.dtype), device=x.device)
    mask_M = None if token_mask is None else token_mask.flatten().contiguous()
    weight_SD, key_weight_SD = (weight, None) if norms is None else norms
    kernels.engram_forward(
        _tokens(x), key_MSD, value_MD, _dense(weight_SD), mask_M, call.eps, call.residual, call.zero_dot,
        out_MSD=_tokens(out), saved_MS4=saved_MS4,
        key_weight_SD=None if key_weight_SD is None else _dense(key_weight_SD),
    )  # fmt: skip
    return out, saved_MS4


class _EngramGate(Function):
    """Inputs: call, a tie to what is not saved (for second derivatives), x, key, value, weight, token_mask, and the two
    weights that are rounded apart, or None."""

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
        query_weight: Tensor | None,
        key_weight: Tensor | None,
    ) -> Tensor:
        _, _, need_x, need_key, need_value, need_weight, *_ = ctx.needs_input_grad
        needs = Needs.of(need_x, need_key, None if value is None else need_value, need_weight)
        norms = None if query_weight is None or key_weight is None else (query_weight, key_weight)
        out, saved_MS4 = _forward(call, x, key, value, weight, token_mask, norms)
        ctx.call, ctx.needs, ctx.packed, ctx.masked = call, needs, value is None, token_mask is not None
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
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, saved: tuple[Any, ...], grad_out: Tensor) -> tuple[Tensor | None, ...]:
        needs: Needs = ctx.needs
        x, key, value, weight, saved_MS4, _ = saved
        arguments = (
            needs, ctx.packed, ctx.shapes, ctx.weight_dtype, ctx.call.residual, ctx.masked,
            grad_out, x, key, value, weight, saved_MS4,
        )  # fmt: skip
        if _dispatch_stack():
            from . import library

            gradients = library.backward(ctx.call.backend.name, *arguments)
        else:
            gradients = backward(load(ctx.call.backend), *arguments)
        return None, None, *gradients, None, None, None


def backward(
    kernels: Any,
    needs: Needs,
    packed: bool,
    shapes: Sequence[Sequence[int] | None],
    weight_dtype: torch.dtype,
    residual: bool,
    masked: bool,
    grad_out: Tensor,
    x: Tensor | None,
    key: Tensor | None,
    value: Tensor | None,
    weight: Tensor | None,
    saved_MS4: Tensor,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, key, value and weight that `needs` asks for; `shapes` are those of x, key and value."""
    x_shape, _, value_shape = shapes
    assert x_shape is not None
    streams, width = x_shape[-2:]
    key_MSD, value_MD = (None, None) if key is None else _keys_and_value(key, value, streams)

    grad_x = grad_key = grad_value = grad_weight = None
    if needs.x:
        assert x is not None  # its own gradient reads it, and so was it saved
        grad_x = _empty_like(x)
    if needs.key:
        assert key is not None
        grad_key = _empty_like(key)
    if needs.value and not packed:  # which may not have been saved
        assert value_shape is not None
        grad_value = torch.empty(value_shape, dtype=grad_out.dtype, device=grad_out.device)
    if needs.weight:
        grad_weight = torch.empty(streams, width, dtype=weight_dtype, device=grad_out.device)
    grad_key_MSD: Tensor | None
    grad_value_MD: Tensor | None
    if packed and grad_key is not None:
        grad_key_MSD, grad_value_MD = _keys_and_value(grad_key, None, streams)
    else:
        grad_key_MSD = None if grad_key is None else split_keys(_rows(grad_key), streams)
        grad_value_MD = None if grad_value is None else _rows(grad_value)
    kernels.engram_backward(
        _tokens(grad_out),
        None if x is None else _tokens(x),
        key_MSD,
        value_MD,
        None if weight is None else _dense(weight),
        saved_MS4,
        residual,
        masked,
        grad_x_MSD=None if grad_x is None else _tokens(grad_x),
        grad_key_MSD=grad_key_MSD,
        grad_value_MD=grad_value_MD,
        grad_weight_SD=grad_weight,
    )
    return grad_x, grad_key, grad_value, grad_weight


def _keys_and_value(key: Tensor, value: Tensor | None, streams: int) -> tuple[Tensor, Tensor]:
    """key [M, S, D] and value [M, D], which are halves of one tensor where value is None."""
    if value is None:
        return unpacked(_rows(key), streams)
    return split_keys(_rows(key), streams), _rows(value)


def unpacked(rows: Tensor, streams: int) -> tuple[Tensor, Tensor]:
    """The keys `[M, S, D]` and the value `[M, D]` in `rows [M, (S+1)*D]`."""
    width = rows.shape[1] // (streams + 1)
    keys, value_MD = rows.split_with_sizes((streams * width, width), 1)
    return split_keys(keys, streams), value_MD


def split_keys(rows: Tensor, streams: int) -> Tensor:
    """`rows [M, S*D]` of any row stride as `[M, S, D]`."""
    tokens, width = rows.shape
    return rows.view(tokens, streams, width // streams)


# Nearly every tensor is contiguous, and costs no more than that test: kernels of a few tokens wait for the host.


def _tokens(t: Tensor) -> Tensor:
    """`t [..., S, D]` as `[M, S, D]` that kernels can read: itself or a view where the layout allows it, or a copy."""
    if t.dim() == 3 and t.is_contiguous() and _starts_well(t):
        return t
    streams, width = t.shape[-2:]
    found = t.reshape(t.shape[:-2].numel(), streams, width)
    is_dense = found.stride()[1:] == (width, 1) or (streams == 1 and found.stride(2) == 1)
    return found if is_dense and _can_be_read(found) else _copy(found)


def _rows(t: Tensor) -> Tensor:
    """`t [..., W]` as `[M, W]` rows that kernels can read: as _tokens."""
    if t.dim() == 2 and t.is_contiguous() and _starts_well(t):
        return t
    rows = t.reshape(t.shape[:-1].numel(), t.shape[-1])
    return rows if rows.stride(1) == 1 and _can_be_read(rows) else _copy(rows)


def _dense(t: Tensor) -> Tensor:
    """`t` itself where it is contiguous and starts on 16 bytes, else a copy."""
    return t if t.is_contiguous() and _starts_well(t) else _copy(t)


def _can_be_read(t: Tensor) -> bool:
    """Whether rows lie apart, at distances that kernels take, and start on 16 bytes."""
    apart = t.shape[0] <= 1 or (t.stride(0) >= t.shape[1:].numel() and t.stride(0) % WIDTH_MULTIPLE == 0)
    return apart and _starts_well(t)


def _starts_well(t: Tensor) -> bool:
    """Whether it starts on 16 bytes."""
    return t.data_ptr() % 16 == 0


def _empty_like(t: Tensor) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def _copy(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


# ---------------------------------------------------------------------------------------------------- bad input


def _check(
    x: Tensor, kv: Tensor, weight: Tensor, token_mask: Tensor | None, eps: float, residual: bool, zero_dot: str
) -> Problem:
    """Raises TypeError or ValueError for what does not fit."""
    _require("x", x)
    _require("kv", kv)
    _require("weight", weight)
    if token_mask is not None:
        _require("token_mask", token_mask)
    if x.dim() < 2 or 0 in x.shape[-2:]:
        raise ValueError(f"x must be [..., S, D] with at least one stream, got {list(x.shape)}")
    *lead, streams, width = x.shape
    _require_beside(x, "kv", kv, [*lead, (streams + 1) * width])
    _require_beside(x, "weight", weight, [streams, width])
    if token_mask is not None:
        _require_beside(x, "token_mask", token_mask, lead)
    check_options(x.dtype, weight.dtype, width, eps, residual, zero_dot)
    if kv.dtype != x.dtype:
        raise ValueError(f"x and kv must have one dtype, got {x.dtype} and {kv.dtype}")
    if token_mask is not None and token_mask.dtype != torch.bool:
        raise ValueError(f"token_mask must be bool, got {token_mask.dtype}")
    return Problem(x.device, x.dtype, weight.dtype, streams, width, residual, zero_dot, token_mask is not None)


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


def _require_beside(x: Tensor, name: str, tensor: Tensor, shape: list[int]) -> None:
    if list(tensor.shape) != shape:
        raise ValueError(f"{name} is {list(tensor.shape)}, but must be {shape} beside x {list(x.shape)} [..., S, D]")
    if tensor.device != x.device:
        raise ValueError(f"all tensors must be on one device, got {name} on {tensor.device} and x on {x.device}")


def _shapes(*tensors: Tensor) -> str:
    return " and ".join(str(list(tensor.shape)) for tensor in tensors)
