"""The Engram gate in plain PyTorch against a plain definition in fp64, what autograd asks of it, bad input, faults.

Beyond NVIDIA's kernel, which takes width 5120, four streams and a multiple of 64 up to 8192 tokens: 0, 1 and odd
numbers of tokens, other widths, and one, three and six streams.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from fusepatch import ops
from fusepatch.kernels.engram_gate import choose, op, reference
from support import grads_of, is_within_parity, relative_error

EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
FORMS = {
    f"{'residual' if residual else 'gated'}, {zero_dot}": {"residual": residual, "zero_dot": zero_dot}
    for residual in (True, False)
    for zero_dot in reference.ZERO_DOTS
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)

Named = dict[str, Tensor]


def inputs(
    lead: tuple[int, ...], streams: int, width: int, dtype: torch.dtype, lean: float = 0.7, scale: float = 1.0
) -> Named:
    """Leaves by name. Keys lean towards x by `lean`, or away, so that |dot| stays off 0, where any rounding counts."""
    torch.manual_seed(0)
    x = torch.randn(*lead, streams, width)
    side = torch.where(torch.rand(*lead, streams, 1) < 0.5, -lean, lean)
    keys, value = side * x + torch.randn_like(x) * (1 - lean), torch.randn(*lead, width)
    kv = torch.cat([keys.flatten(-2), value], -1)
    weight = (1 + 0.2 * torch.randn(streams, width)).to(reference.wide_dtype(dtype))
    wide = {"x": x * scale, "kv": kv * scale}
    return {**{n: t.to(dtype).requires_grad_() for n, t in wide.items()}, "weight": weight.requires_grad_()}


def eager(p: Named, mask: Tensor | None = None, *, eps: float, residual: bool, zero_dot: str) -> Tensor:
    """The definition, term by term, in the dtype of the inputs: in fp64 the truth, in bf16 what users write."""
    x, kv, weight = p["x"], p["kv"], p["weight"].to(p["x"].dtype)
    streams, width = x.shape[-2:]
    key, value = kv[..., : streams * width].unflatten(-1, (streams, width)), kv[..., streams * width :]
    query_normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
    key_normed = key * torch.rsqrt(key.pow(2).mean(-1, keepdim=True) + eps)
    dot = (query_normed * key_normed).sum(-1, keepdim=True) / math.sqrt(width)
    sign = torch.copysign(torch.ones_like(dot), dot.detach()) if zero_dot == "copysign" else dot.sign()
    gated = torch.sigmoid(dot.abs().clamp_min(1e-6).sqrt() * sign) * value.unsqueeze(-2)
    if mask is not None:
        gated = gated * mask[..., None, None]
    return x + gated if residual else gated


def ours(p: Named, mask: Tensor | None = None, **options) -> Tensor:
    return ops.engram_gate(p["x"], p["kv"], p["weight"], mask, **options)


def errors(p: Named, mask: Tensor | None, **options) -> dict[str, tuple[float, float]]:
    """Of the output and of each gradient, our error and that of the eager expression."""
    dout = torch.randn(p["x"].shape).to(p["x"].dtype)
    wide = {name: t.detach().double().requires_grad_() for name, t in p.items()}
    expected = grads_of(lambda: eager(wide, mask, **options), wide, dout.double())
    theirs = grads_of(lambda: eager(p, mask, **options), p, dout)
    found = grads_of(lambda: ours(p, mask, **options), p, dout)
    assert all(found[name].dtype is p[name].dtype for name in p)
    return {n: (relative_error(found[n], expected[n]), relative_error(theirs[n], expected[n])) for n in expected}


CASES = {
    "no tokens": ((0,), 4, 64),
    "no tokens in 3-D": ((2, 0), 4, 64),
    "one token, without a leading dimension": ((), 4, 64),
    "one token": ((1,), 4, 64),
    "7 tokens, one stream": ((7,), 1, 40),
    "65 tokens, three streams": ((65,), 3, 280),
    "2 x 33 tokens, six streams": ((2, 33), 6, 72),
    "the smallest width": ((129,), 2, 8),
    "the width it is tuned for": ((3,), 4, 5120),
}


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("dtype", EPS, ids=str)
@forms
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_within_parity(case: str, form, dtype: torch.dtype, masked: bool) -> None:
    lead, streams, width = CASES[case]
    p = inputs(lead, streams, width, dtype)
    mask = torch.rand(lead) < 0.8 if masked else None
    for name, (error, theirs) in errors(p, mask, eps=1e-6, **form).items():
        if dtype is torch.float64:  # the truth itself: 1 - gate cancels in it, not in ours
            assert error <= 1e-12, name
        elif dtype is torch.float32:
            assert error <= 2 * theirs + 8 * EPS[dtype], (name, error, theirs)
        else:
            assert is_within_parity(error, theirs), (name, error, theirs)


@forms
def test_gradcheck(form) -> None:
    p = inputs((2, 3), 2, 8, torch.float64)
    mask = torch.tensor([[True, False, True], [True, True, False]])
    for each in (None, mask):
        run = lambda x, kv, weight, each=each: ops.engram_gate(x, kv, weight, each, eps=1e-6, **form)
        assert torch.autograd.gradcheck(run, tuple(p.values()))


def test_gradcheck_of_separate_key_and_value() -> None:
    p = inputs((5,), 3, 8, torch.float64)
    call = op.Call(choose.REFERENCE, 1e-6, False, "sign")
    key, value = (t.detach().clone().requires_grad_() for t in p["kv"].split([24, 8], -1))
    run = lambda x, key, value, weight: op.run_engram_gate(call, x, key, value, weight, None)
    assert torch.autograd.gradcheck(run, (p["x"], key, value, p["weight"]))


def test_gradcheck_of_the_weight() -> None:
    query, key = torch.randn(2, 24, dtype=torch.float64).requires_grad_()
    for zero_centred in (False, True):
        assert torch.autograd.gradcheck(
            lambda q, k, z=zero_centred: ops.engram_gate_weight(q, k, 3, zero_centred=z), (query, key)
        )
    query, key = torch.randn(2, 24).bfloat16()
    assert ops.engram_gate_weight(query, key, 3).dtype is torch.float32
    expected = ((1 + query.float()) * (1 + key.float())).view(3, 8)
    assert torch.equal(ops.engram_gate_weight(query, key, 3, zero_centred=True), expected)


# ------------------------------------------------------------------------------------------------------- the corners


@pytest.mark.parametrize("zero_dot", reference.ZERO_DOTS)
def test_the_gate_around_zero(zero_dot: str) -> None:
    dots = torch.tensor([0.0, -0.0, 1e-9, -1e-9, 1e-6, -1e-6, 4e-6, -4e-6, 1e4, -1e4, math.nan], dtype=torch.float64)
    z = [1e-3, -1e-3, 1e-3, -1e-3, 1e-3, -1e-3, 2e-3, -2e-3, 100, -100, math.nan]
    if zero_dot == "sign":
        z[:2] = [0.0, 0.0]
    expected = torch.sigmoid(torch.tensor(z, dtype=torch.float64))
    torch.testing.assert_close(reference.gate_of(dots, zero_dot), expected, rtol=1e-14, atol=0, equal_nan=True)


@forms
@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_a_dot_of_zero_passes_no_gradient_through_the_gate(form, dtype: torch.dtype) -> None:
    p = inputs((5,), 2, 16, dtype)
    with torch.no_grad():
        p["x"][..., 8:] = 0
        p["kv"].view(5, 3, 16)[:, :2, :8] = 0
    found = grads_of(lambda: ours(p, eps=1e-20, **form), p)
    assert torch.equal(found["x"], torch.full_like(p["x"], float(form["residual"])))
    assert not found["kv"][:, :32].any()
    assert not found["weight"].any()
    gates = (found["out"].double() - form["residual"] * p["x"].detach().double()) / p["kv"][:, None, 32:].double()
    assert relative_error(gates, torch.full_like(gates, 0.5)) < 0.02


def test_clamp_region_and_its_edge() -> None:
    """|dot| of 0.9e-6 and 1.1e-6: only the second passes a gradient."""
    width, options = 16, {"eps": 1e-20, "residual": False, "zero_dot": "sign"}
    x, key, value = (torch.zeros(1, 1, width, dtype=torch.float64) for _ in range(3))
    x[..., 0], value[:] = 1, 1
    for size, passes in ((0.9e-6, False), (1.1e-6, True), (-0.9e-6, False), (-1.1e-6, True)):
        # Of unit length, and so turned that the dot product is sqrt(D) times the cosine, which is `size`.
        key[..., 0] = size / math.sqrt(width)
        key[..., 1] = math.sqrt(1 - key[0, 0, 0].item() ** 2)
        p = {
            "x": x.clone().requires_grad_(),
            "kv": torch.cat([key, value], -1).flatten(1).requires_grad_(),
            "weight": torch.ones(1, width, dtype=torch.float64, requires_grad=True),
        }
        found, expected = grads_of(lambda p=p: ours(p, **options), p), grads_of(lambda p=p: eager(p, **options), p)
        assert bool(found["x"].any()) is passes
        assert all(relative_error(found[name], expected[name]) < 1e-12 or not expected[name].any() for name in found)


@forms
@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_masked_tokens_keep_x_bit_for_bit_whatever_lies_there(form, dtype: torch.dtype) -> None:
    p = inputs((6,), 2, 16, dtype)
    with torch.no_grad():
        p["x"][0] = -0.0
        p["kv"][1] = math.nan
        p["kv"][2] = math.inf
    found = grads_of(lambda: ours(p, torch.zeros(6, dtype=torch.bool), eps=1e-20, **form), p)
    if form["residual"]:
        assert torch.equal(found["out"].view(torch.uint8), p["x"].detach().view(torch.uint8))
    else:
        assert not found["out"].any()
    assert torch.equal(found["x"], torch.full_like(p["x"], float(form["residual"])))
    assert not found["kv"].any()
    assert not found["weight"].any()


@pytest.mark.parametrize("scale", [1e-12, 1e-4, 1e4, 1e12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiny_norms_and_large_scales(scale: float, dtype: torch.dtype) -> None:
    p = inputs((65,), 2, 64, dtype, scale=scale)
    for name, (error, theirs) in errors(p, None, eps=1e-20, residual=True, zero_dot="copysign").items():
        assert error <= max(1.25 * theirs + 1e-4, 4 * EPS[dtype]), (name, error, theirs)


def test_rows_of_zeros() -> None:
    p = {"x": torch.zeros(2, 2, 8), "kv": torch.zeros(2, 24), "weight": torch.ones(2, 8)}
    p = {name: t.requires_grad_() for name, t in p.items()}
    found = grads_of(lambda: ours(p, eps=op.SMALLEST_EPS, residual=True, zero_dot="sign"), p)
    assert all(torch.isfinite(t).all() for t in found.values())


def test_nan_is_not_hidden() -> None:
    for name, at in (("x", (3, 1, 2)), ("kv", (3, 9))):
        p = inputs((5,), 2, 8, torch.float32)
        with torch.no_grad():
            p[name][at] = math.nan
        out = ours(p, eps=1e-6, residual=False)
        assert out[3, 1].isnan().all()
        assert torch.isfinite(out[torch.arange(5) != 3]).all()


# ----------------------------------------------------------------------------------------------------------- autograd


def wanted_only(p: Named, wanted) -> Named:
    return {name: t.detach().clone().requires_grad_(name in wanted) for name, t in p.items()}


@pytest.mark.parametrize("wanted", [w for n in range(4) for w in itertools.combinations(("x", "kv", "weight"), n)])
def test_every_choice_of_wanted_gradients(wanted) -> None:
    everything = inputs((9,), 2, 16, torch.float32)
    dout = torch.randn(9, 2, 16)
    expected = grads_of(lambda: ours(everything, eps=1e-6), everything, dout)
    p = wanted_only(everything, wanted)
    out = ours(p, eps=1e-6)
    assert torch.equal(out, expected["out"])
    assert out.requires_grad is bool(wanted)
    if wanted:
        assert all(torch.equal(grads_of(lambda: ours(p, eps=1e-6), p, dout)[name], expected[name]) for name in wanted)


@pytest.mark.parametrize(
    ("wanted", "kept"),
    [
        (("x", "kv", "weight"), {"x", "kv", "weight"}),
        (("x",), {"x", "kv", "weight"}),
        (("kv",), {"x", "kv", "weight"}),
        (("weight",), {"x", "kv"}),
    ],
)
def test_what_is_saved(wanted, kept) -> None:
    p = wanted_only(inputs((9,), 2, 16, torch.bfloat16), wanted)
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        ours(p, torch.ones(9, dtype=torch.bool), eps=1e-6)
    saved = [t for t in saved if t.numel()]
    own = [t for t in saved if all(t.data_ptr() != each.data_ptr() for each in p.values())]
    assert {name for name, each in p.items() if any(t.data_ptr() == each.data_ptr() for t in saved)} == kept
    assert [(t.dtype, tuple(t.shape)) for t in own] == [(torch.float32, (9, 2, 4))]


def test_only_the_value_wanted_saves_nothing_of_the_inputs() -> None:
    p = inputs((9,), 2, 16, torch.float32)
    call = op.Call(choose.REFERENCE, 1e-6, True, "sign")
    x, weight = p["x"].detach(), p["weight"].detach()
    key, value = p["kv"].detach()[:, :32], p["kv"].detach()[:, 32:].clone().requires_grad_()
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        out = op.run_engram_gate(call, x, key, value, weight, None)
    assert [tuple(t.shape) for t in saved if t.numel()] == [(9, 2, 4)]
    dout = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, value, dout)
    assert torch.equal(found, grads_of(lambda: ours(p, eps=1e-6, zero_dot="sign"), p, dout)["kv"][:, 32:])


def test_nothing_that_was_read_is_written_to() -> None:
    p = inputs((9,), 2, 16, torch.float32)
    dout = torch.randn(9, 2, 16)
    before = {name: t.detach().clone() for name, t in {**p, "dout": dout}.items()}
    out = ours(p, eps=1e-6)
    first = torch.autograd.grad(out, list(p.values()), dout, retain_graph=True)
    second = torch.autograd.grad(out, list(p.values()), dout)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(t, before[name]) for name, t in {**p, "dout": dout}.items())


@pytest.mark.parametrize("wanted", [w for n in (1, 2, 3) for w in itertools.combinations(("x", "kv", "weight"), n)])
def test_a_second_derivative_raises(wanted) -> None:
    p = wanted_only(inputs((3,), 2, 8, torch.float64), wanted)
    leaves = [p[name] for name in wanted]
    out = ours(p, eps=1e-6).square().sum()
    grads = torch.autograd.grad(out, leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.autograd.grad(sum(g.sum() for g in grads), leaves)


@pytest.mark.parametrize("name", ["x", "kv", "weight"])
def test_an_input_changed_before_the_backward_pass_raises(name: str) -> None:
    p = {n: t.detach() for n, t in inputs((3,), 2, 8, torch.float32).items()}
    leaf = torch.zeros_like(p["x"]).requires_grad_()
    out = ops.engram_gate(p["x"] + leaf if name != "x" else p["x"], p["kv"] + leaf.sum(), p["weight"], eps=1e-6)
    tensors = {"x": p["x"], "kv": p["kv"], "weight": p["weight"]}
    tensors[name].add_(1)
    if name == "kv":  # the op read p["kv"] + 0, not the tensor that changed
        torch.autograd.grad(out.sum(), leaf)
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), leaf)


def test_saved_tensors_may_live_elsewhere() -> None:
    p = inputs((9,), 2, 16, torch.float32)
    dout = torch.randn(9, 2, 16)
    expected = grads_of(lambda: ours(p, eps=1e-6), p, dout)
    with save_on_cpu():
        found = grads_of(lambda: ours(p, eps=1e-6), p, dout)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


LAYOUTS = {
    "rows of a wider tensor": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "every other row": lambda t: torch.stack([t, t], 1)[:, 0],
    "no unit stride": lambda t: torch.stack([t, t], -1)[..., 0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout: str) -> None:
    p = inputs((4, 3), 2, 16, torch.float32)
    dout = torch.randn(4, 3, 2, 16)
    expected = grads_of(lambda: ours(p, eps=1e-6), p, dout)
    q = {name: t.detach() if name == "weight" else LAYOUTS[layout](t.detach()) for name, t in p.items()}
    q = {name: t.requires_grad_() for name, t in q.items()}
    found = grads_of(lambda: ours(q, eps=1e-6), q, LAYOUTS[layout](dout))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    expanded = grads_of(lambda: ours(p, eps=1e-6), p, torch.ones(()).expand(4, 3, 2, 16))
    ones = grads_of(lambda: ours(p, eps=1e-6), p, torch.ones(4, 3, 2, 16))
    assert all(torch.equal(expanded[name], ones[name]) for name in expanded)


def test_the_packed_gradient_is_one_contiguous_tensor() -> None:
    p = inputs((9,), 4, 16, torch.bfloat16)
    found = grads_of(lambda: ours(p, eps=1e-6), p)
    assert found["kv"].shape == (9, 80)
    assert found["kv"].is_contiguous()
    assert found["weight"].dtype is torch.float32


# ----------------------------------------------------------------------------------------------------------- bad input

BAD = {
    "x is no tensor": ({"x": None}, TypeError, "x must be a torch.Tensor"),
    "x of one dimension": ({"x": torch.ones(8)}, ValueError, "at least one stream"),
    "no streams": ({"x": torch.ones(3, 0, 8)}, ValueError, "at least one stream"),
    "kv without a value": ({"kv": torch.ones(3, 16)}, ValueError, r"kv is \[3, 16\], but must be \[3, 24\]"),
    "kv of other tokens": ({"kv": torch.ones(4, 24)}, ValueError, r"kv is \[4, 24\], but must be \[3, 24\]"),
    "weight flat": ({"weight": torch.ones(16)}, ValueError, r"weight is \[16\], but must be \[2, 8\]"),
    "mask of another shape": ({"token_mask": torch.ones(2, dtype=torch.bool)}, ValueError, "token_mask is"),
    "mask of numbers": ({"token_mask": torch.ones(3)}, ValueError, "token_mask must be bool"),
    "two dtypes": ({"kv": torch.ones(3, 24).half()}, ValueError, "one dtype"),
    "weight of a third dtype": ({"weight": torch.ones(2, 8).half()}, ValueError, "floating dtype"),
    "weight too wide": ({"weight": torch.ones(2, 8).double()}, ValueError, "floating dtype"),
    "integers": ({"x": torch.ones(3, 2, 8).int(), "kv": torch.ones(3, 24).int()}, ValueError, "floating dtype"),
    "two devices": ({"kv": torch.ones(3, 24, device="meta")}, ValueError, "one device"),
    "eps 0": ({"eps": 0.0}, ValueError, "eps must be finite"),
    "eps negative": ({"eps": -1e-6}, ValueError, "eps must be finite"),
    "eps nan": ({"eps": math.nan}, ValueError, "eps must be finite"),
    "eps inf": ({"eps": math.inf}, ValueError, "eps must be finite"),
    "eps a string": ({"eps": "1e-6"}, TypeError, "eps must be a number"),
    "residual a number": ({"residual": 1}, TypeError, "residual must be a bool"),
    "unknown zero_dot": ({"zero_dot": "zero"}, ValueError, "zero_dot must be one of copysign, sign"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_refused_before_anything_runs(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, error, message = BAD[bad]
    monkeypatch.setattr(reference, "engram_forward", lambda *a, **k: pytest.fail("it ran"))
    good = {"x": torch.ones(3, 2, 8), "kv": torch.ones(3, 24), "weight": torch.ones(2, 8), "token_mask": None}
    with pytest.raises(error, match=message):
        ops.engram_gate(**{**good, "eps": 1e-6, **changes})


def test_a_width_that_is_no_multiple_of_8_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 8, got 12"):
        ops.engram_gate(torch.ones(3, 2, 12), torch.ones(3, 36), torch.ones(2, 12), eps=1e-6)
    with pytest.raises(ValueError, match="must hold 3 streams"):
        ops.engram_gate_weight(torch.ones(16), torch.ones(16), 3)


# --------------------------------------------------------------------------------------------------- broken on purpose


def _stale(right):
    def wrong(*args, **outputs):
        right(*(t.roll(1, 0) if isinstance(t, Tensor) and t.shape[:1] == (65,) else t for t in args), **outputs)

    return wrong


def _filled(value: float):
    def broken(right):
        def wrong(*args, **outputs):
            right(*args, **outputs)
            for tensor in outputs.values():
                if tensor is not None:
                    tensor.fill_(value)

        return wrong

    return broken


def _one_percent(right):
    def wrong(*args, **outputs):
        right(*args, **outputs)
        for tensor in outputs.values():
            if tensor is not None:
                tensor.mul_(1.01)

    return wrong


@pytest.mark.parametrize("which", ["engram_forward", "engram_backward"])
@pytest.mark.parametrize("broken", [_stale, _filled(math.nan), _filled(0.0), _one_percent])
def test_the_metric_notices_what_is_wrong(broken, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p = inputs((65,), 2, 64, torch.float32)
    options = {"eps": 1e-6, "residual": False, "zero_dot": "copysign"}
    assert all(is_within_parity(*pair) for pair in errors(p, None, **options).values())
    monkeypatch.setattr(reference, which, broken(getattr(reference, which)))
    found = errors(p, None, **options)
    outside = {name for name, (error, theirs) in found.items() if not is_within_parity(error, theirs)}
    gradients = {"x", "kv"} if broken is _stale else {"x", "kv", "weight"}  # a sum over tokens in any order
    assert outside >= ({"out"} if which == "engram_forward" else gradients)
