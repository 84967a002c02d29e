"""Kimi Delta Attention and the gated delta rule in plain PyTorch: the definition of what every kernel here computes.

Per sequence and value head, with a state S [K, V] that starts at 0 or at `initial_state`, token after token:

    S_t = diag(exp(g_t)) S_{t-1}                      decay: g_t [K] in KDA, one number per head in the gated delta rule
    S_t = S_t + k_t (beta_t (v_t - S_t^T k_t))^T      the delta rule
    o_t = S_t^T (scale q_t)

Before that, where the call asks for it:

    q, k = q / sqrt(|q|^2 + 1e-6), likewise k                  `l2norm`
    g    = -exp(A_log) softplus(g + dt_bias)                   `gate` is "softplus"
    g    = lower_bound sigmoid(exp(A_log) (g + dt_bias))       `gate` is "bounded"; without A_log, exp(A_log) is 1
    beta = sigmoid(beta), or twice that                        `beta_sigmoid`, `negative_eigenvalues`

Sources: Kimi Linear (arXiv 2510.26692), Gated Delta Networks (arXiv 2412.06464); the conventions, and the 1e-6, are
those of flash-linear-attention 0.6.0. Runs on any device, for any floating dtype, forward and backward by autograd, and
so as often as wanted. Maths is fp32 (fp64 for fp64), and each result is rounded once.

Tensors: B batch, T tokens, H heads of q and k, G value heads (a multiple of H: each group shares one head of q and k),
K and V widths; N sequences, which is B, or what `cu_seqlens [N + 1]` cuts one row of tokens into.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F

from .problem import Call, Inputs

L2_EPS = 1e-6


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the maths and of states."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def l2_normalise(x: Tensor) -> Tensor:
    """`x / sqrt(|x|^2 + 1e-6)` over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def log_gate(call: Call, g: Tensor, A_log_G: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    """The log of the decay from what the call passes as g: [B, T, G, K], or [B, T, G]."""
    if call.gate == "given":
        return g
    per_channel = g.dim() == 4
    raw = g if dt_bias is None else g + dt_bias.to(g.dtype).view(g.shape[2:])
    rate: Tensor | float = 1.0
    if A_log_G is not None:
        rate = A_log_G.to(g.dtype).reshape(-1).exp()
        rate = rate.unsqueeze(-1) if per_channel else rate
    if call.gate == "softplus":
        return -rate * F.softplus(raw)
    return call.lower_bound * torch.sigmoid(rate * raw)


def write_strength(call: Call, beta: Tensor) -> Tensor:
    """beta as the delta rule takes it."""
    if not call.beta_sigmoid:
        return beta
    return torch.sigmoid(beta) * (2.0 if call.negative_eigenvalues else 1.0)


def run(call: Call, inputs: Inputs, output_final_state: bool) -> tuple[Tensor, Tensor | None]:
    """The output [B, T, G, V] in v's dtype, and the final states in the dtype of the maths where they are wanted.

    States are [N, G, K, V], or [N, G, V, K] where `call.state_v_first`. `cu_seqlens` is read on the host.
    """
    wide = wide_dtype(inputs.v.dtype)
    q, k, v, g, beta = (t.to(wide) for t in inputs[:5])
    if call.l2norm:
        q, k = l2_normalise(q), l2_normalise(k)
    group = v.shape[2] // q.shape[2]
    q, k = (t.repeat_interleave(group, 2) for t in (q * call.scale, k))
    decay = log_gate(call, g, inputs.A_log, inputs.dt_bias).exp()
    decay = decay if decay.dim() == 4 else decay.unsqueeze(-1)
    beta = write_strength(call, beta).unsqueeze(-1)
    states = _initial_states(call, inputs, q, v)
    if inputs.cu_seqlens is None:
        out, states = _recurrence(q, k, v, decay, beta, states)
    else:
        ends = inputs.cu_seqlens.tolist()
        parts, finals = [], []
        for index, (first, last) in enumerate(itertools.pairwise(ends)):
            q_n, k_n, v_n, decay_n, beta_n = (t[:, first:last] for t in (q, k, v, decay, beta))
            part, final = _recurrence(q_n, k_n, v_n, decay_n, beta_n, states[index : index + 1])
            parts.append(part)
            finals.append(final)
        out, states = torch.cat(parts, 1), torch.cat(finals)
    out = out.to(inputs.v.dtype)
    if not output_final_state:
        return out, None
    return out, (states.transpose(-1, -2) if call.state_v_first else states).contiguous()


def _initial_states(call: Call, inputs: Inputs, q: Tensor, v: Tensor) -> Tensor:
    if inputs.initial_state is not None:
        found = inputs.initial_state.to(q.dtype)
        return found.transpose(-1, -2) if call.state_v_first else found
    sequences = q.shape[0] if inputs.cu_seqlens is None else inputs.cu_seqlens.numel() - 1
    return q.new_zeros(sequences, v.shape[2], q.shape[-1], v.shape[-1])


def _recurrence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """All [B, T, G, ...], decay and beta broadcast over the last; state [B, G, K, V]."""
    outs = []
    for q_t, k_t, v_t, decay_t, beta_t in zip(*(t.unbind(1) for t in (q, k, v, decay, beta)), strict=True):
        state = state * decay_t.unsqueeze(-1)
        remembered = torch.einsum("bgkv,bgk->bgv", state, k_t)
        state = state + torch.einsum("bgk,bgv->bgkv", k_t, beta_t * (v_t - remembered))
        outs.append(torch.einsum("bgkv,bgk->bgv", state, q_t))
    return torch.stack(outs, 1) if outs else torch.zeros_like(v), state
