"""What must hold of every backend that has the two fused kernels: tests to inherit, and the data they are made of."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusepatch import selfcheck
from fusepatch.kernels import backends
from fusepatch.kernels.gated_mlp import check, choose, op
from support import is_within_parity, relative_error

DEVICE = torch.device("cuda", 0)
REFERENCE = choose.REFERENCE
NAMES = ("x", "gate_weight", "up_weight", "down_weight")
BIASES = ("gate_bias", "up_bias")


def why_not(name: str) -> str:
    """Why the backend of that name can't run here; empty where it can."""
    backend = next((each for each in choose.BACKENDS if each.name == name), None)
    if backend is None:
        return f"FUSEPATCH_GATED_MLP_BACKEND can't name the backend {name}"
    made_for = backend.capabilities or {(9, 0), (10, 0), (10, 3)}
    if torch.cuda.is_available() and torch.cuda.get_device_capability(DEVICE) not in made_for:
        return f"the backend {name} is not made for this GPU"
    missing = backends.missing(backend)
    return f"not importable: {', '.join(missing)}" if missing else ""


def data(
    tokens: int, hidden: int, inner: int, dtype: torch.dtype = torch.bfloat16, *, biased: bool = False, apart: int = 24
) -> dict[str, Tensor]:
    """x and dout are rows of wider tensors; everything has unit scale at every place."""
    shapes = {"x": (tokens, hidden + apart), "gate_weight": (inner, hidden), "up_weight": (inner, hidden)}
    shapes |= {"down_weight": (hidden, inner), "dout": (tokens, hidden + apart)}
    scales = {name: shapes[name][1] ** -0.5 for name in NAMES[1:]}
    made = {name: (torch.randn(*s, device=DEVICE) * scales.get(name, 1.0)).to(dtype) for name, s in shapes.items()}
    made |= {name: made[name][:, :hidden] for name in ("x", "dout")}
    return made | {name: torch.randn(inner, device=DEVICE).to(dtype) for name in (BIASES if biased else ())}


def run(
    backend: choose.Backend,
    given: dict[str, Tensor],
    activation: str = "silu",
    *,
    dtype: torch.dtype | None = None,
    wanted: tuple[str, ...] = (*NAMES, *BIASES),
    packed: bool = False,
) -> dict[str, Tensor]:
    """Output and the wanted gradients, through the op; those of packed tensors as their halves."""
    cast = {name: tensor.detach() if dtype is None else tensor.detach().to(dtype) for name, tensor in given.items()}
    dout = cast.pop("dout")
    halves = {"gate_weight": "up_weight", "gate_bias": "up_bias"} if packed else {}
    for first, second in halves.items():
        if first in cast:
            cast[first] = torch.cat([cast[first], cast.pop(second)])
    leaves = {name: tensor.requires_grad_(name in wanted) for name, tensor in cast.items()}
    out = op.run_gated_mlp(backend, *(leaves.get(name) for name in (*NAMES, *BIASES)), None, activation)
    graded = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad(out, list(graded.values()), dout) if graded else ()
    found = dict(zip(graded, gradients, strict=True))
    for first, second in halves.items():
        if first in found:
            found[first], found[second] = found[first].chunk(2)
    return {"out": out.detach(), **found}


def assert_like_reference(
    backend: choose.Backend, given: dict[str, Tensor], activation: str = "silu", *, packed: bool = False
) -> None:
    """Every result's error against fp64 is at most 1.25 x that of plain PyTorch in the same dtype."""
    exact = run(REFERENCE, given, activation, dtype=torch.float64, packed=packed)
    plain, ours = (run(each, given, activation, packed=packed) for each in (REFERENCE, backend))
    for name, expected in exact.items():
        assert ours[name].dtype is plain[name].dtype
        errors = relative_error(ours[name], expected), relative_error(plain[name], expected)
        assert is_within_parity(*errors), (name, errors)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded scalar": lambda t: t[:1, :1].expand_as(t),
    "expanded row": lambda t: t[:1].expand_as(t),
    "columns": lambda t: t.t().contiguous().t(),
    "odd stride": lambda t: torch.cat([t, t[:, :3]], 1)[:, : t.shape[1]],
    "off 16 bytes": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view_as(t),
}
ROUNDING = 4e-3
"""Of results in bf16. cuBLAS takes another kernel where the layout is another, and that adds in another order."""


class Steps:
    """A self-check's steps, with nobody to tell."""

    def reference(self) -> None: ...

    def kernel(self, case: str) -> None: ...


FAULTS: dict[str, tuple[str, Callable[[Tensor, Tensor | None], object]]] = {
    "a tile of h left out": ("dual_gemm_act", lambda h, _: h[-64:, -32:].fill_(float("nan"))),
    "d_gate a little off": ("gemm_dact", lambda d_gate_up, _: d_gate_up[:, : d_gate_up.shape[1] // 2].mul_(1.02)),
    "h of the backward pass shifted": ("gemm_dact", lambda _, h: None if h is None else h.copy_(h.roll(1, 0))),
}


class FusedCases:
    """Inherit, name the backend and its module, and mark the class or file as a GPU test."""

    BACKEND: choose.Backend
    KERNELS: ModuleType

    @pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
    @pytest.mark.parametrize("tokens", [1, 7, 64, 257, 4099])
    def test_against_fp64(self, tokens: int, packed: bool) -> None:
        assert_like_reference(self.BACKEND, data(tokens, 200, 1352), packed=packed)

    @pytest.mark.parametrize("activation", choose.ACTIVATIONS)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_every_dtype_and_activation_against_fp64(self, dtype: torch.dtype, activation: str) -> None:
        assert_like_reference(self.BACKEND, data(4099, 136, 1352, dtype), activation)

    @pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
    @pytest.mark.parametrize("tokens", [1, 257, 4099])
    def test_biases_against_fp64(self, tokens: int, packed: bool) -> None:
        assert_like_reference(self.BACKEND, data(tokens, 200, 1352, biased=True), packed=packed)

    @pytest.mark.parametrize("activation", choose.ACTIVATIONS)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_biases_in_every_dtype_and_activation(self, dtype: torch.dtype, activation: str) -> None:
        assert_like_reference(self.BACKEND, data(2055, 136, 1352, dtype, biased=True), activation)

    @pytest.mark.parametrize("name", BIASES)
    def test_a_bias_that_is_off_16_bytes(self, name: str) -> None:
        given = data(257, 72, 1352, biased=True)
        plain = run(self.BACKEND, given)
        shifted = torch.cat([given[name][:1], given[name]])[1:]
        assert shifted.data_ptr() % 16
        for key, result in run(self.BACKEND, {**given, name: shifted}).items():
            assert torch.equal(result, plain[key]), key

    def test_many_columns_and_few_rows(self) -> None:
        """More tiles than multiprocessors, with one row of them."""
        given = data(72, 136, 20488)
        for _ in range(3):
            assert_like_reference(self.BACKEND, given)

    def test_a_long_sum_against_fp64(self) -> None:
        assert_like_reference(self.BACKEND, data(2055, 2056, 3080))

    @pytest.mark.parametrize("tokens", [64, 4099])
    def test_every_choice_of_wanted_gradients(self, tokens: int) -> None:
        """Each gives the gradients that all together give, bit for bit."""
        given = data(tokens, 72, 1352)
        everything = run(self.BACKEND, given)
        for count in range(5):
            for wanted in itertools.combinations(NAMES, count):
                for name, gradient in run(self.BACKEND, given, wanted=wanted).items():
                    assert torch.equal(gradient, everything[name]), (wanted, name)

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("tokens", [1, 257])
    def test_any_layout_of_the_incoming_gradient(self, tokens: int, layout: str) -> None:
        given = data(tokens, 72, 1352)
        strange = LAYOUTS[layout](given["dout"])
        plain = run(self.BACKEND, {**given, "dout": strange.contiguous().clone()})
        for name, gradient in run(self.BACKEND, {**given, "dout": strange}).items():
            assert relative_error(gradient, plain[name]) < ROUNDING, name

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("layout", ["columns", "odd stride", "off 16 bytes"])
    def test_any_layout_of_the_operands(self, name: str, layout: str) -> None:
        given = data(257, 72, 1352)
        plain = run(self.BACKEND, {key: tensor.contiguous() for key, tensor in given.items()})
        strange = LAYOUTS[layout](given[name])
        for key, result in run(self.BACKEND, {**given, name: strange}).items():
            assert relative_error(result, plain[key]) < ROUNDING, key

    def test_no_tokens(self) -> None:
        found = run(self.BACKEND, data(0, 72, 1352))
        assert found["out"].shape == (0, 72)
        assert not found["down_weight"].any()

    def test_a_second_backward_pass_doubles_the_gradients(self) -> None:
        given = data(257, 72, 1352)
        leaves = [given[name].contiguous().requires_grad_() for name in NAMES]
        out = op.run_gated_mlp(self.BACKEND, *leaves, None, None, None, "silu")
        out.backward(given["dout"], retain_graph=True)
        once = [leaf.grad.clone() for leaf in leaves]
        out.backward(given["dout"])
        assert all(torch.equal(leaf.grad, 2 * gradient) for leaf, gradient in zip(leaves, once, strict=True))

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpointing_gives_the_same_bits(self, reentrant: bool) -> None:
        given = data(257, 72, 1352)
        leaves = [given[name].contiguous().requires_grad_() for name in NAMES]

        def mlp(*tensors: Tensor) -> Tensor:
            return op.run_gated_mlp(self.BACKEND, *tensors, None, None, None, "silu")

        plain = torch.autograd.grad(mlp(*leaves), leaves, given["dout"])
        checkpoint(mlp, *leaves, use_reentrant=reentrant).backward(given["dout"])
        assert all(torch.equal(leaf.grad, gradient) for leaf, gradient in zip(leaves, plain, strict=True))

    @pytest.mark.parametrize("activation", choose.ACTIVATIONS)
    def test_the_backward_pass_gives_the_forwards_h_bit_for_bit(self, activation: str) -> None:
        given = data(4099, 136, 1352)
        operands = given["x"], given["gate_weight"], given["up_weight"], None, None, activation
        h, gate_up = self.KERNELS.dual_gemm_act(*operands, want_gate_up=True)
        alone, nothing = self.KERNELS.dual_gemm_act(*operands, want_gate_up=False)
        _, again = self.KERNELS.gemm_dact(given["dout"], given["down_weight"], gate_up, activation, want_h=True)
        assert nothing is None
        assert torch.equal(h, alone)
        assert torch.equal(h, again)

    def test_two_streams_at_once(self) -> None:
        given = data(4099, 200, 1352)
        expected = run(self.BACKEND, given)
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        results = []
        for stream in streams * 4:
            with torch.cuda.stream(stream):
                results.append(run(self.BACKEND, given))
        torch.cuda.synchronize()
        assert all(torch.equal(result[name], expected[name]) for result in results for name in expected)

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
    def test_a_device_that_is_not_the_current_one(self) -> None:
        given = data(257, 72, 1352)
        there = {name: tensor.to("cuda:1") for name, tensor in given.items()}
        expected, found = run(self.BACKEND, given), run(self.BACKEND, there)
        assert torch.cuda.current_device() == 0
        assert all(torch.equal(found[name].to(DEVICE), expected[name]) for name in expected)

    def test_offsets_beyond_32_bits(self) -> None:
        tokens, hidden, inner = 2**17 + 3, 64, 2**13 + 8
        assert tokens * 2 * inner > 2**31
        given = data(tokens, hidden, inner)
        weights = given["gate_weight"], given["up_weight"], None, None, "silu"
        h, gate_up = self.KERNELS.dual_gemm_act(given["x"], *weights, want_gate_up=True)
        backward = given["down_weight"], gate_up, "silu"
        d_gate_up, again = self.KERNELS.gemm_dact(given["dout"], *backward, want_h=True)
        assert torch.equal(h, again)
        del again
        tail = slice(-5, None)
        h_tail, gate_up_tail = self.KERNELS.dual_gemm_act(given["x"][tail], *weights, want_gate_up=True)
        backward = given["down_weight"], gate_up_tail, "silu"
        d_tail, _ = self.KERNELS.gemm_dact(given["dout"][tail], *backward, want_h=True)
        for whole, part in ((h, h_tail), (gate_up, gate_up_tail), (d_gate_up, d_tail)):
            assert relative_error(whole[tail], part) < 1e-3

    @pytest.mark.parametrize("biased", ["", " biased"])
    def test_selfcheck_passes(self, biased: str) -> None:
        case = selfcheck.Check("fusepatch.kernels.gated_mlp.check", f"{self.BACKEND.name} fused bfloat16 silu{biased}")
        assert selfcheck.verdict(case, DEVICE) == selfcheck.Verdict(selfcheck.Outcome.PASSED)

    @pytest.mark.parametrize("fault", FAULTS)
    def test_selfcheck_sees_a_fault(self, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
        name, spoil = FAULTS[fault]
        right = getattr(self.KERNELS, name)

        def wrong(*arguments: object, **flags: bool) -> tuple[Tensor, Tensor | None]:
            results = right(*arguments, **flags)
            spoil(*results)
            return results

        monkeypatch.setattr(self.KERNELS, name, wrong)
        monkeypatch.setattr(check, "_FUSED_SHAPES", ((200, 136, 1352),))
        assert check._fused(self.BACKEND, DEVICE, torch.bfloat16, "silu", Steps())


def assert_nothing_outside(
    forward: Callable[[dict[str, Tensor], Tensor, Tensor], object],
    backward: Callable[[dict[str, Tensor], Tensor, Tensor, Tensor], object],
    tokens: int,
    hidden: int = 72,
    inner: int = 1352,
) -> None:
    """Launches both kernels into the middle of larger tensors: forward(data, h, gate_up), and backward(data, gate_up,
    d_gate_up, h)."""
    given = data(tokens, hidden, inner)
    buffers = [
        torch.full((tokens + 2, width), 7.0, device=DEVICE, dtype=torch.bfloat16) for width in (inner, 2 * inner)
    ]
    h, gate_up = (buffer[1:-1] for buffer in buffers)
    forward(given, h, gate_up)
    kept = gate_up.clone()
    h.fill_(float("nan"))
    gate_up.fill_(float("nan"))
    backward(given, kept, gate_up, h)
    for buffer in buffers:
        assert (buffer[0] == 7).all()
        assert (buffer[-1] == 7).all()
        assert torch.isfinite(buffer).all()
