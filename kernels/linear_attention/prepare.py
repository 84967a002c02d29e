# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""What KDA does to its inputs before the recurrence, as one Triton kernel each way: SM80 and up.

    q, k = q / sqrt(|q|^2 + 1e-6), likewise k, written once for each value head that shares them
    g    = g, or -exp(A_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias)), in fp32
    beta = sigmoid(beta), in fp32

The backward kernel takes the gradients of the four results and gives those of the raw q, k, g, beta, A_log and dt_bias:
the exact derivatives of the above, in fp32, with q and k read back as they were rounded.

Memory-bound. Forward: one program per block of tokens and value head. Backward: one program per run of tokens and head
of q and k; it sums the gradients of A_log and dt_bias over its run, and the runs are summed in order after it. No
atomics: the same bits each time. All offsets of tokens are 64 bits wide.

Tensors: M tokens, H heads of q and k, G value heads, K width, P programs per head. Inputs may have any token and head
stride, and unit inner stride; what is written is contiguous.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .elementwise import L2_EPS, launch, sigmoid, sigmoid_slope, softplus
from .problem import GATES, Call

_ROWS = 16
_WARPS = 4
_PROGRAMS = 1056
"""Of a backward pass, all heads together, where there are the tokens: 8 for each multiprocessor of an H200."""

_SOFTPLUS = tl.constexpr(GATES.index("softplus"))
_BOUNDED = tl.constexpr(GATES.index("bounded"))


@triton.jit(do_not_specialize=["tokens"])
def _forward_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, rate_ptr, bias_ptr, q_out_ptr, k_out_ptr, g_out_ptr, beta_out_ptr, norm_ptr,
    tokens, q_token, q_head, k_token, k_head, g_token, g_head, beta_token, beta_head, lower_bound,
    HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    GATE: tl.constexpr, HAS_RATE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = VALUE_HEADS // HEADS
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    value_head = tl.program_id(1).to(tl.int64)
    head = value_head // GROUP
    columns = tl.arange(0, WIDTH)
    exists = rows < tokens
    inside = exists[:, None] & (columns < WIDTH)[None, :]
    out_at = (rows * VALUE_HEADS + value_head)[:, None] * WIDTH + columns[None, :]
    norm_at = norm_ptr + rows * HEADS + head
    is_first = rows < tl.where(value_head % GROUP == 0, tokens, 0)

    q = tl.load(q_ptr + (rows * q_token + head * q_head)[:, None] + columns[None, :], mask=inside, other=0.0)
    q = q.to(tl.float32)
    q_norm = tl.rsqrt(tl.sum(q * q, 1) + L2_EPS)
    tl.store(q_out_ptr + out_at, (q * q_norm[:, None]).to(q_out_ptr.dtype.element_ty), mask=inside)
    tl.store(norm_at, q_norm, mask=is_first)
    k = tl.load(k_ptr + (rows * k_token + head * k_head)[:, None] + columns[None, :], mask=inside, other=0.0)
    k = k.to(tl.float32)
    k_norm = tl.rsqrt(tl.sum(k * k, 1) + L2_EPS)
    tl.store(k_out_ptr + out_at, (k * k_norm[:, None]).to(k_out_ptr.dtype.element_ty), mask=inside)
    tl.store(norm_at + tokens.to(tl.int64) * HEADS, k_norm, mask=is_first)

    g_at = g_ptr + (rows * g_token + value_head * g_head)[:, None] + columns[None, :]
    g = tl.load(g_at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        g += tl.load(bias_ptr + value_head * WIDTH + columns).to(tl.float32)[None, :]
    rate = tl.exp(tl.load(rate_ptr + value_head).to(tl.float32)) if HAS_RATE else 1.0
    if GATE == _SOFTPLUS:
        g = -rate * softplus(g)
    if GATE == _BOUNDED:
        g = lower_bound * sigmoid(rate * g)
    tl.store(g_out_ptr + out_at, g, mask=inside)

    beta = tl.load(beta_ptr + rows * beta_token + value_head * beta_head, mask=exists, other=0.0).to(tl.float32)
    tl.store(beta_out_ptr + rows * VALUE_HEADS + value_head, sigmoid(beta), mask=exists)


@triton.jit(do_not_specialize=["tokens", "span"])
def _backward_kernel(
    grad_q_ptr, grad_k_ptr, grad_g_ptr, grad_beta_ptr, q_out_ptr, k_out_ptr, norm_ptr,
    g_ptr, beta_ptr, rate_ptr, bias_ptr,
    q_ptr, k_ptr, raw_g_ptr, raw_beta_ptr, rate_sum_ptr, bias_sum_ptr,
    tokens, span, g_token, g_head, beta_token, beta_head, lower_bound,
    HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    GATE: tl.constexpr, HAS_RATE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """`q_ptr` to `raw_beta_ptr` are written: the gradients of the raw inputs. Each program has `span` tokens."""
    GROUP: tl.constexpr = VALUE_HEADS // HEADS
    program = tl.program_id(0).to(tl.int64)
    first = program * span
    last = tl.minimum(first + span, tokens.to(tl.int64))
    head = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, WIDTH)

    for member in range(GROUP):
        value_head = head * GROUP + member
        rate = tl.exp(tl.load(rate_ptr + value_head).to(tl.float32)) if HAS_RATE else 1.0
        bias = tl.zeros([WIDTH], tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + value_head * WIDTH + columns).to(tl.float32)
        rate_sum, bias_sum = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
        for start in range(first, last, ROWS):
            rows = start + tl.arange(0, ROWS)
            exists = rows < last
            inside = exists[:, None] & (columns < WIDTH)[None, :]
            at = (rows * VALUE_HEADS + value_head)[:, None] * WIDTH + columns[None, :]
            grad = tl.load(grad_g_ptr + at, mask=inside, other=0.0)
            if GATE == _SOFTPLUS or GATE == _BOUNDED:  # noqa: SIM109 (not every Triton knows `in`)
                g_at = g_ptr + (rows * g_token + value_head * g_head)[:, None] + columns[None, :]
                raw = tl.load(g_at, mask=inside, other=0.0).to(tl.float32) + bias[None, :]
                if GATE == _SOFTPLUS:
                    rate_sum += tl.sum(grad * (-rate * softplus(raw)), 0)
                    grad = grad * (-rate * sigmoid(raw))
                else:
                    grad = grad * (lower_bound * rate * sigmoid_slope(rate * raw))
                    rate_sum += tl.sum(grad * raw, 0)
                bias_sum += tl.sum(grad, 0)
            tl.store(raw_g_ptr + at, grad.to(raw_g_ptr.dtype.element_ty), mask=inside)
            beta_at = rows * VALUE_HEADS + value_head
            beta = tl.load(beta_ptr + rows * beta_token + value_head * beta_head, mask=exists, other=0.0).to(tl.float32)
            grad_beta = tl.load(grad_beta_ptr + beta_at, mask=exists, other=0.0) * sigmoid_slope(beta)
            tl.store(raw_beta_ptr + beta_at, grad_beta.to(raw_beta_ptr.dtype.element_ty), mask=exists)
        if HAS_RATE:
            tl.store(rate_sum_ptr + program * VALUE_HEADS + value_head, tl.sum(rate_sum))
        if HAS_BIAS:
            tl.store(bias_sum_ptr + (program * VALUE_HEADS + value_head) * WIDTH + columns, bias_sum)

    for start in range(first, last, ROWS):
        rows = start + tl.arange(0, ROWS)
        exists = rows < last
        inside = exists[:, None] & (columns < WIDTH)[None, :]
        first_at = (rows * VALUE_HEADS + head * GROUP)[:, None] * WIDTH + columns[None, :]
        grad_q, grad_k = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
        for member in range(GROUP):
            at = first_at + member * WIDTH
            grad_q += tl.load(grad_q_ptr + at, mask=inside, other=0.0).to(tl.float32)
            grad_k += tl.load(grad_k_ptr + at, mask=inside, other=0.0).to(tl.float32)
        q = tl.load(q_out_ptr + first_at, mask=inside, other=0.0).to(tl.float32)
        k = tl.load(k_out_ptr + first_at, mask=inside, other=0.0).to(tl.float32)
        q_norm = tl.load(norm_ptr + rows * HEADS + head, mask=exists, other=0.0)
        k_norm = tl.load(norm_ptr + (tokens.to(tl.int64) + rows) * HEADS + head, mask=exists, other=0.0)
        grad_q = (grad_q - tl.sum(grad_q * q, 1)[:, None] * q) * q_norm[:, None]
        grad_k = (grad_k - tl.sum(grad_k * k, 1)[:, None] * k) * k_norm[:, None]
        raw_at = (rows * HEADS + head)[:, None] * WIDTH + columns[None, :]
        tl.store(q_ptr + raw_at, grad_q.to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(k_ptr + raw_at, grad_k.to(k_ptr.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------------------------------------- launching


class Prepared(NamedTuple):
    """What the recurrence takes."""

    q: Tensor
    """[M, G, K], as are k and g."""
    k: Tensor
    g: Tensor
    """fp32, as are the next two."""
    beta: Tensor
    """[M, G]."""
    norms: Tensor
    """[2, M, H]: 1 / sqrt(|q|^2 + 1e-6), and the same of k."""


class Gradients(NamedTuple):
    """Of the raw inputs, contiguous, each in the dtype of its input."""

    q: Tensor
    """[M, H, K], as is k."""
    k: Tensor
    g: Tensor
    """[M, G, K]."""
    beta: Tensor
    """[M, G]."""
    A_log: Tensor | None
    """[G]."""
    dt_bias: Tensor | None
    """[G, K]."""


def prepare(
    call: Call, q_MHK: Tensor, k_MHK: Tensor, g_MGK: Tensor, beta_MG: Tensor,
    A_log_G: Tensor | None, dt_bias_GK: Tensor | None,
) -> Prepared:  # fmt: skip
    """The inputs of the recurrence. Compiles the backward kernel too, at the first call of a kind."""
    tokens, heads, width = q_MHK.shape
    value_heads = g_MGK.shape[1]
    out = Prepared(
        torch.empty(tokens, value_heads, width, dtype=q_MHK.dtype, device=q_MHK.device),
        torch.empty(tokens, value_heads, width, dtype=k_MHK.dtype, device=q_MHK.device),
        torch.empty(tokens, value_heads, width, dtype=torch.float32, device=q_MHK.device),
        torch.empty(tokens, value_heads, dtype=torch.float32, device=q_MHK.device),
        torch.empty(2, tokens, heads, dtype=torch.float32, device=q_MHK.device),
    )
    if tokens == 0:
        return out
    arguments = (
        q_MHK, k_MHK, g_MGK, beta_MG, _or(A_log_G, q_MHK), _or(dt_bias_GK, q_MHK), *out, tokens,
        *q_MHK.stride()[:2], *k_MHK.stride()[:2], *g_MGK.stride()[:2], *beta_MG.stride(), call.lower_bound,
    )  # fmt: skip
    grid = (triton.cdiv(tokens, _ROWS), value_heads)
    constants = _constants(call, heads, value_heads, width, A_log_G, dt_bias_GK)
    launch(_forward_kernel, grid, arguments, constants, warps=_WARPS)
    kind = (q_MHK.device, q_MHK.dtype, g_MGK.dtype, beta_MG.dtype, *constants.values())
    if kind not in _compiled:
        _compile_backward(call, out, g_MGK, beta_MG, A_log_G, dt_bias_GK)
        _compiled.add(kind)
    return out


_compiled: set[tuple[Any, ...]] = set()


def _compile_backward(
    call: Call, prepared: Prepared, g_MGK: Tensor, beta_MG: Tensor, A_log_G: Tensor | None, dt_bias_GK: Tensor | None
) -> None:
    """Empty tensors, aligned as those of a backward pass will be, stand in for the gradients."""

    def of(dtype: torch.dtype) -> Tensor:
        return torch.empty(0, dtype=dtype, device=g_MGK.device)

    q, k, fp32 = of(prepared.q.dtype), of(prepared.k.dtype), of(torch.float32)
    into = Gradients(q, k, of(g_MGK.dtype), of(beta_MG.dtype), None, None)
    _launch_backward(call, q, k, fp32, fp32, prepared, g_MGK, beta_MG, A_log_G, dt_bias_GK, into, fp32, fp32,
                     only_compile=True)  # fmt: skip


def backward(
    call: Call, grad_q_MGK: Tensor, grad_k_MGK: Tensor, grad_g_MGK: Tensor, grad_beta_MG: Tensor, prepared: Prepared,
    g_MGK: Tensor, beta_MG: Tensor, A_log_G: Tensor | None, dt_bias_GK: Tensor | None,
) -> Gradients:  # fmt: skip
    """The gradients of the raw inputs from those, contiguous, of the prepared ones. Nothing that was read is written.

    `g_MGK` and `beta_MG` are the raw ones.
    """
    tokens, value_heads, width = prepared.q.shape
    heads = prepared.norms.shape[2]
    device = grad_q_MGK.device
    grads = Gradients(
        torch.empty(tokens, heads, width, dtype=prepared.q.dtype, device=device),
        torch.empty(tokens, heads, width, dtype=prepared.k.dtype, device=device),
        torch.empty(tokens, value_heads, width, dtype=g_MGK.dtype, device=device),
        torch.empty(tokens, value_heads, dtype=beta_MG.dtype, device=device),
        None,
        None,
    )
    programs, _ = spans_of(tokens, heads)
    rate_sums_PG = torch.empty(programs, value_heads, dtype=torch.float32, device=device)
    bias_sums_PGK = torch.empty(programs, value_heads, width, dtype=torch.float32, device=device)
    if tokens:
        _launch_backward(call, grad_q_MGK, grad_k_MGK, grad_g_MGK, grad_beta_MG, prepared, g_MGK, beta_MG, A_log_G,
                         dt_bias_GK, grads, rate_sums_PG, bias_sums_PGK)  # fmt: skip
    return grads._replace(
        A_log=None if A_log_G is None else rate_sums_PG.sum(0).to(A_log_G.dtype),
        dt_bias=None if dt_bias_GK is None else bias_sums_PGK.sum(0).to(dt_bias_GK.dtype),
    )


def spans_of(tokens: int, heads: int) -> tuple[int, int]:
    """How many programs share the tokens of one head in a backward pass, and how many tokens each has at most."""
    blocks = -(-tokens // _ROWS)
    span = -(-blocks // max(1, _PROGRAMS // heads)) * _ROWS
    return -(-tokens // span) if tokens else 0, span


def _launch_backward(
    call: Call, grad_q: Tensor, grad_k: Tensor, grad_g: Tensor, grad_beta: Tensor, prepared: Prepared, g: Tensor,
    beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, grads: Gradients, rate_sums: Tensor, bias_sums: Tensor,
    *, only_compile: bool = False,
) -> None:  # fmt: skip
    tokens, value_heads, width = prepared.q.shape
    heads = prepared.norms.shape[2]
    programs, span = spans_of(tokens, heads)
    arguments = (
        grad_q, grad_k, grad_g, grad_beta, prepared.q, prepared.k, prepared.norms,
        g, beta, _or(A_log, g), _or(dt_bias, g), *grads[:4], rate_sums, bias_sums,
        tokens, span, *g.stride()[:2], *beta.stride(), call.lower_bound,
    )  # fmt: skip
    grid = (programs, heads)
    constants = _constants(call, heads, value_heads, width, A_log, dt_bias)
    launch(_backward_kernel, grid, arguments, constants, warps=_WARPS, only_compile=only_compile)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor


def _constants(
    call: Call, heads: int, value_heads: int, width: int, A_log: Tensor | None, dt_bias: Tensor | None
) -> dict[str, Any]:
    if width & (width - 1):
        raise ValueError(f"the width of q and k must be a power of two, got {width}")
    return {
        "HEADS": heads, "VALUE_HEADS": value_heads, "WIDTH": width, "ROWS": _ROWS, "GATE": GATES.index(call.gate),
        "HAS_RATE": A_log is not None, "HAS_BIAS": dt_bias is not None,
    }  # fmt: skip
