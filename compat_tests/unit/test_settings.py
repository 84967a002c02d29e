"""The environment variables: what each takes, when they are read, and what they turn off."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

import fusepatch
from fusepatch import settings
from fusepatch.decline import Route
from fusepatch.settings import TABLE, SettingsError
from support import tiny_llama_mlp

CHOICES = [
    (variable.name, text)
    for variable in TABLE.values()
    if variable.values != "a directory"
    for text in variable.values.split(", ")
]
BACKEND = "FUSEPATCH_GATED_MLP_BACKEND"


def reason_of(mlp: LlamaMLP) -> str | None:
    """Why the last route of the next call is not faster."""
    fusepatch.restore()
    fusepatch.accelerate()
    mlp(torch.ones(1, 64))
    (target,) = (each for each in fusepatch.status().targets if each.library == "transformers")
    return next(iter(target.total("declines")), None)


@pytest.mark.parametrize(("name", "text"), CHOICES)
def test_every_listed_value_is_taken(name: str, text: str) -> None:
    settings.read({name: text})


@pytest.mark.parametrize("name", [name for name, variable in TABLE.items() if variable.values != "a directory"])
@pytest.mark.parametrize("text", ["nonsense", "2", " 1", "TRUE", "yes", "None", "1,0", "Fused"])
def test_every_other_value_is_refused(name: str, text: str) -> None:
    with pytest.raises(SettingsError) as raised:
        settings.read({name: text})
    assert name in str(raised.value)
    assert repr(text) in str(raised.value)
    assert TABLE[name].values in str(raised.value)


@pytest.mark.parametrize("name", TABLE)
def test_empty_is_unset(name: str) -> None:
    assert vars(settings.read({name: ""})) == vars(settings.read({}))


@pytest.mark.parametrize("variable", [v for v in TABLE.values() if v.values != "a directory"], ids=lambda v: v.name)
def test_documented_default_is_the_default(variable: settings.EnvVar) -> None:
    given, unset = settings.read({variable.name: variable.default}), settings.read({})
    for op in settings.OPS:
        assert given.allows(op) == unset.allows(op)
        assert given.ops[op].backend == unset.ops[op].backend
        assert given.ops[op].route in (unset.ops[op].route, Route.FUSED)
    assert (given.enabled, given.strict, given.log) == (unset.enabled, unset.strict, unset.log)


def test_each_value_reaches_its_field(tmp_path: Path) -> None:
    found = settings.read(
        {
            "FUSEPATCH": "0",
            "FUSEPATCH_STRICT": "1",
            "FUSEPATCH_CACHE_DIR": str(tmp_path),
            "FUSEPATCH_LOG": "debug",
            "FUSEPATCH_GATED_MLP": "0",
            "FUSEPATCH_GATED_MLP_ROUTE": "pointwise",
            BACKEND: "reference",
        }
    )
    assert (found.enabled, found.strict, found.cache_dir, found.log) == (False, True, tmp_path, "debug")
    assert found.ops["gated_mlp"] == settings.OpSettings(False, Route.POINTWISE, "reference")


@pytest.mark.parametrize(
    ("environ", "named", "allowed"),
    [
        ({}, False, True),
        ({}, True, True),
        ({"FUSEPATCH_GATED_MLP": "0"}, False, False),
        ({"FUSEPATCH_GATED_MLP": "0"}, True, False),
        ({"FUSEPATCH_GATED_MLP": "1"}, False, True),
        ({"FUSEPATCH": "0"}, True, False),
        ({"FUSEPATCH": "0", "FUSEPATCH_GATED_MLP": "1"}, True, False),
    ],
)
def test_what_is_allowed(environ: dict[str, str], named: bool, allowed: bool) -> None:
    assert settings.read(environ).allows("gated_mlp", named=named) is allowed


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("FUSEPATCH_STRIKT", "Did you mean FUSEPATCH_STRICT?"),
        ("FUSEPATCH_GATED_MLP_ROUT", "Did you mean FUSEPATCH_GATED_MLP_ROUTE?"),
        ("FUSEPATCH_GATEDMLP", "Did you mean FUSEPATCH_GATED_MLP?"),
        ("FUSEPATCH_QQQQQQQQQQQQQQQQQQQQQQQQQQQQQ", "Valid ones"),
        ("FUSEPATCH_", "Valid ones"),
    ],
)
def test_unknown_name(name: str, hint: str) -> None:
    with pytest.raises(SettingsError, match="unknown environment variable") as raised:
        settings.read({name: "1"})
    assert hint in str(raised.value)
    assert all(known in str(raised.value) for known in TABLE)


@pytest.mark.parametrize("name", ["FUSEPATCHED", "FUSEPATCHES_STRICT", "MY_FUSEPATCH_LOG", "fusepatch", ""])
def test_names_of_others_are_left_alone(name: str) -> None:
    assert vars(settings.read({name: "nonsense"})) == vars(settings.read({}))


class TestCacheDir:
    def test_home_is_expanded(self) -> None:
        assert settings.read({"FUSEPATCH_CACHE_DIR": "~/x"}).cache_dir == Path.home() / "x"

    def test_blank_is_refused(self) -> None:
        with pytest.raises(SettingsError):
            settings.read({"FUSEPATCH_CACHE_DIR": "  "})

    def test_xdg(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert settings.read({}).cache_dir == tmp_path / "fusepatch"

    # Found: Path.expanduser() raises RuntimeError, which read() lets through.
    def test_home_of_nobody_is_refused(self) -> None:
        with pytest.raises(SettingsError):
            settings.read({"FUSEPATCH_CACHE_DIR": "~no-such-user/x"})

    # Found: an account without a home directory (a container's) can't call accelerate(), which needs no cache.
    def test_no_home_is_no_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_home() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", staticmethod(no_home))
        settings.read({})


@pytest.mark.parametrize(
    "call",
    [
        lambda model: fusepatch.accelerate(model=model),
        lambda model: fusepatch.accelerated(model=model).__enter__(),
        fusepatch.explain,
    ],
    ids=["accelerate", "accelerated", "explain"],
)
def test_bad_environment_raises_and_changes_nothing(monkeypatch: pytest.MonkeyPatch, call) -> None:
    mlp, before, finders = tiny_llama_mlp(), LlamaMLP.forward, list(sys.meta_path)
    monkeypatch.setenv("FUSEPATCH_LOG", "loud")
    with pytest.raises(SettingsError):
        call(mlp)
    assert LlamaMLP.forward is before
    assert sys.meta_path == finders


def test_bad_environment_leaves_the_earlier_accelerate_on(
    monkeypatch: pytest.MonkeyPatch, reference_backend: None
) -> None:
    fusepatch.accelerate()
    in_force = settings.current()
    monkeypatch.setenv("FUSEPATCH_LOG", "loud")
    with pytest.raises(SettingsError):
        fusepatch.accelerate(strict=True)
    assert settings.current() is in_force
    assert not fusepatch.status().strict
    tiny_llama_mlp()(torch.ones(1, 64))
    assert fusepatch.status().native_calls() == 1


@pytest.mark.parametrize("name", ["FUSEPATCH", "FUSEPATCH_GATED_MLP"])
class TestTurnedOff:
    @pytest.mark.parametrize("ops", [None, "gated_mlp", ["gated_mlp"]])
    @pytest.mark.parametrize("of_model", [False, True])
    def test_nothing_is_patched(self, monkeypatch: pytest.MonkeyPatch, name: str, ops, of_model: bool) -> None:
        mlp, before, finders = tiny_llama_mlp(), LlamaMLP.forward, list(sys.meta_path)
        monkeypatch.setenv(name, "0")
        status = fusepatch.accelerate(ops, model=mlp if of_model else None)
        assert LlamaMLP.forward is before
        assert sys.meta_path == finders
        assert {(target.state, target.reason) for target in status.targets} == {("off", "env-disabled")}
        assert "env-disabled:" in str(status)

    def test_accelerate_again_turns_it_off_and_on(
        self, monkeypatch: pytest.MonkeyPatch, reference_backend: None, name: str
    ) -> None:
        before, finders = LlamaMLP.forward, list(sys.meta_path)
        fusepatch.accelerate()
        monkeypatch.setenv(name, "0")
        fusepatch.accelerate("gated_mlp")
        assert LlamaMLP.forward is before
        assert sys.meta_path == finders
        monkeypatch.delenv(name)
        fusepatch.accelerate()
        tiny_llama_mlp()(torch.ones(1, 64))
        assert fusepatch.status().native_calls() == 1

    # Found: _return_to() does not put back what the block had turned off, though it says that it is on.
    def test_off_for_a_block(self, monkeypatch: pytest.MonkeyPatch, reference_backend: None, name: str) -> None:
        fusepatch.accelerate()
        patched = LlamaMLP.forward
        monkeypatch.setenv(name, "0")
        with fusepatch.accelerated():
            assert LlamaMLP.forward is not patched
        assert LlamaMLP.forward is patched
        tiny_llama_mlp()(torch.ones(1, 64))
        assert fusepatch.status().native_calls() == 1


def test_read_only_by_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp, x = tiny_llama_mlp(), torch.ones(1, 64)
    fusepatch.accelerate()
    for name, text in [(BACKEND, "reference"), ("FUSEPATCH_STRICT", "1"), ("FUSEPATCH_NO_SUCH", "1")]:
        monkeypatch.setenv(name, text)
    mlp(x)
    with fusepatch.disabled():
        mlp(x)
    fusepatch.explain(mlp)
    assert fusepatch.status().native_calls() == 0
    monkeypatch.delenv("FUSEPATCH_NO_SUCH")
    monkeypatch.delenv("FUSEPATCH_STRICT")
    fusepatch.accelerate()
    mlp(x)
    assert fusepatch.status().native_calls() == 1


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({}, "cpu"),
        ({BACKEND: "auto"}, "cpu"),
        ({BACKEND: "reference"}, None),
        ({BACKEND: "reference", "FUSEPATCH_GATED_MLP_ROUTE": "fused"}, None),
        ({BACKEND: "reference", "FUSEPATCH_GATED_MLP_ROUTE": "pointwise"}, "route-bound"),
        ({BACKEND: "reference", "FUSEPATCH_GATED_MLP_ROUTE": "original"}, "route-bound"),
    ],
)
def test_effect_on_a_call(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], reason: str | None) -> None:
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    assert reason_of(tiny_llama_mlp()) == reason


# Found: current() reads the global twice; a restore() in another thread between the two makes a forward fail.
def test_current_survives_a_restore_in_between() -> None:
    def forget(frame, event, argument):
        if frame.f_code is settings.current.__code__ and event == "line":
            settings.install(None)
        return forget

    tracer = sys.gettrace()
    settings.install(settings.read())
    sys.settrace(forget)
    try:
        found = settings.current()
    finally:
        sys.settrace(tracer)
    assert isinstance(found, settings.Settings)
