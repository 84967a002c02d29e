"""The pytest plugin, in pytest runs of their own over a small project whose library is found as transformers is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

LIBRARY = '''
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
'''

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

NATIVE = {"FUSEPATCH_GATED_MLP_BACKEND": "reference"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    package = root / "library" / "transformers" / "models" / "tiny"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "modeling_tiny.py").write_text(LIBRARY)
    (root / "test_project.py").write_text(TESTS)
    (root / "pytest.ini").write_text("[pytest]\n")
    return root


def run(
    project: Path, *arguments: str, environ: dict[str, str] | None = None, code: str | None = None
) -> subprocess.CompletedProcess[str]:
    dropped = ("FUSEPATCH", "PYTEST", "PYTHON", "COV")
    clean = {name: text for name, text in os.environ.items() if not name.startswith(dropped)}
    clean |= {"PYTHONPATH": str(project / "library"), "OMP_NUM_THREADS": "1", **(environ or {})}
    command = ["-c", code] if code is not None else ["-m", "pytest"]
    given = [] if code is not None else ["-p", "fusepatch.pytest_plugin", "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, *command, *given, *arguments], cwd=project, env=clean, capture_output=True, text=True
    )


def named(*tests: str) -> list[str]:
    return [f"test_project.py::test_{name}" for name in tests]


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Every line of the plugin's, on either stream."""
    assert "INTERNALERROR" not in done.stdout + done.stderr, done.stdout + done.stderr
    return [line for line in (done.stdout + done.stderr).splitlines() if "fusepatch" in line]


def check(done: subprocess.CompletedProcess[str], code: int, expected: Sequence[str]) -> None:
    assert (done.returncode, lines(done)) == (code, list(expected)), done.stdout + done.stderr


def test_without_the_option_nothing_happens(project: Path) -> None:
    check(run(project, *named("once", "untouched"), environ=NATIVE), 0, [])


def test_counts_and_the_exit_code_of_a_failing_test(project: Path) -> None:
    tests = named("once", "twice", "other_class", "no_tokens", "failing", "patched_at_collection")
    done = run(project, "--fusepatch", "--fusepatch-require-native", *tests, environ=NATIVE)
    check(done, 1, ["fusepatch: 7 native calls; fused 7, original 1; declined: zero-tokens 1"])
    assert "1 failed, 5 passed" in done.stdout


def test_a_class_that_no_shim_serves_is_not_counted(project: Path) -> None:
    done = run(project, "--fusepatch", *named("other_class"), environ=NATIVE)
    check(done, 0, ["fusepatch: 0 native calls; no call of a patched class"])


def test_workers_of_xdist_are_added_up(project: Path) -> None:
    """`once` and `twice` run in different workers; that one worker ran nothing natively fails nobody."""
    tests = named("once", "twice", "no_tokens")
    arguments = ("-n", "2", "--dist", "each", "--fusepatch", "--fusepatch-require-native")
    done = run(project, *arguments, *tests, environ=NATIVE)
    check(done, 0, ["fusepatch: 6 native calls; fused 6, original 2; declined: zero-tokens 2"])


def test_a_worker_that_crashed_is_said_to_be_missing(project: Path) -> None:
    done = run(
        project, "-n", "1", "--fusepatch", "--fusepatch-require-native", *named("crash", "once"), environ=NATIVE
    )
    check(done, 1, ["fusepatch: 1 native calls; fused 1; not counted: 1 crashed workers"])


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["one process", "xdist"])
def test_required_native_calls_that_did_not_come_fail_the_session(project: Path, workers: list[str]) -> None:
    done = run(project, *workers, "--fusepatch", "--fusepatch-require-native", *named("twice"))
    line = "fusepatch: 0 native calls; original 2; declined: cpu 2"
    check(done, 1, ["fusepatch: FAILED, no call ran natively", line])
    assert "1 passed" in done.stdout


def test_no_native_calls_are_no_failure_unless_required(project: Path) -> None:
    check(
        run(project, "--fusepatch", *named("twice")), 0, ["fusepatch: 0 native calls; original 2; declined: cpu 2"]
    )


@pytest.mark.parametrize(("required", "code"), [([], 5), (["--fusepatch-require-native"], 1)])
def test_no_tests_collected(project: Path, required: list[str], code: int) -> None:
    done = run(project, "--fusepatch", *required, "-k", "nothing_of_that_name", environ=NATIVE)
    failed = ["fusepatch: FAILED, no call ran natively"] if required else []
    check(done, code, [*failed, "fusepatch: 0 native calls; no call of a patched class"])


def test_collect_only_requires_nothing(project: Path) -> None:
    done = run(project, "--fusepatch", "--fusepatch-require-native", "--collect-only", *named("once"))
    check(done, 0, ["fusepatch: 0 native calls; no call of a patched class"])


def test_an_op_turned_off_by_the_environment_is_named(project: Path) -> None:
    done = run(project, "--fusepatch", *named("once"), environ={**NATIVE, "FUSEPATCH": "0"})
    assert done.returncode == 0
    assert lines(done)[-1].startswith("fusepatch: 0 native calls; gated_mlp/transformers is off (env-disabled)")


def test_strict_mode_and_a_named_op_require_native_calls(project: Path) -> None:
    """Outside pytest strict mode raises at the end; here the session fails, in words and not by a traceback."""
    done = run(
        project, "--fusepatch", "--fusepatch-ops", "gated_mlp", *named("other_class"), environ={"FUSEPATCH_STRICT": "1"}
    )
    expected = ["fusepatch: FAILED, no call ran natively", "fusepatch: 0 native calls; no call of a patched class"]
    check(done, 1, expected)


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        (["--fusepatch-require-native"], {}, "ERROR: --fusepatch-require-native: only together with --fusepatch"),
        (["--fusepatch-ops", "gated_mlp"], {}, "ERROR: --fusepatch-ops: only together with --fusepatch"),
        (["--fusepatch", "--fusepatch-ops", "nope"], {}, "ERROR: --fusepatch: unknown op 'nope'. Ops: gated_mlp."),
        (["--fusepatch"], {"FUSEPATCH_LOG": "loud"}, "ERROR: --fusepatch: FUSEPATCH_LOG='loud' is not valid"),
    ],
)
def test_wrong_usage(project: Path, arguments: list[str], environ: dict[str, str], message: str) -> None:
    done = run(project, *arguments, environ=environ)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert message in done.stderr
    assert "Traceback" not in done.stderr


IN_PROCESS = """
import sys
import pytest
import fusepatch
from transformers.models.tiny.modeling_tiny import TinyMLP

if "accelerated" in sys.argv:
    fusepatch.accelerate()
before = vars(TinyMLP)["forward"], list(sys.meta_path)
arguments = ["-p", "no:cacheprovider", "-p", "fusepatch.pytest_plugin", "--fusepatch", "test_project.py::test_once"]
assert pytest.main(arguments) == 0
after = vars(TinyMLP)["forward"], [finder for finder in sys.meta_path if "_pytest" not in type(finder).__module__]
assert after == before, (before, after)
print("patched" if hasattr(after[0], "__fusepatch__") else "restored")
"""


@pytest.mark.parametrize(("word", "state"), [("plain", "restored"), ("accelerated", "patched")])
def test_pytest_main_leaves_the_process_as_it_was(project: Path, word: str, state: str) -> None:
    done = run(project, word, code=IN_PROCESS, environ={**NATIVE, "FUSEPATCH_LOG": "off"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == state
    assert "fusepatch: 1 native calls; fused 1" in done.stdout


def test_the_real_library(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text("from transformers.models.llama.modeling_llama import LlamaMLP\n")
    (tmp_path / "test_llama.py").write_text(
        "import torch\n"
        "from conftest import LlamaMLP\n"
        "from transformers import LlamaConfig\n"
        "def test_mlp():\n"
        "    x = torch.ones(1, 2, 8)\n"
        "    assert LlamaMLP(LlamaConfig(hidden_size=8, intermediate_size=12))(x).shape == x.shape\n"
    )
    check(run(tmp_path, "--fusepatch", environ=NATIVE), 0, ["fusepatch: 1 native calls; fused 1"])
