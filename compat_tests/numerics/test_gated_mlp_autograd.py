"""What autograd asks of the gated MLP: which gradients, what is saved, what is written to, and what raises."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fusepatch.kernels.gated_mlp import op, reference
from support import grads_of, relative_error

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}
TOKENS, H, INNER = 9, 10, 6
SEPARATE = {
    "x": (TOKENS, H),
    "gate_weight": (INNER, H),
    "up_weight": (INNER, H),
    "down_weight": (H, INNER),
    "gate_bias": (INNER,),
    "up_bias": (INNER,),
    "down_bias": (H,),
}
PACKED = {
    "x": (TOKENS, H),
    "gate_up_weight": (2 * INNER, H),
    "down_weight": (H, INNER),
    "gate_up_bias": (2 * INNER,),
    "down_bias": (H,),
}
LAYOUTS = {"separate": SEPARATE, "packed": PACKED}
layouts = pytest.mark.parametrize("shapes", LAYOUTS.values(), ids=LAYOUTS)
recomputes = pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])

Named = dict[str, Tensor]


def leaves(
    shapes: dict[str, tuple[int, ...]], wanted=None, dtype: torch.dtype = torch.float32, tokens=(TOKENS,)
) -> Named:
    torch.manual_seed(0)
    found = {name: torch.randn(shape) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    found["x"] = torch.randn(*tokens, H)
    return {name: t.to(dtype).requires_grad_(wanted is None or name in wanted) for name, t in found.items()}


def ours(p: Named, activation: str = "silu", **options: bool) -> Tensor:
    return (op.gated_mlp_packed if "gate_up_weight" in p else op.gated_mlp)(**p, activation=activation, **options)


def stock(p: Named, activation: str = "silu") -> Tensor:
    if "gate_up_weight" in p:
        gate, up = F.linear(p["x"], p["gate_up_weight"], p["gate_up_bias"]).chunk(2, -1)
    else:
        gate, up = (F.linear(p["x"], p[f"{name}_weight"], p[f"{name}_bias"]) for name in ("gate", "up"))
    return F.linear(ACTIVATIONS[activation](gate) * up, p["down_weight"], p["down_bias"])


def act_mul(p: Named) -> Tensor:
    return op.act_mul(**p) if "up" in p else op.act_mul_packed(**p)


def stock_act_mul(p: Named) -> Tensor:
    if "up" in p:
        return F.silu(p["gate"]) * p["up"]
    inner = p["gate_up"].shape[-1] // 2
    return F.silu(p["gate_up"][..., :inner]) * p["gate_up"][..., inner:]


def subsets(names) -> list[tuple[str, ...]]:
    names = tuple(names)
    return [some for size in range(len(names) + 1) for some in itertools.combinations(names, size)]


def same(a: Named, b: Named) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ----------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("activation", ACTIVATIONS)
@recomputes
@layouts
def test_gradcheck(shapes, recompute: bool, activation: str) -> None:
    p = leaves(shapes, dtype=torch.float64, tokens=(1, 3))
    run = lambda *tensors: ours(dict(zip(p, tensors, strict=True)), activation, recompute=recompute)
    assert torch.autograd.gradcheck(run, tuple(p.values()))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck_of_act_mul(activation: str) -> None:
    gate, up = torch.randn(2, 3, 2, 5, dtype=torch.float64).mul(2).requires_grad_()
    gate_up = torch.randn(3, 2, 10, dtype=torch.float64).mul(2).requires_grad_()
    assert torch.autograd.gradcheck(lambda *pair: op.act_mul(*pair, activation=activation), (gate, up))
    assert torch.autograd.gradcheck(lambda t: op.act_mul_packed(t, activation=activation), gate_up)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_derivative_is_that_of_the_activation(activation: str) -> None:
    gate = torch.linspace(-6, 6, 101, dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(reference.activate(gate, activation).sum(), gate)
    assert torch.autograd.gradcheck(lambda g: reference.activate(g, activation), gate)
    assert relative_error(reference.activate_derivative(gate, activation), slope) < 1e-14


@recomputes
@layouts
def test_every_choice_of_wanted_gradients(shapes, recompute: bool) -> None:
    dout = torch.randn(TOKENS, H)
    everything = leaves(shapes)
    expected = grads_of(lambda: ours(everything), everything, dout)
    for wanted in subsets(shapes):
        p = leaves(shapes, wanted)
        out = ours(p, recompute=recompute)
        assert torch.equal(out, expected["out"])
        assert out.requires_grad is bool(wanted)
        if wanted:
            ((function, _),) = out.grad_fn.next_functions  # below the view that restores the shape
            given = [gradient for gradient in function.apply(dout) if gradient is not None]
            found = dict(zip([name for name in shapes if name in wanted], given, strict=True))
            assert same(found, {name: expected[name] for name in wanted}), wanted


def test_every_choice_of_wanted_gradients_of_act_mul() -> None:
    dh = torch.randn(TOKENS, INNER)
    base = {"gate": torch.randn(TOKENS, INNER), "up": torch.randn(TOKENS, INNER)}
    both = {name: t.clone().requires_grad_() for name, t in base.items()}
    expected = grads_of(lambda: act_mul(both), both, dh)
    for wanted in subsets(base):
        p = {name: t.clone().requires_grad_(name in wanted) for name, t in base.items()}
        out = act_mul(p)
        assert torch.equal(out, expected["out"])
        assert out.requires_grad is bool(wanted)
        if wanted:
            given = dict(zip(("gate", "up"), out.grad_fn.apply(dh)[2:], strict=True))
            assert same({n: g for n, g in given.items() if g is not None}, {n: expected[n] for n in wanted})


def test_one_weight_as_gate_and_up_gets_the_sum() -> None:
    p = leaves(SEPARATE)
    p["up_weight"] = p["gate_weight"].detach().clone().requires_grad_()
    apart = grads_of(lambda: ours(p), p)
    p["up_weight"] = p["gate_weight"]
    tied = grads_of(lambda: ours(p), p)
    assert torch.equal(tied["gate_weight"], apart["gate_weight"] + apart["up_weight"])
    assert relative_error(tied["gate_weight"], grads_of(lambda: stock(p), p)["gate_weight"]) < 1e-6


def test_one_tensor_as_gate_and_up_of_act_mul_gets_the_sum() -> None:
    p = {"gate": torch.randn(TOKENS, INNER, requires_grad=True)}
    p["up"] = p["gate"]
    found = grads_of(lambda: act_mul(p), p)
    assert relative_error(found["gate"], grads_of(lambda: stock_act_mul(p), p)["gate"]) < 1e-6


# ----------------------------------------------------------------------------------------------- what is saved


def saved_by(run, p: Named) -> tuple[Tensor, set[str]]:
    """The output, and what was saved for it: arguments by name, other tensors by shape."""
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda t: (saved.append(t) if t.numel() else None) or t, lambda t: t):
        out = run(p)
    names = {t.data_ptr(): name for name, t in p.items()}
    assert all(t.data_ptr() in names or t.untyped_storage().nbytes() == t.nbytes for t in saved), (
        "saves a larger tensor"
    )
    found = [names.get(t.data_ptr()) or str(list(t.shape)) for t in saved]
    assert len(set(found)) == len(found), found
    return out, set(found)


GATE_UP, PRODUCT = f"[{TOKENS}, {2 * INNER}]", f"[{TOKENS}, {INNER}]"
WEIGHTS = {"gate_weight", "up_weight", "down_weight"}
AGAIN = {"x", "gate_weight", "up_weight", "gate_bias", "up_bias"}
AGAIN_PACKED = {"x", "gate_up_weight", "gate_up_bias"}
SAVED = [
    (SEPARATE, False, None, {"x", *WEIGHTS, GATE_UP}),
    (SEPARATE, False, "x", {*WEIGHTS, GATE_UP}),
    (SEPARATE, False, "gate_weight", {"x", "down_weight", GATE_UP}),
    (SEPARATE, False, "up_weight", {"x", "down_weight", GATE_UP}),
    (SEPARATE, False, "down_weight", {PRODUCT}),
    (SEPARATE, False, "down_weight down_bias", {PRODUCT}),
    (SEPARATE, False, "down_weight gate_weight", {"x", "down_weight", GATE_UP}),
    (SEPARATE, False, "gate_bias", {"down_weight", GATE_UP}),
    (SEPARATE, False, "up_bias", {"down_weight", GATE_UP}),
    (SEPARATE, False, "down_bias", set()),
    (SEPARATE, False, "", set()),
    (SEPARATE, True, None, {*AGAIN, "down_weight"}),
    (SEPARATE, True, "x", {*AGAIN, "down_weight"}),
    (SEPARATE, True, "up_bias", {*AGAIN, "down_weight"}),
    (SEPARATE, True, "down_weight", AGAIN),
    (SEPARATE, True, "down_bias", set()),
    (SEPARATE, True, "", set()),
    (PACKED, False, None, {"x", "gate_up_weight", "down_weight", GATE_UP}),
    (PACKED, False, "x", {"gate_up_weight", "down_weight", GATE_UP}),
    (PACKED, False, "gate_up_weight", {"x", "down_weight", GATE_UP}),
    (PACKED, False, "down_weight", {PRODUCT}),
    (PACKED, False, "down_bias", set()),
    (PACKED, True, None, {*AGAIN_PACKED, "down_weight"}),
    (PACKED, True, "down_weight", AGAIN_PACKED),
    (PACKED, True, "down_bias", set()),
]


def _id(value) -> str | None:
    if isinstance(value, dict):
        return "packed" if value is PACKED else "separate"
    if isinstance(value, bool):
        return "recomputed" if value else "saved"
    return "none" if value == "" else value if isinstance(value, str) else "all" if value is None else ""


@pytest.mark.parametrize(("shapes", "recompute", "wanted", "expected"), SAVED, ids=_id)
def test_only_what_the_wanted_gradients_read_is_saved(shapes, recompute: bool, wanted, expected: set[str]) -> None:
    p = leaves(shapes, None if wanted is None else wanted.split())
    _, saved = saved_by(functools.partial(ours, recompute=recompute), p)
    assert saved == expected


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("gate", {"gate", "up"}),
        ("up", {"gate"}),
        ("gate up", {"gate", "up"}),
        ("gate_up", {"gate_up"}),
        ("none", set()),
    ],
)
def test_what_act_mul_saves(wanted: str, expected: set[str]) -> None:
    shapes = (
        {"gate_up": (TOKENS, 2 * INNER)} if wanted == "gate_up" else {"gate": (TOKENS, INNER), "up": (TOKENS, INNER)}
    )
    p = {name: torch.randn(shape).requires_grad_(name in wanted.split()) for name, shape in shapes.items()}
    _, saved = saved_by(act_mul, p)
    assert saved == expected


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
@recomputes
@layouts
def test_without_gradients_nothing_is_saved(shapes, recompute: bool, without) -> None:
    p = leaves(shapes)
    expected = ours(p, recompute=recompute)
    with without():
        out, saved = saved_by(functools.partial(ours, recompute=recompute), p)
    assert not saved
    assert out.grad_fn is None
    assert torch.equal(out, expected)


@pytest.mark.parametrize("tokens", [(TOKENS,), (3, 5), ()], ids=str)
@recomputes
@layouts
def test_a_second_backward_pass_adds_the_same_and_writes_to_nothing_saved(shapes, recompute: bool, tokens) -> None:
    p = leaves(shapes, tokens=tokens)
    dout = torch.randn(*tokens, H)
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda t: (saved.append(t) if t.numel() else None) or t, lambda t: t):
        out = ours(p, recompute=recompute)
    before = [t.clone() for t in (dout, out, *p.values(), *saved)]
    out.backward(dout, retain_graph=True)
    first = {name: t.grad.clone() for name, t in p.items()}
    out.backward(dout)
    assert same({name: t.grad for name, t in p.items()}, {name: 2 * grad for name, grad in first.items()})
    assert all(torch.equal(*pair) for pair in zip(before, (dout, out, *p.values(), *saved), strict=True))


def test_act_mul_writes_to_nothing_saved() -> None:
    for names in (("gate", "up"), ("gate_up",)):
        p = {name: torch.randn(TOKENS, 2 * INNER, requires_grad=True) for name in names}
        out = act_mul(p)
        dh = torch.randn_like(out)
        before = [t.clone() for t in (dh, *p.values())]
        out.backward(dh, retain_graph=True)
        first = {name: t.grad.clone() for name, t in p.items()}
        out.backward(dh)
        assert same({name: t.grad for name, t in p.items()}, {name: 2 * grad for name, grad in first.items()})
        assert all(torch.equal(*pair) for pair in zip(before, (dh, *p.values()), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@layouts
def test_recomputing_gives_the_same_bits(shapes, dtype: torch.dtype) -> None:
    p = leaves(shapes, dtype=dtype)
    dout = torch.randn(TOKENS, H, dtype=dtype)
    plain = grads_of(lambda: ours(p), p, dout)
    assert same(grads_of(lambda: ours(p, recompute=True), p, dout), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@recomputes
@layouts
def test_checkpointing_gives_the_same_bits(shapes, recompute: bool, reentrant: bool, dtype: torch.dtype) -> None:
    p = leaves(shapes, dtype=dtype)
    dout = torch.randn(TOKENS, H, dtype=dtype)
    run = lambda x: ours({**p, "x": x}, recompute=recompute)
    plain = grads_of(lambda: run(p["x"]), p, dout)
    assert same(grads_of(lambda: checkpoint(run, p["x"], use_reentrant=reentrant), p, dout), plain)


@layouts
def test_checkpointing_with_few_wanted_gradients(shapes) -> None:
    for wanted in (["down_weight"], ["down_bias"], ["x"]):
        p = leaves(shapes, wanted)
        run = lambda x, p=p: ours({**p, "x": x})
        plain = grads_of(lambda p=p, run=run: run(p["x"]), p)
        assert same(grads_of(lambda p=p, run=run: checkpoint(run, p["x"], use_reentrant=False), p), plain)


@recomputes
@layouts
def test_offloading_gives_the_same_bits(shapes, recompute: bool) -> None:
    p = leaves(shapes)
    plain = grads_of(lambda: ours(p, recompute=recompute), p)

    def offloaded() -> Tensor:
        with save_on_cpu():
            return ours(p, recompute=recompute)

    assert same(grads_of(offloaded, p), plain)


# ------------------------------------------------------------------------------------- the incoming gradient

normal = functools.partial(torch.randn, dtype=torch.float64)
INCOMING = {
    "row stride": lambda: normal(3, 4, 2 * H)[..., :H],
    "rows of a transpose": lambda: normal(4, 3, H).transpose(0, 1),
    "columns": lambda: normal(H, 4, 3).permute(2, 1, 0),
    "columns that flatten": lambda: normal(H, 3, 4).permute(1, 2, 0),
    "every other row": lambda: normal(3, 8, H)[:, ::2],
    "every other column": lambda: normal(3, 4, 2 * H)[..., ::2],
    "one row for all": lambda: normal(H).expand(3, 4, H),
    "one column for all": lambda: normal(3, 4, 1).expand(3, 4, H),
    "one number": lambda: normal(()).expand(3, 4, H),
}


@pytest.mark.parametrize("layout", INCOMING)
@recomputes
@layouts
def test_any_layout_of_the_incoming_gradient(shapes, recompute: bool, layout: str) -> None:
    p = leaves(shapes, dtype=torch.float64, tokens=(3, 4))
    dout = INCOMING[layout]()
    assert not dout.is_contiguous()
    before = dout.clone()
    found = grads_of(lambda: ours(p, recompute=recompute), p, dout)
    assert torch.equal(dout, before)
    expected = grads_of(lambda: stock(p), p, before)
    assert all(relative_error(found[name], expected[name]) < 1e-13 for name in expected)


class Asked(list):
    """Every call of the two fused kernels: its first tensor, and what it was asked to write besides its result."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("dual_gemm_act", "gemm_dact"):
            monkeypatch.setattr(reference, name, functools.partial(self.note, getattr(reference, name)))

    def note(self, kernel, first: Tensor, *args, **wants: bool):
        self.append((first, *wants.values()))
        return kernel(first, *args, **wants)


def are_rows(t: Tensor) -> bool:
    return t.dim() == 2 and t.stride(1) == 1 and (t.stride(0) >= t.shape[1] or t.shape[0] == 1)


@pytest.mark.parametrize("layout", INCOMING)
@recomputes
@layouts
def test_kernels_get_rows_of_unit_inner_stride(shapes, recompute: bool, layout: str, monkeypatch) -> None:
    asked = Asked(monkeypatch)
    p = leaves(shapes, dtype=torch.float64)
    p["x"], dout = INCOMING[layout]().requires_grad_(), INCOMING[layout]()
    ours(p, recompute=recompute).backward(dout)
    assert len(asked) == 2 + recompute
    assert all(are_rows(first) and first.shape == (12, H) for first, _ in asked)
    if layout == "row stride":
        assert {first.data_ptr() for first, _ in asked} == {p["x"].data_ptr(), dout.data_ptr()}, "copied in vain"


@layouts
def test_kernels_write_only_what_a_gradient_reads(shapes, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked_for(wanted, recompute: bool = False, without_grad: bool = False) -> list[bool]:
        asked = Asked(monkeypatch)
        p = leaves(shapes, wanted)
        with torch.set_grad_enabled(not without_grad):
            out = ours(p, recompute=recompute)
        if out.requires_grad:
            out.sum().backward()
        return [want for _, want in asked]

    first = list(shapes)[1]
    assert asked_for([]) == [False]
    assert asked_for(shapes, without_grad=True) == [False]
    assert asked_for(shapes) == [True, True]
    assert asked_for(["x", first]) == [True, False]
    assert asked_for(["down_weight"]) == [False]
    assert asked_for(["down_bias"]) == [False]
    assert asked_for(shapes, recompute=True) == [False, True, True]
    assert asked_for([first], recompute=True) == [False, True, False]
    assert asked_for(["down_weight"], recompute=True) == [False, False]
    assert asked_for(["down_bias"], recompute=True) == [False]


@pytest.mark.parametrize("layout", INCOMING)
def test_any_layout_of_the_incoming_gradient_of_act_mul(layout: str) -> None:
    dh = INCOMING[layout]()
    before = dh.clone()
    for shapes in ({"gate": H, "up": H}, {"gate_up": 2 * H}):
        p = {name: normal(3, 4, width).requires_grad_() for name, width in shapes.items()}
        found = grads_of(lambda p=p: act_mul(p), p, dh)
        assert torch.equal(dh, before)
        expected = grads_of(lambda p=p: stock_act_mul(p), p, before)
        assert all(relative_error(found[name], expected[name]) < 1e-13 for name in expected)


@recomputes
@layouts
def test_the_gradient_of_a_sum(shapes, recompute: bool) -> None:
    p = leaves(shapes)
    ours(p, recompute=recompute).sum().backward()
    summed = {name: t.grad for name, t in p.items()}
    found = grads_of(lambda: ours(p, recompute=recompute), p)
    assert all(torch.equal(summed[name], found[name]) for name in p)


# --------------------------------------------------------------------------------------- memory that is shared


@pytest.mark.parametrize("tokens", [(TOKENS,), (1,), (), (0,)], ids=str)
@recomputes
@layouts
def test_no_two_gradients_share_memory(shapes, recompute: bool, tokens) -> None:
    p = leaves(shapes, tokens=tokens)
    dout = torch.randn(*tokens, H)
    out = grads_of(lambda: ours(p, recompute=recompute), p, dout)["out"]
    grads = [t.grad for t in p.values()]
    addresses = [t.untyped_storage().data_ptr() for t in (dout, out, *p.values(), *grads) if t.numel()]
    assert len(set(addresses)) == len(addresses)
    assert all(grad.untyped_storage().nbytes() == grad.nbytes for grad in grads)


def test_no_two_gradients_of_act_mul_share_memory() -> None:
    p = {name: torch.randn(TOKENS, INNER, requires_grad=True) for name in ("gate", "up")}
    dh = torch.randn(TOKENS, INNER)
    found = grads_of(lambda: act_mul(p), p, dh)
    addresses = [t.untyped_storage().data_ptr() for t in (dh, *p.values(), *found.values())]
    assert len(set(addresses)) == len(addresses)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("tokens", [(TOKENS,), (3, 5), (), (0,)], ids=str)
@layouts
def test_the_output_may_be_written_to(shapes, tokens, bias: bool) -> None:
    p = leaves({name: shape for name, shape in shapes.items() if bias or "bias" not in name}, tokens=tokens)
    expected = grads_of(lambda: ours(p).mul(2) + 1, p)
    assert same(grads_of(lambda: ours(p).mul_(2).add_(1), p), expected)


def raises_after_an_update(run, p: Named, name: str) -> bool:
    out = run(p)
    with torch.no_grad():
        p[name].mul_(2)
    try:
        out.sum().backward()
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            return True
        raise
    return False


@layouts
def test_an_update_before_the_backward_pass_raises_where_it_does_in_stock(shapes) -> None:
    for wanted, name in itertools.product(subsets(shapes)[1:], shapes):
        stocks, found = (raises_after_an_update(run, leaves(shapes, wanted), name) for run in (stock, ours))
        assert found is stocks, (wanted, name)


@layouts
def test_an_update_of_what_recomputing_reads_raises(shapes) -> None:
    for name in set(shapes) - {"down_bias"}:
        assert raises_after_an_update(functools.partial(ours, recompute=True), leaves(shapes), name), name
    assert not raises_after_an_update(functools.partial(ours, recompute=True), leaves(shapes), "down_bias")


@pytest.mark.parametrize("names", [("gate", "up"), ("gate_up",)], ids=str)
def test_an_update_before_the_backward_pass_of_act_mul(names) -> None:
    different = []
    for wanted, name in itertools.product(subsets(names)[1:], names):
        stocks, found = (
            raises_after_an_update(
                run, {n: torch.randn(TOKENS, 2 * INNER).requires_grad_(n in wanted) for n in names}, name
            )
            for run in (stock_act_mul, act_mul)
        )
        if found is not stocks:
            different.append((wanted, name, found))
    # Where only up wants a gradient stock saves act(gate), and ours gate: ours raises, and stock need not.
    assert different == ([(("up",), "gate", True)] if len(names) == 2 else [])


# ---------------------------------------------------------------------------------------- what can't be had


@recomputes
@layouts
def test_a_second_derivative_raises(shapes, recompute: bool) -> None:
    p = leaves(shapes)
    plain = torch.autograd.grad(ours(p, recompute=recompute).sum(), list(p.values()))
    firsts = torch.autograd.grad(ours(p, recompute=recompute).sum(), list(p.values()), create_graph=True)
    assert all(torch.equal(*pair) for pair in zip(firsts, plain, strict=True))
    for first in firsts:
        with pytest.raises(RuntimeError, match="differentiate twice through a kernel of fusepatch"):
            first.square().sum().backward(retain_graph=True)


@pytest.mark.parametrize("loss", [torch.sum, torch.norm], ids=["linear", "nonlinear"])
@recomputes
@layouts
def test_a_second_derivative_by_a_named_tensor_raises(shapes, recompute: bool, loss) -> None:
    for wanted in (None, ["x"], list(shapes)[1:2]):
        p = leaves(shapes, wanted)
        out = ours(p, recompute=recompute)
        # With a linear loss no first derivative depends on the bias that is added last.
        named = [t for name, t in p.items() if t.requires_grad and (name != "down_bias" or loss is torch.norm)]
        for first, by in itertools.product(torch.autograd.grad(loss(out), named, create_graph=True), named):
            with pytest.raises(RuntimeError, match="differentiate twice"):
                torch.autograd.grad(first.square().sum() + loss(out), by, retain_graph=True)


def test_a_second_derivative_by_the_incoming_gradient_raises() -> None:
    p = leaves(SEPARATE, ["x"])
    dout = torch.randn(TOKENS, H, requires_grad=True)
    (dx,) = torch.autograd.grad(ours(p), p["x"], dout, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.autograd.grad(dx.sum(), dout)


@pytest.mark.parametrize("names", [("gate", "up"), ("gate_up",)], ids=str)
def test_a_second_derivative_of_act_mul_raises(names) -> None:
    p = {name: torch.randn(TOKENS, 2 * INNER, requires_grad=True) for name in names}
    for first in torch.autograd.grad(act_mul(p).sum(), list(p.values()), create_graph=True):
        with pytest.raises(RuntimeError, match="differentiate twice"):
            first.square().sum().backward(retain_graph=True)


@recomputes
@layouts
def test_under_autocast_the_gradients_are_those_of_stock(shapes, recompute: bool) -> None:
    p = leaves(shapes)

    def under_autocast(run) -> Named:
        def cast() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return run(p)

        return grads_of(cast, p)

    found, expected = under_autocast(functools.partial(ours, recompute=recompute)), under_autocast(stock)
    assert all(relative_error(found[name], expected[name]) < 2e-2 for name in expected)


def test_a_device_without_autocast_inside_another_devices_autocast() -> None:
    x, gate, up, down = (torch.empty(shape, device="meta") for shape in ((4, 8), (16, 8), (16, 8), (8, 16)))
    with torch.autocast("cpu", torch.bfloat16):
        assert op.gated_mlp(x, gate, up, down).shape == (4, 8)
