"""`import fusepatch` needs torch alone and imports nothing else; every file is of the oldest Python's syntax."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    path for folder in ("accelerate/fusepatch", "shims", "kernels", "scripts") for path in (ROOT / folder).rglob("*.py")
]


# -------------------------------------------------------------------------------------------------- torch alone


def _run(environment, code: str, repository: Path) -> str:
    result = environment.run(environment.python, "-W", "always", "-c", code, cwd=repository)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_torch_alone_is_alone(torch_alone, repository) -> None:
    found = _run(
        torch_alone,
        "import importlib.metadata, importlib.util\n"
        "from_torch = {text.split()[0].partition('=')[0] for text in importlib.metadata.requires('torch') or ()}\n"
        "absent = {'transformers', 'fla', 'triton', 'cutlass', 'rich', 'numpy', 'huggingface_hub'}\n"
        "for name in absent - (from_torch & {'triton'}):  # a CUDA build of torch brings triton itself\n"
        "    assert importlib.util.find_spec(name) is None, name\n"
        "print(*sorted(d.metadata['Name'] for d in importlib.metadata.distributions()))",
        repository,
    )
    assert "torch" in found.split()


def test_op_works_with_torch_alone(torch_alone, repository) -> None:
    _run(
        torch_alone,
        "import torch, fusepatch\n"
        "from torch.nn import functional as F\n"
        "x, gate, up, down = (torch.randn(s, requires_grad=True) for s in ((5, 8), (12, 8), (12, 8), (8, 12)))\n"
        "def grads(out):\n"
        "    return [out, *torch.autograd.grad(out.sum(), (x, gate, up, down))]\n"
        "ours = grads(fusepatch.ops.gated_mlp(x, gate, up, down))\n"
        "stock = grads(F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down))\n"
        "torch.testing.assert_close(ours, stock)\n",
        repository,
    )


def test_accelerate_with_torch_alone(torch_alone, repository) -> None:
    """Nothing to patch: a warning; an error where an op was asked for by name."""
    _run(
        torch_alone,
        "import warnings, fusepatch\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    fusepatch.accelerate()\n"
        "(message,) = [str(w.message) for w in caught if 'gated_mlp' in str(w.message)]\n"
        "assert 'nothing to patch' in message and 'pip install transformers' in message, message\n"
        "assert fusepatch.status().native_calls() == 0\n"
        "fusepatch.restore()\n"
        "try:\n"
        "    fusepatch.accelerate('gated_mlp')\n"
        "except ImportError as error:\n"
        "    assert 'pip install transformers' in str(error), error\n"
        "else:\n"
        "    raise SystemExit('no error')\n",
        repository,
    )


# ---------------------------------------------------------------------------------------------- nothing else imported


@pytest.mark.parametrize(
    "use", ["import fusepatch", "import fusepatch; fusepatch.accelerate; fusepatch.ops; fusepatch.status()"]
)
def test_import_loads_nothing_but_torch(use: str) -> None:
    """With every library installed: beyond what torch itself loads come the standard library and our own modules."""
    code = (
        "import json, sys, torch\n"
        "before = set(sys.modules)\n"
        f"{use}\n"
        "print(json.dumps([sorted(set(sys.modules) - before), torch.cuda.is_initialized(), sorted(sys.modules)]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    new, cuda_started, loaded = json.loads(result.stdout)
    assert {name.split(".")[0] for name in new} <= {"fusepatch", "torch", *sys.stdlib_module_names}
    assert "fusepatch" in new
    assert not cuda_started
    forbidden = {
        "transformers",
        "fla",
        "triton",
        "cutlass",
        "cudnn",
        "rich",
        "accelerate",
        "kernels",
        "huggingface_hub",
    }
    assert not forbidden & set(loaded)


# -------------------------------------------------------------------------------------------------- Python versions


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_syntax_of_the_oldest_python(path: Path) -> None:
    ast.parse(path.read_text(), str(path), feature_version=(3, 10))


def _interpreter(version: str) -> str | None:
    """A Python of this version, on the path or where pyenv keeps it."""
    kept = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"))
    for candidate in (shutil.which(f"python{version}"), *map(str, kept)):
        if candidate is not None:
            code = "import sys; print('%d.%d' % sys.version_info[:2])"
            said = subprocess.run([candidate, "-c", code], capture_output=True, text=True).stdout.strip()
            if said == version:  # pyenv's stand-ins on the path exist for versions that are not chosen
                return candidate
    return None


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_compiles(version: str, tmp_path: Path) -> None:
    python = _interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    code = (
        "import sys\n"
        "for name in sys.argv[1:]:\n"
        "    with open(name, encoding='utf-8') as file:\n"
        "        compile(file.read(), name, 'exec')\n"
    )
    command = [python, "-I", "-W", "error", "-c", code, *map(str, SOURCES)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
