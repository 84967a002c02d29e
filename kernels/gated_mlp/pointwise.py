"""`act(gate) * up` and its backward as Triton kernels: SM80 and up, one source for all.

Memory-bound: the forward reads two elements and writes one, the backward reads three and writes two. Element-wise
maths is fp32, rounded once. Any leading strides, unit inner stride, 64-bit indexing; nothing that was read is written.

Every tensor is seen as [outer, rows, width] with its own two strides; `_geometry` merges dimensions until that fits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# By its full name: a test runs a broken copy of this file, which is in no package.
from fusepatch.kernels.device import made_current

_BLOCK = 2048
_WARPS = 8

_SILU, _GELU, _GELU_TANH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_ACTIVATION = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


@triton.jit
def _activate(gate, activation: tl.constexpr):
    """(act(gate), act'(gate)) in fp32; the compiler drops the one that is not used."""
    if activation == _SILU:
        s = 1.0 / (1.0 + tl.exp(-gate))
        return gate * s, s * (1.0 + gate * (1.0 - s))
    elif activation == _GELU:
        cdf = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        return gate * cdf, cdf + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    else:
        # (1 + tanh(z)) / 2 is sigmoid(2 z): no tanh, and no cancellation where it is near -1.
        s = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
        return gate * s, s + gate * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)


@triton.jit
def _place(rows, width, BLOCK: tl.constexpr):
    """This program's (outer index, row, columns), in 64 bits."""
    column_blocks = tl.cdiv(width, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    line = program // column_blocks
    columns = (program % column_blocks) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    return line // rows, line % rows, columns


@triton.jit
def _forward_kernel(
    gate_ptr, up_ptr, out_ptr, rows, width,
    gate_outer, gate_row, up_outer, up_row, out_outer, out_row,
    activation: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    outer, row, columns = _place(rows, width, BLOCK)
    inside = columns < width
    gate = tl.load(gate_ptr + outer * gate_outer + row * gate_row + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + outer * up_outer + row * up_row + columns, mask=inside, other=0.0).to(tl.float32)
    act, _ = _activate(gate, activation)
    out = (act * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + outer * out_outer + row * out_row + columns, out, mask=inside)


@triton.jit
def _backward_kernel(
    dh_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, rows, width,
    dh_outer, dh_row, gate_outer, gate_row, up_outer, up_row, d_gate_outer, d_gate_row, d_up_outer, d_up_row,
    activation: tl.constexpr, WANT_GATE: tl.constexpr, WANT_UP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    outer, row, columns = _place(rows, width, BLOCK)
    inside = columns < width
    dh = tl.load(dh_ptr + outer * dh_outer + row * dh_row + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + outer * gate_outer + row * gate_row + columns, mask=inside, other=0.0).to(tl.float32)
    act, derivative = _activate(gate, activation)
    if WANT_GATE:
        up = tl.load(up_ptr + outer * up_outer + row * up_row + columns, mask=inside, other=0.0).to(tl.float32)
        d_gate = (dh * up * derivative).to(d_gate_ptr.dtype.element_ty)
        tl.store(d_gate_ptr + outer * d_gate_outer + row * d_gate_row + columns, d_gate, mask=inside)
    if WANT_UP:
        d_up = (dh * act).to(d_up_ptr.dtype.element_ty)
        tl.store(d_up_ptr + outer * d_up_outer + row * d_up_row + columns, d_up, mask=inside)


# ------------------------------------------------------------------------------------------------------- launching


def act_mul(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`act(gate) * up`, any equal shapes with unit inner stride; the result is contiguous."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _launch(_forward_kernel, (gate, up), (out,), activation)
    tokens, inner = gate.shape[:-1].numel(), gate.shape[-1]
    dense = gate.is_contiguous() and up.is_contiguous()
    size = (gate.device, gate.dtype, activation, tokens, inner, dense)
    if size not in _compiled:
        # Tensors of the same shapes and strides stand in for the gradients.
        flags = {"WANT_GATE": True, "WANT_UP": True}
        _launch(_backward_kernel, (out, gate, up), (gate, up), activation, compile_only=True, **flags)
        _compiled.add(size)
    return out


def act_mul_backward(
    dh: Tensor, gate: Tensor, up: Tensor, activation: str, *, d_gate: Tensor | None, d_up: Tensor | None
) -> None:
    """Writes `dh * up * act'(gate)` to d_gate and `dh * act(gate)` to d_up, each where given."""
    some = d_gate if d_gate is not None else d_up
    assert some is not None
    outputs = (some if d_gate is None else d_gate, some if d_up is None else d_up)  # the one not wanted is not touched
    flags = {"WANT_GATE": d_gate is not None, "WANT_UP": d_up is not None}
    _launch(_backward_kernel, (dh, gate, up), outputs, activation, **flags)


_compiled: set[tuple[torch.device, torch.dtype, str, int, int, bool]] = set()
"""Triton compiles for a device, and for what it sees of rows, width and strides, which follow from the last three."""


def is_compiled(
    device: torch.device, dtype: torch.dtype, activation: str, tokens: int, inner: int, packed: bool
) -> bool:
    """Whether both passes are compiled for this size, so that CUDA-graph capture may launch them.

    The first forward pass at a size compiles its backward too: were that left to the first backward pass, a pass
    without gradients and its recomputation under checkpointing could be told different things.
    """
    dense = not packed or tokens == 1  # halves of one row each
    return (device, dtype, activation, tokens, inner, dense) in _compiled


def _launch(
    kernel: Any,
    inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    activation: str,
    *,
    compile_only: bool = False,
    **flags: bool,
) -> None:
    inputs = tuple(t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in inputs)
    geometry = _geometry(*inputs, *outputs)
    if geometry is None:
        inputs = tuple(t.contiguous() for t in inputs)
        outputs = inputs[-len(outputs) :] if compile_only else outputs
        geometry = _geometry(*inputs, *outputs)
        assert geometry is not None  # our own outputs are contiguous, or halves of what is
    (outer, rows, width), strides = geometry
    programs = outer * rows * triton.cdiv(width, _BLOCK)
    if programs == 0:
        return
    device = inputs[0].device
    with made_current(device):
        arguments = (*inputs, *outputs, rows, width, *strides)
        options = {"activation": _ACTIVATION[activation], "BLOCK": _BLOCK, "num_warps": _WARPS, **flags}
        if not compile_only:
            kernel[(programs,)](*arguments, **options)
        elif device.type == "cuda":
            kernel.run(*arguments, grid=(programs,), warmup=True, **options)._init_handles()


def _geometry(*tensors: Tensor) -> tuple[tuple[int, int, int], list[int]] | None:
    """One (outer, rows, width) for tensors of one shape, and the outer and row stride of each in turn.

    Neighbouring dimensions are merged where every tensor lies so that one stride steps through both. None where more
    than two remain beside the last, which no library's projections return.
    """
    if all(tensor.is_contiguous() for tensor in tensors):  # as nearly always, and ten times as fast to tell
        return (1, 1, tensors[0].numel()), [0] * (2 * len(tensors))
    sizes, steps = [1], [[0] * len(tensors)]
    for dim, size in enumerate(tensors[0].shape):
        if size == 1:
            continue
        step = [tensor.stride(dim) for tensor in tensors]
        if all(before == size * now for before, now in zip(steps[-1], step, strict=True)) or sizes[-1] == 1:
            sizes[-1], steps[-1] = sizes[-1] * size, step
        else:
            sizes.append(size)
            steps.append(step)
    if sizes[-1] > 1 and steps[-1] != [1] * len(tensors):  # the width itself is 1
        sizes.append(1)
        steps.append([1] * len(tensors))
    if len(sizes) > 3:
        return None
    lead_sizes, lead_steps = sizes[:-1], steps[:-1]
    while len(lead_sizes) < 2:
        lead_sizes, lead_steps = [1, *lead_sizes], [[0] * len(tensors), *lead_steps]
    strides = [step for pair in zip(*lead_steps, strict=True) for step in pair]
    return (lead_sizes[0], lead_sizes[1], sizes[-1]), strides
