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


Times = tuple[float, float, float]
"""20th percentile, median, 80th percentile."""


@pytest.fixture(scope="module")
def measured() -> dict[tuple[str, str, str], dict[str, Times]]:
    """By run, case and mode: the times of each arm, ascending in date."""
    found: dict[tuple[str, str, str], dict[str, Times]] = {}
    with _ROWS.open(newline="") as file:
        for row in sorted(csv.DictReader(file), key=lambda row: row["date"]):
            if row["metric"] == "time":
                times = float(row["p20"]), float(row["p50"]), float(row["p80"])
                found.setdefault((row["run"], row["case"], row["mode"]), {})[row["arm"]] = times
    return found


@pytest.mark.parametrize(("case", "ours", "theirs"), list(admitted()))
@pytest.mark.parametrize("mode", ["train", "forward"])
def test_it_was_ahead_when_it_was_last_measured(
    measured: dict[tuple[str, str, str], dict[str, Times]], case: str, ours: str, theirs: str, mode: str
) -> None:
    arms = [found for (_, *of), found in measured.items() if of == [case, mode] and {ours, theirs} <= found.keys()]
    assert arms, "admitted, and never measured"
    (p20, p50, p80), (their_p20, their_p50, _) = arms[-1][ours], arms[-1][theirs]
    assert p50 < their_p50
    # Level forward is enough for a route that both passes must share; the step must win by more than it varies.
    assert p80 < their_p20 if mode == "train" else p20 < their_p50
