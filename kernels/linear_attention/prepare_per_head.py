# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""What the gated delta rule does to its inputs before the recurrence, as one Triton kernel each way: SM80 and up.

    q, k = q / sqrt(|q|^2 + 1e-6), likewise k
    g    = -exp(A_log) softplus(g + dt_bias), in fp32
    beta = sigmoid(beta), or twice that where eigenvalues may be negative, in fp32

The backward kernel takes the gradients of the four results and gives those of the raw q, k, g, beta, A_log and dt_bias:
the exact derivatives of the above, in fp32, with q and k read back as they were rounded. Gradients of q and k come once
for each value head, and are summed over those that share a head.

Unlike prepare.py, which serves KDA, the gate is one number per head, and heads of q and k are not written out for the
value heads that share them. Memory-bound. Forward: one program per block of tokens and head of q and k. Backward: one
program per run of tokens and head; it sums the gradients of A_log and dt_bias over its run, and the runs are summed in
order after it. No atomics: the same bits each time. All offsets of tokens are 64 bits wide.

Tensors: M tokens, H heads of q and k, G value heads, K width, P programs per head. Inputs may have any token and head
stride, and unit inner stride (of q and k); what is written is contiguous.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .elementwise import L2_EPS, launch, sigmoid, sigmoid_slope, softplus
from .prepare import spans_of
from .problem import Call

_ROWS = 16
_WARPS = 4


@triton.jit(do_not_specialize=["tokens"])
def _forward_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, rate_ptr, bias_ptr, q_out_ptr, k_out_ptr, g_out_ptr, beta_out_ptr, norm_ptr,
    tokens, q_token, q_head, k_token, k_head, g_token, g_head, beta_token, beta_head, beta_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """`MEMBERS` is `GROUP`, the number of value heads of a head, rounded up to a power of two."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    exists = rows < tokens
    inside = exists[:, None] & (columns < WIDTH)[None, :]
    out_at = (rows * HEADS + head)[:, None] * WIDTH + columns[None, :]
    norm_at = norm_ptr + rows * HEADS + head

    q = tl.load(q_ptr + (rows * q_token + head * q_head)[:, None] + columns[None, :], mask=inside, other=0.0)
    q = q.to(tl.float32)
    q_norm = tl.rsqrt(tl.sum(q * q, 1) + L2_EPS)
    tl.store(q_out_ptr + out_at, (q * q_norm[:, None]).to(q_out_ptr.dtype.element_ty), mask=inside)
    tl.store(norm_at, q_norm, mask=exists)
    k = tl.load(k_ptr + (rows * k_token + head * k_head)[:, None] + columns[None, :], mask=inside, other=0.0)
    k = k.to(tl.float32)
    k_norm = tl.rsqrt(tl.sum(k * k, 1) + L2_EPS)
    tl.store(k_out_ptr + out_at, (k * k_norm[:, None]).to(k_out_ptr.dtype.element_ty), mask=inside)
    tl.store(norm_at + tokens.to(tl.int64) * HEADS, k_norm, mask=exists)

    members = tl.arange(0, MEMBERS)
    value_heads = head * GROUP + members
    among = members < GROUP
    both = exists[:, None] & among[None, :]
    gate_at = (rows * (HEADS * GROUP))[:, None] + value_heads[None, :]
    g = tl.load(g_ptr + (rows * g_token)[:, None] + (value_heads * g_head)[None, :], mask=both, other=0.0)
    g = g.to(tl.float32)
    if HAS_BIAS:
        g += tl.load(bias_ptr + value_heads, mask=among, other=0.0).to(tl.float32)[None, :]
    rate = tl.exp(tl.load(rate_ptr + value_heads, mask=among, other=0.0).to(tl.float32))
    tl.store(g_out_ptr + gate_at, -rate[None, :] * softplus(g), mask=both)
    beta = tl.load(beta_ptr + (rows * beta_token)[:, None] + (value_heads * beta_head)[None, :], mask=both, other=0.0)
    tl.store(beta_out_ptr + gate_at, beta_scale * sigmoid(beta.to(tl.float32)), mask=both)


@triton.jit(do_not_specialize=["tokens", "span"])
def _backward_kernel(
    grad_q_ptr, grad_k_ptr, grad_g_ptr, grad_beta_ptr, q_out_ptr, k_out_ptr, norm_ptr,
    g_ptr, beta_ptr, rate_ptr, bias_ptr,
    q_ptr, k_ptr, raw_g_ptr, raw_beta_ptr, rate_sum_ptr, bias_sum_ptr,
    tokens, span, g_token, g_head, beta_token, beta_head, beta_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """`q_ptr` to `raw_beta_ptr` are written: the gradients of the raw inputs. Each program has `span` tokens."""
    VALUE_HEADS: tl.constexpr = HEADS * GROUP
    program = tl.program_id(0).to(tl.int64)
    first = program * span
    last = tl.minimum(first + span, tokens.to(tl.int64))
    head = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    members = tl.arange(0, MEMBERS)
    value_heads = head * GROUP + members
    among = members < GROUP
    rate = tl.exp(tl.load(rate_ptr + value_heads, mask=among, other=0.0).to(tl.float32))
    bias = tl.zeros([MEMBERS], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + value_heads, mask=among, other=0.0).to(tl.float32)
    rate_sum, bias_sum = tl.zeros([MEMBERS], tl.float32), tl.zeros([MEMBERS], tl.float32)

    for start in range(first, last, ROWS):
        rows = start + tl.arange(0, ROWS)
        exists = rows < last
        both = exists[:, None] & among[None, :]
        gate_at = (rows * VALUE_HEADS)[:, None] + value_heads[None, :]
        g = tl.load(g_ptr + (rows * g_token)[:, None] + (value_heads * g_head)[None, :], mask=both, other=0.0)
        g = g.to(tl.float32) + bias[None, :]
        grad_g = tl.load(grad_g_ptr + gate_at, mask=both, other=0.0)
        rate_sum += tl.sum(grad_g * (-rate[None, :] * softplus(g)), 0)
        grad_g = grad_g * (-rate[None, :] * sigmoid(g))
        bias_sum += tl.sum(grad_g, 0)
        tl.store(raw_g_ptr + gate_at, grad_g.to(raw_g_ptr.dtype.element_ty), mask=both)
        beta_at = (rows * beta_token)[:, None] + (value_heads * beta_head)[None, :]
        beta = tl.load(beta_ptr + beta_at, mask=both, other=0.0).to(tl.float32)
        grad_beta = tl.load(grad_beta_ptr + gate_at, mask=both, other=0.0) * (beta_scale * sigmoid_slope(beta))
        tl.store(raw_beta_ptr + gate_at, grad_beta.to(raw_beta_ptr.dtype.element_ty), mask=both)

        inside = exists[:, None] & (columns < WIDTH)[None, :]
        first_at = (rows * VALUE_HEADS + head * GROUP)[:, None] * WIDTH + columns[None, :]
        grad_q, grad_k = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
        for member in range(GROUP):
            at = first_at + member * WIDTH
            grad_q += tl.load(grad_q_ptr + at, mask=inside, other=0.0).to(tl.float32)
            grad_k += tl.load(grad_k_ptr + at, mask=inside, other=0.0).to(tl.float32)
        raw_at = (rows * HEADS + head)[:, None] * WIDTH + columns[None, :]
        q = tl.load(q_out_ptr + raw_at, mask=inside, other=0.0).to(tl.float32)
        k = tl.load(k_out_ptr + raw_at, mask=inside, other=0.0).to(tl.float32)
        q_norm = tl.load(norm_ptr + rows * HEADS + head, mask=exists, other=0.0)
        k_norm = tl.load(norm_ptr + (tokens.to(tl.int64) + rows) * HEADS + head, mask=exists, other=0.0)
        grad_q = (grad_q - tl.sum(grad_q * q, 1)[:, None] * q) * q_norm[:, None]
        grad_k = (grad_k - tl.sum(grad_k * k, 1)[:, None] * k) * k_norm[:, None]
        tl.store(q_ptr + raw_at, grad_q.to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(k_ptr + raw_at, grad_k.to(k_ptr.dtype.element_ty), mask=inside)

    tl.store(rate_sum_ptr + program * VALUE_HEADS + value_heads, rate_sum, mask=among)
    if HAS_BIAS:
        tl.store(bias_sum_ptr + program * VALUE_HEADS + value_heads, bias_sum, mask=among)


# ------------------------------------------------------------------------------------------------------- launching


class Raw(NamedTuple):
    """What a call passes."""

    q: Tensor
    """[M, H, K], as is k."""
    k: Tensor
    g: Tensor
    """[M, G], as is beta."""
    beta: Tensor
    A_log: Tensor
    """[G], contiguous, as is dt_bias."""
    dt_bias: Tensor | None


class Prepared(NamedTuple):
    """What the recurrence takes."""

    q: Tensor
    """[M, H, K], as is k."""
    k: Tensor
    g: Tensor
    """[M, G] in fp32, as is beta."""
    beta: Tensor
    norms: Tensor
    """[2, M, H] in fp32: 1 / sqrt(|q|^2 + 1e-6), and the same of k."""


class Incoming(NamedTuple):
    """The gradients of what the recurrence took, contiguous."""

    q: Tensor
    """[M, G, K], as is k: one for each value head."""
    k: Tensor
    g: Tensor
    """[M, G] in fp32, as is beta."""
    beta: Tensor


def prepare(call: Call, raw: Raw) -> Prepared:
    """The inputs of the recurrence."""
    tokens, heads, width = raw.q.shape
    value_heads, device = raw.g.shape[1], raw.q.device
    out = Prepared(
        torch.empty(tokens, heads, width, dtype=raw.q.dtype, device=device),
        torch.empty(tokens, heads, width, dtype=raw.k.dtype, device=device),
        torch.empty(tokens, value_heads, dtype=torch.float32, device=device),
        torch.empty(tokens, value_heads, dtype=torch.float32, device=device),
        torch.empty(2, tokens, heads, dtype=torch.float32, device=device),
    )
    if tokens:
        arguments = (
            *raw[:5], raw.A_log if raw.dt_bias is None else raw.dt_bias, *out, tokens, *raw.q.stride()[:2],
            *raw.k.stride()[:2], *raw.g.stride(), *raw.beta.stride(), _beta_scale(call),
        )  # fmt: skip
        grid = (triton.cdiv(tokens, _ROWS), heads)
        launch(_forward_kernel, grid, arguments, _constants(raw), warps=_WARPS)
    return out


def backward(call: Call, incoming: Incoming, prepared: Prepared, raw: Raw) -> Raw:
    """The gradients of the raw inputs, contiguous, each in the dtype of its input. Nothing that was read is written."""
    tokens, heads, _ = raw.q.shape
    value_heads, device = raw.g.shape[1], raw.q.device
    programs, span = spans_of(tokens, heads)
    grad_q, grad_k, grad_g, grad_beta = (torch.empty(t.shape, dtype=t.dtype, device=device) for t in raw[:4])
    rate_sums_PG, bias_sums_PG = torch.empty(2, programs, value_heads, dtype=torch.float32, device=device)
    if tokens:
        arguments = (
            *incoming, prepared.q, prepared.k, prepared.norms, raw.g, raw.beta, raw.A_log,
            raw.A_log if raw.dt_bias is None else raw.dt_bias, grad_q, grad_k, grad_g, grad_beta, rate_sums_PG,
            bias_sums_PG, tokens, span, *raw.g.stride(), *raw.beta.stride(), _beta_scale(call),
        )  # fmt: skip
        launch(_backward_kernel, (programs, heads), arguments, _constants(raw), warps=_WARPS)
    return Raw(
        grad_q,
        grad_k,
        grad_g,
        grad_beta,
        rate_sums_PG.sum(0).to(raw.A_log.dtype),
        None if raw.dt_bias is None else bias_sums_PG.sum(0).to(raw.dt_bias.dtype),
    )


def _beta_scale(call: Call) -> float:
    return 2.0 if call.negative_eigenvalues else 1.0


def _constants(raw: Raw) -> dict[str, Any]:
    heads, width = raw.q.shape[1:]
    group = raw.g.shape[1] // heads
    if width & (width - 1):
        raise ValueError(f"the width of q and k must be a power of two, got {width}")
    return {
        "HEADS": heads, "GROUP": group, "MEMBERS": triton.next_power_of_2(group), "WIDTH": width, "ROWS": _ROWS,
        "HAS_BIAS": raw.dt_bias is not None,
    }  # fmt: skip
