"""transformers' own modelling tests: with Llama and Qwen3 accelerated, every one of them ends as it does without."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from pathlib import Path

import pytest

from upstream import suite, transformers_source

HERE = Path(__file__).parent
STUBS = {
    "__init__.py": "",
    "exporters/__init__.py": "",
    "exporters/test_export.py": "class ExportTesterMixin: pass\n",
    "generation/__init__.py": "",
    "generation/test_utils.py": "class GenerationTesterMixin: pass\n",
}
"""In place of what transformers' modelling tests import and its source distribution leaves out."""
MODELS = "tests/test_models.py"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with transformers' tests, stubs for what they import, and our two models under them."""
    pytest.importorskip("parameterized")
    source = transformers_source.folder()
    if not source.exists():
        missing = f"{source} is missing: python compat_tests/upstream/transformers_source.py fetches it"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    tests = tmp_path / "tests"
    shutil.copytree(source, tests)
    for name, text in STUBS.items():
        (tests / name).parent.mkdir(exist_ok=True)
        (tests / name).write_text(text)
    shutil.copy(HERE / "transformers_models.py", tmp_path / MODELS)
    return tmp_path


# Two runs in a row, on one core: about 8 s each for a selection, 12 to 15 s for everything.
ALL = ""
TRAINING = "training or checkpointing or save_load or equivalence or meta"


@pytest.mark.parametrize(
    ("model", "selection", "passing"),
    [
        pytest.param("Llama", TRAINING, 12, id="Llama-training"),
        pytest.param("Llama", ALL, 90, id="Llama", marks=pytest.mark.slow),
        pytest.param("Qwen3", ALL, 90, id="Qwen3", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("reference_backend")
@pytest.mark.timeout(900)
def test_ends_the_same(project: Path, model: str, selection: str, passing: int) -> None:
    tests = (f"{MODELS}::{model}ModelTest", "-k", selection)
    stock = suite.run(project, *tests)
    assert stock.is_whole(), stock.output
    assert not stock.native
    assert sum(outcome == "passed" for outcome in stock.outcomes.values()) >= passing, stock.output
    patched = suite.run(project, *suite.NATIVE_REQUIRED, *tests)
    assert suite.differences(stock, patched) == [], patched.output
    assert patched.status == stock.status, patched.output
    assert patched.native > 400, patched.output


@pytest.mark.slow
@pytest.mark.usefixtures("reference_backend")
def test_a_wrong_kernel_fails_it(project: Path) -> None:
    """That the right one passes this test is part of the above."""
    test = "test_training_overfit"
    wrong = suite.run(project, *suite.NATIVE_REQUIRED, "-p", "upstream.wrong_op", f"{MODELS}::LlamaModelTest::{test}")
    assert wrong.failed() == [f"tests.test_models.LlamaModelTest::{test}"], wrong.output
    assert wrong.native > 400, wrong.output


# ------------------------------------------------------------------------------------------------------- fetching


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What pip would download, made here, with a cache of the test's own."""
    monkeypatch.setattr(transformers_source, "CACHE", tmp_path / "cache")
    path = tmp_path / "transformers-9.9.tar.gz"
    _write(path, transformers_source.WANTED)
    monkeypatch.setattr(transformers_source, "_download", lambda to: path)
    return path


def _write(path: Path, names: tuple[str, ...]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name in names:
            text = name.encode()
            member = tarfile.TarInfo(f"transformers-9.9/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))


def test_fetched_once(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert transformers_source.main() == 0
    assert capsys.readouterr().out.endswith("done\n")
    found = {path.name: path.read_text() for path in transformers_source.folder().iterdir()}
    assert found == {Path(name).name: name for name in transformers_source.WANTED}
    assert list(transformers_source.CACHE.iterdir()) == [transformers_source.folder()]
    archive.unlink()
    assert transformers_source.main() == 0
    assert capsys.readouterr().out == ""


def test_what_can_not_be_fetched_is_said_and_leaves_nothing(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(archive, transformers_source.WANTED[1:])
    assert transformers_source.main() == 0
    assert f"holds no {transformers_source.WANTED[0]}" in capsys.readouterr().out
    archive.write_text("no archive")
    assert transformers_source.main() == 0
    assert "failed" in capsys.readouterr().out
    assert list(transformers_source.CACHE.iterdir()) == []


def test_pip_that_fails_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pip")
    monkeypatch.setattr(transformers_source, "CACHE", tmp_path / "cache")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    assert transformers_source.main() == 0
    assert "No matching distribution found for transformers" in capsys.readouterr().out
