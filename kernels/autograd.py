"""A backward pass that can't be differentiated itself, and says so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def differentiable_once(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """A backward that raises when its gradients are differentiated.

    `torch.autograd.function.once_differentiable` does so only where the incoming gradient requires one; under
    `create_graph=True` with an ordinary loss it returns gradients without a graph, and a gradient penalty is then
    silently dropped.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return backward(ctx, *incoming)
        with torch.no_grad():
            gradients = backward(ctx, *incoming)
        return tuple(None if gradient is None else _refuse(gradient) for gradient in gradients)

    return wrapper


def _refuse(gradient: Tensor) -> Tensor:
    refusing: Tensor = _Refuse.apply(gradient.detach().requires_grad_())  # type: ignore[no-untyped-call]
    return refusing


class _Refuse(Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> Tensor:
        raise RuntimeError(
            "trying to differentiate twice through a kernel of fusepatch, which has a first derivative only; "
            "run this part inside `with fusepatch.disabled():`"
        )
