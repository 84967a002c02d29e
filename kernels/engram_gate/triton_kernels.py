# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""The Engram gate as Triton kernels: SM80 and up, one source for all. See reference.py for what they compute.

Memory-bound, and each byte is read once from memory. One step of a program is one stream of one token (of a few,
forward); each program has a run of tokens, and rows are copied into shared memory ahead of their use. Forward: x and
key stay in registers between the moments and the output, and the value for all streams of its token. Backward: the
gradient of the value is held across a token's streams. Each program adds up the weight's gradient over its own tokens,
in registers where it fits, and a small kernel adds the programs' sums in order: no atomics, and the same bits each time
on one kind of GPU.

A row is cut into a head of a power of two and a tail; sizes.py says how, and how many warps share one. Maths is fp32;
but a dot next to 0, as it is saved for the backward pass, comes from a sum in fp64.
All offsets of tokens are 64 bits wide, and distances between rows are given in units of ROW_UNIT elements, so that the
compiler knows how they are aligned: one compiled kernel serves every layout.

Tensors: M tokens, S streams, D width of a stream, P programs; saved [M, S, 4] holds gate, dot, rstd_x, rstd_key.
Row strides that are multiples of 8, unit inner stride, on 16 bytes; nothing that was read is written.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusepatch.kernels.device import made_current
from fusepatch.kernels.engram_gate.sizes import (
    MOST_MULTIPROCESSORS,
    SHARED_BYTES,
    Shape,
    programs_per_multiprocessor,
    shape_of,
)

ROW_UNIT = 8

_SMALLEST_DOT = tl.constexpr(1e-6)  # reference.SMALLEST_DOT; a kernel reads no other kind of global
_NEAR_0 = tl.constexpr(1e-3)  # below, |dot| is summed up again: see _forward_kernel
_UNIT = tl.constexpr(ROW_UNIT)


@triton.jit
def _row(pointer, token, units):
    """Where the row of a token starts."""
    return pointer + token * units * _UNIT


@triton.jit
def _load(at, columns, END: tl.constexpr, WIDTH: tl.constexpr):
    """Columns of a row in fp32; those from WIDTH on, where END says that there are some, are 0."""
    if END <= WIDTH:
        return tl.load(at + columns).to(tl.float32)
    else:
        return tl.load(at + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def _read_if(wanted, at, columns, END: tl.constexpr, WIDTH: tl.constexpr):
    """Columns of a row as they are, where wanted, else nothing is read and all are 0."""
    if END <= WIDTH:
        return tl.load(at + columns, mask=wanted, other=0.0)
    else:
        return tl.load(at + columns, mask=wanted & (columns < WIDTH), other=0.0)


@triton.jit
def _load_if(wanted, at, columns, END: tl.constexpr, WIDTH: tl.constexpr):
    """`_load` where wanted, else nothing is read and all are 0."""
    return _read_if(wanted, at, columns, END, WIDTH).to(tl.float32)


@triton.jit
def _store(at, columns, numbers, END: tl.constexpr, WIDTH: tl.constexpr):
    numbers = numbers.to(at.dtype.element_ty)
    if END <= WIDTH:
        tl.store(at + columns, numbers)
    else:
        tl.store(at + columns, numbers, mask=columns < WIDTH)


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
def _rounded(numbers, dtype: tl.constexpr):
    return numbers.to(dtype).to(tl.float32)


@triton.jit
def _add_three(a, b, c, other_a, other_b, other_c):
    return a + other_a, b + other_b, c + other_c


# The interpreter, which compiles nothing, runs a reduction of our own element by element.
_COMPILES = isinstance(_add_three, triton.JITFunction)
_IS_COMPILED = tl.constexpr(_COMPILES)


@triton.jit
def _sums(a, b, c):
    """Three sums of each row, for the barriers of one."""
    if _IS_COMPILED:
        return tl.reduce((a, b, c), 1, _add_three)
    else:
        return tl.sum(a, 1), tl.sum(b, 1), tl.sum(c, 1)


@triton.jit
def _of_threads(numbers, ROWS: tl.constexpr, SIZE: tl.constexpr, THREADS: tl.constexpr, RUN: tl.constexpr):
    """The sum of each thread's own columns of a row: neither shuffles nor barriers. RUN lie beside each other."""
    run: tl.constexpr = min(RUN, SIZE // THREADS)
    numbers = tl.reshape(numbers, [ROWS, SIZE // (THREADS * run), THREADS, run])
    return tl.sum(tl.sum(numbers, 3), 1)


@triton.jit
def _precise_sum(x_at, key_at, weight_at, here, HEAD: tl.constexpr, WIDTH: tl.constexpr):
    """sum(x * weight * key) in fp64, of rows that are read again; a few columns at a time, for want of registers."""
    columns_at_a_time: tl.constexpr = min(HEAD, 256)
    END: tl.constexpr = (WIDTH + columns_at_a_time - 1) // columns_at_a_time * columns_at_a_time
    total = tl.zeros([here.shape[0], columns_at_a_time], tl.float64)
    # It starts at 0, as the compiler can't know: it would unroll the loop, and hold all columns after all.
    for start in tl.range(tl.program_id(1), WIDTH, columns_at_a_time, num_stages=1):
        columns = start + tl.arange(0, columns_at_a_time)[None, :]
        x, key = _load_if(here, x_at, columns, END, WIDTH), _load_if(here, key_at, columns, END, WIDTH)
        weight = _load(weight_at, columns, END, WIDTH)
        total += x.to(tl.float64) * weight.to(tl.float64) * key.to(tl.float64)
    return tl.sum(total, 1).to(tl.float32)


@triton.jit(do_not_specialize=["mask_ptr", "tokens", "x_row", "key_row", "value_row", "out_row"])
def _forward_kernel(
    x_ptr, key_ptr, value_ptr, weight_ptr, key_weight_ptr, mask_ptr, out_ptr, saved_ptr,
    tokens, x_row, key_row, value_row, out_row, eps,
    STREAMS: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, MASKED: tl.constexpr,
    RESIDUAL: tl.constexpr, COPYSIGN: tl.constexpr, ROUNDED: tl.constexpr, TOGETHER: tl.constexpr,
    ONE_STREAM: tl.constexpr, THREADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One step is one stream of TOGETHER tokens, which share its weights: those come from the L2 cache each time.

    With ONE_STREAM a program has one stream of its tokens, and keeps the weights: what comes from the L2 cache is the
    value, for every stream but the first to read it.
    """
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    steps_of_a_token: tl.constexpr = 1 if ONE_STREAM else STREAMS
    own_stream = (program % STREAMS).to(tl.int32)
    if ONE_STREAM:
        program, programs = program // STREAMS, programs // STREAMS
    first, last = program * tokens // programs, (program + 1) * tokens // programs
    END: tl.constexpr = HEAD + TAIL
    head, tail = tl.arange(0, HEAD)[None, :], HEAD + tl.arange(0, TAIL)[None, :]
    io: tl.constexpr = x_ptr.dtype.element_ty
    RUN: tl.constexpr = 128 // io.primitive_bitwidth
    if ONE_STREAM:
        weight_at = weight_ptr + own_stream * WIDTH
        weight_head, weight_tail = _load(weight_at, head, HEAD, WIDTH), _load(weight_at, tail, END, WIDTH)
    else:
        value_head, value_tail = tl.zeros([TOGETHER, HEAD], io), tl.zeros([TOGETHER, TAIL], io)
    steps = ((last - first + TOGETHER - 1) // TOGETHER * steps_of_a_token).to(tl.int32)
    for step in tl.range(0, steps, num_stages=STAGES):
        token = first + step // steps_of_a_token * TOGETHER + tl.arange(0, TOGETHER)
        stream = own_stream if ONE_STREAM else step % STREAMS
        column = stream * WIDTH
        exists = token < last
        here, at = exists[:, None], token[:, None]
        x_at, key_at = _row(x_ptr, at, x_row) + column, _row(key_ptr, at, key_row) + column
        x_head, x_tail = _load_if(here, x_at, head, HEAD, WIDTH), _load_if(here, x_at, tail, END, WIDTH)
        key_head, key_tail = _load_if(here, key_at, head, HEAD, WIDTH), _load_if(here, key_at, tail, END, WIDTH)
        # The value is read with a token's first step, and kept for the others, in registers of two elements each.
        value_at, is_first = _row(value_ptr, at, value_row), ONE_STREAM | (stream == 0)
        read_head = _read_if(here & is_first, value_at, head, HEAD, WIDTH)
        read_tail = _read_if(here & is_first, value_at, tail, END, WIDTH)
        if ONE_STREAM:
            value_head, value_tail = read_head, read_tail
        else:
            weight_at = weight_ptr + column
            weight_head, weight_tail = _load(weight_at, head, HEAD, WIDTH), _load(weight_at, tail, END, WIDTH)
            value_head = tl.where(is_first, read_head, value_head)
            value_tail = tl.where(is_first, read_tail, value_tail)
        if MASKED:
            on = tl.load(mask_ptr + token, mask=exists, other=0) != 0

        # Both dtypes of 16 bits have products of two that are exact in fp32.
        weighed_head, weighed_tail = x_head * key_head * weight_head, x_tail * key_tail * weight_tail
        if THREADS:  # head and tail meet before the threads do
            square_x, square_key, product = _sums(
                _of_threads(x_head * x_head, TOGETHER, HEAD, THREADS, RUN)
                + _of_threads(x_tail * x_tail, TOGETHER, TAIL, THREADS, RUN),
                _of_threads(key_head * key_head, TOGETHER, HEAD, THREADS, RUN)
                + _of_threads(key_tail * key_tail, TOGETHER, TAIL, THREADS, RUN),
                _of_threads(weighed_head, TOGETHER, HEAD, THREADS, RUN)
                + _of_threads(weighed_tail, TOGETHER, TAIL, THREADS, RUN),
            )
        else:
            square_x, square_key, product = _sums(x_head * x_head, key_head * key_head, weighed_head)
            if WIDTH > HEAD:
                square_x_tail, square_key_tail, product_tail = _sums(x_tail * x_tail, key_tail * key_tail, weighed_tail)
                square_x, square_key = square_x + square_x_tail, square_key + square_key_tail
                product += product_tail
        rstd_x = tl.rsqrt(square_x / WIDTH + eps)
        rstd_key = tl.rsqrt(square_key / WIDTH + eps)
        if ROUNDED:  # weight is the query's; see reference.py
            of_x, of_key, key_weight_at = rstd_x[:, None], rstd_key[:, None], key_weight_ptr + column
            query_head, query_tail = (
                _rounded(x_head * of_x * weight_head, io),
                _rounded(x_tail * of_x * weight_tail, io),
            )
            normed_head = _rounded(key_head * of_key * _load(key_weight_at, head, HEAD, WIDTH), io)
            normed_tail = _rounded(key_tail * of_key * _load(key_weight_at, tail, END, WIDTH), io)
            product = tl.sum(_rounded(query_head * normed_head, io), 1)
            product += tl.sum(_rounded(query_tail * normed_tail, io), 1)
            dot = _rounded(_rounded(product, io) * (WIDTH**-0.5), io)
        else:
            dot = product * rstd_x * rstd_key * (WIDTH**-0.5)
        gate = 1.0 / (1.0 + tl.exp(-_sign(dot, COPYSIGN) * _root(dot)))
        added_head, added_tail = value_head.to(tl.float32), value_tail.to(tl.float32)
        if MASKED:
            # The value may be anything. x + -0 is x bit for bit, as x + 0 is not where x is -0; of its bits, as Triton
            # 3.6 takes the number -0.0 for 0.0.
            off = tl.full([TOGETHER], -(2**31) if RESIDUAL else 0, tl.int32).to(tl.float32, bitcast=True)
            gate, dot = tl.where(on, gate, off), tl.where(on, dot, 0.0)
            rstd_x, rstd_key = tl.where(on, rstd_x, 0.0), tl.where(on, rstd_key, 0.0)
            added_head, added_tail = tl.where(on[:, None], added_head, 0.0), tl.where(on[:, None], added_tail, 0.0)
        out_head, out_tail = gate[:, None] * added_head, gate[:, None] * added_tail
        if RESIDUAL:
            out_head += x_head
            out_tail += x_tail
        out_at = _row(out_ptr, at, out_row) + column
        tl.store(out_at + head, out_head.to(io), mask=here)
        tl.store(out_at + tail, out_tail.to(io), mask=here & (tail < WIDTH))
        saved_at = saved_ptr + (token * STREAMS + stream) * 4
        tl.store(saved_at, gate, mask=exists)
        tl.store(saved_at + 1, dot, mask=exists)
        tl.store(saved_at + 2, rstd_x, mask=exists)
        tl.store(saved_at + 3, rstd_key, mask=exists)
        if not ROUNDED:
            # Next to 0 the root's slope, 1 / (2 sqrt|dot|), makes most of the weight's gradient of very few tokens, and
            # most of its error of what fp32 loses in their sum. The output hardly knows: its slope is that root. Dots
            # that near are so rare that it costs no time; down here, where x and key need no more registers. A row of
            # zeros has none to gain.
            near = (tl.abs(dot) < _NEAR_0) & (dot != 0.0)
            if tl.max(near.to(tl.int32), 0) != 0:
                precise = _precise_sum(x_at, key_at, weight_ptr + column, here, HEAD, WIDTH)
                tl.store(saved_at + 1, dot * (precise / product), mask=near)


@triton.jit(
    do_not_specialize=[
        "tokens", "want_x", "want_key", "want_value", "grad_out_row", "x_row", "key_row", "value_row", "grad_x_row",
        "grad_key_row", "grad_value_row",
    ]
)  # fmt: skip
def _backward_kernel(
    grad_out_ptr, x_ptr, key_ptr, value_ptr, weight_ptr, saved_ptr,
    grad_x_ptr, grad_key_ptr, grad_value_ptr, partial_ptr,
    tokens, want_x, want_key, want_value, grad_out_row, x_row, key_row, value_row,
    grad_x_row, grad_key_row, grad_value_row,
    STREAMS: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, MASKED: tl.constexpr,
    RESIDUAL: tl.constexpr, WANT_WEIGHT: tl.constexpr, HELD: tl.constexpr, COPY_WEIGHT: tl.constexpr,
    THREADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    first, last = program * tokens // programs, (program + 1) * tokens // programs
    END: tl.constexpr = HEAD + TAIL
    head, tail = tl.arange(0, HEAD), HEAD + tl.arange(0, TAIL)
    RUN: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    # One name per stream: a kernel has no list of accumulators, and a ring needs them where they are in each step.
    sum_0_head, sum_0_tail = tl.zeros([HEAD], tl.float32), tl.zeros([TAIL], tl.float32)
    sum_1_head, sum_1_tail = tl.zeros([HEAD], tl.float32), tl.zeros([TAIL], tl.float32)
    sum_2_head, sum_2_tail = tl.zeros([HEAD], tl.float32), tl.zeros([TAIL], tl.float32)
    sum_3_head, sum_3_tail = tl.zeros([HEAD], tl.float32), tl.zeros([TAIL], tl.float32)
    grad_value_head, grad_value_tail = tl.zeros([HEAD], tl.float32), tl.zeros([TAIL], tl.float32)
    # Four numbers can't be copied ahead like a row can: they are loaded one step early instead.
    saved_at = saved_ptr + first * (STREAMS * 4)
    next_gate, next_dot = tl.load(saved_at), tl.load(saved_at + 1)  # each program has a token
    next_rstd_x, next_rstd_key = tl.load(saved_at + 2), tl.load(saved_at + 3)

    steps = ((last - first) * STREAMS).to(tl.int32)
    for step in tl.range(0, steps, num_stages=STAGES):
        token, stream = first + step // STREAMS, step % STREAMS
        column = stream * WIDTH
        grad_out_at = _row(grad_out_ptr, token, grad_out_row) + column
        grad_out_head, grad_out_tail = _load(grad_out_at, head, HEAD, WIDTH), _load(grad_out_at, tail, END, WIDTH)
        x_at, key_at = _row(x_ptr, token, x_row) + column, _row(key_ptr, token, key_row) + column
        x_head, x_tail = _load(x_at, head, HEAD, WIDTH), _load(x_at, tail, END, WIDTH)
        key_head, key_tail = _load(key_at, head, HEAD, WIDTH), _load(key_at, tail, END, WIDTH)
        weight_at = weight_ptr + column
        if COPY_WEIGHT:
            weight_head, weight_tail = _load(weight_at, head, HEAD, WIDTH), _load(weight_at, tail, END, WIDTH)
        value_at = _row(value_ptr, token, value_row)
        value_head, value_tail = _load(value_at, head, HEAD, WIDTH), _load(value_at, tail, END, WIDTH)

        gate, dot, rstd_x, rstd_key = next_gate, next_dot, next_rstd_x, next_rstd_key
        saved_at += 4
        any_left = step + 1 < steps
        next_gate = tl.load(saved_at, mask=any_left, other=0.0)
        next_dot = tl.load(saved_at + 1, mask=any_left, other=0.0)
        next_rstd_x = tl.load(saved_at + 2, mask=any_left, other=0.0)
        next_rstd_key = tl.load(saved_at + 3, mask=any_left, other=0.0)

        if THREADS:  # as in the forward pass
            grad_gate = tl.sum(
                _of_threads(grad_out_head * value_head, 1, HEAD, THREADS, RUN)
                + _of_threads(grad_out_tail * value_tail, 1, TAIL, THREADS, RUN)
            )
        else:
            grad_gate = tl.sum(grad_out_head * value_head) + tl.sum(grad_out_tail * value_tail)
        root = _root(dot)
        # gate * (1 - gate), which depends on |dot| alone, without the cancellation of 1 - gate near 1.
        decay = tl.exp(-root)
        slope = decay / ((1.0 + decay) * (1.0 + decay)) * 0.5 / root
        grad_dot = tl.where(tl.abs(dot) < _SMALLEST_DOT, 0.0, grad_gate * slope)
        of_product = grad_dot * rstd_x * (rstd_key * (WIDTH**-0.5))
        of_norms = grad_dot * dot / WIDTH
        of_x, of_key = of_norms * rstd_x * rstd_x, of_norms * rstd_key * rstd_key

        of_value_head, of_value_tail = gate * grad_out_head, gate * grad_out_tail
        if MASKED:  # a token whose inputs may be anything; or a gate that is 0 to the last bit, whose slope is 0 too
            on = gate != 0.0
            of_product, of_x, of_key = tl.where(on, of_product, 0.0), tl.where(on, of_x, 0.0), tl.where(on, of_key, 0.0)
            x_head, x_tail = tl.where(on, x_head, 0.0), tl.where(on, x_tail, 0.0)
            key_head, key_tail = tl.where(on, key_head, 0.0), tl.where(on, key_tail, 0.0)
            of_value_head = tl.where(on, of_value_head, 0.0)
            of_value_tail = tl.where(on, of_value_tail, 0.0)
        grad_value_head = tl.where(stream == 0, 0.0, grad_value_head) + of_value_head
        grad_value_tail = tl.where(stream == 0, 0.0, grad_value_tail) + of_value_tail
        if (stream == STREAMS - 1) & (want_value != 0):
            grad_value_at = _row(grad_value_ptr, token, grad_value_row)
            _store(grad_value_at, head, grad_value_head, HEAD, WIDTH)
            _store(grad_value_at, tail, grad_value_tail, END, WIDTH)
        if not COPY_WEIGHT:
            # A thread copies 16 bytes at a time, past the L1 cache. Of its eight weights in fp32 that is half a sector,
            # which is then read twice. What is read in a condition is loaded, and not copied.
            weight_head, weight_tail = tl.zeros([HEAD], tl.float32), tl.zeros([TAIL], tl.float32)
            if (want_x != 0) | (want_key != 0):
                weight_head, weight_tail = _load(weight_at, head, HEAD, WIDTH), _load(weight_at, tail, END, WIDTH)
        scaled_head, scaled_tail = of_product * weight_head, of_product * weight_tail
        if want_x != 0:
            grad_x_head = scaled_head * key_head - of_x * x_head
            grad_x_tail = scaled_tail * key_tail - of_x * x_tail
            if RESIDUAL:
                grad_x_head += grad_out_head
                grad_x_tail += grad_out_tail
            grad_x_at = _row(grad_x_ptr, token, grad_x_row) + column
            _store(grad_x_at, head, grad_x_head, HEAD, WIDTH)
            _store(grad_x_at, tail, grad_x_tail, END, WIDTH)
        if want_key != 0:
            grad_key_at = _row(grad_key_ptr, token, grad_key_row) + column
            _store(grad_key_at, head, scaled_head * x_head - of_key * key_head, HEAD, WIDTH)
            _store(grad_key_at, tail, scaled_tail * x_tail - of_key * key_tail, END, WIDTH)
        if WANT_WEIGHT:
            part_head, part_tail = of_product * (x_head * key_head), of_product * (x_tail * key_tail)
            if HELD:
                if stream == 0:
                    sum_0_head += part_head
                    sum_0_tail += part_tail
                if STREAMS > 1:  # noqa: SIM102  known when compiling, and apart from what is not
                    if stream == 1:
                        sum_1_head += part_head
                        sum_1_tail += part_tail
                if STREAMS > 2:  # noqa: SIM102  known when compiling, and apart from what is not
                    if stream == 2:
                        sum_2_head += part_head
                        sum_2_tail += part_tail
                if STREAMS > 3:  # noqa: SIM102  known when compiling, and apart from what is not
                    if stream == 3:
                        sum_3_head += part_head
                        sum_3_tail += part_tail
            else:
                # This program's own slot. STAGES is 1 here: a load ahead would miss the store before it.
                so_far = step >= STREAMS
                slot = partial_ptr + (program * STREAMS + stream) * WIDTH
                part_head += tl.load(slot + head, mask=so_far, other=0.0)
                part_tail += tl.load(slot + tail, mask=(tail < WIDTH) & so_far, other=0.0)
                _store(slot, head, part_head, HEAD, WIDTH)
                _store(slot, tail, part_tail, END, WIDTH)

    if WANT_WEIGHT and HELD:
        slot = partial_ptr + program * (STREAMS * WIDTH)
        _store(slot, head, sum_0_head, HEAD, WIDTH)
        _store(slot, tail, sum_0_tail, END, WIDTH)
        if STREAMS > 1:
            _store(slot + WIDTH, head, sum_1_head, HEAD, WIDTH)
            _store(slot + WIDTH, tail, sum_1_tail, END, WIDTH)
        if STREAMS > 2:
            _store(slot + 2 * WIDTH, head, sum_2_head, HEAD, WIDTH)
            _store(slot + 2 * WIDTH, tail, sum_2_tail, END, WIDTH)
        if STREAMS > 3:
            _store(slot + 3 * WIDTH, head, sum_3_head, HEAD, WIDTH)
            _store(slot + 3 * WIDTH, tail, sum_3_tail, END, WIDTH)


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

_INTERPRETED_PROGRAMS = 3  # so that a program has several tokens


@functools.cache
def _programs(device: torch.device, on_each: int) -> int:
    """How many programs run at once, with so many on each multiprocessor."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return on_each * min(torch.cuda.get_device_properties(device).multi_processor_count, MOST_MULTIPROCESSORS)


@functools.cache
def _shape_on(
    device: torch.device, streams: int, width: int, dtype: torch.dtype, weight_dtype: torch.dtype, weights: int = 1
) -> Shape:
    shared = SHARED_BYTES
    if device.type == "cuda":
        shared = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
    return shape_of(streams, width, dtype.itemsize, weight_dtype.itemsize, shared, weights)


def programs_of(tokens: int, width: int, device: torch.device, shape: Shape | None = None) -> int:
    """How many programs share the tokens in a backward pass: rows of the workspace."""
    on_each = programs_per_multiprocessor(width) if shape is None else shape.backward_programs
    return min(tokens, _programs(device, on_each))


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
    key_weight_SD: Tensor | None = None,
    _shape: Shape | None = None,
) -> None:
    """As in reference.py. Compiles the backward pass too, at the first call. `_shape` is for measuring others."""
    tokens, streams, width = x_MSD.shape
    if tokens == 0:
        return
    device, masked = x_MSD.device, mask_M is not None
    kind = (device, x_MSD.dtype, weight_SD.dtype, streams, width, residual, zero_dot, masked)
    launch = _forward_launch(*kind, None if key_weight_SD is None else key_weight_SD.dtype, _shape)
    with made_current(device):
        _run_forward(launch, x_MSD, key_MSD, value_MD, weight_SD, key_weight_SD, mask_M, eps, out_MSD, saved_MS4)
        if not launch.has_backward:
            _compile_backward(x_MSD, key_MSD, value_MD, weight_SD, saved_MS4, residual, masked, out_MSD, device)
            _compiled.add((*kind, key_weight_SD is not None))
            launch.has_backward = True


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
    """Compiles both passes, for tensors of which none is made."""
    if tokens == 0:
        return

    def shape_only(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")  # its address is 0, as well aligned as can be

    x, out = shape_only(tokens, streams, width), shape_only(tokens, streams, width)
    kv, weight = shape_only(tokens, (streams + 1) * width), shape_only(streams, width, dtype=weight_dtype)
    key, value = kv[:, : streams * width].unflatten(1, (streams, width)), kv[:, streams * width :]
    saved = shape_only(tokens, streams, 4, dtype=torch.float32)
    mask = shape_only(tokens, dtype=torch.bool) if masked else None
    kind = (device, dtype, weight_dtype, streams, width, residual, zero_dot, masked)
    launch = _forward_launch(*kind, None, None)
    with made_current(device):
        # Any number will do for eps: what is compiled takes it as an argument.
        _run_forward(launch, x, key, value, weight, None, mask, 0.5, out, saved, compile_only=True)
        _compile_backward(x, key, value, weight, saved, residual, masked, out, device)
    _compiled.add((*kind, False))
    launch.has_backward = True


def _compile_backward(
    x: Tensor, key: Tensor, value: Tensor, weight: Tensor, saved: Tensor, residual: bool, masked: bool, out: Tensor,
    device: torch.device,
) -> None:  # fmt: skip
    """Tensors of the same shapes, dtypes and strides stand in for the gradients and the partial sums."""
    streams, width = weight.shape
    kind = (device, out.dtype, weight.dtype, streams, width, residual, masked)
    for with_weight in (True, False):
        launch = _backward_launch(*kind, with_weight, None)
        tensors = (out, x, key, value, weight, saved, out, key, value, saved)
        _run_backward(launch, 1, tensors, (True, True, True), compile_only=True)
    _run_sum(_sum_launch(device, weight.dtype, streams, width, None), 1, saved, weight, compile_only=True)


_compiled: set[tuple[torch.device, torch.dtype, torch.dtype, int, int, bool, str, bool, bool]] = set()


def is_compiled(
    device: torch.device,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    streams: int,
    width: int,
    residual: bool,
    zero_dot: str,
    masked: bool,
    rounded: bool,
) -> bool:
    """Whether both passes are compiled for this kind of call, so that CUDA-graph capture may launch them."""
    return (device, dtype, weight_dtype, streams, width, residual, zero_dot, masked, rounded) in _compiled


def engram_backward(
    grad_out_MSD: Tensor,
    x_MSD: Tensor | None,
    key_MSD: Tensor | None,
    value_MD: Tensor | None,
    weight_SD: Tensor | None,
    saved_MS4: Tensor,
    residual: bool,
    masked: bool,
    *,
    grad_x_MSD: Tensor | None,
    grad_key_MSD: Tensor | None,
    grad_value_MD: Tensor | None,
    grad_weight_SD: Tensor | None,
    partial_PSD: Tensor | None = None,
    _shape: Shape | None = None,
) -> None:
    """As in reference.py. `partial_PSD` is fp32 scratch for the weight's gradient; made where it is None."""
    tokens, streams, width = grad_out_MSD.shape
    if tokens == 0:
        if grad_weight_SD is not None:
            grad_weight_SD.zero_()
        return
    device = grad_out_MSD.device
    programs = programs_of(tokens, width, device, _shape)
    if grad_weight_SD is None:
        partial_PSD = None
    elif partial_PSD is None:
        partial_PSD = saved_MS4.new_empty(programs, streams, width)
    # What is not needed was not saved. Its place is taken by a tensor of the shape, and what comes of it is not stored.
    if weight_SD is None:
        weight_SD = saved_MS4.new_empty(streams, width) if grad_weight_SD is None else grad_weight_SD
    tensors = (
        grad_out_MSD,
        grad_out_MSD if x_MSD is None else x_MSD,
        grad_out_MSD if key_MSD is None else key_MSD,
        grad_out_MSD[:, 0] if value_MD is None else value_MD,
        weight_SD,
        saved_MS4,
        grad_out_MSD if grad_x_MSD is None else grad_x_MSD,
        grad_out_MSD if grad_key_MSD is None else grad_key_MSD,
        grad_out_MSD[:, 0] if grad_value_MD is None else grad_value_MD,
        saved_MS4 if partial_PSD is None else partial_PSD,
    )
    want = (grad_x_MSD is not None, grad_key_MSD is not None, grad_value_MD is not None)
    with_weight = partial_PSD is not None
    launch = _backward_launch(
        device, grad_out_MSD.dtype, weight_SD.dtype, streams, width, residual, masked, with_weight, _shape
    )
    with made_current(device):
        _run_backward(launch, programs, tensors, want)
        if grad_weight_SD is not None and partial_PSD is not None:
            summing = _sum_launch(device, grad_weight_SD.dtype, streams, width, _shape)
            _run_sum(summing, programs, partial_PSD, grad_weight_SD)


@dataclass(eq=False)
class _Launch:
    """A kernel for one kind of call. All that Triton compiles it for follows from the kind: the device, dtypes, sizes
    of a row and constants. The rest is as every call has it: tensors on 16 bytes, numbers that fit into 32 bits."""

    kernel: Any
    shape: Shape
    constants: tuple[Any, ...]
    """The last arguments of the kernel, in its order."""
    options: dict[str, Any]
    compiled: Any = None
    """Launched as it is: Triton takes longer to find out again which compiled kernel serves a call."""
    has_backward: bool = False
    """Of the forward pass, whether the kernels of the backward pass that follows it were compiled too."""


@functools.cache
def _forward_launch(
    device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype, streams: int, width: int, residual: bool,
    zero_dot: str, masked: bool, key_weight_dtype: torch.dtype | None, shape: Shape | None,
) -> _Launch:  # fmt: skip
    rounded = key_weight_dtype is not None
    shape = shape or _shape_on(device, streams, width, dtype, weight_dtype, 2 if rounded else 1)
    constants = (
        streams, width, shape.head, shape.tail, masked, residual, zero_dot == "copysign", rounded,
        shape.forward_together, shape.forward_one_stream, shape.forward_threads, shape.forward_stages,
    )  # fmt: skip
    options = {"num_warps": shape.forward_warps, "maxnreg": shape.forward_registers}
    return _Launch(_forward_kernel, shape, constants, options)


@functools.cache
def _backward_launch(
    device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype, streams: int, width: int, residual: bool,
    masked: bool, with_weight: bool, shape: Shape | None,
) -> _Launch:  # fmt: skip
    shape = shape or _shape_on(device, streams, width, dtype, weight_dtype)
    constants = (
        streams, width, shape.head, shape.tail, masked, residual, with_weight, shape.held,
        shape.backward_copies_weight, shape.backward_threads, shape.backward_stages,
    )  # fmt: skip
    return _Launch(_backward_kernel, shape, constants, {"num_warps": shape.backward_warps})


@functools.cache
def _sum_launch(
    device: torch.device, weight_dtype: torch.dtype, streams: int, width: int, shape: Shape | None
) -> _Launch:
    shape = shape or _shape_on(device, streams, width, weight_dtype, weight_dtype)
    return _Launch(_weight_kernel, shape, (shape.sum_rows, shape.sum_columns), {"num_warps": 4})


def _run_forward(
    launch: _Launch, x: Tensor, key: Tensor, value: Tensor, weight: Tensor, key_weight: Tensor | None,
    mask: Tensor | None, eps: float, out: Tensor, saved: Tensor, compile_only: bool = False,
) -> None:  # fmt: skip
    tokens, streams, _ = x.shape
    tensors = (
        x, key, value, weight, weight if key_weight is None else key_weight,
        weight if mask is None else mask.view(torch.uint8), out, saved,
    )  # fmt: skip
    numbers = (tokens, _units(x), _units(key), _units(value), _units(out), float(eps))
    shape = launch.shape
    programs = -(-tokens // shape.forward_together)  # triton.cdiv is made for kernels, and slow here
    of_each = streams if shape.forward_one_stream else 1  # run of tokens
    if shape.forward_programs:
        programs = min(programs, max(1, _programs(x.device, shape.forward_programs) // of_each))
    _run(launch, programs * of_each, tensors, numbers, compile_only)


def _run_backward(
    launch: _Launch, programs: int, tensors: tuple[Tensor, ...], want: tuple[bool, bool, bool],
    compile_only: bool = False,
) -> None:  # fmt: skip
    grad_out, x, key, value, _, _, grad_x, grad_key, grad_value, _ = tensors
    numbers = (
        grad_out.shape[0], int(want[0]), int(want[1]), int(want[2]), _units(grad_out), _units(x), _units(key),
        _units(value), _units(grad_x), _units(grad_key), _units(grad_value),
    )  # fmt: skip
    _run(launch, programs, tensors, numbers, compile_only)


def _run_sum(launch: _Launch, programs: int, partial: Tensor, grad_weight: Tensor, compile_only: bool = False) -> None:
    size = grad_weight.numel()
    blocks = -(-size // launch.shape.sum_columns)
    _run(launch, blocks, (partial, grad_weight), (programs, size), compile_only)


def _units(t: Tensor) -> int:
    """The distance between tokens in units; of one token or none it means nothing, and may be anything."""
    return t.stride(0) // ROW_UNIT


_LARGEST = 2**31 - 1


def _run(
    launch: _Launch, programs: int, tensors: tuple[Tensor, ...], numbers: tuple[float, ...], compile_only: bool
) -> None:
    """Launches the kernel on the current device, or only compiles it: the tensors may then be anywhere."""
    if not _COMPILES or max(numbers) > _LARGEST:
        if not compile_only:
            launch.kernel[(programs,)](*tensors, *numbers, *launch.constants, **launch.options)
        return
    if launch.compiled is None:
        arguments = (*tensors, *numbers, *launch.constants)
        compiled = launch.kernel.run(*arguments, **launch.options, grid=(programs,), warmup=True)
        compiled._init_handles()
        launch.compiled = compiled
    if not compile_only:
        # Addresses, since of a tensor Triton asks the driver each time whether a GPU can reach it.
        launch.compiled[(programs, 1, 1)](*map(Tensor.data_ptr, tensors), *numbers, *launch.constants)
