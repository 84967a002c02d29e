"""What a patched gated MLP costs on the host: the decision alone, and all that our forward adds to the library's.

    python -m benchmarks.host_decide [--save]

The promise is 10 microseconds for the whole decision. Needs transformers and peft; no GPU.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

os.environ.setdefault("FUSEPATCH_GATED_MLP_BACKEND", "reference")

import peft
import torch
import transformers
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaConfig, GemmaMLP
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3Config, Phi3MLP

import fusepatch
from benchmarks.results import Figure, append, summary
from fusepatch import catalogue, table
from fusepatch.shims import gated_mlp, hf_gated_mlp

BATCHES, CALLS = 60, 500
_SMALL = {"hidden_size": 64, "intermediate_size": 128}


def _lora() -> nn.Module:
    holder = nn.ModuleDict({"mlp": LlamaMLP(LlamaConfig(**_SMALL))})
    return peft.get_peft_model(holder, peft.LoraConfig(target_modules=["gate_proj", "up_proj"])).base_model.model["mlp"]


CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "LlamaMLP": (lambda: LlamaMLP(LlamaConfig(**_SMALL)), "fused"),
    "GemmaMLP": (lambda: GemmaMLP(GemmaConfig(**_SMALL)), "fused"),
    "Phi3MLP": (lambda: Phi3MLP(Phi3Config(**_SMALL, pad_token_id=0)), "fused"),
    "LlamaMLP_bias": (lambda: LlamaMLP(LlamaConfig(**_SMALL, mlp_bias=True)), "pointwise"),
    "LlamaMLP_lora": (_lora, "pointwise"),
}


def _samples(call: Callable[[], object]) -> list[float]:
    """Microseconds per call, one sample per batch of calls."""
    found = []
    for _ in range(BATCHES + 5):
        start = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter_ns() - start) / CALLS / 1000)
    return found[5:]


def _decide(module: nn.Module, x: Tensor) -> Callable[[], object]:
    owner = catalogue.owner_of(type(module))
    assert owner is not None
    template = hf_gated_mlp.template_of(catalogue.forward_of(owner))
    assert template is not None
    return lambda: gated_mlp.decide(template.layout, module, x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="append the rows to benchmarks/results/")
    save = parser.parse_args().save
    torch.set_num_threads(1)
    fusepatch.accelerate("gated_mlp")
    figures = []
    for case, (build, route) in CASES.items():
        module, x = build().bfloat16(), torch.randn(1, 32, 64, dtype=torch.bfloat16)
        verdict = _decide(module, x)()
        assert isinstance(verdict, gated_mlp.Verdict)
        assert verdict.decision.route.value == route, (case, verdict.decision)
        for dtype in (None, torch.bfloat16):
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                samples = _samples(_decide(module, x))
            name = case if dtype is None else f"{case}_autocast"
            figures.append(Figure("gated_mlp", name, "host", "fusepatch", "decide", "us", *summary(samples), BATCHES))
        with fusepatch.disabled():
            off = _samples(lambda module=module, x=x: module.forward(x))
        forward = type(module).forward.__wrapped__
        plain = _samples(lambda module=module, x=x, forward=forward: forward(module, x))
        for arm, samples in (("eager", plain), ("fusepatch_disabled", off)):
            figures.append(Figure("gated_mlp", case, "host", arm, "forward", "us", *summary(samples), BATCHES))
    if save:
        for path in append(figures):
            print(f"appended to {path}")
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, microseconds per call")
    rows = [(f.case, f.arm, f.metric, f"{f.p20:.2f}", f"{f.p50:.2f}", f"{f.p80:.2f}") for f in figures]
    print(table.render(("case", "arm", "metric", "p20", "p50", "p80"), rows))


if __name__ == "__main__":
    main()
