"""The numbers that the arms of a case share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .cases import Case

MOST_COPIES = 16


@dataclass(frozen=True, eq=False)
class Data:
    """`x [1, M, H]`, which wants a gradient, `gate, up [I, H]`, `down [H, I]` and the incoming gradient `dout`.

    Arms share these tensors, and none may write to them. Gate, up and the output are of unit scale or near it: small
    numbers would hide errors, and zeros run faster than a model's numbers do.
    """

    x: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    dout: Tensor


def make(case: Case, seed: int) -> Data:
    """Random normal data for a case."""
    generator = torch.Generator(case.device).manual_seed(seed)
    shape = case.shape

    def normal(*sizes: int, scale: float = 1.0) -> Tensor:
        wide = torch.randn(*sizes, generator=generator, device=case.device)
        return wide.mul_(scale).to(case.dtype)

    return Data(
        x=normal(1, shape.tokens, shape.hidden).requires_grad_(),
        gate=normal(shape.inner, shape.hidden, scale=shape.hidden**-0.5),
        up=normal(shape.inner, shape.hidden, scale=shape.hidden**-0.5),
        down=normal(shape.hidden, shape.inner, scale=shape.inner**-0.5),
        dout=normal(1, shape.tokens, shape.hidden),
    )


def copies(case: Case, cache_bytes: int) -> int:
    """How many sets of data calls must rotate among, so that none finds its inputs in a cache of that size."""
    shape = case.shape
    inputs = (2 * shape.tokens * shape.hidden + 3 * shape.inner * shape.hidden) * case.dtype.itemsize
    if inputs > cache_bytes:
        return 1
    return min(MOST_COPIES, 1 + math.ceil(cache_bytes / inputs))
