"""A training step of a KDA language model, under each arm in a process of its own."""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fusepatch

from . import linear_arms, results
from .linear_attention import BENCHMARK
from .linear_cases import OPS, WIDTH
from .results import Figure


@dataclass(frozen=True)
class Model:
    """A KDA language model, and one step of it."""

    layers: int = 12
    hidden: int = 2048
    batch: int = 4
    tokens: int = 2048
    vocabulary: int = 32000
    steps: int = 10


def run_model(model: Model, save_to: Path | None, seconds: float = 540.0) -> list[Figure]:
    """A training step of a KDA language model under each arm, in a process of its own: the first step, with all that
    is compiled and tuned in it, and the steps after."""
    found = []
    for arm in linear_arms.select(None, OPS["kda"]):
        command = [sys.executable, "-m", "benchmarks.linear_model", arm.name, json.dumps(vars(model))]
        print(f"{arm.name}: a model in a process of its own", flush=True)
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds, cwd=Path(__file__).parent.parent
            )
        except subprocess.TimeoutExpired:
            print(f"  not done within {seconds:.0f} s", flush=True)
            continue
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            print("  failed: " + "\n".join(done.stderr.strip().splitlines()[-5:]), flush=True)
            continue
        told = json.loads(lines[-1])
        print(f"  {told}", flush=True)
        case = f"kda_lm_{model.layers}_layers_H{model.hidden}_B{model.batch}_T{model.tokens}"
        for metric, unit, samples in (("first_step", "s", [told["first_s"]]), ("time", "ms", told["step_ms"])):
            found.append(
                Figure(BENCHMARK, case, "train", arm.name, metric, unit, *results.summary(samples), len(samples))
            )
    if save_to is not None and found:
        results.append(found, save_to)
    return found


def _model_child(arm_name: str, model: Model) -> dict[str, Any]:
    (arm,) = linear_arms.select([arm_name], OPS["kda"])
    kda = importlib.import_module("fla.models.kda")
    torch.manual_seed(0)
    config = kda.KDAConfig(
        hidden_size=model.hidden, num_hidden_layers=model.layers, num_heads=model.hidden // WIDTH, head_dim=WIDTH,
        vocab_size=model.vocabulary, safe_gate=True, lower_bound=-5.0,
    )  # fmt: skip
    net = kda.KDAForCausalLM(config).to("cuda", torch.bfloat16).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, model.vocabulary, (model.batch, model.tokens), device="cuda")
    took, losses = [], []
    with arm.context(OPS["kda"], "cuda"):
        for _ in range(1 + model.steps):
            torch.cuda.synchronize()
            began = time.perf_counter()
            loss = net(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            took.append(time.perf_counter() - began)
            losses.append(float(loss))
        routes = fusepatch.status().summary()
    step_ms = [1e3 * each for each in took[1:]]
    return {
        "first_s": took[0], "step_ms": step_ms, "median_ms": statistics.median(step_ms), "losses": losses[:3],
        "routes": routes,
    }  # fmt: skip


def main() -> None:
    """One arm's model, in a process of its own."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("arm")
    parser.add_argument("model", type=json.loads)
    given = parser.parse_args()
    print(json.dumps(_model_child(given.arm, Model(**given.model))), flush=True)


if __name__ == "__main__":
    main()
