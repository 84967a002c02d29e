"""What of a call of KDA or of the gated delta rule decides which kernel may serve it, and what one must be told."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...decline import Route

GATES = ("given", "softplus", "bounded")
"""g is the log of the decay; or what -exp(A_log) softplus(g + dt_bias) makes it of; or lower_bound sigmoid(...)."""


class Call(NamedTuple):
    """What of a call is no tensor."""

    scale: float
    l2norm: bool = False
    gate: str = "given"
    lower_bound: float = 0.0
    """Of a bounded gate."""
    beta_sigmoid: bool = False
    negative_eigenvalues: bool = False
    """beta is twice the sigmoid, in (0, 2)."""
    state_v_first: bool = False
    """States are [N, G, V, K], and not [N, G, K, V]."""
    safe_gate: bool = False
    """Whoever makes the gate promises that it lies in [-5, 0)."""


class Inputs(NamedTuple):
    """The tensors of a call, in any layout: B batch, T tokens, H heads of q and k, G of the values, K and V widths."""

    q: Tensor
    """[B, T, H, K], as is k."""
    k: Tensor
    v: Tensor
    """[B, T, G, V]."""
    g: Tensor
    """[B, T, G, K] in KDA, [B, T, G] in the gated delta rule."""
    beta: Tensor
    """[B, T, G]."""
    A_log: Tensor | None = None
    """Of G elements."""
    dt_bias: Tensor | None = None
    """Of G * K elements in KDA, of G in the gated delta rule."""
    initial_state: Tensor | None = None
    """[N, G, K, V], or as `Call.state_v_first` says."""
    cu_seqlens: Tensor | None = None
    """[N + 1] integers, where B is 1."""


class Problem(NamedTuple):
    """One call as a kernel sees it, without its number of tokens and of sequences."""

    device: torch.device
    dtype: torch.dtype
    """Of q, k and v."""
    heads: int
    """H, of q and k."""
    value_heads: int
    """G, a multiple of H."""
    key_width: int
    value_width: int
    trains: bool
    """Whether an input requires a gradient. The grad mode is not looked at: checkpointing changes it between a forward
    pass and its recomputation."""
    call: Call
    g_dtype: torch.dtype
    beta_dtype: torch.dtype
    parameter_dtypes: tuple[torch.dtype | None, torch.dtype | None]
    """Of A_log and dt_bias; None where there is none."""

    @property
    def route(self) -> Route:
        """The op has no parts that the library would run: it is one kernel's or the library's."""
        return Route.FUSED


def problem_of(call: Call, inputs: Inputs) -> Problem:
    """The problem that a call poses. Its tensors fit each other."""
    q, _, v, g, beta, A_log, dt_bias, *_ = inputs
    return Problem(
        v.device,
        v.dtype,
        q.shape[2],
        v.shape[2],
        q.shape[3],
        v.shape[3],
        any(t is not None and t.requires_grad for t in inputs),
        call,
        g.dtype,
        beta.dtype,
        (None if A_log is None else A_log.dtype, None if dt_bias is None else dt_bias.dtype),
    )
