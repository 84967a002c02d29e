"""Qwen3-Next, Qwen3.5 and Kimi-Linear of transformers on a CPU, where FLA's own kernels can't run: by the reference in
FLA's registry, and held to what transformers computes where FLA is not installed."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from fla_stand_in import standing_in
from torch import Tensor, nn

import fusepatch
from fusepatch.parity_check.report import Verdict
from support import relative_error

# The names of transformers 5.17, which 5.24 still takes.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

_SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "layer_types": ["linear_attention", "full_attention"], "initializer_range": 0.1,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_QWEN = {
    **_SIZES, "num_key_value_heads": 1, "head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
_KIMI = {
    **_SIZES, **_EXPERTS, "num_key_value_heads": 2, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "qk_nope_head_dim": 8, "num_local_experts": 2, "linear_head_dim": 8, "linear_num_heads": 2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "mlp_layer_types": ["dense", "dense"],
}  # fmt: skip
MODELS: dict[str, tuple[str, str, str, dict[str, Any], str, str]] = {
    "qwen3_next": (
        "qwen3_next", "Qwen3NextForCausalLM", "Qwen3NextConfig",
        {**_QWEN, **_EXPERTS, "num_experts": 3, "shared_expert_intermediate_size": 16},
        "gated_delta_rule", "torch_chunk_gated_delta_rule",
    ),
    "qwen3_5": (
        "qwen3_5", "Qwen3_5ForCausalLM", "Qwen3_5TextConfig", _QWEN, "gated_delta_rule", "torch_chunk_gated_delta_rule",
    ),
    "kimi_linear": (
        "kimi_linear", "KimiLinearForCausalLM", "KimiLinearConfig", _KIMI, "kda", "chunk_kimi_delta_attention",
    ),
}  # fmt: skip


def built(name: str) -> tuple[nn.Module, str, Any, str]:
    """The model, the op that it calls, its modelling file, and by what name that has the function."""
    folder, model_class, config_class, sizes, op, function = MODELS[name]
    modeling = pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}")
    configuration = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    torch.manual_seed(0)
    model = getattr(modeling, model_class)(getattr(configuration, config_class)(**sizes))
    for parameter in model.parameters():
        if parameter.dim() <= 1 or parameter.numel() == parameter.shape.numel() == max(parameter.shape):
            nn.init.normal_(parameter, std=0.3)  # what starts at 0 or 1 would hide mistakes
    return model, op, modeling, function


def step(model: nn.Module) -> dict[str, Tensor]:
    ids = torch.randint(3, 64, (2, 11), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    out = model(ids, labels=ids)
    out.loss.backward()
    return {
        "logits": out.logits.detach(),
        **{name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
    }


def fused(op: str) -> int:
    (target,) = (each for each in fusepatch.status().targets if each.name == f"{op}/fla")
    assert not target.total("declines")
    return target.total("calls").get("fused", 0)


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("name", MODELS)
def test_training_step(name: str, checkpointing: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, op, modeling, function = built(name)
    with pytest.raises(RuntimeError, match="active driver"):
        step(model)  # transformers takes FLA's function because it can be imported, whatever the device
    with monkeypatch.context() as patched:
        patched.setattr(modeling, function, getattr(modeling, function).__wrapped__)
        expected = step(model)
    if checkpointing is not None:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    monkeypatch.setenv(f"FUSEPATCH_{op.upper()}_BACKEND", "reference")
    fusepatch.accelerate(op)
    found = step(model)
    assert fused(op) == (1 if checkpointing is None else 2)
    assert found.keys() == expected.keys()
    assert any("A_log" in each for each in found)
    for each, wanted in expected.items():
        assert relative_error(found[each], wanted) < 1e-4, each
    fusepatch.restore()
    with pytest.raises(RuntimeError, match="active driver"):
        step(model)


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_of_states(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in two parts, so that the second starts from the state that the first left."""
    model, op, _, _ = built(name)
    model.eval()
    monkeypatch.setenv(f"FUSEPATCH_{op.upper()}_BACKEND", "reference")
    fusepatch.accelerate(op)
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        first = model(ids[:, :7], use_cache=True)
        second = model(ids[:, 7:], past_key_values=first.past_key_values, use_cache=True)
    assert fused(op) == 3
    assert relative_error(torch.cat([first.logits, second.logits], 1), whole) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_explain_and_warmup(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, op, _, _ = built(name)
    monkeypatch.setenv(f"FUSEPATCH_{op.upper()}_BACKEND", "reference")
    fusepatch.accelerate(op, model=model)
    (row,) = (row for row in fusepatch.explain(model).modules if row.op == op)
    assert row.name.startswith("model.layers.0.")  # the other layer is of full attention
    assert (row.route, row.backend, row.patched) == ("fused", "reference", True)
    report = fusepatch.warmup(model, [5, 70])
    assert [(row.route, row.tokens, row.modules) for row in report.rows] == [("fused", 5, 1), ("fused", 70, 1)]
    assert fused(op) == 0


@pytest.mark.parametrize("name", MODELS)
def test_parity(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in for FLA's kernels, which a CPU can't run; without it there is nothing to compare with."""
    model, op, _, _ = built(name)
    monkeypatch.setenv(f"FUSEPATCH_{op.upper()}_BACKEND", "reference")
    ids = torch.randint(3, 64, (1, 70), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    assert fusepatch.parity(model.bfloat16(), batch, ops=op).verdict is Verdict.BASELINE_FAILED
    with standing_in():
        report = fusepatch.parity(model, batch, ops=op)
    assert report.verdict is Verdict.PASSED, report
    assert (report.patched_native, report.unpatched_native) == (1, 0)
    assert f"1 of 1 calls of the function of {op} ran natively" in report.notes
    assert any(error.name.endswith(": output") for error in report.in_place)
    assert any("A_log" in error.name for error in report.in_place)
