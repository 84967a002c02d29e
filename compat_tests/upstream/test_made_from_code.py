"""The documentation that is made from code is up to date, the list of matching classes of transformers among it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import transformers

ROOT = Path(__file__).parents[2]


def test_generated_documents_are_up_to_date() -> None:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("FUSEPATCH")}
    command = [sys.executable, "docs/generate.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\nrun python docs/generate.py, and read the difference"


def test_the_expected_families_match() -> None:
    listed = (ROOT / "docs" / "matches" / f"transformers-{transformers.__version__}.txt").read_text()
    for name in ("llama.modeling_llama.LlamaMLP", "phi3.modeling_phi3.Phi3MLP", "lfm2.modeling_lfm2.Lfm2MLP"):
        assert f"\n{name}\n" in listed
    assert len(listed.splitlines()) - 1 == {"5.24.0": 164, "5.17.0": 138}[transformers.__version__]
