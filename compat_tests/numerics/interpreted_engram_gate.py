"""The Triton kernels of the Engram gate, run by Triton's interpreter on a CPU, against the reference in fp64.

Collected by test_interpreted.py, in a process of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fusepatch.kernels import backends
from fusepatch.kernels.engram_gate import check as selfcheck
from fusepatch.kernels.engram_gate import choose, op, reference, sizes, triton_kernels
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


SIZES = [(1, 4, 5120), (3, 1, 8), (7, 2, 88), (4, 3, 280), (5, 6, 40), (2, 4, 2048), (1, 1, 8200)]


@pytest.mark.parametrize(
    ("size", "dtype"),
    [*((size, torch.float32) for size in SIZES), *((SIZES[i], dtype) for i in (0, 2) for dtype in BOUND)],
    ids=str,
)
def test_forward_and_backward(size, dtype: torch.dtype) -> None:
    check(inputs(*size, dtype))


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("zero_dot", reference.ZERO_DOTS)
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "gated"])
@pytest.mark.parametrize("streams", [2, 5])
def test_forms(streams: int, residual: bool, zero_dot: str, masked: bool) -> None:
    mask = torch.tensor([True, False, True, True]) if masked else None
    check(inputs(4, streams, 24), mask, residual=residual, zero_dot=zero_dot)


@pytest.mark.parametrize("wanted", [w for n in (1, 2) for w in itertools.combinations(NAMES, n)])
@pytest.mark.parametrize("streams", [2, 5])
def test_every_choice_of_wanted_gradients(streams: int, wanted) -> None:
    check(inputs(4, streams, 24), wanted=wanted)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("streams", [2])
def test_query_and_key_rounded_apart(streams: int, dtype: torch.dtype) -> None:
    """Near a dot product of 0, where roundings decide: the kernel has those of the reference, in the same places."""
    torch.manual_seed(0)
    x, kv = torch.randn(33, streams, 24).to(dtype), torch.randn(33, (streams + 1) * 24).to(dtype)
    norms = 1 + 0.2 * torch.randn(streams, 24), 1 + 0.2 * torch.randn(streams, 24)
    dout = torch.randn(x.shape).to(dtype)

    def both(backend: backends.Backend, given: tuple[Tensor, Tensor] | None) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, kv, norms[0] * norms[1])]
        call = op.Call(backend, 1e-6, False, "sign")
        out = op.run_engram_gate(call, leaves[0], leaves[1], None, leaves[2], None, given)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    ours, expected, unrounded = both(TRITON, norms), both(choose.REFERENCE, norms), both(TRITON, None)
    bound = {torch.float32: 2e-5, torch.float16: 1e-3}[dtype]
    errors = [relative_error(one, other) for one, other in zip(ours, expected, strict=True)]
    assert max(errors) < bound
    if dtype is torch.float16:  # which test would not fail without the roundings says nothing of them
        assert relative_error(unrounded[1], expected[1]) > 3 * bound


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


@pytest.mark.parametrize("together", [1, 2])
def test_dots_next_to_zero_are_not_those_of_a_sum_in_fp32(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many random tokens those with the smallest dots: of such the error of the weight's gradient is made."""
    tokens, width = 20000, 88
    torch.manual_seed(0)
    x, key = torch.randn(tokens, 1, width).half().float(), torch.randn(tokens, 1, width).half().float()
    weight = (1 + 0.2 * torch.randn(1, width)).half().float()

    def saved_by(forward, size: torch.dtype, **more) -> Tensor:
        tensors = [t.to(size) for t in (x, key, torch.ones(len(x), width), weight)]
        out, saved = torch.empty_like(tensors[0]), torch.empty(len(x), 1, 4, dtype=size)
        forward(*tensors, None, 1e-20, True, "copysign", out_MSD=out, saved_MS4=saved, **more)
        return saved[:, 0, 1].double()

    nearest = saved_by(reference.engram_forward, torch.float64).abs().argsort()[:7]
    x, key = x[nearest], key[nearest]
    exact = saved_by(reference.engram_forward, torch.float64)
    assert 1e-6 < exact.abs().max() < 1e-3
    shape = sizes.shape_of(1, width)._replace(forward_together=together)
    ours = saved_by(triton_kernels.engram_forward, torch.float32, _shape=shape)
    plain = saved_by(reference.engram_forward, torch.float32)
    assert relative_error(ours, exact) < 1e-6
    assert ((ours - exact) / exact).abs().max() < 1e-6
    assert ((plain - exact) / exact).abs().max() > 1e-4


@pytest.mark.parametrize("scale", [1e-12, 1e-4, 1e4, 1e12])
def test_tiny_norms_and_large_scales(scale: float) -> None:
    x, kv, weight = inputs(5, 2, 64)
    found, saved = forward(x * scale, kv * scale, weight, "copysign")
    expected, _ = forward(x, kv, weight, "copysign")
    if scale > 1e-9:  # below, eps is what counts
        assert relative_error(found, expected * scale) < 1e-5
    assert torch.isfinite(saved).all()


@pytest.mark.parametrize("rounded", [False, True], ids=["", "rounded"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("one_stream", [False, True], ids=["", "one stream"])
@pytest.mark.parametrize(("together", "programs"), [(2, 1), (2, 0), (4, 1), (1, 7)])
def test_tokens_that_share_a_step(
    together: int, programs: int, one_stream: bool, masked: bool, rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_kernels, "_programs", lambda device, on_each: on_each)
    x, kv, weight = inputs(11, 3, 24)
    x[3], kv[4] = -0.0, math.nan
    mask = torch.arange(11) % 4 > 0 if masked else torch.arange(11) != 4
    key_weight = weight.flip(0) if rounded else None
    options = (kv[:, :72].view(11, 3, 24), kv[:, 72:], weight, mask, 1e-6, True, "copysign")
    found, expected = ((torch.full_like(x, math.nan), torch.full((11, 3, 4), math.nan)) for _ in range(2))
    changes = {"forward_together": together, "forward_programs": programs, "forward_one_stream": one_stream}
    shape = sizes.shape_of(3, 24)._replace(**changes)
    for forward, (out, saved), more in (
        (triton_kernels.engram_forward, found, {"_shape": shape}),
        (reference.engram_forward, expected, {}),
    ):
        forward(x, *options, out_MSD=out, saved_MS4=saved, key_weight_SD=key_weight, **more)
    assert all(relative_error(one, other) < 1e-5 for one, other in zip(found, expected, strict=True))
    assert torch.equal(found[0][~mask].view(torch.int32), x[~mask].view(torch.int32))


OTHER_SHAPES = {
    "one stream": {"forward_one_stream": True},
    "weights not copied ahead": {"backward_copies_weight": False},
    "few rows summed at a time": {"sum_rows": 2, "sum_columns": 32},
    "head and tail summed apart": {"by_thread": False},
}


@pytest.fixture
def new_launches() -> Iterator[None]:
    """Shapes are asked for once for each kind of call."""
    caches = (triton_kernels._forward_launch, triton_kernels._backward_launch, triton_kernels._sum_launch)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("wanted", [NAMES, ("kv",), ("x", "weight"), ("weight",)], ids=str)
@pytest.mark.parametrize("other", OTHER_SHAPES)
def test_other_launch_shapes(other: str, wanted, new_launches: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def shape_on(device: torch.device, streams: int, width: int, *rest: object) -> sizes.Shape:
        asked.append(sizes.shape_of(streams, width)._replace(**OTHER_SHAPES[other]))
        return asked[-1]

    monkeypatch.setattr(triton_kernels, "_shape_on", shape_on)
    check(inputs(7, 2, 88), torch.arange(7) % 3 > 0, wanted=wanted)
    assert asked


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
    monkeypatch.setattr(triton_kernels, "_programs", lambda device, on_each: programs)
    check(inputs(11, streams, 24))


@pytest.mark.parametrize("rows", [1, 16, 17, 192])
def test_the_sum_over_programs(rows: int) -> None:
    partial, total = torch.randn(rows, 2, 72), torch.empty(2, 72)
    launch = triton_kernels._sum_launch(total.device, total.dtype, 2, 72, None)
    triton_kernels._run_sum(launch, rows, partial, total)
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
        shape = sizes.shape_of(4, width)
        assert shape.head <= width <= shape.head + shape.tail
        assert shape.head & (shape.head - 1) == shape.tail & (shape.tail - 1) == 0
    assert sizes.cut(5120) == (4096, 1024)
    for streams, width in ((5, 64), (4, 8192)):
        assert sizes.shape_of(streams, width).backward_stages == 1  # sums in memory: nothing is loaded ahead of a store


@pytest.mark.parametrize("shared", [227, 163, 99, 48])
@pytest.mark.parametrize("item", [2, 4])
@pytest.mark.parametrize("width", [8, 264, 1024, 2560, 5120, 8192, 16384])
def test_rings_fit_into_shared_memory(width: int, item: int, shared: int) -> None:
    """On SM90, SM80, SM89 and smaller ones: what the steps that are held take, for all programs that share it."""
    for weights in (1, 2):
        shape = sizes.shape_of(4, width, item, 4, shared * 1024, weights)
        padded = shape.head + shape.tail
        step = 3 * item * shape.forward_together + 4 * weights
        forward = (shape.forward_stages - 1) * padded * step * max(shape.forward_programs, 1)
        backward = (shape.backward_stages - 1) * padded * (4 * item + 4) * shape.backward_programs
        if shape.backward_stages > 1:  # x and key may be held for one step more
            backward += 2 * item * padded * shape.backward_programs
        assert max(forward, backward) < shared * 1024
        assert shape.forward_programs == 0 or shape.forward_stages > 1


def test_compiled_means_that_this_kind_ran() -> None:
    kind = (torch.device("cpu"), torch.float32, torch.float32, 3, 16, True, "copysign", False, False)
    assert not triton_kernels.is_compiled(*kind)
    run(TRITON, inputs(2, 3, 16), None, torch.ones(2, 3, 16))
    assert triton_kernels.is_compiled(*kind)
    assert not triton_kernels.is_compiled(*kind[:-1], True)
    assert not triton_kernels.is_compiled(*kind[:-2], True, False)


# --------------------------------------------------------------------------------------- the self-check, broken kernels

FAULTS = {
    "a mask that zeroes": (
        "out_head += x_head",
        "out_head += tl.where(on[:, None], x_head, 0.0) if MASKED else x_head",
        "a masked token",
    ),
    "a mask that gates": ("gate, dot = tl.where(on, gate, off),", "dot =", "grad_kv of"),
    "no mean": ("square_x / WIDTH", "square_x", "out of"),
    "a tail left out": ("mask=columns < WIDTH)", "mask=columns < WIDTH - 8)", "nan"),
    "a gradient without the residual": ("grad_x_head += grad_out_head", "pass", "grad_x of"),
    "a slope of the other sign": ("* 0.5 / root", "* -0.5 / root", "grad_kv of"),
    "one stream's sum in another": ("_store(slot + WIDTH, head, sum_1_head, HEAD, WIDTH)", "pass", "nan"),
    "sums that forget": ("so_far = step >= STREAMS", "so_far = step < 0", "grad_weight of"),
    "a token twice": ("(program + 1) * tokens // programs", "tokens", "grad_weight of"),
    "the value of one stream": ("tl.where(stream == 0, 0.0, grad_value_head)", "0.0", "grad_kv of"),
    "roundings left out": ("return numbers.to(dtype).to(tl.float32)", "return numbers * 1.01", "out of [3, 2, 40]"),
    "a masked token that leaks": ("tl.where(on, of_value_head, 0.0)", "of_value_head + 1.0", "grad_kv of"),
}


def differences(shapes: tuple[selfcheck.Shape, ...], backend: backends.Backend) -> Iterator[str]:
    class Steps:
        def reference(self) -> None: ...
        def kernel(self, what: str) -> None: ...

    # In fp32: the interpreter truncates to bf16 where the hardware rounds, which the check notices.
    cpu = torch.device("cpu")
    for shape in shapes:
        yield from selfcheck._compare(backend, cpu, torch.float32, shape, Steps())


SMALL = (
    selfcheck.Shape(5, 2, 88, True, "copysign", True, 1e-20),
    selfcheck.Shape(4, 5, 24, False, "sign", False, 1e-6),
    selfcheck.Shape(3, 2, 40, False, "sign", False, 1e-6, True),
)


def test_the_selfcheck_finds_nothing_in_what_is_right() -> None:
    assert list(differences(SMALL, TRITON)) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_the_selfcheck_finds_faults(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, what = FAULTS[fault]
    text = Path(triton_kernels.__file__).read_text()
    assert old in text
    (tmp_path / "faulty_kernels.py").write_text(text.replace(old, new))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "faulty_kernels", raising=False)
    found = differences(SMALL, dataclasses.replace(TRITON, module="faulty_kernels"))
    assert any(what in difference for difference in found)


# ------------------------------------------------------------------------------------- what cudnn_engram.py relies on


def test_cudnns_triton_kernels_mean_what_the_definition_says() -> None:
    """Of its backward pass the coefficients and the last sum; what lies between them is CuTe's, and only read here."""
    kernels = pytest.importorskip("cudnn.engram._reductions")
    tokens, streams, width = 3, 4, 5120
    x, kv, weight = inputs(tokens, streams, width)
    key, value = kv[:, : streams * width].view(x.shape), kv[:, streams * width :]
    with torch.no_grad():
        key[1, 2] = 0  # below the clamp, which passes no gradient
    saved, grad_out = torch.empty(tokens, streams, 4), torch.randn_like(x)
    reference.engram_forward(
        x, key, value, weight, None, 1e-6, True, "copysign", out_MSD=torch.empty_like(x), saved_MS4=saved
    )
    exact = {"x": x, "key": key, "value": value, "weight": weight}
    exact = {name: torch.empty_like(t, dtype=torch.float64) for name, t in exact.items()}
    wide = [t.double() for t in (grad_out, x, key, value, weight, saved)]
    names = ("grad_x_MSD", "grad_key_MSD", "grad_value_MD", "grad_weight_SD")
    reference.engram_backward(*wide, True, False, **dict(zip(names, exact.values(), strict=True)))

    coefficients = torch.full((tokens, streams, 4), math.nan)
    kernels.cudnn_engram_gate_saved_moments[(tokens * streams,)](
        value.contiguous(), grad_out, saved, coefficients, width, width, 8192
    )
    gate, of_product, of_x, of_key = coefficients.unsqueeze(-2).unbind(-1)
    partial, grad_weight = of_product * x * key, torch.full((streams, width), math.nan)
    kernels.cudnn_engram_gate_weight_reduce[(streams * width // 128,)](partial, grad_weight, tokens, width, 4, 128)
    found = {
        "x": grad_out + of_product * weight * key - of_x * x,
        "key": of_product * weight * x - of_key * key,
        "value": (gate * grad_out).sum(1),
        "weight": grad_weight,
    }
    cancelled = 2**-24 / float(1 - gate.max())  # of 1 - gate, in fp32
    assert cancelled < 1e-3
    for name, expected in exact.items():
        assert relative_error(found[name], expected) < cancelled, name


# ------------------------------------------------------------------------------------------ the benchmark's own control


def test_the_control_of_three_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    from benchmarks import engram_arms, engram_gate

    data = engram_arms.make(engram_arms.Case(19, 3, 24, device="cpu"))
    with torch.no_grad():
        for name, tensor in data.tensors.items():  # in fp32, as above
            data.tensors[name] = tensor.float().requires_grad_()
    data = dataclasses.replace(data, grad_out=data.grad_out.float())
    data.mask[::3] = False
    expected = engram_arms.reference(data)
    for build in (engram_arms._three_kernels, engram_arms._eager):
        found = build(data).train()
        assert all(engram_gate.error_of(found[name], expected[name]) < 1e-5 for name in expected)
