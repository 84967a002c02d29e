"""What the gated delta rule does to its inputs as Triton kernels, by Triton's interpreter on a CPU, against autograd in
fp64; and the op that is made of these and of FlashQLA's kernels, which are emulated.

Collected by test_interpreted.py, in a process of its own.
"""

from __future__ import annotations

import math
from typing import Any

import emulated_flash_qla
import pytest
import torch
from recurrences import errors
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusepatch.kernels.linear_attention import check as selfchecked
from fusepatch.kernels.linear_attention import flash_qla, prepare, prepare_per_head, reference
from fusepatch.kernels.linear_attention.flash_qla_pieces import Pieces
from fusepatch.kernels.linear_attention.prepare_per_head import Incoming, Prepared, Raw
from fusepatch.kernels.linear_attention.problem import Call, Inputs
from support import relative_error

# The interpreter truncates to bf16 where the hardware rounds to nearest: twice the error, and checked on the GPU.
BOUND = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
CALL = Call(0.25, l2norm=True, gate="softplus", beta_sigmoid=True)
TWICE = CALL._replace(negative_eigenvalues=True)
NAMES = ("q", "k", "g", "beta")


def inputs(tokens: int, heads: int, value_heads: int, width: int, dtype: torch.dtype = torch.float32) -> Raw:
    torch.manual_seed(0)
    return Raw(
        torch.randn(tokens, heads, width).to(dtype),
        (3 * torch.randn(tokens, heads, width)).to(dtype),
        (2 * torch.randn(tokens, value_heads)).to(dtype),
        (2 * torch.randn(tokens, value_heads)).to(dtype),
        torch.randn(value_heads),
        torch.randn(value_heads),
    )


def gradients_for(raw: Raw) -> Incoming:
    tokens, _, width = raw.q.shape
    shape = (tokens, raw.g.shape[1])
    wide = [torch.randn(*shape, width).to(raw.q.dtype) for _ in range(2)]
    return Incoming(*wide, torch.randn(shape), torch.randn(shape))


def run(call: Call, raw: Raw, incoming: Incoming) -> dict[str, Tensor]:
    """Results and gradients of the kernels."""
    prepared = prepare_per_head.prepare(call, raw)
    assert isinstance(prepared, Prepared)
    grads = prepare_per_head.backward(call, incoming, prepared, raw)
    named = {f"grad_{name}": t for name, t in grads._asdict().items() if t is not None}
    return {**dict(zip(NAMES, prepared, strict=False)), **named}


def exact(call: Call, raw: Raw, incoming: Incoming) -> dict[str, Tensor]:
    leaves = {name: t.detach().double().requires_grad_() for name, t in raw._asdict().items() if t is not None}
    gate = reference.log_gate(call, leaves["g"].unsqueeze(0), leaves["A_log"], leaves.get("dt_bias"))
    found = {
        **{name: reference.l2_normalise(leaves[name]) for name in ("q", "k")},
        "g": gate.squeeze(0),
        "beta": reference.write_strength(call, leaves["beta"]),
    }
    group = raw.g.shape[1] // raw.q.shape[1]
    used = [found[n].repeat_interleave(group, 1) if n in ("q", "k") else found[n] for n in NAMES]
    grads = torch.autograd.grad(used, list(leaves.values()), [t.double() for t in incoming])
    return {**{n: t.detach() for n, t in found.items()}, **{f"grad_{n}": t for n, t in zip(leaves, grads, strict=True)}}


def check(call: Call, raw: Raw, bound: float) -> None:
    incoming = gradients_for(raw)
    before = [None if t is None else t.clone() for t in (*raw, *incoming)]
    found, expected = run(call, raw, incoming), exact(call, raw, incoming)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert relative_error(found[name], value) < bound, name
    for was, now in zip(before, (*raw, *incoming), strict=True):
        assert was is None or torch.equal(was, now), "an input was written to"  # type: ignore[arg-type]
    again = run(call, raw, incoming)
    assert all(torch.equal(t, again[name]) for name, t in found.items()), "not the same bits a second time"


SIZES = [(1, 1, 1, 16), (16, 2, 2, 128), (17, 1, 2, 32), (35, 2, 6, 16), (33, 1, 4, 16)]


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("call", [CALL, TWICE], ids=["beta below 1", "below 2"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_forward_and_backward(size: tuple[int, ...], call: Call, dtype: torch.dtype) -> None:
    check(call, inputs(*size, dtype), BOUND[dtype])


def test_without_a_bias() -> None:
    check(CALL, inputs(19, 1, 2, 16)._replace(dt_bias=None), 5e-6)


def test_any_token_and_head_stride() -> None:
    """Views of packed projections, as FLA's layers hand them over, and heads before tokens."""
    raw = inputs(21, 2, 4, 16)
    packed = torch.cat([raw.q.flatten(1), raw.k.flatten(1)], 1)
    q, k = packed[:, :32].unflatten(1, (2, 16)), packed[:, 32:].unflatten(1, (2, 16))
    check(CALL, raw._replace(q=q, k=k, g=raw.g.t().contiguous().t(), beta=raw.beta.t().contiguous().t()), 5e-6)


def test_far_out_gates_keep_their_relative_accuracy() -> None:
    """Raw gates of -40, where 1 + exp(x) is 1 in fp32, to 40; each element for itself."""
    raw = inputs(81, 1, 1, 16)._replace(
        g=torch.linspace(-40, 40, 81).view(81, 1), A_log=torch.tensor([-1.0]), dt_bias=torch.zeros(1)
    )
    incoming = gradients_for(raw)._replace(g=torch.ones(81, 1))
    found, expected = run(CALL, raw, incoming), exact(CALL, raw, incoming)
    for name in ("g", "grad_g"):
        off = (found[name].double() - expected[name]).abs() / expected[name].abs()
        assert float(off.max()) < 1e-5, name


def test_rows_of_zeros() -> None:
    raw = inputs(5, 1, 1, 16)
    raw.q[1], raw.k[3] = 0, 0
    check(CALL, raw, 5e-6)


def test_no_tokens() -> None:
    raw = inputs(0, 1, 2, 16)
    found = run(CALL, raw, gradients_for(raw))
    assert found["q"].shape == (0, 1, 16)
    assert not found["grad_A_log"].any()
    assert not found["grad_dt_bias"].any()


def test_several_programs_share_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_PROGRAMS", 6)
    assert prepare.spans_of(53, 2) == (2, 32)
    check(CALL, inputs(53, 2, 4, 16), 5e-6)


def test_a_width_that_is_no_power_of_two_is_refused() -> None:
    raw = inputs(3, 1, 1, 24)
    with pytest.raises(ValueError, match="power of two, got 24"):
        run(CALL, raw, gradients_for(raw))


@pytest.mark.parametrize("name", ["grad_q", "grad_g", "grad_A_log", "grad_dt_bias", "grad_beta"])
def test_the_bound_would_show_a_mistake(name: str) -> None:
    """A negative control: one token's share left out of a gradient is far outside of it."""
    raw = inputs(53, 1, 1, 16)
    incoming = gradients_for(raw)
    expected = exact(CALL, raw, incoming)
    for tensor in incoming:
        tensor[7] = 0
    assert relative_error(run(CALL, raw, incoming)[name], expected[name]) > 1e-3


# -------------------------------------------------------------------------- the whole op, FlashQLA's kernels emulated


class Seen:
    """Which of FlashQLA's functions were called, with what."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.library = emulated_flash_qla.library()
        for name, function in vars(self.library).items():
            if callable(function):
                setattr(self.library, name, self._seeing(name, function))

    def _seeing(self, name: str, function: Any) -> Any:
        def seeing(**given: Any) -> Any:
            self.calls.append((name, given))
            return function(**given)

        return seeing

    def of(self, name: str) -> list[dict[str, Any]]:
        return [given for called, given in self.calls if called == name]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()
    monkeypatch.setattr(flash_qla, "_library", lambda: found.library)
    monkeypatch.setattr(flash_qla, "_warm", set())
    in_pieces_of(monkeypatch, None)
    return found


def in_pieces_of(monkeypatch: pytest.MonkeyPatch, chunks: int | None) -> None:
    monkeypatch.setattr(flash_qla, "_chunks_per_piece", lambda *sizes: chunks)


ORDER = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def op_inputs(
    batch: int = 2, tokens: int = 7, heads: int = 1, groups: int = 2, sequences: int | None = None
) -> dict[str, Tensor]:
    torch.manual_seed(1)
    values = heads * groups
    return {
        "q": torch.randn(batch, tokens, heads, 16),
        "k": torch.randn(batch, tokens, heads, 16),
        "v": torch.randn(batch, tokens, values, 16),
        "g": torch.randn(batch, tokens, values) - 2,
        "beta": torch.randn(batch, tokens, values),
        "A_log": torch.linspace(-3, 0, values),
        "dt_bias": torch.randn(values),
        "initial_state": torch.randn(sequences or batch, values, 16, 16),
    }


def both(call: Call, given: dict[str, Tensor], final: bool = True, **more: Any) -> None:
    found = errors(flash_qla.run, call, given, final, **more)
    assert max(found.values()) < 1e-4, found  # sums of a chunk's gates are in fp32


@pytest.mark.parametrize("call", [CALL, TWICE], ids=["beta below 1", "below 2"])
@pytest.mark.parametrize("state_v_first", [True, False])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("tokens", [1, 70])
def test_the_op(seen: Seen, tokens: int, groups: int, state_v_first: bool, call: Call) -> None:
    both(call._replace(state_v_first=state_v_first), op_inputs(tokens=tokens, groups=groups))
    assert not seen.of("get_warmup_chunks_bidi")


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("left_out", [("initial_state",), ("dt_bias", "initial_state"), ()])
@pytest.mark.parametrize("chunks", [None, 1])
def test_the_op_without_an_input(
    seen: Seen, chunks: int | None, left_out: tuple[str, ...], final: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_pieces_of(monkeypatch, chunks)
    both(CALL, {name: t for name, t in op_inputs(1, 70).items() if name not in left_out}, final)


@pytest.mark.parametrize("ends", [[0, 1, 1, 70, 140], [0, 0, 64, 140, 140], [0, 0, 0, 3, 140]], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_the_op_on_sequences_of_a_row(seen: Seen, dtype: torch.dtype, ends: list[int]) -> None:
    """Empty ones among them, for which FlashQLA's own table of chunks is wrong."""
    given = torch.tensor(ends, dtype=dtype)
    both(CALL, op_inputs(1, 140, sequences=4), cu_seqlens=given)
    assert not hasattr(given, "_flash_qla_prepared_varlen"), "the caller's tensor was written to"


def test_one_sequence_of_a_row_may_be_cut(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    in_pieces_of(monkeypatch, 1)
    both(CALL, op_inputs(1, 100), cu_seqlens=torch.tensor([0, 100]))
    assert seen.of("get_warmup_chunks_bidi")


@pytest.mark.parametrize("rate", [-4.0, 0.0, 2.0], ids=["hardly decays", "decays", "is forgotten at once"])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("batch", [1, 2])
def test_sequences_in_pieces(seen: Seen, batch: int, chunks: int, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    in_pieces_of(monkeypatch, chunks)
    given = op_inputs(batch, 210)
    given["A_log"] = torch.tensor([rate, -1.0])
    both(CALL, given)
    (called,) = seen.of("get_warmup_chunks_bidi")
    assert called["threshold"] == flash_qla.FORGOTTEN
    assert called["cu_seqlens"].numel() - 1 == batch * (4 if chunks == 1 else 2)


def test_flash_qlas_own_bound_would_be_seen(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: exp(-10) of the state is missed where nothing is written after it."""
    in_pieces_of(monkeypatch, 1)
    given = op_inputs(1, 210, groups=1)
    given |= {"A_log": torch.tensor([-1.0]), "dt_bias": torch.zeros(1), "g": torch.zeros(1, 210, 1)}
    given["v"][:, 64:] = 0
    both(CALL, given)
    monkeypatch.setattr(flash_qla, "FORGOTTEN", -10.0)
    found = errors(flash_qla.run, CALL, given, True)
    assert found["state"] > 1e-2


@pytest.mark.parametrize("spoilt", ["mt_buffer", "fallback_mask", "ht_buffer"])
def test_what_joins_the_pieces_matters(seen: Seen, spoilt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control."""
    in_pieces_of(monkeypatch, 1)
    join = seen.library.correct_initial_states

    def spoiling(**given: Any) -> Tensor:
        return join(**{**given, spoilt: torch.zeros_like(given[spoilt])})

    monkeypatch.setattr(seen.library, "correct_initial_states", spoiling)
    assert max(errors(flash_qla.run, CALL, op_inputs(1, 210), True).values()) > 1e-3


def test_layouts_of_the_op_are_copied_where_they_must_be(seen: Seen) -> None:
    """The last dimension strided, as transformers hands tensors over; addresses off 16 bytes; a gradient expanded."""
    plain = op_inputs()
    given = {name: t.transpose(1, -1).contiguous().transpose(1, -1) for name, t in plain.items() if t.dim() == 4}
    given |= {name: torch.cat([torch.zeros(1), plain[name].flatten()])[1:].view(plain[name].shape) for name in ("v",)}
    leaves = {name: t.requires_grad_() for name, t in (plain | given).items()}
    out, _ = flash_qla.run(CALL, Inputs(**leaves), False)
    grads = torch.autograd.grad(out.sum(), list(leaves.values()))
    dense = {name: t.detach().clone().requires_grad_() for name, t in leaves.items()}
    expected, _ = reference.run(CALL, Inputs(**dense), False)
    assert relative_error(out, expected) < 2e-5
    for found, wanted in zip(grads, torch.autograd.grad(expected.sum(), list(dense.values())), strict=True):
        assert relative_error(found, wanted) < 2e-5


def test_dtypes_of_the_parameters_and_the_state(seen: Seen) -> None:
    given = op_inputs()
    kinds = {"A_log": torch.bfloat16, "dt_bias": torch.float16, "initial_state": torch.bfloat16, "g": torch.float16}
    leaves = {name: t.to(kinds.get(name, t.dtype)).requires_grad_() for name, t in given.items()}
    out, state = flash_qla.run(CALL, Inputs(**leaves), True)
    assert state is not None
    assert state.dtype is torch.float32
    grads = torch.autograd.grad((out.sum(), state.sum()), list(leaves.values()))
    assert [g.dtype for g in grads] == [t.dtype for t in leaves.values()]


@pytest.mark.parametrize("chunks", [None, 1])
def test_only_wanted_gradients_and_a_second_pass(
    seen: Seen, chunks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_pieces_of(monkeypatch, chunks)
    given = op_inputs(1, 130)
    leaves = {name: t.requires_grad_(name == "A_log") for name, t in given.items()}
    out, _ = flash_qla.run(CALL, Inputs(**leaves), False)
    first, second = (torch.autograd.grad(out.sum(), [leaves["A_log"]], retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert all(t.grad is None for t in leaves.values())


def test_a_gradient_of_the_final_state_alone(seen: Seen) -> None:
    leaves = {name: t.requires_grad_() for name, t in op_inputs().items()}
    found, expected = (
        torch.autograd.grad(run_op(CALL, Inputs(**leaves), True)[1].square().sum(), list(leaves.values())[1:])
        for run_op in (flash_qla.run, reference.run)
    )
    for mine, wanted in zip(found, expected, strict=True):
        assert relative_error(mine, wanted) < 2e-5


def test_nothing_is_saved_where_no_gradient_is_wanted(seen: Seen) -> None:
    leaves = {name: t.requires_grad_() for name, t in op_inputs().items()}
    with torch.no_grad():
        out, state = flash_qla.run(CALL, Inputs(**leaves), True)
    assert out.grad_fn is None
    assert state is not None
    assert state.grad_fn is None


@pytest.mark.parametrize("name", ["q", "v", "g", "A_log", "initial_state"])
def test_second_derivatives_raise(seen: Seen, name: str) -> None:
    leaves = {each: t.requires_grad_(each == name) for each, t in op_inputs().items()}
    out, _ = flash_qla.run(CALL, Inputs(**leaves), False)
    (grad,) = torch.autograd.grad(out.sum(), [leaves[name]], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.autograd.grad(grad.sum(), [leaves[name]])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_both_checkpointing_modes(seen: Seen, use_reentrant: bool) -> None:
    def run_op(*tensors: Tensor) -> Tensor:
        return flash_qla.run(CALL, Inputs(*tensors), False)[0]

    given = op_inputs()
    leaves = [given[name].requires_grad_() for name in ORDER]
    plain = torch.autograd.grad(run_op(*leaves).sum(), leaves)
    checkpoint(run_op, *leaves, use_reentrant=use_reentrant).sum().backward()
    assert all(torch.equal(a, leaf.grad) for a, leaf in zip(plain, leaves, strict=True))


def test_hooks_on_saved_tensors_see_all_of_them(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept on a host, and brought back as another tensor, gives the same gradients."""
    in_pieces_of(monkeypatch, 1)
    leaves = {name: t.requires_grad_() for name, t in op_inputs(1, 130).items()}
    plain = torch.autograd.grad(flash_qla.run(CALL, Inputs(**leaves), False)[0].sum(), list(leaves.values()))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
        out, _ = flash_qla.run(CALL, Inputs(**leaves), False)
    again = torch.autograd.grad(out.sum(), list(leaves.values()))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_what_has_run_is_what_a_graph_may_hold(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = {name: t.requires_grad_() for name, t in op_inputs().items()}
    inputs_ = Inputs(**leaves)
    pieces = flash_qla._pieces(inputs_)
    assert isinstance(pieces, Pieces)
    problem = flash_qla.problem_of(CALL, inputs_)
    key = flash_qla._key_of(CALL, inputs_, pieces, False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    device = torch.device("cuda", 0)
    with pytest.raises(flash_qla.not_supported(), match="must have run"):
        flash_qla._refuse_cold(device, key, trains=False)
    out, _ = flash_qla.run(CALL, inputs_, False)
    assert not flash_qla.is_compiled(problem)
    assert flash_qla.is_compiled(problem._replace(trains=False))
    flash_qla._refuse_cold(device, key, trains=False)
    with pytest.raises(flash_qla.NotWarmError):
        flash_qla._refuse_cold(device, key, trains=True)
    out.sum().backward()
    assert flash_qla.is_compiled(problem)
    flash_qla._refuse_cold(device, key, trains=True)
    other = flash_qla._key_of(CALL, inputs_, pieces, True)
    with pytest.raises(flash_qla.NotWarmError):
        flash_qla._refuse_cold(device, other, trains=True)


# ------------------------------------------------------------------------------------------------------ the self-check


class _Steps:
    def reference(self) -> None:
        pass

    def kernel(self, case: str) -> None:
        pass


def run_check(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Small shapes in fp32: FlashQLA's kernels are emulated, and ours interpreted."""
    shapes = [
        shape._replace(tokens=130 if shape.spreads else min(shape.tokens, 80), heads=1, groups=2, width=16)
        for shape in selfchecked.FLASH_QLA_SHAPES
    ]
    shapes[0] = shapes[0]._replace(ends=(0, 0, 1, 66, 66, 80))
    monkeypatch.setattr(selfchecked, "FLASH_QLA_SHAPES", tuple(shapes))
    monkeypatch.setattr(flash_qla, "_chunks_per_piece", lambda batch, length, *more: 1 if batch == 1 else None)
    return selfchecked.run("flash_qla gated_delta_rule float32", torch.device("cpu"), _Steps())


def test_the_self_check_passes(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not run_check(monkeypatch)


def spoil_backward(index: int, spoil: Any) -> Any:
    def spoiling(**given: Any) -> tuple[Tensor, ...]:
        found = emulated_flash_qla.fused_gdr_bwd(**given)
        spoil(found[index])
        return found

    return spoiling


@pytest.mark.parametrize("index", range(6))
def test_the_self_check_finds_a_wrong_gradient(seen: Seen, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen.library, "fused_gdr_bwd", spoil_backward(index, lambda t: t.mul_(1.5)))
    assert run_check(monkeypatch)


def test_the_self_check_finds_what_is_not_written(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen.library, "fused_gdr_bwd", spoil_backward(2, lambda t: t[:, -1:].fill_(math.nan)))
    assert run_check(monkeypatch)


@pytest.mark.parametrize("name", ["correct_initial_states", "correct_terminal_states"])
def test_the_self_check_finds_pieces_that_are_not_joined(
    seen: Seen, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    join = getattr(emulated_flash_qla, name)
    monkeypatch.setattr(
        seen.library, name, lambda **a: join(**{**a, "fallback_mask": torch.zeros_like(a["fallback_mask"])})
    )
    assert run_check(monkeypatch)
