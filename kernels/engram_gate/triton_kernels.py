# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""The Engram gate as Triton kernels: SM80 and up, one source for all. See reference.py for what they compute.

Memory-bound, and each byte is read once. Forward: one program per token, which keeps the token's value for all its
streams, and x and key of one stream between the moments and the output. Backward: a fixed number of programs, each with
a contiguous run of tokens; one step of a program is one stream of one token, its loads are copied into shared memory a
few steps ahead, and the gradient of the value is held across a token's streams. Each program adds up the weight's
gradient over its own tokens, in registers where it fits, and a small kernel adds the programs' sums in order: no
atomics, and the same bits each time on one kind of GPU.

A row is cut into a head of a power of two and a tail: 5120 = 4096 + 1024, where one block would be padded to 8192.
Maths is fp32. All offsets of tokens are 64 bits wide.

Tensors: M tokens, S streams, D width of a stream, P programs; saved [M, S, 4] holds gate, dot, rstd_x, rstd_key.
Any row stride, unit inner stride; nothing that was read is written.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_PROGRAMS = 192
"""More than any GPU of arch.py has multiprocessors: what plans leave room for without asking a GPU."""
_HELD_STREAMS = 4
_HELD_WIDTH = 8192
"""Up to this many streams of this width, a program holds its sums of the weight's gradient in registers."""
_SUM_COLUMNS, _SUM_ROWS = 128, 16

_SMALLEST_DOT = tl.constexpr(1e-6)  # reference.SMALLEST_DOT; a kernel reads no other kind of global


@triton.jit
def _columns(WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr):
    """The columns of head and tail, and which of the tail exist."""
    tail = HEAD + tl.arange(0, TAIL)
    return tl.arange(0, HEAD), tail, tail < WIDTH


@triton.jit
def _root(dot):
    """sqrt(max(|dot|, 1e-6)); NaN stays NaN, as tl.maximum would not have it."""
    size = tl.abs(dot)
    return tl.sqrt(tl.where(size < _SMALLEST_DOT, _SMALLEST_DOT, size))


@triton.jit
def _sign(dot, COPYSIGN: tl.constexpr):
    if COPYSIGN:
        return tl.where(dot.to(tl.int32, bitcast=True) < 0, -1.0, 1.0)
    else:
        return tl.where(dot > 0, 1.0, tl.where(dot < 0, -1.0, 0.0))


@triton.jit
def _forward_kernel(
    x_ptr, key_ptr, value_ptr, weight_ptr, mask_ptr, out_ptr, saved_ptr, x_row, key_row, value_row, out_row, eps,
    STREAMS: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
    MASKED: tl.constexpr, RESIDUAL: tl.constexpr, COPYSIGN: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, tail, exists = _columns(WIDTH, HEAD, TAIL)
    # Nothing of a masked token is read but x.
    on = tl.load(mask_ptr + token).to(tl.int32) if MASKED else 1
    read_head, read_tail = head < WIDTH * on, tail < WIDTH * on
    value_head = tl.load(value_ptr + token * value_row + head, mask=read_head, other=0.0).to(tl.float32)
    value_tail = tl.load(value_ptr + token * value_row + tail, mask=read_tail, other=0.0).to(tl.float32)
    for stream in range(STREAMS):
        column = stream * WIDTH
        x_at, key_at = x_ptr + token * x_row + column, key_ptr + token * key_row + column
        key_head = tl.load(key_at + head, mask=read_head, other=0.0, eviction_policy="evict_first").to(tl.float32)
        key_tail = tl.load(key_at + tail, mask=read_tail, other=0.0, eviction_policy="evict_first").to(tl.float32)
        raw_head = tl.load(x_at + head, eviction_policy="evict_first")
        raw_tail = tl.load(x_at + tail, mask=exists, other=0.0, eviction_policy="evict_first")
        weight_head = tl.load(weight_ptr + column + head, eviction_policy="evict_last").to(tl.float32)
        weight_tail = tl.load(weight_ptr + column + tail, mask=exists, other=0.0, eviction_policy="evict_last")
        weight_tail = weight_tail.to(tl.float32)
        x_head, x_tail = raw_head.to(tl.float32), raw_tail.to(tl.float32)

        square_x = tl.sum(x_head * x_head) + tl.sum(x_tail * x_tail)
        square_key = tl.sum(key_head * key_head) + tl.sum(key_tail * key_tail)
        product = tl.sum(x_head * weight_head * key_head) + tl.sum(x_tail * weight_tail * key_tail)
        rstd_x, rstd_key = tl.rsqrt(square_x / WIDTH + eps), tl.rsqrt(square_key / WIDTH + eps)
        dot = product * rstd_x * rstd_key * (WIDTH**-0.5)
        gate = 1.0 / (1.0 + tl.exp(-_sign(dot, COPYSIGN) * _root(dot)))
        out_head, out_tail = gate * value_head, gate * value_tail
        if RESIDUAL:
            out_head += x_head
            out_tail += x_tail
        out_head, out_tail = out_head.to(out_ptr.dtype.element_ty), out_tail.to(out_ptr.dtype.element_ty)
        if MASKED:
            gate, dot = tl.where(on != 0, gate, 0.0), tl.where(on != 0, dot, 0.0)
            rstd_x, rstd_key = tl.where(on != 0, rstd_x, 0.0), tl.where(on != 0, rstd_key, 0.0)
            # x itself and not x + 0, which is not -0 where x is.
            out_head = tl.where(read_head, out_head, raw_head if RESIDUAL else tl.zeros_like(raw_head))
            out_tail = tl.where(read_tail, out_tail, raw_tail if RESIDUAL else tl.zeros_like(raw_tail))
        out_at = out_ptr + token * out_row + column
        tl.store(out_at + head, out_head)
        tl.store(out_at + tail, out_tail, mask=exists)
        saved_at = saved_ptr + (token * STREAMS + stream) * 4
        tl.store(saved_at, gate)
        tl.store(saved_at + 1, dot)
        tl.store(saved_at + 2, rstd_x)
        tl.store(saved_at + 3, rstd_key)


@triton.jit(do_not_specialize=["tokens", "want_x", "want_key", "want_value"])
def _backward_kernel(
    grad_out_ptr, x_ptr, key_ptr, value_ptr, weight_ptr, saved_ptr,
    grad_x_ptr, grad_key_ptr, grad_value_ptr, partial_ptr,
    tokens, want_x, want_key, want_value, grad_out_row, x_row, key_row, value_row,
    grad_x_row, grad_key_row, grad_value_row,
    STREAMS: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
    RESIDUAL: tl.constexpr, WANT_WEIGHT: tl.constexpr, HELD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    first, last = program * tokens // programs, (program + 1) * tokens // programs
    head, tail, exists = _columns(WIDTH, HEAD, TAIL)
    # One name per stream: a kernel has no list of accumulators.
    sum_0_head, sum_0_tail = tl.zeros([HEAD], tl.float32), tl.zeros([TAIL], tl.float32)
    sum_1_head, sum_1_tail = tl.zeros([HEAD], tl.float32), tl.zeros([TAIL], tl.float32)
    sum_2_head, sum_2_tail = tl.zeros([HEAD], tl.float32), tl.zeros([TAIL], tl.float32)
    sum_3_head, sum_3_tail = tl.zeros([HEAD], tl.float32), tl.zeros([TAIL], tl.float32)
    grad_value_head, grad_value_tail = tl.zeros([HEAD], tl.float32), tl.zeros([TAIL], tl.float32)
    # Four numbers can't be copied ahead like a row can: they are loaded one step early instead.
    saved_at = saved_ptr + first * (STREAMS * 4)
    next_gate, next_dot = tl.load(saved_at), tl.load(saved_at + 1)  # each program has a token
    next_rstd_x, next_rstd_key = tl.load(saved_at + 2), tl.load(saved_at + 3)

    # All columns or none: which gradients are wanted is no reason to compile again.
    write_x_head, write_x_tail = head < WIDTH * want_x, tail < WIDTH * want_x
    write_key_head, write_key_tail = head < WIDTH * want_key, tail < WIDTH * want_key

    steps = (last - first) * STREAMS
    for step in tl.range(0, steps, num_stages=STAGES):
        token, stream = first + step // STREAMS, step % STREAMS
        column = stream * WIDTH
        grad_out_at = grad_out_ptr + token * grad_out_row + column
        x_at, key_at = x_ptr + token * x_row + column, key_ptr + token * key_row + column
        value_at, weight_at = value_ptr + token * value_row, weight_ptr + column
        grad_out_head = tl.load(grad_out_at + head).to(tl.float32)
        grad_out_tail = tl.load(grad_out_at + tail, mask=exists, other=0.0).to(tl.float32)
        value_head = tl.load(value_at + head).to(tl.float32)
        value_tail = tl.load(value_at + tail, mask=exists, other=0.0).to(tl.float32)
        x_head = tl.load(x_at + head).to(tl.float32)
        x_tail = tl.load(x_at + tail, mask=exists, other=0.0).to(tl.float32)
        key_head = tl.load(key_at + head).to(tl.float32)
        key_tail = tl.load(key_at + tail, mask=exists, other=0.0).to(tl.float32)
        weight_head = tl.load(weight_at + head).to(tl.float32)
        weight_tail = tl.load(weight_at + tail, mask=exists, other=0.0).to(tl.float32)

        gate, dot, rstd_x, rstd_key = next_gate, next_dot, next_rstd_x, next_rstd_key
        saved_at += 4
        any_left = step + 1 < steps
        next_gate = tl.load(saved_at, mask=any_left, other=0.0)
        next_dot = tl.load(saved_at + 1, mask=any_left, other=0.0)
        next_rstd_x = tl.load(saved_at + 2, mask=any_left, other=0.0)
        next_rstd_key = tl.load(saved_at + 3, mask=any_left, other=0.0)

        # A masked token, whose inputs may be anything; or a gate that is 0 to the last bit, whose slope is 0 too.
        on = gate != 0.0
        is_first, is_last = stream == 0, stream == STREAMS - 1
        grad_value_head = tl.where(is_first, 0.0, grad_value_head) + tl.where(on, gate * grad_out_head, 0.0)
        grad_value_tail = tl.where(is_first, 0.0, grad_value_tail) + tl.where(on, gate * grad_out_tail, 0.0)
        grad_value_at = grad_value_ptr + token * grad_value_row
        out_type = grad_value_ptr.dtype.element_ty
        done = tl.where(is_last, WIDTH * want_value, 0)
        tl.store(grad_value_at + head, grad_value_head.to(out_type), mask=head < done)
        tl.store(grad_value_at + tail, grad_value_tail.to(out_type), mask=tail < done)

        grad_gate = tl.sum(grad_out_head * value_head) + tl.sum(grad_out_tail * value_tail)
        root = _root(dot)
        # gate * (1 - gate), which depends on |dot| alone, without the cancellation of 1 - gate near 1.
        decay = tl.exp(-root)
        slope = decay / ((1.0 + decay) * (1.0 + decay)) * 0.5 / root
        grad_dot = tl.where(tl.abs(dot) < _SMALLEST_DOT, 0.0, grad_gate * slope)
        of_product = grad_dot * rstd_x * (rstd_key * (WIDTH**-0.5))
        of_norms = grad_dot * dot / WIDTH
        of_x, of_key = of_norms * rstd_x * rstd_x, of_norms * rstd_key * rstd_key

        grad_x_head = tl.where(on, of_product * weight_head * key_head - of_x * x_head, 0.0)
        grad_x_tail = tl.where(on, of_product * weight_tail * key_tail - of_x * x_tail, 0.0)
        if RESIDUAL:
            grad_x_head += grad_out_head
            grad_x_tail += grad_out_tail
        grad_x_at = grad_x_ptr + token * grad_x_row + column
        tl.store(grad_x_at + head, grad_x_head.to(grad_x_ptr.dtype.element_ty), mask=write_x_head)
        tl.store(grad_x_at + tail, grad_x_tail.to(grad_x_ptr.dtype.element_ty), mask=write_x_tail)
        grad_key_head = tl.where(on, of_product * weight_head * x_head - of_key * key_head, 0.0)
        grad_key_tail = tl.where(on, of_product * weight_tail * x_tail - of_key * key_tail, 0.0)
        grad_key_at = grad_key_ptr + token * grad_key_row + column
        tl.store(grad_key_at + head, grad_key_head.to(grad_key_ptr.dtype.element_ty), mask=write_key_head)
        tl.store(grad_key_at + tail, grad_key_tail.to(grad_key_ptr.dtype.element_ty), mask=write_key_tail)

        if WANT_WEIGHT:
            part_head = tl.where(on, of_product * x_head * key_head, 0.0)
            part_tail = tl.where(on, of_product * x_tail * key_tail, 0.0)
            if HELD:
                sum_0_head += tl.where(stream == 0, part_head, 0.0)
                sum_0_tail += tl.where(stream == 0, part_tail, 0.0)
                if STREAMS > 1:
                    sum_1_head += tl.where(stream == 1, part_head, 0.0)
                    sum_1_tail += tl.where(stream == 1, part_tail, 0.0)
                if STREAMS > 2:
                    sum_2_head += tl.where(stream == 2, part_head, 0.0)
                    sum_2_tail += tl.where(stream == 2, part_tail, 0.0)
                if STREAMS > 3:
                    sum_3_head += tl.where(stream == 3, part_head, 0.0)
                    sum_3_tail += tl.where(stream == 3, part_tail, 0.0)
            else:
                # This program's own slot. STAGES is 1 here: a load ahead would miss the store before it.
                so_far = step >= STREAMS
                slot = partial_ptr + (program * STREAMS + stream) * WIDTH
                part_head += tl.load(slot + head, mask=so_far, other=0.0)
                part_tail += tl.load(slot + tail, mask=exists & so_far, other=0.0)
                tl.store(slot + head, part_head)
                tl.store(slot + tail, part_tail, mask=exists)

    if WANT_WEIGHT and HELD:
        slot = partial_ptr + program * (STREAMS * WIDTH)
        tl.store(slot + head, sum_0_head)
        tl.store(slot + tail, sum_0_tail, mask=exists)
        if STREAMS > 1:
            tl.store(slot + WIDTH + head, sum_1_head)
            tl.store(slot + WIDTH + tail, sum_1_tail, mask=exists)
        if STREAMS > 2:
            tl.store(slot + 2 * WIDTH + head, sum_2_head)
            tl.store(slot + 2 * WIDTH + tail, sum_2_tail, mask=exists)
        if STREAMS > 3:
            tl.store(slot + 3 * WIDTH + head, sum_3_head)
            tl.store(slot + 3 * WIDTH + tail, sum_3_tail, mask=exists)


@triton.jit(do_not_specialize=["programs"])
def _weight_kernel(partial_ptr, grad_weight_ptr, programs, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """grad_weight = the sum of the programs' partial sums, in an order that depends on their number alone."""
    columns = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, programs, ROWS):
        row = first + rows
        inside = (row < programs)[:, None] & (columns < size)[None, :]
        total += tl.load(partial_ptr + row[:, None].to(tl.int64) * size + columns[None, :], mask=inside, other=0.0)
    tl.store(grad_weight_ptr + columns, tl.sum(total, 0).to(grad_weight_ptr.dtype.element_ty), mask=columns < size)


# ------------------------------------------------------------------------------------------------------- launching


class Shape(NamedTuple):
    """How a row is cut, and how the kernels are launched for it."""

    head: int
    tail: int
    forward_warps: int
    backward_warps: int
    held: bool
    stages: int


def shape_of(streams: int, width: int) -> Shape:
    """The cut of a row of `width`, and warps that give each thread 16 bf16 elements of it forward and 10 backward."""
    head = 1 << (width.bit_length() - 1)
    tail = triton.next_power_of_2(width - head) if width > head else 1  # one column that does not exist
    held = streams <= _HELD_STREAMS and width <= _HELD_WIDTH
    return Shape(
        head,
        tail,
        forward_warps=min(max(head // 512, 1), 16),
        backward_warps=min(max(head // 256, 1), 16),
        held=held,
        stages=3 if held else 1,
    )


def programs_of(tokens: int, device: torch.device) -> int:
    """How many programs share the tokens in a backward pass: one per multiprocessor. The interpreter has three."""
    if device.type != "cuda":
        return min(tokens, 3)
    return min(tokens, torch.cuda.get_device_properties(device).multi_processor_count, MOST_PROGRAMS)


def engram_forward(
    x_MSD: Tensor,
    key_MSD: Tensor,
    value_MD: Tensor,
    weight_SD: Tensor,
    mask_M: Tensor | None,
    eps: float,
    residual: bool,
    zero_dot: str,
    *,
    out_MSD: Tensor,
    saved_MS4: Tensor,
) -> None:
    """Writes the output and what the backward pass needs. Compiles the backward pass too, at the first call."""
    tokens, streams, width = x_MSD.shape
    if tokens == 0:
        return
    _launch_forward(x_MSD, key_MSD, value_MD, weight_SD, mask_M, eps, residual, zero_dot, out_MSD, saved_MS4)
    kind = (x_MSD.dtype, weight_SD.dtype, streams, width, residual, zero_dot, mask_M is not None)
    if kind not in _compiled:
        _compile_backward(x_MSD, key_MSD, value_MD, weight_SD, saved_MS4, residual, out_MSD, out_MSD.device)
        _compiled.add(kind)


def compile_for(
    device: torch.device,
    tokens: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    streams: int,
    width: int,
    residual: bool,
    zero_dot: str,
    masked: bool,
) -> None:
    """Compiles both passes for contiguous, aligned tensors, of which none is made."""
    if tokens == 0:
        return

    def shape_only(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")  # its address is 0, as well aligned as can be

    x, out = shape_only(tokens, streams, width), shape_only(tokens, streams, width)
    kv, weight = shape_only(tokens, (streams + 1) * width), shape_only(streams, width, dtype=weight_dtype)
    key, value = kv[:, : streams * width].unflatten(1, (streams, width)), kv[:, streams * width :]
    saved = shape_only(tokens, streams, 4, dtype=torch.float32)
    mask = shape_only(tokens, dtype=torch.bool) if masked else None
    # Any number will do for eps: what is compiled takes it as an argument.
    _launch_forward(x, key, value, weight, mask, 0.5, residual, zero_dot, out, saved, compile_on=device)
    _compile_backward(x, key, value, weight, saved, residual, out, device)
    _compiled.add((dtype, weight_dtype, streams, width, residual, zero_dot, masked))


def _compile_backward(
    x: Tensor, key: Tensor, value: Tensor, weight: Tensor, saved: Tensor, residual: bool, out: Tensor,
    device: torch.device,
) -> None:  # fmt: skip
    """Tensors of the same shapes, dtypes and strides stand in for the gradients and the partial sums."""
    for partial in (saved, None):
        _launch_backward(
            out, x, key, value, weight, saved, residual, out, key, value, partial,
            want=(True, True, True), compile_on=device,
        )  # fmt: skip
    _launch_sum(saved, weight, 1, compile_on=device)


_compiled: set[tuple[torch.dtype, torch.dtype, int, int, bool, str, bool]] = set()


def is_compiled(
    dtype: torch.dtype, weight_dtype: torch.dtype, streams: int, width: int, residual: bool, zero_dot: str, masked: bool
) -> bool:
    """Whether both passes are compiled for this kind of call, so that CUDA-graph capture may launch them."""
    return (dtype, weight_dtype, streams, width, residual, zero_dot, masked) in _compiled


def engram_backward(
    grad_out_MSD: Tensor,
    x_MSD: Tensor | None,
    key_MSD: Tensor | None,
    value_MD: Tensor | None,
    weight_SD: Tensor | None,
    saved_MS4: Tensor,
    residual: bool,
    *,
    grad_x_MSD: Tensor | None,
    grad_key_MSD: Tensor | None,
    grad_value_MD: Tensor | None,
    grad_weight_SD: Tensor | None,
    partial_PSD: Tensor | None = None,
) -> None:
    """Writes each gradient that is given. `partial_PSD` is fp32 scratch for the weight's; made where it is None."""
    tokens, streams, width = grad_out_MSD.shape
    if tokens == 0:
        if grad_weight_SD is not None:
            grad_weight_SD.zero_()
        return
    programs = programs_of(tokens, grad_out_MSD.device)
    if grad_weight_SD is None:
        partial_PSD = None
    elif partial_PSD is None:
        partial_PSD = saved_MS4.new_empty(programs, streams, width)
    # What is not needed was not saved. Its place is taken by a tensor of the shape, and what comes of it is not stored.
    x = grad_out_MSD if x_MSD is None else x_MSD
    key = grad_out_MSD if key_MSD is None else key_MSD
    value = grad_out_MSD[:, 0] if value_MD is None else value_MD
    if weight_SD is None:
        weight_SD = grad_out_MSD[0] if grad_weight_SD is None else grad_weight_SD
    want = (grad_x_MSD is not None, grad_key_MSD is not None, grad_value_MD is not None)
    _launch_backward(
        grad_out_MSD, x, key, value, weight_SD, saved_MS4, residual,
        grad_out_MSD if grad_x_MSD is None else grad_x_MSD,
        grad_out_MSD if grad_key_MSD is None else grad_key_MSD,
        grad_out_MSD[:, 0] if grad_value_MD is None else grad_value_MD,
        partial_PSD, want=want,
    )  # fmt: skip
    if grad_weight_SD is not None:
        assert partial_PSD is not None
        _launch_sum(partial_PSD, grad_weight_SD, programs)


def _launch_forward(
    x: Tensor, key: Tensor, value: Tensor, weight: Tensor, mask: Tensor | None, eps: float, residual: bool,
    zero_dot: str, out: Tensor, saved: Tensor, *, compile_on: torch.device | None = None,
) -> None:  # fmt: skip
    tokens, streams, width = x.shape
    shape = shape_of(streams, width)
    arguments = (
        x, key, value, weight, x if mask is None else mask.view(torch.uint8), out, saved,
        x.stride(0), key.stride(0), value.stride(0), out.stride(0), eps,
    )  # fmt: skip
    options = {"MASKED": mask is not None, "RESIDUAL": residual, "COPYSIGN": zero_dot == "copysign"}
    cut = (streams, width, shape.head, shape.tail)
    _run(_forward_kernel, tokens, arguments, cut, options, shape.forward_warps, compile_on)


def _launch_backward(
    grad_out: Tensor, x: Tensor, key: Tensor, value: Tensor, weight: Tensor, saved: Tensor, residual: bool,
    grad_x: Tensor, grad_key: Tensor, grad_value: Tensor, partial: Tensor | None, *,
    want: tuple[bool, bool, bool], compile_on: torch.device | None = None,
) -> None:  # fmt: skip
    tokens, streams, width = grad_out.shape
    shape = shape_of(streams, width)
    rows = (t.stride(0) for t in (grad_out, x, key, value, grad_x, grad_key, grad_value))
    arguments = (
        grad_out, x, key, value, weight, saved, grad_x, grad_key, grad_value, saved if partial is None else partial,
        tokens, *(int(wanted) for wanted in want), *rows,
    )  # fmt: skip
    options = {
        "RESIDUAL": residual, "WANT_WEIGHT": partial is not None, "HELD": shape.held, "STAGES": shape.stages
    }  # fmt: skip
    cut = (streams, width, shape.head, shape.tail)
    programs = programs_of(tokens, compile_on or grad_out.device)
    _run(_backward_kernel, programs, arguments, cut, options, shape.backward_warps, compile_on)


def _launch_sum(partial: Tensor, grad_weight: Tensor, programs: int, *, compile_on: torch.device | None = None) -> None:
    size = grad_weight.numel()
    arguments = (partial, grad_weight, programs, size)
    blocks = triton.cdiv(size, _SUM_COLUMNS)
    _run(_weight_kernel, blocks, arguments, (_SUM_ROWS, _SUM_COLUMNS), {}, 4, compile_on)


def _run(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    cut: tuple[int, ...],
    options: dict[str, Any],
    warps: int,
    compile_on: torch.device | None,
) -> None:
    """Launches the kernel, or only compiles it, for a device where the tensors need not be."""
    device = compile_on or arguments[0].device
    # Triton launches on the current device, and entering a context costs 3 us. The interpreter runs on a CPU.
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else contextlib.nullcontext():
        if compile_on is None:
            kernel[(programs,)](*arguments, *cut, **options, num_warps=warps)
        elif device.type == "cuda":
            kernel.run(*arguments, *cut, **options, num_warps=warps, grid=(programs,), warmup=True)._init_handles()
