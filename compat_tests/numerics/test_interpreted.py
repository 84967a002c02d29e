"""Runs the `interpreted_*.py` beside this file in a process of its own: Triton reads TRITON_INTERPRET when imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("path", sorted(FOLDER.glob("interpreted_*.py")), ids=lambda path: path.stem)
def test_under_the_interpreter(path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(command, cwd=FOLDER.parent.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed.group(1)) > 50
