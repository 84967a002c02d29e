"""The Engram gate as operators of torch, for what looks at operators: compilers, selective checkpointing, other modes.

Each calls the backend that it is given the name of. Calling through one costs tens of microseconds on the host, so a
plain call goes past them (op.py). The kernels and what is saved are the same either way.

Tensors: M tokens, S streams, D width of a stream. An output that is not wanted is empty, since an operator can't return
None.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import settings
from ...profiles import MOST_TOKENS
from ..autograd import without_autocast
from ..backends import Backend, load
from . import op
from .choose import BACKENDS, OP, REFERENCE, WIDTH_MULTIPLE, Problem, choose
from .op import Call, Needs, Norms
from .reference import wide_dtype

Shapes = Sequence[Sequence[int] | None]


@functools.cache
def _named(backend: str) -> Backend:
    return next(each for each in BACKENDS if each.name == backend)


# ------------------------------------------------------------------------------------- by what op.py and compilers call


def forward(
    call: Call,
    x: Tensor,
    key: Tensor,
    value: Tensor | None,
    weight: Tensor,
    token_mask: Tensor | None,
    norms: Norms | None,
) -> tuple[Tensor, Tensor]:
    """As op.forward, by way of the operator."""
    query_weight, key_weight = (None, None) if norms is None else norms
    out, saved_MS4 = torch.ops.fusepatch.engram_gate(
        x, key, value, weight, token_mask, query_weight, key_weight,
        call.eps, call.residual, call.zero_dot, call.backend.name,
    )  # fmt: skip
    return out, saved_MS4


def backward(
    backend: str,
    needs: Needs,
    packed: bool,
    shapes: Shapes,
    weight_dtype: torch.dtype,
    residual: bool,
    masked: bool,
    grad_out: Tensor,
    *tensors: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """As op.backward, by way of the operator."""
    wanted = (needs.x, needs.key, needs.value and not packed, needs.weight)
    x_shape, key_shape, value_shape = shapes
    assert x_shape is not None and key_shape is not None
    found = torch.ops.fusepatch.engram_gate_backward(
        grad_out, *tensors, wanted, packed, x_shape, key_shape, value_shape or (), weight_dtype, residual, masked,
        backend,
    )  # fmt: skip
    grad_x, grad_key, grad_value, grad_weight = (
        gradient if is_wanted else None for gradient, is_wanted in zip(found, wanted, strict=True)
    )
    return grad_x, grad_key, grad_value, grad_weight


def traced(problem: Problem, x: Tensor, kv: Tensor, weight: Tensor, token_mask: Tensor | None, eps: float) -> Tensor:
    """`ops.engram_gate` while a compiler traces: the operator alone, of checked inputs."""
    device = problem.device
    backend = _serving(
        device.type, device.index, problem.dtype, problem.weight_dtype, problem.residual, problem.zero_dot,
        problem.masked,
    )  # fmt: skip
    out: Tensor
    out, _ = torch.ops.fusepatch.engram_gate(
        x, kv, None, weight, token_mask, None, None, float(eps), problem.residual, problem.zero_dot, backend
    )
    return out


def _serving(
    device: str, index: int | None, dtype: torch.dtype, weight_dtype: torch.dtype, residual: bool, zero_dot: str,
    masked: bool,
) -> str:  # fmt: skip
    """The backend for any number of tokens: compiled code can't choose again. A native one only where it is named, as
    none has been measured against compiled code.

    Sizes are symbols here. They were checked, and which backend serves does not depend on them beyond that.
    """
    where = torch.device(device) if index is None else torch.device(device, index)
    problem = Problem(where, dtype, weight_dtype, 1, WIDTH_MULTIPLE, residual, zero_dot, masked)
    found = choose(problem, MOST_TOKENS)
    is_named = settings.current().ops[OP].backend != "auto"
    return found.name if isinstance(found, Backend) and (is_named or not found.native) else REFERENCE.name


_serving._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as shims/traced.py: constant, without its import


# --------------------------------------------------------------------------------------------------- the operators


@torch.library.custom_op("fusepatch::engram_gate", mutates_args=())
def _engram_gate(
    x: Tensor,
    key: Tensor,
    value: Tensor | None,
    weight: Tensor,
    token_mask: Tensor | None,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
    residual: bool,
    zero_dot: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    norms = None if query_weight is None or key_weight is None else (query_weight, key_weight)
    call = Call(_named(backend), eps, residual, zero_dot)
    return op.forward(load(call.backend), call, x, key, value, weight, token_mask, norms)


@_engram_gate.register_fake
def _(
    x: Tensor,
    key: Tensor,
    value: Tensor | None,
    weight: Tensor,
    token_mask: Tensor | None,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
    residual: bool,
    zero_dot: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    saved_MS4 = x.new_empty(x.shape[:-2].numel(), x.shape[-2], 4, dtype=wide_dtype(x.dtype))
    return x.new_empty(x.shape), saved_MS4


@torch.library.custom_op("fusepatch::engram_gate_backward", mutates_args=())
def _engram_gate_backward(
    grad_out: Tensor,
    x: Tensor | None,
    key: Tensor | None,
    value: Tensor | None,
    weight: Tensor | None,
    saved_MS4: Tensor,
    wanted: Sequence[bool],
    packed: bool,
    x_shape: Sequence[int],
    key_shape: Sequence[int],
    value_shape: Sequence[int],
    weight_dtype: torch.dtype,
    residual: bool,
    masked: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    want_x, want_key, want_value, want_weight = wanted
    found = op.backward(
        load(_named(backend)), Needs(want_x, want_key, want_key if packed else want_value, want_weight), packed,
        (x_shape, key_shape, value_shape), weight_dtype, residual, masked, grad_out, x, key, value, weight, saved_MS4,
    )  # fmt: skip
    grad_x, grad_key, grad_value, grad_weight = (
        grad_out.new_empty(0) if gradient is None else gradient for gradient in found
    )
    return grad_x, grad_key, grad_value, grad_weight


@_engram_gate_backward.register_fake
def _(
    grad_out: Tensor,
    x: Tensor | None,
    key: Tensor | None,
    value: Tensor | None,
    weight: Tensor | None,
    saved_MS4: Tensor,
    wanted: Sequence[bool],
    packed: bool,
    x_shape: Sequence[int],
    key_shape: Sequence[int],
    value_shape: Sequence[int],
    weight_dtype: torch.dtype,
    residual: bool,
    masked: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    want_x, want_key, want_value, want_weight = wanted
    new = grad_out.new_empty
    return (
        new(x_shape if want_x else (0,)),
        new(key_shape if want_key else (0,)),
        new(value_shape if want_value else (0,)),
        new(x_shape[-2:], dtype=weight_dtype) if want_weight else new((0,)),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, key, value, weight, token_mask, _, _, _, ctx.residual, _, ctx.backend = inputs
    ctx.masked, ctx.packed, ctx.weight_dtype = token_mask is not None, value is None, weight.dtype
    ctx.shapes = (x.shape, key.shape, None if value is None else value.shape)
    ctx.save_for_backward(x, key, value, weight, output[1])


def _differentiate(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, key, value, weight, saved_MS4 = ctx.saved_tensors
    need_x, need_key, need_value, need_weight, *_rest = ctx.needs_input_grad
    needs = Needs(need_x, need_key, need_key if ctx.packed else need_value, need_weight)
    with without_autocast(grad_out):
        gradients = backward(
            ctx.backend, needs, ctx.packed, ctx.shapes, ctx.weight_dtype, ctx.residual, ctx.masked,
            grad_out, x, key, value, weight, saved_MS4,
        )  # fmt: skip
    return *gradients, None, None, None, None, None, None, None


_engram_gate.register_autograd(_differentiate, setup_context=_keep)
