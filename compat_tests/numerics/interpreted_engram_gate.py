"""The Triton kernels of the Engram gate, run by Triton's interpreter on a CPU, against the reference in fp64.

Collected by test_interpreted.py, in a process of its own.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fusepatch.kernels.engram_gate import choose, op, plan, reference, triton_kernels
from support import relative_error

TRITON = choose.BACKENDS[0]
# The interpreter truncates to bf16 where the hardware rounds to nearest: twice the error, and checked on the GPU.
BOUND = {torch.float32: 5e-6, torch.float16: 6e-4, torch.bfloat16: 8e-3}
NAMES = ("x", "kv", "weight")


def inputs(tokens: int, streams: int, width: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Keys that lean towards x or away, so that |dot| stays off 0, where any rounding counts."""
    torch.manual_seed(0)
    x = torch.randn(tokens, streams, width)
    side = torch.where(torch.rand(tokens, streams, 1) < 0.5, -0.7, 0.7)
    keys = side * x + 0.3 * torch.randn_like(x)
    kv = torch.cat([keys.flatten(1), torch.randn(tokens, width)], 1)
    return [x.to(dtype), kv.to(dtype), 1 + 0.2 * torch.randn(streams, width)]


def run(backend, tensors, mask, dout, *, residual=True, zero_dot="copysign", wanted=NAMES) -> dict[str, Tensor]:
    call = op.Call(backend, 1e-6, residual, zero_dot)
    leaves = [t.detach().requires_grad_(name in wanted) for name, t in zip(NAMES, tensors, strict=True)]
    out = op.run_engram_gate(call, leaves[0], leaves[1], None, leaves[2], mask)
    picked = {name: leaf for name, leaf in zip(NAMES, leaves, strict=True) if name in wanted}
    return {
        "out": out.detach(),
        **dict(zip(picked, torch.autograd.grad(out, list(picked.values()), dout), strict=True)),
    }


def check(tensors, mask=None, **options) -> None:
    x = tensors[0]
    dout = torch.randn(x.shape).to(x.dtype)
    before = [t.clone() for t in (*tensors, dout)]
    found = run(TRITON, tensors, mask, dout, **options)
    exact = run(choose.REFERENCE, [t.double() for t in tensors], mask, dout.double(), **options)
    for name, expected in exact.items():
        assert relative_error(found[name], expected) < BOUND[x.dtype], name
    assert all(torch.equal(a, b) for a, b in zip(before, (*tensors, dout), strict=True)), "an input was written to"


SIZES = [(1, 4, 5120), (3, 1, 8), (7, 2, 72), (4, 3, 264), (5, 6, 40), (2, 4, 2048), (1, 1, 8200), (2, 5, 1032)]


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_forward_and_backward(size, dtype: torch.dtype) -> None:
    check(inputs(*size, dtype))


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("zero_dot", reference.ZERO_DOTS)
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "gated"])
@pytest.mark.parametrize("streams", [2, 5])
def test_forms(streams: int, residual: bool, zero_dot: str, masked: bool) -> None:
    mask = torch.tensor([True, False, True, True, False, True, True]) if masked else None
    check(inputs(7, streams, 24), mask, residual=residual, zero_dot=zero_dot)


@pytest.mark.parametrize("wanted", [w for n in (1, 2) for w in itertools.combinations(NAMES, n)])
@pytest.mark.parametrize("streams", [2, 5])
def test_every_choice_of_wanted_gradients(streams: int, wanted) -> None:
    check(inputs(7, streams, 24), wanted=wanted)


@pytest.mark.parametrize("wanted", ["key", "value"])
def test_separate_key_and_value(wanted: str) -> None:
    x, kv, weight = inputs(7, 2, 24)
    call = op.Call(TRITON, 1e-6, False, "sign")
    key, value = kv[:, :48].clone(), kv[:, 48:].clone()
    leaf = (key if wanted == "key" else value).requires_grad_()
    dout = torch.randn_like(x)
    (found,) = torch.autograd.grad(op.run_engram_gate(call, x, key, value, weight, None), leaf, dout)
    packed = run(choose.REFERENCE, (x, kv, weight), None, dout, residual=False, zero_dot="sign")["kv"]
    assert relative_error(found, packed[:, :48] if wanted == "key" else packed[:, 48:]) < 1e-6


@pytest.mark.parametrize("residual", [True, False], ids=["residual", "gated"])
def test_masked_tokens_keep_x_bit_for_bit_whatever_lies_there(residual: bool) -> None:
    x, kv, weight = inputs(4, 2, 24)
    x[0], kv[1], kv[2] = -0.0, math.nan, math.inf
    found = run(TRITON, (x, kv, weight), torch.zeros(4, dtype=torch.bool), torch.ones_like(x), residual=residual)
    expected = x if residual else torch.zeros_like(x)
    assert torch.equal(found["out"].view(torch.int32), expected.view(torch.int32))
    assert torch.equal(found["x"], torch.full_like(x, float(residual)))
    assert not found["kv"].any()
    assert not found["weight"].any()


def forward(x: Tensor, kv: Tensor, weight: Tensor, zero_dot: str) -> tuple[Tensor, Tensor]:
    tokens, streams, width = x.shape
    out, saved = torch.empty_like(x), torch.empty(tokens, streams, 4)
    key, value = kv[:, : streams * width].view(tokens, streams, width), kv[:, streams * width :]
    arguments = (x, key, value, weight, None, 1e-20, False, zero_dot)
    triton_kernels.engram_forward(*arguments, out_MSD=out, saved_MS4=saved)
    return out, saved


@pytest.mark.parametrize("zero_dot", reference.ZERO_DOTS)
def test_the_gate_around_zero(zero_dot: str) -> None:
    """Dots of 0 (and -0, where the sum keeps it), inside the clamp, at its edge, and far out."""
    width, sizes = 16, [0.0, -0.0, 1e-9, -1e-9, 0.9e-6, 1.1e-6, -1.1e-6, 1.0, -3.0]
    x = torch.zeros(len(sizes), 1, width)
    key, value = torch.zeros_like(x), torch.ones(len(sizes), width)
    x[..., 0] = 1
    for row, size in enumerate(sizes):
        key[row, 0, 0] = size / math.sqrt(width)
        key[row, 0, 1] = math.sqrt(1 - key[row, 0, 0].item() ** 2)
    out, saved = forward(x, torch.cat([key.flatten(1), value], 1), torch.ones(1, width), zero_dot)
    gate, dot = saved[:, 0, 0], saved[:, 0, 1]
    assert relative_error(dot, torch.tensor(sizes)) < 1e-6
    assert torch.allclose(gate, reference.gate_of(dot, zero_dot), rtol=1e-6, atol=0)
    assert torch.equal(out, gate.view(-1, 1, 1).expand_as(out))
    if zero_dot == "sign":
        assert torch.equal(gate[:2], torch.tensor([0.5, 0.5]))


def test_a_negative_zero_keeps_its_sign() -> None:
    x, key = torch.full((2, 1, 8), 1e-30), torch.full((2, 1, 8), 1e-30)
    key[1] *= -1  # each product is too small for fp32, and is 0 or -0
    kv = torch.cat([key.flatten(1), torch.ones(2, 8)], 1)
    _, saved = forward(x, kv, torch.ones(1, 8), "copysign")
    assert not saved[..., 1].any()
    z = torch.where(saved[..., 1].signbit(), -1e-3, 1e-3)
    assert torch.allclose(saved[..., 0], torch.sigmoid(z), rtol=1e-6, atol=0)
    assert not saved[0, 0, 1].signbit()


def test_nan_is_not_hidden() -> None:
    for which, at in ((0, (3, 1, 2)), (1, (3, 9))):
        tensors = inputs(5, 2, 8)
        tensors[which][at] = math.nan
        found = run(TRITON, tensors, None, torch.ones(5, 2, 8), residual=False)
        assert found["out"][3, 1].isnan().all()
        assert torch.isfinite(found["out"][torch.arange(5) != 3]).all()


@pytest.mark.parametrize("scale", [1e-12, 1e-4, 1e4, 1e12])
def test_tiny_norms_and_large_scales(scale: float) -> None:
    x, kv, weight = inputs(5, 2, 64)
    found, saved = forward(x * scale, kv * scale, weight, "copysign")
    expected, _ = forward(x, kv, weight, "copysign")
    if scale > 1e-9:  # below, eps is what counts
        assert relative_error(found, expected * scale) < 1e-5
    assert torch.isfinite(saved).all()


def test_no_tokens() -> None:
    x, kv, weight = inputs(0, 2, 24)
    found = run(TRITON, (x, kv, weight), None, torch.ones_like(x))
    assert found["out"].shape == x.shape
    assert torch.equal(found["weight"], torch.zeros(2, 24))


@pytest.mark.parametrize("streams", [2, 5])
def test_the_same_bits_each_time(streams: int) -> None:
    tensors = inputs(11, streams, 24)
    dout = torch.randn_like(tensors[0])
    first, second = (run(TRITON, tensors, None, dout) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("programs", [1, 2, 7, 11])
@pytest.mark.parametrize("streams", [2, 5])
def test_any_number_of_programs(streams: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "programs_of", lambda tokens, device: programs)
    check(inputs(11, streams, 24))


@pytest.mark.parametrize("rows", [1, 16, 17, 192])
def test_the_sum_over_programs(rows: int) -> None:
    partial, total = torch.randn(rows, 2, 72), torch.empty(2, 72)
    triton_kernels._launch_sum(partial, total, rows)
    assert relative_error(total, partial.double().sum(0)) < 1e-6


def test_offsets_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that lie 2^31 elements apart: 17 GB of addresses, of which a few pages are touched."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    tokens, streams, width = 3, 2, 24
    step = 2**31 + 16
    try:
        far = [torch.empty((tokens - 1) * step + 128, dtype=torch.float16) for _ in range(2)]
    except RuntimeError:
        pytest.skip("this machine reserves no 17 GB of address space")
    x, kv, weight = inputs(tokens, streams, width, torch.float16)
    torch.utils.deterministic.fill_uninitialized_memory = True
    x_far = far[0].as_strided(x.shape, (step, width, 1)).copy_(x)
    kv_far = far[1].as_strided(kv.shape, (step, 1)).copy_(kv)
    dout = torch.randn_like(x)
    found = run(TRITON, (x_far, kv_far, weight), None, dout)
    near = run(TRITON, (x, kv, weight), None, dout)
    assert all(torch.equal(found[name], near[name]) for name in near)


def test_how_rows_are_cut() -> None:
    for width in (8, 24, 2048, 5120, 7168, 8200):
        shape = triton_kernels.shape_of(4, width)
        assert shape.head <= width <= shape.head + shape.tail
        assert shape.head & (shape.head - 1) == shape.tail & (shape.tail - 1) == 0
    assert triton_kernels.shape_of(4, 5120)[:2] == (4096, 1024)
    assert triton_kernels.shape_of(5, 64).stages == 1  # sums in memory: nothing may be loaded ahead of a store
    assert plan._MOST_PROGRAMS == triton_kernels.MOST_PROGRAMS


def test_compiled_means_that_this_kind_ran() -> None:
    kind = (torch.float32, torch.float32, 3, 16, True, "copysign", False)
    assert not triton_kernels.is_compiled(*kind)
    run(TRITON, inputs(2, 3, 16), None, torch.ones(2, 3, 16))
    assert triton_kernels.is_compiled(*kind)
    assert not triton_kernels.is_compiled(*kind[:-1], True)
