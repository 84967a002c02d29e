"""The benchmark of KDA, rehearsed on a CPU."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

pytest.importorskip("fla.ops.kda")

from benchmarks import linear_attention
from benchmarks.__main__ import main


def test_a_dry_run_saves_rows_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["linear_attention", "--device", "cpu", "--repeats", "2", "--scopes", "op", "--modes", "train,forward"]
    assert main([*words, "--save"]) == 1  # a dry run is no result
    assert main([*words, "--save", "--results", str(tmp_path)]) == 0
    assert "DRY RUN" in capsys.readouterr().out
    (path,) = tmp_path.glob("dry-run-*/linear_attention.csv")
    rows = list(csv.DictReader(path.open()))
    assert {row["arm"] for row in rows} == {"fusepatch"}
    assert {row["case"] for row in rows} == {"B1_T5_H1_D128"}
    assert {(row["mode"], row["metric"]) for row in rows} >= {
        ("train", "time"),
        ("forward", "time"),
        ("train", "error_g"),
    }


@pytest.mark.parametrize("word", ["1,2", "a,b,c", "0,1,1", "1,2,3,4"])
def test_shapes_that_are_none(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["linear_attention", "--device", "cpu", "--shapes", word]) == 1
    assert word in capsys.readouterr().err


def judged(found: float, stock: float, name: str = "q") -> str | None:
    fla, ours = (linear_attention._Entry(arm) for arm in linear_attention.ARMS)
    fla.errors, ours.errors = {name: stock}, {name: found}
    linear_attention._judge([fla, ours], {"fla": {}, "fusepatch": {}})
    return ours.why_not


def test_an_arm_that_is_wrong_has_no_figures() -> None:
    assert judged(5e-3, 4.5e-3) is None
    assert "q has a relative error of 9.00e-03" in str(judged(9e-3, 4.5e-3))
    assert judged(9e-3, 4.5e-3, "A_log") is None
    assert judged(float("inf"), 4.5e-3) is not None
