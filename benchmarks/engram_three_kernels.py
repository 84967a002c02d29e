# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""A control for the Engram gate: the structure of NVIDIA's `cudnn.engram`, written plainly for any GPU with Triton.

Forward, one kernel of a program per token. Backward, three: one program per token and stream reads the incoming
gradient and the value for four coefficients; one per 16 tokens and 128 columns reads all inputs again, and writes the
gradients and a partial sum of the weight's; one adds these up. So the backward pass reads its inputs twice.

Tensors: M tokens, S streams, D width of a stream; coefficients [M, S, 4] hold gate and the factors of product, x, key.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

_TOKENS, _COLUMNS, _ROWS = 16, 128, 16


@triton.jit
def _forward_kernel(
    x_ptr, kv_ptr, weight_ptr, mask_ptr, out_ptr, saved_ptr, eps,
    STREAMS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    exists = columns < WIDTH
    on = tl.load(mask_ptr + token) != 0
    kv_at, x_at = kv_ptr + token * ((STREAMS + 1) * WIDTH), x_ptr + token * (STREAMS * WIDTH)
    value = tl.load(kv_at + STREAMS * WIDTH + columns, mask=exists, other=0.0).to(tl.float32)
    for stream in range(STREAMS):
        at = stream * WIDTH + columns
        x = tl.load(x_at + at, mask=exists, other=0.0)
        wide = x.to(tl.float32)
        key = tl.load(kv_at + at, mask=exists, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + at, mask=exists, other=0.0)
        rstd_x = tl.rsqrt(tl.sum(wide * wide) / WIDTH + eps)
        rstd_key = tl.rsqrt(tl.sum(key * key) / WIDTH + eps)
        dot = tl.sum(wide * weight * key) * rstd_x * rstd_key * (WIDTH**-0.5)
        root = tl.sqrt(tl.maximum(tl.abs(dot), 1e-6))
        gate = tl.sigmoid(tl.where(dot.to(tl.int32, bitcast=True) < 0, -root, root))
        gate = tl.where(on, gate, 0.0)
        out = tl.where(on, (wide + gate * value).to(x.dtype), x)
        tl.store(out_ptr + token * (STREAMS * WIDTH) + at, out, mask=exists)
        saved_at = saved_ptr + (token * STREAMS + stream) * 4
        tl.store(saved_at, gate)
        tl.store(saved_at + 1, dot)
        tl.store(saved_at + 2, rstd_x)
        tl.store(saved_at + 3, rstd_key)


@triton.jit
def _moments_kernel(
    grad_out_ptr, kv_ptr, saved_ptr, coefficients_ptr,
    STREAMS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    exists = columns < WIDTH
    grad = tl.load(grad_out_ptr + row * WIDTH + columns, mask=exists, other=0.0).to(tl.float32)
    value_at = kv_ptr + (row // STREAMS) * ((STREAMS + 1) * WIDTH) + STREAMS * WIDTH
    value = tl.load(value_at + columns, mask=exists, other=0.0).to(tl.float32)
    gate, dot = tl.load(saved_ptr + row * 4), tl.load(saved_ptr + row * 4 + 1)
    rstd_x, rstd_key = tl.load(saved_ptr + row * 4 + 2), tl.load(saved_ptr + row * 4 + 3)
    root = tl.sqrt(tl.maximum(tl.abs(dot), 1e-6))
    slope = gate * (1 - gate) * 0.5 / root
    grad_dot = tl.where(tl.abs(dot) >= 1e-6, tl.sum(grad * value) * slope, 0.0)
    at = coefficients_ptr + row * 4
    tl.store(at, gate)
    tl.store(at + 1, grad_dot * rstd_x * rstd_key * (WIDTH**-0.5))
    tl.store(at + 2, grad_dot * dot * rstd_x * rstd_x / WIDTH)
    tl.store(at + 3, grad_dot * dot * rstd_key * rstd_key / WIDTH)


@triton.jit
def _apply_kernel(
    grad_out_ptr, x_ptr, kv_ptr, weight_ptr, coefficients_ptr, grad_x_ptr, grad_kv_ptr, partial_ptr, tokens,
    STREAMS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    token = (tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    there = token < tokens
    exists = there & (column < WIDTH)
    grad_value = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for stream in range(STREAMS):
        at = token * (STREAMS * WIDTH) + stream * WIDTH + column
        at_kv = token * ((STREAMS + 1) * WIDTH) + stream * WIDTH + column
        grad = tl.load(grad_out_ptr + at, mask=exists, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=exists, other=0.0).to(tl.float32)
        key = tl.load(kv_ptr + at_kv, mask=exists, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + stream * WIDTH + column, mask=column < WIDTH, other=0.0)
        of = coefficients_ptr + (token * STREAMS + stream) * 4
        gate, of_product = tl.load(of, mask=there, other=0.0), tl.load(of + 1, mask=there, other=0.0)
        of_x, of_key = tl.load(of + 2, mask=there, other=0.0), tl.load(of + 3, mask=there, other=0.0)
        grad_x = grad + of_product * weight * key - of_x * x
        grad_key = of_product * weight * x - of_key * key
        tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=exists)
        tl.store(grad_kv_ptr + at_kv, grad_key.to(grad_kv_ptr.dtype.element_ty), mask=exists)
        grad_value += gate * grad
        slot = partial_ptr + (tile * STREAMS + stream).to(tl.int64) * WIDTH + column
        tl.store(slot, tl.sum(of_product * x * key, 0)[None, :], mask=column < WIDTH)
    at_value = token * ((STREAMS + 1) * WIDTH) + STREAMS * WIDTH + column
    tl.store(grad_kv_ptr + at_value, grad_value.to(grad_kv_ptr.dtype.element_ty), mask=exists)


@triton.jit
def _sum_kernel(partial_ptr, grad_weight_ptr, tiles, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, tiles, ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < tiles)[:, None] & (column < size)[None, :]
        total += tl.load(partial_ptr + row[:, None] * size + column[None, :], mask=inside, other=0.0)
    tl.store(grad_weight_ptr + column, tl.sum(total, 0), mask=column < size)


class _Gate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kv: Tensor, weight: Tensor, mask: Tensor, eps: float) -> Tensor:
        tokens, streams, width = x.shape
        out, saved = torch.empty_like(x), x.new_empty(tokens, streams, 4, dtype=torch.float32)
        block = triton.next_power_of_2(width)
        _forward_kernel[(tokens,)](
            x, kv, weight, mask.view(torch.uint8), out, saved, eps, streams, width, block, num_warps=8
        )
        ctx.save_for_backward(x, kv, weight, saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, kv, weight, saved = ctx.saved_tensors
        tokens, streams, width = x.shape
        coefficients, tiles = torch.empty_like(saved), triton.cdiv(tokens, _TOKENS)
        grad_x, grad_kv, grad_weight = torch.empty_like(x), torch.empty_like(kv), torch.empty_like(weight)
        partial = saved.new_empty(tiles, streams, width)
        block = triton.next_power_of_2(width)
        _moments_kernel[(tokens * streams,)](grad_out, kv, saved, coefficients, streams, width, block, num_warps=8)
        _apply_kernel[(tiles, triton.cdiv(width, _COLUMNS))](
            grad_out, x, kv, weight, coefficients, grad_x, grad_kv, partial, tokens, streams, width, _TOKENS, _COLUMNS,
            num_warps=8,
        )  # fmt: skip
        size = streams * width
        _sum_kernel[(triton.cdiv(size, _COLUMNS),)](partial, grad_weight, tiles, size, _ROWS, _COLUMNS)
        return grad_x, grad_kv, grad_weight, None, None


def gate(x: Tensor, kv: Tensor, weight: Tensor, mask: Tensor, eps: float) -> Tensor:
    """`ops.engram_gate` with residual and `zero_dot="copysign"`; x [M, S, D], kv [M, (S+1)*D], weight fp32."""
    out: Tensor = _Gate.apply(x, kv, weight, mask, eps)  # type: ignore[no-untyped-call]
    return out
