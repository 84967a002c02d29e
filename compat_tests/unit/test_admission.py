"""What the fused route of the gated MLP is admitted for on an H200 stands in the measurements that are kept."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from fusepatch.kernels.gated_mlp import choose

_ROWS = Path(__file__).parents[2] / "benchmarks" / "results" / "NVIDIA-H200" / "gated_mlp.csv"
Widths = Mapping[tuple[int, int], int]


def admitted() -> Iterator[tuple[str, str, str]]:
    """A case of the benchmark, our arm there, and the one that it must have been ahead of."""
    kinds: dict[tuple[torch.dtype, str], Widths] = {(torch.bfloat16, "silu"): choose._FUSED_WINS, **choose._ALSO_WINS}
    suffixes = {
        (torch.bfloat16, "silu"): "",
        (torch.float16, "silu"): "_fp16",
        (torch.bfloat16, "gelu_tanh"): "_gelu_tanh",
    }
    for kind, widths in kinds.items():
        for (hidden, inner), tokens in widths.items():
            yield f"M{tokens}_H{hidden}_I{inner}{suffixes[kind]}", "fusepatch", "eager"
    for (hidden, inner), tokens in choose._FUSED_WINS_COMPILED.items():
        yield f"M{tokens}_H{hidden}_I{inner}", "compile_fusepatch_hopper", "compile"


@pytest.fixture(scope="module")
def measured() -> dict[tuple[str, str, str], dict[str, float]]:
    """By run, case and mode: the median of each arm. The file is in order of time."""
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    with _ROWS.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["metric"] == "time":
                found.setdefault((row["run"], row["case"], row["mode"]), {})[row["arm"]] = float(row["p50"])
    return found


@pytest.mark.parametrize(("case", "ours", "theirs"), list(admitted()))
@pytest.mark.parametrize("mode", ["train", "forward"])
def test_it_was_ahead_when_it_was_last_measured(
    measured: dict[tuple[str, str, str], dict[str, float]], case: str, ours: str, theirs: str, mode: str
) -> None:
    arms = [found for (_, *of), found in measured.items() if of == [case, mode] and {ours, theirs} <= found.keys()]
    assert arms, "admitted, and never measured"
    assert arms[-1][ours] < arms[-1][theirs]
