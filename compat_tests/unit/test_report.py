"""`status()` and `explain()`: what they say, for people and for programs, and that asking changes nothing."""

from __future__ import annotations

import functools
import importlib
import json
import types

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from fla.modules.mlp import GatedMLP
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

import fusepatch
from fusepatch import settings, table
from fusepatch.decline import Reason
from support import tiny_llama, tiny_llama_mlp

X = torch.linspace(-1, 1, 3 * 64).reshape(3, 64)
TOKENS = torch.arange(5)[None]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def build(model: str, causal: str, config: str, **overrides: object) -> nn.Module:
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    configuration = importlib.import_module(f"transformers.models.{model}.configuration_{model}")
    return getattr(module, causal)(getattr(configuration, config)(**SIZES, **overrides))


BUILDERS = {
    "LlamaMLP": tiny_llama,
    "Phi3MLP": lambda: build("phi3", "Phi3ForCausalLM", "Phi3Config"),
    "Lfm2MLP": lambda: build("lfm2", "Lfm2ForCausalLM", "Lfm2Config", layer_types=["conv", "full_attention"]),
    "Gemma3MLP": lambda: build("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=16),
}


def rows(model: nn.Module, **kwargs: object) -> list[tuple[str, str | None, bool]]:
    return [(row.route, row.reason, row.patched) for row in fusepatch.explain(model, **kwargs).modules]


def hf_target() -> fusepatch.report.TargetStatus:
    return next(target for target in fusepatch.status().targets if target.library == "transformers")


# ---------------------------------------------------------------------------------------------------------- status


class TestStatus:
    def test_before_anything(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fusepatch.entry, "_state", fusepatch.entry._State())
        status = fusepatch.status()
        assert {(target.state, target.reason, target.classes) for target in status.targets} == {("off", None, ())}
        assert status.summary() == "nothing is patched"
        assert str(status).startswith("fusepatch\n")
        assert status.native_calls() == 0

    def test_keys_are_stable(self, reference_backend: None) -> None:
        fusepatch.accelerate()
        tiny_llama_mlp()(X)
        found = json.loads(json.dumps(fusepatch.status().to_dict()))
        assert found.keys() == {"targets", "strict", "disabled"}
        (target,) = (each for each in found["targets"] if each["name"] == "gated_mlp/transformers")
        assert target.keys() == {"name", "library", "version", "state", "reason", "fix", "classes", "note"}
        (mlp,) = (each for each in target["classes"] if each["calls"])
        assert mlp == {
            "name": "transformers.models.llama.modeling_llama.LlamaMLP",
            "state": "patched",
            "calls": {"fused": 1},
            "declines": {},
            "traces": {},
            "captured": {},
            "errors": {},
            "notes": [],
        }

    @pytest.mark.parametrize("state", ["fresh", "on", "model", "restored", "env-disabled", "missing"])
    def test_json(self, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
        mlp = tiny_llama_mlp()
        if state == "env-disabled":
            monkeypatch.setenv("FUSEPATCH", "0")
        if state == "missing":
            monkeypatch.setattr(fusepatch.importhook, "is_installed", lambda library: library == "fla")
        if state != "fresh":
            fusepatch.accelerate(model=mlp if state == "model" else None)
            mlp(X)
        if state == "restored":
            fusepatch.restore()
        status = fusepatch.status()
        found = json.loads(json.dumps(status.to_dict(), allow_nan=False))
        assert [target["state"] for target in found["targets"]] == [target.state for target in status.targets]
        assert all(target.name in str(status) for target in status.targets)

    @pytest.mark.parametrize(
        ("provoke", "reason"),
        [
            (lambda mlp: mlp(X), Reason.CPU),
            (lambda mlp: mlp(X[:0]), Reason.ZERO_TOKENS),
            (lambda mlp: torch.func.vmap(mlp)(X), Reason.FUNCTORCH),
        ],
    )
    def test_text_says_why_and_what_to_do(self, provoke, reason: Reason) -> None:
        fusepatch.accelerate()
        provoke(tiny_llama_mlp())
        text = str(fusepatch.status())
        assert f"{reason.value}: {reason.meaning}. Fix: {reason.fix}." in text
        assert f"declined: {reason.value} 1" in fusepatch.status().summary()
        others = [other for other in Reason if other is not reason]
        assert not any(f"{other.value}: {other.meaning}" in text for other in others)

    def test_head_says_what_is_in_force(self) -> None:
        fusepatch.accelerate(strict=True)
        with fusepatch.disabled():
            assert str(fusepatch.status()).startswith("fusepatch, strict, disabled() in force\n")

    def test_a_report_does_not_change_later(self) -> None:
        fusepatch.accelerate()
        mlp = tiny_llama_mlp()
        mlp(X)
        status = fusepatch.status()
        before = str(status)
        mlp(X)
        fusepatch.restore()
        assert str(status) == before

    # Found: an op that was simply turned off is explained as "somebody kept our forward past restore()".
    def test_restored_accuses_nobody(self) -> None:
        fusepatch.accelerate()
        fusepatch.restore()
        assert "somebody kept" not in str(fusepatch.status())

    def test_summary_adds_up(self, monkeypatch: pytest.MonkeyPatch, reference_backend: None) -> None:
        model, mlp = tiny_llama(), tiny_llama_mlp(mlp_bias=True)
        fusepatch.accelerate()
        model(TOKENS), mlp(X), mlp(X[:0]), mlp(X[:0])
        part = next(part for part in fusepatch.status().summary().split(" | ") if "transformers" in part)
        assert "fused 2, pointwise 1, original 2 (declined: zero-tokens 2, bias 1)" in part

    def test_shown_by_a_notebook(self) -> None:
        printed: list[str] = []
        fusepatch.status()._repr_pretty_(types.SimpleNamespace(text=printed.append), False)
        assert printed == [str(fusepatch.status())]


def test_table_columns_line_up() -> None:
    lines = table.render(("name", "count"), [("a", 1), ("", ""), ("longer", 100)]).splitlines()
    assert lines == ["name    count", "------  -----", "a           1", "", "longer    100"]


# --------------------------------------------------------------------------------------------------------- explain


class TestExplain:
    @pytest.mark.parametrize("kind", BUILDERS)
    @pytest.mark.parametrize("on", [False, True])
    def test_says_what_a_call_then_does(self, reference_backend: None, kind: str, on: bool) -> None:
        model = BUILDERS[kind]()
        if on:
            fusepatch.accelerate()
        explanation = fusepatch.explain(model)
        assert [(row.name, row.route, row.reason, row.patched) for row in explanation.modules] == [
            (name, "fused", None, on) for name, module in model.named_modules() if type(module).__name__ == kind
        ]
        assert len(explanation.modules) == 2
        fusepatch.accelerate()
        with torch.no_grad():
            model(TOKENS)
        assert hf_target().total("calls") == {"fused": 2}

    @pytest.mark.parametrize(
        ("model", "kind", "config"),
        [
            ("bitnet", "BitNetMLP", "BitNetConfig"),
            ("deepseek_v4", "DeepseekV4MLP", "DeepseekV4Config"),
            ("falcon_h1", "FalconH1MLP", "FalconH1Config"),
            ("t5gemma", "T5GemmaMLP", "T5GemmaModuleConfig"),
        ],
    )
    def test_look_alike(self, reference_backend: None, model: str, kind: str, config: str) -> None:
        overrides = {"dropout_rate": 0.0} if kind == "T5GemmaMLP" else {}
        mlp = build(model, kind, config, **overrides)
        before = vars(type(mlp))["forward"]
        fusepatch.accelerate()
        assert vars(type(mlp))["forward"] is before
        assert rows(nn.Sequential(mlp)) == [("original", "forward-differs", False)]
        with pytest.raises(ValueError, match="explain"):
            fusepatch.accelerate(model=mlp)

    def test_layers_are_no_look_alikes(self) -> None:
        assert rows(nn.Sequential(nn.Linear(2, 2), nn.GELU())) == []
        assert "no module" in str(fusepatch.explain(nn.Linear(2, 2)))

    @pytest.mark.parametrize("on", [False, True])
    def test_another_library_wrapped_the_class(self, monkeypatch: pytest.MonkeyPatch, on: bool) -> None:
        forward = LlamaMLP.forward
        wrapped = functools.wraps(forward)(lambda self, x: forward(self, x))
        monkeypatch.setattr(LlamaMLP, "forward", wrapped)
        if on:
            fusepatch.accelerate()
        assert rows(tiny_llama_mlp()) == [("original", "foreign-forward", False)]
        assert LlamaMLP.forward is wrapped

    @pytest.mark.parametrize("on", [False, True])
    def test_instance_forward(self, reference_backend: None, on: bool) -> None:
        mlp = tiny_llama_mlp()
        if on:
            fusepatch.accelerate()
        mlp.forward = types.MethodType(lambda self, x: x, mlp)
        assert rows(mlp) == [("original", "instance-forward", on)]

    def test_accelerate_hooks(self, reference_backend: None) -> None:
        mlp = add_hook_to_module(tiny_llama_mlp(), ModelHook())
        assert rows(mlp) == [("original", "accelerate-hooks", False)]

    # Found: a hook that was put on while patched binds our forward, which serves the calls; explain() denies it.
    @pytest.mark.parametrize("how", ["bound", "partial", "hook"])
    def test_forward_bound_while_patched(self, reference_backend: None, how: str) -> None:
        mlp = tiny_llama_mlp()
        fusepatch.accelerate()
        if how == "hook":
            add_hook_to_module(mlp, ModelHook())
        else:
            mlp.forward = functools.partial(LlamaMLP.forward, mlp) if how == "partial" else mlp.forward
        mlp(X)
        assert fusepatch.status().native_calls() == 1
        assert rows(mlp) == [("fused", None, True)]

    @pytest.mark.parametrize("name", ["FUSEPATCH", "FUSEPATCH_GATED_MLP"])
    def test_turned_off_by_the_environment(
        self, monkeypatch: pytest.MonkeyPatch, reference_backend: None, name: str
    ) -> None:
        monkeypatch.setenv(name, "0")
        assert rows(tiny_llama_mlp()) == [("original", "env-disabled", False)]
        fusepatch.accelerate()
        assert rows(tiny_llama_mlp()) == [("original", "env-disabled", False)]

    def test_disabled_and_other_model(self, reference_backend: None) -> None:
        chosen, other = tiny_llama_mlp(), tiny_llama_mlp()
        fusepatch.accelerate(model=chosen)
        assert rows(nn.Sequential(chosen, other)) == [("fused", None, True), ("original", "other-model", True)]
        with fusepatch.disabled():
            assert rows(chosen) == [("original", "disabled", True)]
        fusepatch.restore()
        assert rows(other) == [("fused", None, False)]

    def test_what_accelerate_would_bring(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mlp = tiny_llama_mlp()
        assert rows(mlp) == [("original", "cpu", False)]
        monkeypatch.setenv("FUSEPATCH_GATED_MLP_BACKEND", "reference")
        assert rows(mlp) == [("fused", None, False)]
        monkeypatch.setenv("FUSEPATCH_GATED_MLP_ROUTE", "pointwise")
        assert rows(mlp) == [("pointwise", "route-bound", False)]

    def test_sees_the_settings_of_accelerate(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mlp = tiny_llama_mlp()
        fusepatch.accelerate()
        monkeypatch.setenv("FUSEPATCH_GATED_MLP_BACKEND", "reference")
        assert rows(mlp) == [("original", "cpu", True)]

    @pytest.mark.parametrize("on", [False, True])
    def test_changes_nothing(self, reference_backend: None, on: bool) -> None:
        model = tiny_llama()
        if on:
            fusepatch.accelerate()
        in_force, status = settings._current, fusepatch.status()
        classes = {type(module): list(vars(type(module)).items()) for module in model.modules()}
        state = [(module, dict(vars(module))) for module in model.modules()]
        fusepatch.explain(model)
        assert settings._current is in_force
        assert fusepatch.status() == status
        assert all(list(vars(kind).items()) == items for kind, items in classes.items())
        assert all(vars(module) == before for module, before in state)

    # Found: settings_in_force() forgets the settings that a direct call of an op had read.
    def test_keeps_the_settings_of_direct_calls(self) -> None:
        read = settings.current()
        fusepatch.explain(tiny_llama_mlp())
        assert settings.current() is read

    def test_meta_device(self, reference_backend: None) -> None:
        with torch.device("meta"):
            model = tiny_llama()
        assert rows(model) == [("original", "meta", False)] * 2
        assert rows(model, device="cpu") == [("fused", None, False)] * 2
        assert rows(model, device="cpu", dtype=torch.int8) == [("original", "dtype", False)] * 2

    def test_no_tokens(self, reference_backend: None) -> None:
        assert rows(tiny_llama_mlp(), tokens=0) == [("original", "zero-tokens", False)]

    def test_fla(self, reference_backend: None) -> None:
        assert rows(GatedMLP(64, intermediate_size=96)) == [("fused", None, False)]
        assert rows(GatedMLP(64, intermediate_size=96, hidden_act="powlu")) == [("original", "activation", False)]
        assert rows(GatedMLP(64, intermediate_size=96).half().to("meta")) == [("original", "meta", False)]

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ({"model": "llama"}, TypeError),
            ({"model": LlamaMLP}, TypeError),
            ({"model": None}, TypeError),
            ({"tokens": -1}, ValueError),
            ({"tokens": 1.0}, TypeError),
            ({"tokens": True}, TypeError),
            ({"tokens": None}, TypeError),
            ({"dtype": "bfloat16"}, TypeError),
            ({"device": "nowhere"}, ValueError),
            ({"device": "cuda"}, ValueError),
            ({"device": 3.5}, ValueError),
        ],
        ids=str,
    )
    def test_wrong_arguments(self, arguments: dict[str, object], error: type[Exception]) -> None:
        if arguments.get("device") == "cuda" and torch.cuda.is_available():
            pytest.skip("a CUDA device is there")
        with pytest.raises(error):
            fusepatch.explain(**{"model": tiny_llama_mlp(), **arguments})
        assert settings._current is None

    def test_json_and_keys(self, reference_backend: None) -> None:
        found = json.loads(json.dumps(fusepatch.explain(tiny_llama()).to_dict()))
        assert found.keys() == {"model", "tokens", "modules"}
        assert found["modules"][0].keys() == {
            "name",
            "class_name",
            "op",
            "route",
            "reason",
            "fix",
            "patched",
            "backend",
            "note",
        }
        assert found["modules"][0]["name"] == "model.layers.0.mlp"

    def test_text_says_why_and_what_to_do(self) -> None:
        model = tiny_llama()
        text = str(fusepatch.explain(model, tokens=7))
        assert text.startswith("LlamaForCausalLM, 7 tokens")
        assert f"cpu: {Reason.CPU.meaning}. Fix: {Reason.CPU.fix}." in text
        assert "model.layers.*.mlp" in text

    def test_one_line_for_alike_and_one_for_each_exception(self) -> None:
        model = tiny_llama(layers=12)
        model.model.layers[11].mlp.act_fn = nn.Tanh()
        lines = [line for line in str(fusepatch.explain(model)).splitlines() if "layers" in line]
        assert [(line.split()[1], line.split()[4]) for line in lines] == [("1", "activation"), ("11", "cpu")]


def test_explain_agrees_with_the_call_on_a_subclass(reference_backend: None) -> None:
    class Inherits(LlamaMLP):
        pass

    class Overrides(LlamaMLP):
        def forward(self, x):
            return super().forward(x) * 2

    config = tiny_llama_mlp().config
    assert rows(Inherits(config)) == [("fused", None, False)]
    assert rows(Overrides(config)) == [("original", "forward-differs", False)]
