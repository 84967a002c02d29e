"""`fusepatch tune` on a real GPU: what it measures is what then serves, and a fresh process follows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusepatch import settings

pytestmark = pytest.mark.gpu

CHOICES = settings.OPS["gated_mlp"].choices

PACKAGE_ROOT = str(Path(__file__).parents[2] / "accelerate")

ROUTES = """
import json, sys, torch, transformers
import fusepatch
model = transformers.AutoModelForCausalLM.from_config(
    transformers.AutoConfig.from_pretrained(sys.argv[1]), dtype=torch.bfloat16
).cuda()
fusepatch.accelerate()
mlp = model.model.layers[0].mlp
for tokens in map(int, sys.argv[2:]):
    x = torch.randn(tokens, mlp.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    before = fusepatch.status().targets[0].total("calls")
    mlp(x).sum().backward()
    after = fusepatch.status().targets[0].total("calls")
    print(tokens, *(route for route in after if after[route] != before.get(route, 0)))
notes = sorted(note.partition(":")[0] for each in fusepatch.status().targets[0].classes for note in each.notes)
print("choices", *(note for note in notes if "/" in note))
"""


@pytest.mark.timeout(900)  # each of its four processes checks, compiles or loads several backends
def test_the_profile_is_followed(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=2, num_attention_heads=16, vocab_size=128
    )
    config.architectures, config.dtype = ["LlamaForCausalLM"], "bfloat16"
    config.save_pretrained(tmp_path / "model")
    environ = {
        **{name: text for name, text in os.environ.items() if not name.startswith("FUSEPATCH")},
        "FUSEPATCH_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(filter(None, (PACKAGE_ROOT, os.environ.get("PYTHONPATH")))),
    }

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *arguments], env=environ, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        return done

    tune = ("-m", "fusepatch", "tune", str(tmp_path / "model"), "--json", "--tokens", "64", "8192")
    first = json.loads(python(*tune).stdout)
    assert (first["new"], first["left"]) == (2, 0)
    again = json.loads(python(*tune).stdout)
    assert (again["new"], again["measured"]) == (0, first["measured"])
    print(json.dumps(first["measured"], indent=1))
    routes = {None: "original", "triton": "pointwise"}
    expected = [f"{each['tokens']} {routes.get(each['backend'], 'fused')}" for each in first["measured"]]
    expected.append(" ".join(["choices", *sorted({each["backend"] for each in first["measured"]} & set(CHOICES))]))
    done = python("-c", ROUTES, str(tmp_path / "model"), "64", "8192")
    assert done.stdout.splitlines() == expected
    assert f"made for {torch.cuda.get_device_name()}" in done.stderr

    # A profile of another driver is not followed, and that is said.
    (path,) = (tmp_path / "cache" / "profiles").glob("*.json")
    stored = json.loads(path.read_text())
    stored["identity"]["driver"] = "1.2.3"
    path.write_text(json.dumps(stored))
    done = python("-c", ROUTES, str(tmp_path / "model"), "64")
    assert "is ignored, since it was made with driver 1.2.3" in done.stderr
