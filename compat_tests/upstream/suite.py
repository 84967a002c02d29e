"""Runs another project's tests, as they are and accelerated, and says where the outcomes differ."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ACCELERATED = ("-p", "fusepatch.pytest_plugin", "--fusepatch")
NATIVE_REQUIRED = (*ACCELERATED, "--fusepatch-require-native")
_OUR_TESTS = Path(__file__).resolve().parents[1]
_SUMMARY = re.compile(r"^fusepatch: (\d+) native calls", re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """What one run of pytest found."""

    outcomes: Mapping[str, str]
    """By test: `passed`, or what pytest reported instead, once for each subtest that it reported."""
    native: int
    """Calls that a route of ours served."""
    status: int
    output: str

    def failed(self) -> list[str]:
        """Tests that failed, at the set-up, in a subtest or at the end too."""
        return [name for name, outcome in self.outcomes.items() if "failure" in outcome or "error" in outcome]

    def count(self) -> str:
        """The counts in words."""
        failed = len(self.failed())
        passed = sum(outcome == "passed" for outcome in self.outcomes.values())
        return f"{passed} passed, {failed} failed, {len(self.outcomes) - passed - failed} skipped"

    def is_whole(self) -> bool:
        """Whether pytest came to its end: a crash or a usage error has another status."""
        return self.status in (0, 1) and bool(self.outcomes)


def run(folder: Path, *arguments: str, timeout: float | None = None) -> Run:
    """Runs pytest in `folder` with `arguments`, in a process with the same random numbers each time."""
    dropped = ("PYTEST", "COV_")  # of the pytest that we may run in
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    # What is relative here would be looked for in `folder`.
    given = [os.path.abspath(path) for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    path = os.pathsep.join((str(_OUR_TESTS), *given))
    environment |= {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.xml"
        # No configuration file: one in a folder above, ours perhaps, is not meant for these tests.
        fixed = ("-c", os.devnull, "--rootdir", str(folder), "-p", "no:cacheprovider", "-p", "upstream.seeded")
        shown = ("-q", "-rfE", "--tb=short", "--disable-warnings", f"--junitxml={report}")
        # On past a file that can't be imported: it is one more outcome to compare.
        command = (sys.executable, "-m", "pytest", *fixed, *shown, "--continue-on-collection-errors", *arguments)
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        outcomes = read(report.read_text()) if report.exists() else {}
    native = _SUMMARY.search(done.stdout)
    return Run(outcomes, int(native[1]) if native else 0, done.returncode, done.stdout)


def read(report: str) -> dict[str, str]:
    """The outcome of each test in a report in JUnit's format."""
    found: dict[str, list[str]] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        tags = [tag.tag for tag in case if tag.tag in ("failure", "error", "skipped")]
        # A test that fails and whose clean-up fails too is reported twice.
        found.setdefault(f"{case.get('classname')}::{case.get('name')}", []).extend(tags)
    return {name: ", ".join(sorted(tags)) or "passed" for name, tags in found.items()}


def differences(stock: Run, patched: Run) -> list[str]:
    """A line for each test whose outcome is not the same in both."""
    names = dict.fromkeys((*stock.outcomes, *patched.outcomes))
    pairs = {name: (stock.outcomes.get(name, "not run"), patched.outcomes.get(name, "not run")) for name in names}
    return [f"{name}: unpatched {one}; patched {two}" for name, (one, two) in pairs.items() if one != two]
