"""KDA and the gated delta rule by their definition: against FLA's naive ops, transformers' own, and by gradcheck."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fusepatch import ops
from fusepatch.kernels.linear_attention import reference
from fusepatch.kernels.linear_attention.problem import Call, Inputs
from support import relative_error

pytest.importorskip("fla")
naive_kda = pytest.importorskip("fla.ops.kda.naive")
naive_gdn = pytest.importorskip("fla.ops.gated_delta_rule.naive")
kda_gate = pytest.importorskip("fla.ops.kda.gate")
gdn_gate = pytest.importorskip("fla.ops.gated_delta_rule.gate")

KINDS = pytest.mark.parametrize("kind", ["kda", "gated_delta_rule"])


def tensors(
    kind: str, batch: int = 2, tokens: int = 9, heads: int = 2, groups: int = 1, width: int = 8, value: int = 6,
    dtype: torch.dtype = torch.float32, sequences: int | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Normal q, k, v; log gates down to -3; write strengths in (0, 1); an initial state."""
    generator = torch.Generator().manual_seed(0)
    values = heads * groups

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    channels = (width,) if kind == "kda" else ()
    return {
        "q": normal(batch, tokens, heads, width),
        "k": normal(batch, tokens, heads, width) / math.sqrt(width),
        "v": normal(batch, tokens, values, value),
        "g": -3 * torch.sigmoid(normal(batch, tokens, values, *channels)),
        "beta": torch.sigmoid(normal(batch, tokens, values)),
        "initial_state": normal(sequences or batch, values, width, value),
    }


def by_fla(kind: str, given: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """FLA's naive ops, the token-by-token ones; that of the gated delta rule has no grouped heads."""
    if kind == "kda":
        return naive_kda.naive_recurrent_kda(**given, output_final_state=True, **options)
    group = given["v"].shape[2] // given["q"].shape[2]
    heads = {name: given[name].repeat_interleave(group, 2) for name in ("q", "k")}
    return naive_gdn.naive_recurrent_gated_delta_rule(**(given | heads), output_final_state=True, **options)


def ours(kind: str, given: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor | None]:
    return getattr(ops, kind)(**given, **{"output_final_state": True, **options})


@KINDS
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 37])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_against_flas_naive_op(kind: str, tokens: int, groups: int, scale: float | None) -> None:
    given = tensors(kind, tokens=tokens, groups=groups)
    leaves = [{name: t.clone().requires_grad_() for name, t in given.items()} for _ in range(2)]
    found, expected = ours(kind, leaves[0], scale=scale), by_fla(kind, leaves[1], scale=scale)
    incoming = [torch.randn_like(t) for t in expected]
    for result, wanted in zip(found, expected, strict=True):
        assert relative_error(result, wanted) < 2e-6
    mine = torch.autograd.grad(found, list(leaves[0].values()), incoming)
    theirs = torch.autograd.grad(expected, list(leaves[1].values()), incoming)
    for name, actual, wanted in zip(given, mine, theirs, strict=True):
        assert relative_error(actual, wanted) < 1e-5, name


@KINDS
def test_against_flas_chunked_op(kind: str) -> None:
    given = tensors(kind, tokens=128)
    del given["initial_state"]
    chunked = naive_kda.naive_chunk_kda if kind == "kda" else naive_gdn.naive_chunk_gated_delta_rule
    out, state = ours(kind, given)
    expected, final = chunked(**given, output_final_state=True)
    assert relative_error(out, expected) < 1e-5
    assert relative_error(state, final) < 1e-5


def test_the_gates_are_flas() -> None:
    given = tensors("kda")
    raw = torch.randn(2, 9, 2, 8) * 3
    A_log, dt_bias = torch.randn(2), torch.randn(16)
    del given["g"]
    softplus = kda_gate.naive_kda_gate(raw, A_log, dt_bias)
    gate = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}
    assert torch.equal(
        *(out[0] for out in (ours("kda", {**given, "g": softplus}), ours("kda", {**given, "g": raw}, **gate)))
    )
    for rate, bias in itertools.product([A_log, None], [dt_bias, None]):
        bounded = kda_gate.naive_kda_lowerbound_gate(raw, rate, bias, lower_bound=-4.0)
        gate = {"use_gate_in_kernel": True, "A_log": rate, "dt_bias": bias, "lower_bound": -4.0}
        expected, _ = ours("kda", {**given, "g": bounded})
        assert relative_error(ours("kda", {**given, "g": raw}, **gate)[0], expected) < 1e-6

    given = tensors("gated_delta_rule")
    raw, dt_bias = torch.randn(2, 9, 2) * 3, torch.randn(2)
    expected, _ = ours("gated_delta_rule", {**given, "g": gdn_gate.naive_gdn_gate(raw, A_log, dt_bias)})
    gate = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}
    assert relative_error(ours("gated_delta_rule", {**given, "g": raw}, **gate)[0], expected) < 1e-6


@KINDS
def test_norm_and_sigmoid_are_those_of_the_layers(kind: str) -> None:
    given = tensors(kind)
    logits = torch.randn(2, 9, 2)
    outside = {**given, "beta": 2 * logits.sigmoid()}
    for name in ("q", "k"):
        outside[name] = given[name] / torch.sqrt(given[name].square().sum(-1, keepdim=True) + 1e-6)
    inside = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    assert relative_error(ours(kind, {**given, "beta": logits}, **inside)[0], ours(kind, outside)[0]) < 1e-6


@pytest.mark.parametrize(
    ("kind", "module", "name"),
    [
        ("kda", "transformers.models.kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention"),
        ("gated_delta_rule", "transformers.models.qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule"),
    ],
)
def test_against_the_pytorch_of_transformers(kind: str, module: str, name: str) -> None:
    function = getattr(pytest.importorskip(module), name).__wrapped__
    given = tensors(kind, tokens=70, width=8, value=8)
    positional = [given[each] for each in ("q", "k", "v", "g", "beta")]
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True, "initial_state": given["initial_state"]}
    expected, final = function(*positional, **options)
    found, state = ours(kind, given, use_qk_l2norm_in_kernel=True)
    assert relative_error(found, expected) < 1e-5
    assert relative_error(state, final) < 1e-5


@KINDS
def test_sequences_of_a_row_are_apart(kind: str) -> None:
    """Lengths 1, 0, 7 and 4, whose states are each their own."""
    ends = [0, 1, 1, 8, 12]
    given = tensors(kind, batch=1, tokens=12, sequences=4)
    out, states = ours(kind, given, cu_seqlens=torch.tensor(ends))
    assert out.shape == given["v"].shape
    for index, (first, last) in enumerate(itertools.pairwise(ends)):
        alone = {name: t[:, first:last] for name, t in given.items()}
        alone["initial_state"] = given["initial_state"][index : index + 1]
        expected, state = ours(kind, alone)
        assert torch.equal(out[:, first:last], expected)
        assert torch.equal(states[index : index + 1], state)


@KINDS
def test_the_other_layout_of_states(kind: str) -> None:
    given = tensors(kind)
    expected, state = ours(kind, given)
    given["initial_state"] = given["initial_state"].transpose(-1, -2).contiguous()
    found, transposed = ours(kind, given, state_v_first=True)
    assert torch.equal(found, expected)
    assert transposed.is_contiguous()
    assert torch.equal(transposed.transpose(-1, -2), state)


@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_each_result_is_rounded_once(kind: str, dtype: torch.dtype) -> None:
    given = tensors(kind, dtype=dtype)
    given["initial_state"] = given["initial_state"].float()
    out, state = ours(kind, given)
    exact, final = ours(kind, {name: t.double() for name, t in given.items()})
    assert out.dtype is dtype
    assert state.dtype is torch.float32
    assert relative_error(out, exact) <= 1.01 * relative_error(exact.to(dtype), exact) + 1e-6
    assert relative_error(state, final) < 1e-5


@KINDS
def test_a_state_that_nobody_wants(kind: str) -> None:
    assert ours(kind, tensors(kind), output_final_state=False)[1] is None


@KINDS
def test_no_tokens(kind: str) -> None:
    given = tensors(kind, tokens=0)
    out, state = ours(kind, given)
    assert out.shape == given["v"].shape
    assert torch.equal(state, given["initial_state"])


@pytest.mark.parametrize("gate", ["given", "softplus", "bounded"])
@KINDS
def test_gradients_of_all_inputs(kind: str, gate: str) -> None:
    """Against finite differences, in fp64, the second derivatives too."""
    if kind == "gated_delta_rule" and gate == "bounded":
        pytest.skip("the gated delta rule has no bounded gate")
    given = tensors(kind, batch=1, tokens=3, heads=1, groups=2, width=2, value=2, dtype=torch.float64)
    given |= {"A_log": torch.randn(2).double(), "dt_bias": torch.randn(4 if kind == "kda" else 2).double()}
    names = list(given)
    call = Call(0.7, True, gate, -4.0, True, True, False)

    def run(*leaves: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(names, leaves, strict=True))
        if gate == "given":
            named |= {"A_log": None, "dt_bias": None}
        return reference.run(call, Inputs(**named), True)

    leaves = tuple(t.requires_grad_() for t in given.values())
    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "q is no tensor": ({"q": 3}, "q must be a torch.Tensor, got int"),
    "q of three dimensions": ({"q": torch.ones(2, 9, 8)}, "q and v must be .batch, tokens, heads, width."),
    "heads that are no multiple": ({"v": torch.ones(2, 9, 3, 6)}, "whole multiple of q's heads, got 3 and 2"),
    "other keys": ({"k": torch.ones(2, 9, 2, 7)}, r"k must be \[2, 9, 2, 8\]"),
    "beta": ({"beta": torch.ones(2, 9)}, r"beta must be \[2, 9, 2\]"),
    "another state": ({"initial_state": torch.ones(1, 2, 8, 6)}, r"initial_state must be \[2, 2, 8, 6\]"),
    "v_first state": ({"state_v_first": True}, r"initial_state must be \[2, 2, 6, 8\]"),
    "integers": ({"v": torch.ones(2, 9, 2, 6, dtype=torch.int64)}, "v must be of a floating dtype"),
    "dtypes": ({"v": torch.ones(2, 9, 2, 6).double()}, "one dtype, got"),
    "a device": ({"beta": torch.ones(2, 9, 2, device="meta")}, "beta is on meta and v on cpu"),
    "sequences": ({"cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens must be .N . 1. beside a batch of 1"),
    "eigenvalues": ({"allow_neg_eigval": True}, "allow_neg_eigval needs use_beta_sigmoid_in_kernel"),
    "scale": ({"scale": "1"}, "scale must be a number, got str"),
    "no A_log": ({"use_gate_in_kernel": True}, "use_gate_in_kernel needs A_log"),
    "A_log": ({"use_gate_in_kernel": True, "A_log": torch.ones(3)}, "A_log must have 2 elements, got .3."),
}


@KINDS
@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_one_clear_error(kind: str, case: str) -> None:
    change, message = BAD[case]
    options = {name: value for name, value in change.items() if name not in tensors(kind)}
    given = {**tensors(kind), **{name: value for name, value in change.items() if name in tensors(kind)}}
    with pytest.raises(ValueError, match=message):
        ours(kind, given, **options)


@pytest.mark.parametrize("bound", [None, 0.0, -5.5])
def test_a_safe_gate_needs_a_bound(bound: float | None) -> None:
    with pytest.raises(ValueError, match=r"safe_gate needs a lower_bound in \[-5, 0\), got"):
        ours("kda", tensors("kda"), use_gate_in_kernel=True, A_log=torch.ones(2), safe_gate=True, lower_bound=bound)


@KINDS
def test_the_bounds_of_this_file_would_show_a_mistake(kind: str) -> None:
    """A negative control: one token's decay left out."""
    given = tensors(kind)
    expected = by_fla(kind, given)[0]
    given["g"] = given["g"].index_fill(1, torch.tensor(4), 0.0)
    assert relative_error(ours(kind, given)[0], expected) > 1e-3
