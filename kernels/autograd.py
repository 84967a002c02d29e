"""A backward pass that can't be differentiated itself, and says so."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

_Gradients = tuple[Tensor | None, ...]


def differentiable_once(backward: Callable[..., _Gradients]) -> Callable[..., _Gradients]:
    """Makes `backward(ctx, saved, *incoming)` a Function's, whose gradients raise when they are differentiated.

    `saved` are the saved tensors, unpacked once. `torch.autograd.function.once_differentiable` raises only where the
    incoming gradient requires one; under `create_graph=True` with an ordinary loss it returns gradients without a
    graph, and a gradient penalty is then silently dropped.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *incoming: Tensor) -> _Gradients:
        saved = ctx.saved_tensors
        if not torch.is_grad_enabled():
            with without_autocast(incoming[0]):
                return backward(ctx, saved, *incoming)
        with torch.no_grad(), without_autocast(incoming[0]):
            gradients = backward(ctx, saved, *incoming)
        # Whatever the gradients depend on leads to the refusal, so that the engine meets it on the way there.
        sources = [tensor for tensor in (*incoming, *saved) if tensor is not None and tensor.requires_grad]
        return tuple(None if gradient is None else _refuse(gradient, sources) for gradient in gradients)

    return wrapper


_NOTHING = contextlib.nullcontext()


def without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """For a backward pass that is called inside autocast: what the forward pass read is in one dtype, and stays so."""
    if not torch._C._is_any_autocast_enabled() or not torch.amp.is_autocast_available(tensor.device.type):
        return _NOTHING
    return torch.autocast(tensor.device.type, enabled=False)


def _refuse(gradient: Tensor, sources: list[Tensor]) -> Tensor:
    refusing: Tensor = _Refuse.apply(gradient.detach().requires_grad_(), *sources)  # type: ignore[no-untyped-call]
    return refusing


class _Refuse(Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.clone()  # not a view: the caller may write to it

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> Tensor:
        raise RuntimeError(
            "trying to differentiate twice through a kernel of fusepatch, which has a first derivative only; "
            "run this part inside `with fusepatch.disabled():`"
        )


def tie(*tensors: Tensor) -> Tensor | None:
    """An empty tensor that autograd knows to depend on `tensors`, to be saved in their stead; None for none.

    It holds no memory of theirs, and leads the engine from a gradient to all that the gradient depends on.
    """
    tied: Tensor | None = _Tie.apply(*tensors) if tensors else None  # type: ignore[no-untyped-call]
    return tied


class _Tie(Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)
