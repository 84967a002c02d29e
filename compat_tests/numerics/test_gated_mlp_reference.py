"""The gated MLP in plain PyTorch against the formula in fp64, the bad input it refuses, and faults it catches."""

from __future__ import annotations

import functools
import math
import re

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from fusepatch.kernels.gated_mlp import op, reference
from support import grads_of, is_within_parity, relative_error

EXACT = {
    "silu": lambda g: g / (1 + torch.exp(-g)),
    "gelu": lambda g: 0.5 * g * torch.erfc(-g / math.sqrt(2)),
    "gelu_tanh": lambda g: g / (1 + torch.exp(-math.sqrt(8 / math.pi) * (g + 0.044715 * g**3))),
}
STOCK = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}
EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
WIDE = (torch.float64, torch.float32)

Named = dict[str, Tensor]


def inputs(x: Tensor, inner: int, dtype: torch.dtype, packed: bool = False, bias: bool = False) -> Named:
    """The arguments of the op by name, as leaves; weights and biases such that every activation is unit-scale."""
    hidden = x.shape[-1]
    first = {"gate_up": 2 * inner} if packed else {"gate": inner, "up": inner}
    found = {f"{name}_weight": torch.randn(rows, hidden) / math.sqrt(hidden) for name, rows in first.items()}
    found["down_weight"] = torch.randn(hidden, inner) / math.sqrt(inner)
    if bias:
        found |= {f"{name}_bias": torch.randn(rows) for name, rows in {**first, "down": hidden}.items()}
    # Not x.to(dtype), which gives up a row stride.
    leaves = {"x": torch.empty_strided(x.shape, x.stride(), dtype=dtype).copy_(x)}
    return {name: t.to(dtype).requires_grad_() for name, t in {**leaves, **found}.items()}


def exact(p: Named, activation: str) -> Tensor:
    wide = {name: t.double() for name, t in p.items()}
    if "gate_up_weight" in p:
        for kind in ("weight", "bias"):
            wide[f"gate_{kind}"], wide[f"up_{kind}"] = wide.get(f"gate_up_{kind}", torch.zeros(2)).chunk(2)
    gate, up = (
        torch.einsum("...h,ih->...i", wide["x"], wide[f"{name}_weight"]) + wide.get(f"{name}_bias", 0)
        for name in ("gate", "up")
    )
    h = EXACT[activation](gate) * up
    return torch.einsum("...i,hi->...h", h, wide["down_weight"]) + wide.get("down_bias", 0)


def stock(p: Named, activation: str) -> Tensor:
    if "gate_up_weight" in p:
        gate, up = F.linear(p["x"], p["gate_up_weight"], p.get("gate_up_bias")).chunk(2, -1)
    else:
        gate, up = (F.linear(p["x"], p[f"{name}_weight"], p.get(f"{name}_bias")) for name in ("gate", "up"))
    return F.linear(STOCK[activation](gate) * up, p["down_weight"], p.get("down_bias"))


def ours(p: Named, activation: str, **options: bool) -> Tensor:
    return (op.gated_mlp_packed if "gate_up_weight" in p else op.gated_mlp)(**p, activation=activation, **options)


def errors(p: Named, activation: str) -> dict[str, tuple[float, float]]:
    """Of the output and of each gradient, our error and that of the stock expression."""
    dtype = p["x"].dtype
    dout = torch.randn(p["x"].shape, dtype=dtype)
    wide = {name: t.detach().double().requires_grad_() for name, t in p.items()}
    expected = grads_of(lambda: exact(wide, activation), wide, dout.double())
    theirs = grads_of(lambda: stock(p, activation), p, dout)
    found = grads_of(lambda: ours(p, activation), p, dout)
    assert all(t.dtype is dtype for t in found.values())
    return {n: (relative_error(found[n], expected[n]), relative_error(theirs[n], expected[n])) for n in expected}


def assert_within_parity(p: Named, activation: str) -> None:
    """The parity bound; tighter where its floor would hide everything, wider where few roundings make it a lottery."""
    x = p["x"]
    eps = EPS[x.dtype]
    for name, (error, theirs) in errors(p, activation).items():
        elements = p[name].numel() if name in p else x.numel()
        if x.dtype in WIDE:
            assert error <= 2 * theirs + 8 * eps, name
        elif elements < 256 or x.shape[:-1].numel() < 64:
            assert error <= 2 * theirs + eps, name
        else:
            assert is_within_parity(error, theirs), (name, error, theirs)


ODD = (40, 56)
SMALL = (24, 8)
CASES = {
    "no tokens": (ODD, lambda H: torch.randn(0, H)),
    "no tokens in 3-D": (SMALL, lambda H: torch.randn(2, 0, H)),
    "1-D": (ODD, lambda H: torch.randn(H)),
    "one token": (SMALL, lambda H: torch.randn(1, H)),
    "7 tokens": (ODD, lambda H: torch.randn(7, H)),
    "7 tokens, row stride": (ODD, lambda H: torch.randn(7, 2 * H + 3)[:, 2 : H + 2]),
    "7 tokens, column-major": (SMALL, lambda H: torch.randn(H, 7).t()),
    "one token repeated": (SMALL, lambda H: torch.randn(7, 1, H).expand(7, 3, H)[:, :1]),
    "64 tokens": (SMALL, lambda H: torch.randn(64, H)),
    "3-D": (ODD, lambda H: torch.randn(8, 8, H)),
    "3-D, row stride": (SMALL, lambda H: torch.randn(3, 5, H + 8)[..., :H]),
    "3-D, transposed": (ODD, lambda H: torch.randn(16, 4, H).transpose(0, 1)),
    "257 tokens": (ODD, lambda H: torch.randn(257, H)),
}


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("activation", EXACT)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_within_parity(
    case: str, packed: bool, bias: bool, activation: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    (hidden, inner), make_x = CASES[case]
    x = make_x(hidden)
    p = inputs(x, inner, dtype, packed, bias)
    assert p["x"].stride() == x.stride()
    assert_within_parity(p, activation)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    tokens=st.integers(0, 70),
    hidden=st.integers(8, 70),
    inner=st.integers(8, 70),
    packed=st.booleans(),
    bias=st.booleans(),
    activation=st.sampled_from(sorted(EXACT)),
    dtype=st.sampled_from(list(EPS)),
)
def test_any_size_is_within_parity(
    tokens: int, hidden: int, inner: int, packed: bool, bias: bool, activation: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(tokens)
    assert_within_parity(inputs(torch.randn(tokens, hidden), inner, dtype, packed, bias), activation)


# ----------------------------------------------------------------------------------------------- the pieces


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("activation", EXACT)
def test_activations_and_their_derivatives_are_those_of_pytorch(activation: str, dtype: torch.dtype) -> None:
    extremes = [-1e4, -300.0, -88.0, -0.0, 0.0, 88.0, 300.0, 1e4]
    gate = torch.cat([torch.linspace(-30, 30, 4001), torch.tensor(extremes)]).to(dtype).requires_grad_()
    expected = STOCK[activation](gate)
    (derivative,) = torch.autograd.grad(expected.sum(), gate)
    # Of the tails, of which 1 + erf(g) has no digits, the size alone is compared.
    close = {"rtol": 64 * EPS[dtype], "atol": 64 * EPS[dtype]}
    torch.testing.assert_close(reference.activate(gate, activation), expected, **close)
    torch.testing.assert_close(reference.activate_derivative(gate, activation), derivative, **close)
    mild = torch.linspace(-5, 5, 1001, dtype=torch.float64)
    assert relative_error(reference.activate(mild, activation), EXACT[activation](mild)) < 1e-15


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", EXACT)
def test_the_product_is_rounded_once(activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(2, 100, 100).to(dtype)
    nearest = (EXACT[activation](gate.double()) * up.double()).to(dtype)
    for h in (
        op.act_mul(gate, up, activation=activation),
        op.act_mul_packed(torch.cat([gate, up], -1), activation=activation),
    ):
        assert (h == nearest).double().mean() > 0.999
    assert (STOCK[activation](gate) * up == nearest).double().mean() < 0.9


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("activation", EXACT)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_the_recomputed_h_is_the_forwards_bit_for_bit(bias: bool, activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    p = {name: t.detach() for name, t in inputs(torch.randn(65, 40), 56, dtype, bias=bias).items()}
    first = (p["x"], p["gate_weight"], p["up_weight"], p.get("gate_bias"), p.get("up_bias"), activation)
    h, gate_up = reference.dual_gemm_act(*first, want_gate_up=True)
    alone, nothing = reference.dual_gemm_act(*first, want_gate_up=False)
    d_gate_up, again = reference.gemm_dact(p["x"], p["down_weight"], gate_up, activation, want_h=True)
    d_alone, no_h = reference.gemm_dact(p["x"], p["down_weight"], gate_up, activation, want_h=False)
    assert nothing is no_h is None
    assert torch.equal(h, again)
    assert torch.equal(h, alone)
    assert torch.equal(d_gate_up, d_alone)


# ----------------------------------------------------------------------------------------- broken on purpose


def _swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference.act_mul
    monkeypatch.setattr(reference, "act_mul", lambda gate, up, activation: right(up, gate, activation))


def _one_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference.act_mul_backward

    def wrong(*args, d_gate, d_up):
        right(*args, d_gate=d_gate, d_up=d_up)
        d_gate.mul_(1.01)

    monkeypatch.setattr(reference, "act_mul_backward", wrong)


def _unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference.act_mul_backward

    def wrong(dh, gate, up, activation, *, d_gate, d_up):
        right(dh[:-1], gate[:-1], up[:-1], activation, d_gate=d_gate[:-1], d_up=d_up[:-1])

    monkeypatch.setattr(reference, "act_mul_backward", wrong)


def _no_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference.dual_gemm_act

    def wrong(x, gate_weight, up_weight, gate_bias, up_bias, activation, *, want_gate_up):
        return right(x, gate_weight, up_weight, gate_bias, None, activation, want_gate_up=want_gate_up)

    monkeypatch.setattr(reference, "dual_gemm_act", wrong)


def _wrong_gelu(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference.activate
    monkeypatch.setattr(reference, "activate", lambda gate, activation: right(gate, "gelu_tanh"))


def _stale_h(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference.gemm_dact

    def wrong(*args, want_h):
        d_gate_up, h = right(*args, want_h=want_h)
        return d_gate_up, None if h is None else h.roll(1, 0)

    monkeypatch.setattr(reference, "gemm_dact", wrong)


FIRST = {"gate_weight", "up_weight", "gate_bias", "up_bias"}
BROKEN = {
    _swapped: {"out", "down_weight"},
    _one_percent: {"gate_weight", "gate_bias", "x"},
    _unwritten: {"x", *FIRST},
    _no_bias: {"out", "x", "down_weight", "gate_weight", "gate_bias"},
    _wrong_gelu: {"out", "x", "down_weight", "up_weight", "up_bias"},
    _stale_h: {"down_weight"},
}
"""What each of them makes wrong; all else stays right."""


@pytest.mark.parametrize(
    ("broken", "dtype"),
    [
        (broken, dtype)
        for broken in BROKEN
        for dtype in (torch.float32, torch.bfloat16)
        if (broken, dtype) != (_wrong_gelu, torch.bfloat16)  # the two GELUs differ by less than bf16 resolves
    ],
    ids=lambda value: getattr(value, "__name__", str(value)).strip("_"),
)
def test_a_broken_kernel_is_outside_parity(broken, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    p = inputs(torch.randn(257, 40), 56, dtype, bias=True)
    assert all(is_within_parity(*pair) for pair in errors(p, "gelu").values())
    broken(monkeypatch)
    outside = {name for name, pair in errors(p, "gelu").items() if not is_within_parity(*pair)}
    assert outside == BROKEN[broken]


# ------------------------------------------------------------------------------------------------- bad input


def good(packed: bool) -> dict:
    """H = 6, I = 4."""
    p = inputs(torch.randn(2, 6), 4, torch.float32, packed, bias=True)
    return {name: t.detach() for name, t in p.items()}


def of(*shape: int) -> Tensor:
    return torch.randn(shape)


REFUSED = {
    "x": (of(2, 5), "x is [2, 5], but must be [2, 6] beside down_weight [6, 4]"),
    "x 3-D": (of(3, 2, 4), "x is [3, 2, 4], but must be [3, 2, 6]"),
    "x 0-D": (of(), "x must be [..., H] and the weights matrices, got x []"),
    "gate_weight": (of(6, 4), "gate_weight is [6, 4], but must be [4, 6]"),
    "gate_weight 1-D": (of(6), "the weights matrices, got x [2, 6], gate [6]"),
    "gate_weight 3-D": (of(1, 4, 6), "the weights matrices, got x [2, 6], gate [1, 4, 6]"),
    "up_weight": (of(5, 6), "up_weight is [5, 6], but must be [4, 6]"),
    "up_weight 3-D": (of(1, 4, 6), "up_weight is [1, 4, 6], but must be [4, 6]"),
    "down_weight": (of(4, 6), "beside down_weight [4, 6] [H, I]"),
    "down_weight 1-D": (of(4), "the weights matrices, got x [2, 6], gate [4, 6], down [4]"),
    "gate_bias": (of(6), "gate_bias is [6], but must be [4]"),
    "gate_bias 2-D": (of(1, 4), "gate_bias is [1, 4], but must be [4]"),
    "up_bias": (of(1), "up_bias is [1], but must be [4]"),
    "down_bias": (of(4), "down_bias is [4], but must be [6]"),
    "gate_bias alone": (None, "gate_bias and up_bias must be given together"),
    "up_bias alone": (None, "gate_bias and up_bias must be given together"),
}
REFUSED_PACKED = {
    "x": (of(2, 5), "x is [2, 5], but must be [2, 6]"),
    "gate_up_weight": (of(4, 6), "gate_up_weight is [4, 6], but must be [8, 6]"),
    "gate_up_weight odd": (of(9, 6), "gate_up_weight is [9, 6], but must be [8, 6]"),
    "down_weight": (of(6, 8), "beside down_weight [6, 8] [H, I]"),
    "gate_up_bias": (of(4), "gate_up_bias is [4], but must be [8]"),
    "down_bias": (of(8), "down_bias is [8], but must be [6]"),
}


@pytest.mark.parametrize(
    ("packed", "case"), [*((False, case) for case in REFUSED), *((True, case) for case in REFUSED_PACKED)]
)
def test_a_wrong_shape_is_named(packed: bool, case: str) -> None:
    value, message = (REFUSED_PACKED if packed else REFUSED)[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        ours({**good(packed), case.split()[0]: value}, "silu")


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: op.act_mul(of(2, 4), of(2, 5)), "of one shape, got gate [2, 4], up [2, 5]"),
        (lambda: op.act_mul(of(2, 4), of(4)), "of one shape, got gate [2, 4], up [4]"),
        (lambda: op.act_mul(of(), of()), "must be [..., I] of one shape, got gate [], up []"),
        (lambda: op.act_mul_packed(of(2, 5)), "gate_up must be [..., 2*I], got gate_up [2, 5]"),
        (lambda: op.act_mul_packed(of()), "gate_up must be [..., 2*I], got gate_up []"),
    ],
    ids=["widths", "broadcast", "0-D", "packed odd", "packed 0-D"],
)
def test_a_wrong_shape_of_act_mul_is_named(run, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run()


@pytest.mark.parametrize(
    "activation", ["relu", "SiLU", "", None, F.silu], ids=lambda value: getattr(value, "__name__", str(value))
)
def test_an_unknown_activation_is_named(activation) -> None:
    message = re.escape(f"activation must be one of silu, gelu, gelu_tanh, got {activation!r}")
    for run in (
        lambda: ours(good(False), activation),
        lambda: ours(good(True), activation),
        lambda: op.act_mul(of(2, 4), of(2, 4), activation=activation),
        lambda: op.act_mul_packed(of(2, 4), activation=activation),
    ):
        with pytest.raises(ValueError, match=message):
            run()


ARGUMENTS = [(packed, name) for packed in (False, True) for name in good(packed)]


@pytest.mark.parametrize(("packed", "name"), ARGUMENTS)
def test_mixed_dtypes_and_devices_are_refused(packed: bool, name: str) -> None:
    p = good(packed)
    for value, message in (
        (p[name].bfloat16(), "torch.bfloat16 on cpu"),
        (p[name].to("meta"), "torch.float32 on meta"),
    ):
        with pytest.raises(ValueError, match=f"one floating dtype and one device.*{message}"):
            ours({**p, name: value}, "silu")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_tensors_that_are_not_floating_are_refused(dtype: torch.dtype) -> None:
    message = f"one floating dtype and one device, got .*{dtype} on cpu"
    for packed in (False, True):
        with pytest.raises(ValueError, match=message):
            ours({name: t.to(dtype) for name, t in good(packed).items()}, "silu")
    with pytest.raises(ValueError, match=message):
        op.act_mul(of(2, 4).to(dtype), of(2, 4).to(dtype))


@pytest.mark.parametrize("value", [[1.0], numpy.ones((4, 6)), 1.0, "x"], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(("packed", "name"), ARGUMENTS)
def test_what_is_no_tensor_is_refused(packed: bool, name: str, value) -> None:
    with pytest.raises(TypeError, match=rf"torch.Tensor, got {type(value).__name__}"):
        ours({**good(packed), name: value}, "silu")


@pytest.mark.parametrize(("packed", "name"), ARGUMENTS)
def test_what_is_no_tensor_or_of_another_dtype_is_named(packed: bool, name: str) -> None:
    p = good(packed)
    with pytest.raises(TypeError, match=rf"\b{name}\b"):
        ours({**p, name: [1.0]}, "silu")
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        ours({**p, name: p[name].bfloat16()}, "silu")


@pytest.mark.parametrize(("packed", "name"), [pair for pair in ARGUMENTS if not pair[1].endswith("bias")])
def test_a_required_tensor_that_is_none_is_refused(packed: bool, name: str) -> None:
    with pytest.raises(TypeError, match=rf"\b{name}\b.*None"):
        ours({**good(packed), name: None}, "silu")
