"""What TMA, Hopper's and Blackwell's copy engine, can read."""

from __future__ import annotations

import torch
from torch import Tensor

BYTES = 16
"""Rows start on a multiple of this, and lie a multiple of it apart."""


def operand(t: Tensor) -> Tensor:
    """`t [rows, columns]` as TMA reads it: itself, or a copy where its rows do not start on 16 bytes."""
    row, column = t.stride()
    if column == 1 and row * t.element_size() % BYTES == 0 and row >= t.shape[1] and t.data_ptr() % BYTES == 0:
        return t
    # Not contiguous(): that returns the tensor itself where it only starts, or lies as one row, in the wrong place.
    return torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t)
