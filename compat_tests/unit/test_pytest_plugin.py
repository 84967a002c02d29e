"""The pytest plugin, in pytest runs of their own over a small project whose library is found as transformers is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

LIBRARY = """
from torch import nn

class TinyMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.down_proj, self.act_fn = nn.Linear(12, 8, bias=False), nn.SiLU()

    def forward(self, x):
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj

class OtherMLP(TinyMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=1) * self.up_proj(x))
"""

TESTS = """
import sys
import pytest
import torch
from transformers.models.tiny.modeling_tiny import OtherMLP, TinyMLP

FORWARD = TinyMLP.forward  # as it was when this file was collected

def call(times):
    for _ in range(times):
        TinyMLP()(torch.ones(2, 8))

def test_once(): call(1)
def test_twice(): call(2)
def test_other_class(): OtherMLP()(torch.ones(2, 8))
def test_no_tokens(): TinyMLP()(torch.ones(0, 8))
def test_failing(): call(4); assert False, "as it should"
def test_crash(): import os; os._exit(1)
def test_patched_at_collection(): assert hasattr(FORWARD, "__fusepatch__")
def test_untouched():
    assert not hasattr(FORWARD, "__fusepatch__")
    assert "fusepatch.entry" not in sys.modules
"""

# Every run below is a process of its own, forked off one that has imported torch and nothing else of interest.
DRIVER = """
import json, os, runpy, sys, traceback
import torch

results = []
for arguments, environ in json.load(sys.stdin):
    read, write = os.pipe()
    if not os.fork():
        for stream in (1, 2):
            os.dup2(write, stream)
        os.closerange(3, 64)
        os.environ.update(environ)
        sys.argv = ["pytest", "-p", "no:cacheprovider", *arguments]
        try:
            runpy.run_module("pytest", run_name="__main__", alter_sys=True)
        except SystemExit as done:
            sys.stdout.flush()
            os._exit(done.code)
        except BaseException:
            traceback.print_exc()
        os._exit(99)
    os.close(write)
    with open(read) as output:
        text = output.read()
    results.append([os.waitstatus_to_exitcode(os.wait()[1]), text])
print(json.dumps(results))
"""

NATIVE = (("FUSEPATCH_GATED_MLP_BACKEND", "reference"),)
ON = ("-p", "fusepatch.pytest_plugin", "--fusepatch")
REQUIRED = (*ON, "--fusepatch-require-native")
FAILED = "fusepatch: FAILED, no call ran natively"
OFF = "off (env-disabled)"
NO_CALL = "fusepatch: 0 native calls; no call of a patched class"


def named(*tests: str) -> tuple[str, ...]:
    return tuple(f"test_project.py::test_{name}" for name in tests)


@dataclass(frozen=True)
class Case:
    """What pytest is run with, the exit code, and the lines in which the plugin speaks."""

    arguments: tuple[str, ...]
    code: int
    lines: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = NATIVE
    says: str = ""
    """What else is in the output."""


CASES = {
    "without the option nothing happens": Case(
        ("-p", "fusepatch.pytest_plugin", *named("once", "untouched")), 0, says="2 passed"
    ),
    "counts, and the exit code of a failing test": Case(
        (*REQUIRED, *named("once", "twice", "other_class", "no_tokens", "failing", "patched_at_collection")),
        1,
        ("fusepatch: 7 native calls; fused 7, original 1; declined: zero-tokens 1",),
        says="1 failed, 5 passed",
    ),
    "a class that no shim serves is not counted": Case((*ON, *named("other_class")), 0, (NO_CALL,)),
    # One file for each worker.
    "the workers of xdist are added up": Case(
        ("-n", "2", "--dist", "loadfile", *REQUIRED, *named("once", "no_tokens"), "test_other.py"),
        0,
        ("fusepatch: 3 native calls; fused 3, original 1; declined: zero-tokens 1",),
        says="3 passed",
    ),
    "xdist, a worker crashed, and the rest ran nothing natively": Case(
        ("-n", "1", *REQUIRED, *named("crash", "twice")),
        1,
        (FAILED, "fusepatch: 0 native calls; original 2; declined: cpu 2; not counted: 1 crashed workers"),
        environ=(),
        says="1 failed, 1 passed",
    ),
    "required native calls that did not come fail the session": Case(
        (*REQUIRED, *named("twice")),
        1,
        (FAILED, "fusepatch: 0 native calls; original 2; declined: cpu 2"),
        environ=(),
        says="1 passed",
    ),
    "no native calls are no failure unless required": Case(
        (*ON, *named("twice")), 0, ("fusepatch: 0 native calls; original 2; declined: cpu 2",), environ=()
    ),
    "no tests collected": Case((*ON, "-k", "nothing_of_that_name"), 5, (NO_CALL,)),
    "no tests collected, native calls required": Case(
        (*REQUIRED, "-k", "nothing_of_that_name"), 1, (FAILED, NO_CALL)
    ),
    "an interrupted session keeps its exit code": Case(
        (*REQUIRED, "no_such_file.py"), 4, (FAILED, NO_CALL), says="file or directory not found"
    ),
    "collecting only requires nothing": Case((*REQUIRED, "--collect-only", *named("once")), 0, (NO_CALL,)),
    "an op that is turned off is named": Case(
        (*ON, *named("once")),
        0,
        (f"fusepatch: 0 native calls; gated_mlp/transformers is {OFF}, gated_mlp/fla is {OFF}",),
        environ=(("FUSEPATCH", "0"),),
    ),
    # Elsewhere strict mode raises at the end; here the session fails, in words.
    "strict mode and a named op require native calls": Case(
        (*ON, "--fusepatch-ops", "gated_mlp", *named("other_class")),
        1,
        (FAILED, NO_CALL),
        environ=(("FUSEPATCH_STRICT", "1"),),
    ),
    "require-native alone": Case(
        ("-p", "fusepatch.pytest_plugin", "--fusepatch-require-native"),
        4,
        ("ERROR: --fusepatch-require-native: only together with --fusepatch",),
    ),
    "ops alone": Case(
        ("-p", "fusepatch.pytest_plugin", "--fusepatch-ops", "gated_mlp"),
        4,
        ("ERROR: --fusepatch-ops: only together with --fusepatch",),
    ),
    "an unknown op": Case(
        (*ON, "--fusepatch-ops", "gated_mlp,nope"),
        4,
        ("ERROR: --fusepatch: unknown op 'nope'. Ops: gated_mlp, engram_gate, kda, gated_delta_rule.",),
    ),
    "a value that a variable does not take": Case(
        (*ON, *named("once")),
        4,
        ("ERROR: --fusepatch: FUSEPATCH_LOG='loud' is not valid: it takes off, warning, info, debug.",),
        environ=(("FUSEPATCH_LOG", "loud"),),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    package = root / "library" / "transformers" / "models" / "tiny"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "modeling_tiny.py").write_text(LIBRARY)
    (root / "test_project.py").write_text(TESTS)
    (root / "test_other.py").write_text("from test_project import test_twice\n")
    (root / "pytest.ini").write_text("[pytest]\n")
    return root


def run_python(project: Path, *arguments: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    dropped = ("FUSEPATCH", "PYTEST", "PYTHON", "COV")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(dropped)}
    kept |= {"PYTHONPATH": str(project / "library"), "OMP_NUM_THREADS": "1", **environ}
    return subprocess.run(
        [sys.executable, *arguments], cwd=project, env=kept, input=stdin, capture_output=True, text=True, timeout=240
    )


@pytest.fixture(scope="module")
def results(project: Path) -> dict[str, tuple[int, str]]:
    """Exit code and output of each case."""
    cases = json.dumps([(case.arguments, dict(case.environ)) for case in CASES.values()])
    done = run_python(project, "-c", DRIVER, stdin=cases)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: (code, text) for name, (code, text) in zip(CASES, found, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_a_run_of_pytest(results: dict[str, tuple[int, str]], name: str) -> None:
    case, (code, output) = CASES[name], results[name]
    output = output.replace(sys.prefix, "PREFIX")  # which may lie in a folder of that name
    lines = [line for line in output.splitlines() if "fusepatch" in line]
    assert (code, lines) == (case.code, list(case.lines)), output
    assert case.says in output
    assert "Traceback" not in output


IN_PROCESS = """
import sys
import pytest
import fusepatch
from transformers.models.tiny.modeling_tiny import TinyMLP

def state():
    finders = [finder if isinstance(finder, type) else type(finder) for finder in sys.meta_path]
    return vars(TinyMLP)["forward"], [kind for kind in finders if "_pytest" not in kind.__module__]

for accelerated in (False, True):
    if accelerated:
        fusepatch.accelerate()
    before = state()
    assert hasattr(before[0], "__fusepatch__") is accelerated
    arguments = ["-p", "no:cacheprovider", "-p", "fusepatch.pytest_plugin", "--fusepatch", "test_project.py::test_once"]
    assert pytest.main(arguments) == 0
    assert state() == before
"""


def test_pytest_main_leaves_the_process_as_it_was(project: Path) -> None:
    done = run_python(project, "-c", IN_PROCESS, FUSEPATCH_LOG="off", **dict(NATIVE))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("fusepatch: 1 native calls; fused 1\n") == 2


def test_the_real_library_by_the_real_command(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text("from transformers.models.llama.modeling_llama import LlamaMLP\n")
    (tmp_path / "test_llama.py").write_text(
        "import torch\n"
        "from conftest import LlamaMLP\n"
        "from transformers import LlamaConfig\n"
        "def test_mlp():\n"
        "    x = torch.ones(1, 2, 32)\n"
        "    assert LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=12))(x).shape == x.shape\n"
    )
    done = run_python(tmp_path, "-m", "pytest", *REQUIRED, **dict(NATIVE))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nfusepatch: 1 native calls; fused 1\n" in done.stdout
    assert "fusepatch" not in done.stderr
