"""What KDA does to its inputs as Triton kernels, by Triton's interpreter on a CPU, against autograd in fp64; and the op
that is made of these and of cuDNN's kernels, which are emulated.

Collected by test_interpreted.py, in a process of its own.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import emulated_cudnn
import pytest
import torch
from recurrences import errors
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusepatch.kernels.linear_attention import check as selfchecked
from fusepatch.kernels.linear_attention import cudnn_hopper, prepare, reference
from fusepatch.kernels.linear_attention.problem import Call, Inputs
from support import relative_error

# The interpreter truncates to bf16 where the hardware rounds to nearest: twice the error, and checked on the GPU.
BOUND = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
GATES = {
    "given": Call(1.0, l2norm=True, beta_sigmoid=True),
    "softplus": Call(1.0, l2norm=True, gate="softplus", beta_sigmoid=True),
    "bounded": Call(1.0, l2norm=True, gate="bounded", lower_bound=-5.0, beta_sigmoid=True),
}
RESULTS = ("q", "k", "g", "beta")


def inputs(tokens: int, heads: int, value_heads: int, width: int, gate: str, dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(0)
    found = {
        "q": torch.randn(tokens, heads, width),
        "k": 3 * torch.randn(tokens, heads, width),
        "g": 2 * torch.randn(tokens, value_heads, width),
        "beta": 2 * torch.randn(tokens, value_heads),
    }
    if gate == "given":
        found["g"] = -5 * torch.rand(tokens, value_heads, width)
    found = {name: t.to(dtype) for name, t in found.items()}
    if gate != "given":
        found |= {"A_log": torch.randn(value_heads), "dt_bias": torch.randn(value_heads, width)}
    return found


def definition(call: Call, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The reference's own functions, on leaves in fp64."""
    group = given["g"].shape[1] // given["q"].shape[1]
    q, k = (reference.l2_normalise(given[name]).repeat_interleave(group, 1) for name in ("q", "k"))
    g = reference.log_gate(call, given["g"].unsqueeze(0), given.get("A_log"), given.get("dt_bias"))
    return {"q": q, "k": k, "g": g.squeeze(0), "beta": reference.write_strength(call, given["beta"])}


def run(call: Call, given: dict[str, Tensor], incoming: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results and gradients of the kernels."""
    raw = (given["g"], given["beta"], given.get("A_log"), given.get("dt_bias"))
    prepared = prepare.prepare(call, given["q"], given["k"], *raw)
    grads = prepare.backward(call, *(incoming[name] for name in RESULTS), prepared, *raw)
    return {
        **dict(zip(RESULTS, prepared, strict=False)),
        **{f"grad_{name}": t for name, t in zip((*RESULTS, "A_log", "dt_bias"), grads, strict=True) if t is not None},
    }


def exact(call: Call, given: dict[str, Tensor], incoming: dict[str, Tensor]) -> dict[str, Tensor]:
    leaves = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    found = definition(call, leaves)
    grads = torch.autograd.grad(list(found.values()), list(leaves.values()), [incoming[n].double() for n in found])
    return {**{n: t.detach() for n, t in found.items()}, **{f"grad_{n}": t for n, t in zip(leaves, grads, strict=True)}}


def gradients_for(given: dict[str, Tensor]) -> dict[str, Tensor]:
    shape = given["g"].shape
    qk = {name: torch.randn(shape).to(given["q"].dtype) for name in ("q", "k")}
    return {**qk, "g": torch.randn(shape), "beta": torch.randn(shape[:2])}


def check(call: Call, given: dict[str, Tensor], bound: float) -> None:
    incoming = gradients_for(given)
    before = {name: t.clone() for name, t in (given | incoming).items()}
    found, expected = run(call, given, incoming), exact(call, given, incoming)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert relative_error(found[name], value) < bound, name
    now = given | incoming
    assert all(torch.equal(t, now[name]) for name, t in before.items()), "an input was written to"
    again = run(call, given, incoming)
    assert all(torch.equal(t, again[name]) for name, t in found.items()), "not the same bits a second time"


SIZES = [(1, 1, 1, 16), (16, 2, 2, 128), (17, 1, 2, 32), (35, 1, 3, 16)]


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_forward_and_backward(size: tuple[int, ...], gate: str, dtype: torch.dtype) -> None:
    check(GATES[gate], inputs(*size, gate, dtype), BOUND[dtype])


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
@pytest.mark.parametrize(("rate", "bias"), list(itertools.product([True, False], repeat=2))[1:])
def test_gates_without_a_parameter(gate: str, rate: bool, bias: bool) -> None:
    given = inputs(19, 1, 2, 16, gate, torch.float32)
    for name, kept in (("A_log", rate), ("dt_bias", bias)):
        if not kept:
            del given[name]
    check(GATES[gate], given, 5e-6)


@pytest.mark.parametrize("gate", GATES)
def test_any_token_and_head_stride(gate: str) -> None:
    """Views of packed projections, as FLA's layers hand them over, and heads before tokens."""
    given = inputs(21, 2, 4, 16, gate, torch.float32)
    packed = torch.cat([given["q"].flatten(1), given["k"].flatten(1)], 1)
    given["q"], given["k"] = packed[:, :32].unflatten(1, (2, 16)), packed[:, 32:].unflatten(1, (2, 16))
    given["g"] = given["g"].transpose(0, 1).contiguous().transpose(0, 1)
    given["beta"] = given["beta"].t().contiguous().t()
    check(GATES[gate], given, 5e-6)


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_far_out_gates_keep_their_relative_accuracy(gate: str) -> None:
    """Raw gates of -40, where 1 + exp(x) is 1 in fp32, to 40; each element for itself."""
    given = inputs(81, 1, 1, 16, gate, torch.float32)
    given["g"] = torch.linspace(-40, 40, 81).view(81, 1, 1).expand(81, 1, 16).contiguous()
    given["A_log"], given["dt_bias"] = torch.tensor([-1.0]), torch.zeros(1, 16)
    incoming = {**gradients_for(given), "g": torch.ones(81, 1, 16)}
    found, expected = run(GATES[gate], given, incoming), exact(GATES[gate], given, incoming)
    for name in ("g", "grad_g"):
        off = (found[name].double() - expected[name]).abs() / expected[name].abs()
        assert float(off.max()) < 1e-5, name


def test_rows_of_zeros() -> None:
    given = inputs(5, 1, 1, 16, "bounded", torch.float32)
    given["q"][1], given["k"][3] = 0, 0
    check(GATES["bounded"], given, 5e-6)


def test_no_tokens() -> None:
    given = inputs(0, 1, 2, 16, "bounded", torch.float32)
    found = run(GATES["bounded"], given, gradients_for(given))
    assert found["q"].shape == (0, 2, 16)
    assert not found["grad_A_log"].any()
    assert not found["grad_dt_bias"].any()


def test_several_programs_share_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_PROGRAMS", 6)
    assert prepare.spans_of(53, 2) == (2, 32)
    check(GATES["softplus"], inputs(53, 2, 4, 16, "softplus", torch.float32), 5e-6)


def test_a_width_that_is_no_power_of_two_is_refused() -> None:
    given = inputs(3, 1, 1, 24, "bounded", torch.float32)
    with pytest.raises(ValueError, match="power of two, got 24"):
        run(GATES["bounded"], given, gradients_for(given))


@pytest.mark.parametrize("name", ["grad_q", "grad_g", "grad_A_log", "grad_dt_bias", "grad_beta"])
def test_the_bound_would_show_a_mistake(name: str) -> None:
    """A negative control: one token's share left out of a gradient is far outside of it."""
    given = inputs(53, 1, 1, 16, "bounded", torch.float32)
    incoming = gradients_for(given)
    expected = exact(GATES["bounded"], given, incoming)
    for tensor in incoming.values():
        tensor[7] = 0
    found = run(GATES["bounded"], given, incoming)
    assert relative_error(found[name], expected[name]) > 1e-3


# ------------------------------------------------------------------------------ the whole op, cuDNN's kernels emulated


class _Stream:
    cuda_stream = emulated_cudnn.STREAM


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> emulated_cudnn.Emulated:
    """cuDNN's backward pass on a CPU, in fp32 throughout, and the definition in FLA's place."""
    found = emulated_cudnn.Emulated(torch.float32)

    def forward(call: Call, inputs: Inputs, output_final_state: bool) -> tuple[Tensor, Tensor | None]:
        with torch.no_grad():
            return reference.run(call, inputs, output_final_state)

    monkeypatch.setattr(cudnn_hopper, "_forward", forward)
    monkeypatch.setattr(cudnn_hopper, "_frontend", lambda: found.as_frontend)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: _Stream)
    monkeypatch.setattr(cudnn_hopper, "_compiled", set())
    return found


def call_of(gate: str, **options: Any) -> Call:
    return GATES[gate]._replace(scale=128**-0.5, **options)


def op_inputs(
    gate: str = "bounded",
    batch: int = 2,
    tokens: int = 7,
    heads: int = 1,
    groups: int = 1,
    sequences: int | None = None,
) -> dict[str, Tensor]:
    torch.manual_seed(1)
    values = heads * groups
    found = {
        "q": torch.randn(batch, tokens, heads, 128),
        "k": torch.randn(batch, tokens, heads, 128),
        "v": torch.randn(batch, tokens, values, 128),
        "g": torch.randn(batch, tokens, values, 128),
        "beta": torch.randn(batch, tokens, values),
        "initial_state": torch.randn(sequences or batch, values, 128, 128),
    }
    if gate == "given":
        return {**found, "g": -4 * torch.sigmoid(found["g"])}
    return {**found, "A_log": torch.randn(values), "dt_bias": torch.randn(values * 128)}


def both(call: Call, given: dict[str, Tensor], final: bool = True, **more: Any) -> None:
    """Output, state and every gradient of ours against the definition in fp64."""
    for name, error in errors(cudnn_hopper.run, call, given, final, **more).items():
        assert error < 1e-5, name


@pytest.mark.parametrize("state_v_first", [True, False])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("gate", ["given", "bounded"])
def test_the_op(cudnn: emulated_cudnn.Emulated, gate: str, groups: int, state_v_first: bool) -> None:
    both(call_of(gate, lower_bound=-5.0, state_v_first=state_v_first), op_inputs(gate, groups=groups))
    (launch,) = cudnn.launches
    assert launch["stream"] == emulated_cudnn.STREAM
    assert (launch["n_seqs"], launch["total_tokens"], launch["n_heads"]) == (2, 14, groups)
    assert cudnn.loads == 1


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_the_op_on_sequences_of_a_row(cudnn: emulated_cudnn.Emulated, dtype: torch.dtype) -> None:
    given = op_inputs(batch=1, tokens=12, sequences=4)
    both(call_of("bounded"), given, cu_seqlens=torch.tensor([0, 1, 1, 8, 12], dtype=dtype))


@pytest.mark.parametrize("left_out", [("initial_state",), ("A_log",), ("dt_bias", "initial_state")])
@pytest.mark.parametrize("final", [True, False])
def test_the_op_without_an_input(cudnn: emulated_cudnn.Emulated, left_out: tuple[str, ...], final: bool) -> None:
    both(call_of("bounded"), {name: t for name, t in op_inputs().items() if name not in left_out}, final)


def test_layouts_of_the_op_are_copied_where_they_must_be(cudnn: emulated_cudnn.Emulated) -> None:
    """The last dimension strided, as transformers hands tensors over; addresses off 16 bytes; a gradient expanded."""
    plain = op_inputs()
    given = {name: t.transpose(1, -1).contiguous().transpose(1, -1) for name, t in plain.items() if t.dim() == 4}
    given |= {name: torch.cat([torch.zeros(1), plain[name].flatten()])[1:].view(plain[name].shape) for name in ("v",)}
    leaves = {name: t.requires_grad_() for name, t in (plain | given).items()}
    out, _ = cudnn_hopper.run(call_of("bounded"), Inputs(**leaves), False)
    grads = torch.autograd.grad(out.sum(), list(leaves.values()))
    dense = {name: t.detach().clone().requires_grad_() for name, t in leaves.items()}
    expected, _ = reference.run(call_of("bounded"), Inputs(**dense), False)
    assert relative_error(out, expected) < 1e-5
    for found, wanted in zip(grads, torch.autograd.grad(expected.sum(), list(dense.values())), strict=True):
        assert relative_error(found, wanted) < 1e-5


def test_only_wanted_gradients_and_a_second_pass(cudnn: emulated_cudnn.Emulated) -> None:
    given = op_inputs()
    leaves = {name: t.requires_grad_(name == "A_log") for name, t in given.items()}
    out, _ = cudnn_hopper.run(call_of("bounded"), Inputs(**leaves), False)
    first, second = (torch.autograd.grad(out.sum(), [leaves["A_log"]], retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert all(t.grad is None for t in leaves.values())


def test_a_gradient_of_the_final_state_alone(cudnn: emulated_cudnn.Emulated) -> None:
    leaves = {name: t.requires_grad_() for name, t in op_inputs().items()}
    _, state = cudnn_hopper.run(call_of("bounded"), Inputs(**leaves), True)
    found = torch.autograd.grad(state.square().sum(), list(leaves.values())[1:6])
    _, expected = reference.run(call_of("bounded"), Inputs(**leaves), True)
    for mine, wanted in zip(
        found, torch.autograd.grad(expected.square().sum(), list(leaves.values())[1:6]), strict=True
    ):
        assert relative_error(mine, wanted) < 1e-5


def test_nothing_is_saved_where_no_gradient_is_wanted(cudnn: emulated_cudnn.Emulated) -> None:
    leaves = {name: t.requires_grad_() for name, t in op_inputs().items()}
    with torch.no_grad():
        out, state = cudnn_hopper.run(call_of("bounded"), Inputs(**leaves), True)
    assert out.grad_fn is None
    assert state is not None
    assert state.grad_fn is None


@pytest.mark.parametrize("name", ["q", "v", "g", "A_log", "initial_state"])
def test_second_derivatives_raise(cudnn: emulated_cudnn.Emulated, name: str) -> None:
    leaves = {each: t.requires_grad_(each == name) for each, t in op_inputs().items()}
    out, _ = cudnn_hopper.run(call_of("bounded"), Inputs(**leaves), False)
    (grad,) = torch.autograd.grad(out.sum(), [leaves[name]], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.autograd.grad(grad.sum(), [leaves[name]])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_both_checkpointing_modes(cudnn: emulated_cudnn.Emulated, use_reentrant: bool) -> None:
    def run_op(*tensors: Tensor) -> Tensor:
        return cudnn_hopper.run(call_of("bounded"), Inputs(*tensors), False)[0]

    given = op_inputs()
    order = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    leaves = [given[name].requires_grad_() for name in order]
    plain = torch.autograd.grad(run_op(*leaves).sum(), leaves)
    checkpoint(run_op, *leaves, use_reentrant=use_reentrant).sum().backward()
    assert all(torch.equal(a, leaf.grad) for a, leaf in zip(plain, leaves, strict=True))


def test_an_error_of_cudnn_is_raised(cudnn: emulated_cudnn.Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: int) -> None:
        raise RuntimeError("cuModuleLoadData failed")

    monkeypatch.setattr(cudnn_hopper, "_frontend", lambda: cudnn.as_frontend._replace(load=fail))
    with pytest.raises(RuntimeError, match="cuModuleLoadData failed"):
        cudnn_hopper.run(call_of("bounded"), Inputs(**{n: t.requires_grad_() for n, t in op_inputs().items()}), False)
    assert not cudnn_hopper._compiled


# ------------------------------------------------------------------------------------------------------ the self-check


class _Steps:
    def reference(self) -> None:
        pass

    def kernel(self, case: str) -> None:
        pass


def run_check(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The smallest shapes, in fp32: cuDNN's kernels are emulated, and ours interpreted."""
    shapes = [shape._replace(tokens=min(shape.tokens, 5), heads=min(shape.heads, 2)) for shape in selfchecked._SHAPES]
    shapes[2] = shapes[2]._replace(ends=(0, 1, 1, 3, 5))
    monkeypatch.setattr(selfchecked, "_SHAPES", tuple(shapes))
    return selfchecked.run("cudnn_hopper kda float32", torch.device("cpu"), _Steps())


def test_the_self_check_passes(cudnn: emulated_cudnn.Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not run_check(monkeypatch)


def faulty(cudnn: emulated_cudnn.Emulated, monkeypatch: pytest.MonkeyPatch, spoil: Any) -> list[str]:
    """What the self-check says of a launch that is spoilt after it."""

    def launch(**a: Any) -> None:
        cudnn.launch(**a)
        spoil(a, a["n_heads"] * a["total_tokens"])

    monkeypatch.setattr(cudnn_hopper, "_frontend", lambda: cudnn.as_frontend._replace(launch=launch))
    return run_check(monkeypatch)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda a, rows: emulated_cudnn.at(a["dv"], (1,)).fill_(math.nan),
        lambda a, rows: emulated_cudnn.at(a["dq"], (rows, 128)).copy_(
            emulated_cudnn.at(a["dq"], (rows, 128)).roll(1, 0)
        ),
        lambda a, rows: emulated_cudnn.at(a["d_initial_state"], (128, 128)).copy_(
            emulated_cudnn.at(a["d_initial_state"], (128, 128)).clone().t()
        ),
    ],
    ids=["not written", "the token before", "a state transposed"],
)
def test_the_self_check_finds_a_fault(
    spoil: Any, cudnn: emulated_cudnn.Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert faulty(cudnn, monkeypatch, spoil)


@pytest.mark.parametrize("name", ["dq", "dg", "dbeta", "d_initial_state"])
def test_the_self_check_finds_a_wrong_gradient(
    name: str, cudnn: emulated_cudnn.Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(a: dict[str, Any], rows: int) -> None:
        rows = a["n_heads"] * a["n_seqs"] * 128 if name == "d_initial_state" else rows
        emulated_cudnn.at(a[name], (rows if name == "dbeta" else rows * 128,)).mul_(1.5)

    assert faulty(cudnn, monkeypatch, spoil)
