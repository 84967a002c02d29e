"""Wherever Python is started from the repository root, its folders accelerate/, shims/ and kernels/ shadow no library.

Each test starts Python in one of the ways that put the root on `sys.path`, or install the package, and runs probe.py:
with Hugging Face's accelerate and kernels installed, and without.
"""

from __future__ import annotations

import sys

import pytest


def _with_hf(fast: list[tuple[str, ...]], slow: list[tuple[str, ...]]) -> pytest.MarkDecorator:
    """Parametrises `present`: which of Hugging Face's packages are installed."""
    params = [
        pytest.param(present, id="hf-" + ("+".join(present) or "neither"), marks=[pytest.mark.slow] * (present in slow))
        for present in (*fast, *slow)
    ]
    return pytest.mark.parametrize("present", params, indirect=True)


BOTH, NEITHER = ("accelerate", "kernels"), ()
EACH = _with_hf([BOTH, NEITHER], slow=[("accelerate",), ("kernels",)])
BOTH_OR_NEITHER = _with_hf([BOTH], slow=[NEITHER])


# ------------------------------------------------------------------------------------------ ways to start Python


@EACH
def test_command(environment, repository) -> None:
    environment.probe(environment.python, "-c", "import probe; probe.check()", root=repository)


@BOTH_OR_NEITHER
def test_module(environment, repository) -> None:
    environment.probe(environment.python, "-m", "probe", root=repository)


@BOTH_OR_NEITHER
def test_script_with_spawned_children(environment, own_repository, repository) -> None:
    (own_repository / "spawns.py").write_text(
        "import multiprocessing\n"
        "import probe\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        child = pool.apply_async(probe.check)\n"
        "        probe.check()\n"
        "        child.get(200)\n"
    )
    options = {"root": own_repository, "fusepatch": repository / "accelerate", "times": 2}
    environment.probe(environment.python, "spawns.py", **options)


@BOTH_OR_NEITHER
def test_notebook(environment, own_repository, repository) -> None:
    (own_repository / "run_notebook.py").write_text(
        "import nbclient, nbformat\n"
        "notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell('import probe; probe.check()')])\n"
        "client = nbclient.NotebookClient(notebook, timeout=200, kernel_name='python3')\n"
        "client.execute(cwd='.')\n"
        "print(notebook.cells[0].outputs)\n"
    )
    options = {"root": own_repository, "fusepatch": repository / "accelerate"}
    environment.probe(environment.python, "run_notebook.py", **options)


# ---------------------------------------------------------------------------------------------------- under pytest


_TEST = "import probe\n\n\ndef test_probe():\n    probe.check()\n"
_PREPEND = "[pytest]\n"
_IMPORTLIB = "[pytest]\naddopts = --import-mode=importlib\n"

_SET_UPS = {
    # The test file lies in the root, and pytest puts its folder first on the path.
    "prepend": (_PREPEND, ["pytest", "test_probe.py"], {"test_probe.py": _TEST}, True),
    # The path stays as it is, and has no root on it: the probe is reached by the path of its file.
    "importlib": (
        _IMPORTLIB,
        ["pytest", "checks/test_probe.py"],
        {"checks/test_probe.py": "import runpy\n\n\ndef test_probe():\n    runpy.run_path('probe.py')['check']()\n"},
        False,
    ),
    # `python -m` puts the working folder on the path, whatever pytest does.
    "python -m": (
        _IMPORTLIB,
        ["python", "-m", "pytest", "checks/test_probe.py"],
        {"checks/test_probe.py": _TEST},
        True,
    ),
    # A conftest.py in the root brings the root with it.
    "conftest": (
        _PREPEND,
        ["pytest", "checks/test_probe.py"],
        {"checks/test_probe.py": _TEST, "conftest.py": "import transformers, fusepatch\n"},
        True,
    ),
}


@BOTH_OR_NEITHER
@pytest.mark.parametrize("set_up", _SET_UPS)
def test_pytest(environment, own_repository, repository, set_up: str) -> None:
    settings, (name, *arguments), files, on_path = _SET_UPS[set_up]
    (own_repository / "checks").mkdir()
    for path, text in {**files, "pytest.ini": settings}.items():
        (own_repository / path).write_text(text)
    command = [environment.prefix / "bin" / name, *arguments, "-s", "-p", "no:cacheprovider"]
    environment.probe(*command, root=own_repository, fusepatch=repository / "accelerate", on_path=on_path)


# --------------------------------------------------------------------------------------------- ways to be installed


@BOTH_OR_NEITHER
def test_pythonpath_alone(bare, repository) -> None:
    bare.probe(bare.python, "-c", "import probe; probe.check()", root=repository, PYTHONPATH="accelerate")


@BOTH_OR_NEITHER
def test_editable_install(fresh, own_repository) -> None:
    pip = [sys.executable, "-m", "pip", "--python", fresh.python, "install", "--no-deps", "--no-index"]
    result = fresh.run(*pip, "--no-build-isolation", "--editable", ".", cwd=own_repository)
    assert result.returncode == 0, result.stdout + result.stderr
    fresh.probe(fresh.python, "-c", "import probe; probe.check()", root=own_repository)


@BOTH_OR_NEITHER
def test_wheel(bare, repository, built, tmp_path) -> None:
    (wheel,) = built.glob("wheel/*.whl")
    target = tmp_path.resolve() / "target"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", target, wheel]
    result = bare.run(*pip, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    command = [bare.python, "-c", "import probe; probe.check()"]
    bare.probe(*command, root=repository, fusepatch=target, PYTHONPATH=str(target))


# --------------------------------------------------------------------------------------- would these tests notice?


@EACH
@pytest.mark.parametrize("folder", ["accelerate", "kernels"])
def test_regular_package_in_the_root_is_noticed(environment, own_repository, repository, folder: str) -> None:
    (own_repository / folder / "__init__.py").touch()
    command = [environment.python, "-c", "import probe; probe.check()"]
    result = environment.try_probe(*command, root=own_repository, fusepatch=repository / "accelerate")
    assert result.returncode != 0
    assert "probe passed" not in result.stdout
    if folder in environment.present:  # transformers itself breaks: it imports what it needs from our folder
        assert f"from {folder}" in result.stderr, result.stderr
