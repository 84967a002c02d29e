"""How a call's tensors are laid out for kernels: M = B T tokens, states of the values first or of the keys first."""

from __future__ import annotations

from torch import Tensor


def tokens(t: Tensor) -> Tensor:
    """`t [B, T, heads, K]` as [M, heads, K] of unit inner stride: a view where it can be one, else a copy."""
    flat = t.reshape(-1, *t.shape[2:])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def dense(t: Tensor) -> Tensor:
    """`t` contiguous, and on an address from which 16 bytes can be read at once."""
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


def state(tensor: Tensor, *, is_v_first: bool, v_first: bool) -> Tensor:
    """States in the layout that is wanted: a view, transposed where they have the other one."""
    return tensor if is_v_first == v_first else tensor.transpose(-1, -2)
