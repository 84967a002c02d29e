"""Parity of models with experts: the arms take the reference's routing."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import fusepatch
from fusepatch.parity_check import routing

IDS = torch.randint(0, 128, (2, 128), generator=torch.Generator().manual_seed(1))


def moe() -> nn.Module:
    """Three layers of sixteen experts, four for each token, and a gated MLP for all tokens beside them."""
    import transformers

    config = transformers.Qwen2MoeConfig(
        hidden_size=64,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        num_experts=16,
        num_experts_per_tok=4,
        initializer_range=0.1,
    )
    return transformers.Qwen2MoeForCausalLM(config).bfloat16()


def report() -> Any:
    return fusepatch.parity(moe, {"input_ids": IDS, "labels": IDS})


def of_experts(found: Any) -> float:
    """The largest error of the unpatched arm in the gradients of experts."""
    return max(each.unpatched for each in found.tensors if ".experts." in each.name)


def test_the_arms_take_the_references_routing(reference_backend: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = report()
    assert found.verdict is fusepatch.parity_check.report.Verdict.PASSED, found
    assert found.patched_native == 3
    assert [note.partition(";")[0] for note in found.notes] == [
        f"the {arm} arm took the reference's routing" for arm in ("unpatched", "patched")
    ]
    monkeypatch.setattr(routing, "replayed", lambda choices: contextlib.nullcontext())
    own = report()
    assert of_experts(own) > 2 * of_experts(found)  # the errors of tokens that went elsewhere


def test_a_model_that_chooses_nothing_has_no_note(reference_backend: None) -> None:
    from support import tiny_llama

    found = fusepatch.parity(lambda: tiny_llama(torch.bfloat16), {"input_ids": IDS, "labels": IDS})
    assert not any("routing" in note for note in found.notes)


SPELLINGS = {
    "function": lambda t: torch.topk(t, 2, dim=1),
    "method": lambda t: t.topk(2),
    "keywords": lambda t: torch.topk(input=t, k=2, dim=-1, sorted=False),
    "other dimension": lambda t: torch.topk(t.t(), 2, 0),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling: str) -> None:
    run = SPELLINGS[spelling]
    reference, other = (torch.randn(5, 8, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    choices = routing.Choices()
    with routing.recorded(choices):
        expected = run(reference).indices
    leaf = other.clone().requires_grad_()
    with routing.replayed(choices):
        values, indices = run(leaf)
    assert torch.equal(indices, expected)
    rows = indices.t() if spelling == "other dimension" else indices
    assert torch.equal(values.t() if spelling == "other dimension" else values, leaf.gather(1, rows))
    values.sum().backward()
    assert torch.equal(leaf.grad, torch.zeros_like(other).scatter(1, rows, 1.0))
    own = run(other).indices.t() if spelling == "other dimension" else run(other).indices
    differ = [set(one.tolist()) != set(two.tolist()) for one, two in zip(own, rows, strict=True)]
    assert (choices.turned, choices.difference) == (sum(differ), "")
    assert choices.turned
    assert "took the reference's routing" in (choices.note("patched") or "")


def test_out_is_left_alone() -> None:
    choices = routing.Choices()
    values, indices = torch.empty(5, 2), torch.empty(5, 2, dtype=torch.long)
    t = torch.randn(5, 8)
    with routing.recorded(choices):
        torch.topk(t, 2, out=(values, indices))
    assert choices.indices == []
    assert torch.equal(values, t.gather(1, indices))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([(5, 8)], "1 calls of topk, where the reference has 2"),
        ([(5, 8), (4, 8)], "call 1 of topk chooses [4, 2], where the reference has one of [5, 2]"),
        ([(5, 8), (5, 8), (5, 8)], "call 2 of topk chooses [5, 2], where the reference has no such call"),
    ],
)
def test_an_arm_that_chooses_otherwise_keeps_its_own(sizes: list[tuple[int, int]], said: str) -> None:
    choices = routing.Choices()
    with routing.recorded(choices):
        for _ in range(2):
            torch.randn(5, 8).topk(2)
    tensors = [torch.randn(size) for size in sizes]
    with routing.replayed(choices):
        found = [t.topk(2).indices for t in tensors]
    assert torch.equal(found[0], choices.indices[0])
    assert choices.difference == said
    assert "is its own in part" in (choices.note("patched") or "")
    if len(sizes) > 1:
        assert torch.equal(found[-1], tensors[-1].topk(2).indices)


def test_topk_is_put_back_whatever_happens() -> None:
    before = torch.topk, torch.Tensor.topk, "topk" in vars(torch.Tensor)
    with pytest.raises(RuntimeError), routing.recorded(routing.Choices()):
        torch.topk(torch.ones(1), 2)
    assert (torch.topk, torch.Tensor.topk, "topk" in vars(torch.Tensor)) == before
