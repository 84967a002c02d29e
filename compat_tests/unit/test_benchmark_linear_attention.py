"""The benchmark of linear attention, rehearsed on a CPU, where the definition stands in for FLA's own kernels."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("fla.ops.kda")
from fla_stand_in import registry, standing_in

from benchmarks import linear_arms, linear_attention, linear_cases, tuning
from benchmarks.__main__ import main
from benchmarks.linear_arms import ARMS, Arm
from benchmarks.linear_cases import OPS, Case, Shape
from fusepatch.kernels.linear_attention import arguments, reference

WORDS = ["linear_attention", "--device", "cpu", "--repeats", "2", "--scopes", "op"]
TINY = Shape(1, 5, 2)


def test_a_dry_run_saves_rows_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "--modes", "train,forward", "--ops", "kda,gated_delta_rule"]
    assert main([*words, "--save"]) == 1  # a dry run is no result
    assert main([*words, "--save", "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "DRY RUN" in printed
    assert "flash_qla: unavailable: needs a cuda device" in printed
    (path,) = tmp_path.glob("dry-run-*/linear_attention.csv")
    rows = list(csv.DictReader(path.open()))
    assert {row["arm"] for row in rows} == {"fusepatch"}
    assert {row["case"] for row in rows} == {"B1_T5_H1_D128", "gated_delta_rule_B1_T5_H1_D128"}
    assert {(row["mode"], row["metric"]) for row in rows} >= {
        ("train", "time"),
        ("forward", "time"),
        ("train", "error_g"),
    }


def test_preparing_times_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.timing.measure", None)
    assert main([*WORDS, "--prepare-only", "--ops", "gated_delta_rule", "--scopes", "op,layer"]) == 0
    printed = capsys.readouterr().out
    assert "gated_delta_rule_B1_T5_H1_D128, fusepatch: ready" in printed
    assert "gated_delta_rule_B1_T5_H1_D128_layer, fusepatch: unavailable: FLA's layer needs a cuda device" in printed


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        *((["--shapes", word], word) for word in ("1,2", "a,b,c", "0,1,1", "1,2,3,4")),
        (["--ops", "mamba"], "mamba"),
        (["--arms", "fla,nobody"], "nobody"),
    ],
)
def test_what_there_is_not(words: list[str], wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["linear_attention", "--device", "cpu", *words]) == 1
    assert wrong in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- who is right


def entry(arm: Arm = ARMS[-1], **errors: float) -> linear_attention._Entry:
    return linear_attention._Entry(arm, errors=errors)


def judged(found: float, stock: float | None, name: str = "q") -> linear_attention._Entry:
    ours = entry(**{name: found})
    running = [ours] if stock is None else [entry(ARMS[0], **{name: stock}), ours]
    linear_attention._judge(running, {each.arm.name: {} for each in running})
    return ours


def test_an_arm_that_is_wrong_has_no_figures() -> None:
    assert judged(5e-3, 4.5e-3).remark is None
    assert "q has a relative error of 9.00e-03 (FLA 4.50e-03)" in str(judged(9e-3, 4.5e-3).why_not)
    assert judged(9e-3, 4.5e-3, "A_log").remark is None
    assert judged(float("inf"), 4.5e-3, "A_log").why_not is not None


def test_the_gate_may_be_beyond_parity_up_to_a_bound() -> None:
    ours = judged(6e-2, 4.5e-3, "dt_bias")
    assert (ours.why_not, ours.beyond_parity, ours.remark) == (
        None,
        {"dt_bias": 6e-2},
        "beyond parity: dt_bias 6.0e-02",
    )
    assert judged(0.24, 4.5e-3, "g").why_not is None
    assert "wrong: dt_bias has a relative error of 2.60e-01" in str(judged(0.26, 4.5e-3, "dt_bias").why_not)
    # Zeros, a sign, a factor: each is wrong.
    assert all(judged(error, 4.5e-3, "dt_bias").why_not for error in (1.0, 2.0, 0.5))


def test_without_flas_kernels_a_fixed_bound_holds() -> None:
    assert judged(1.9e-2, None).remark is None
    assert "wrong: q" in str(judged(2.1e-2, None).why_not)


def test_flas_own_kernels_are_no_yardstick_where_they_are_wrong() -> None:
    stock, ours = entry(ARMS[0], q=0.5), entry(q=0.4)
    linear_attention._judge([stock, ours], {})
    assert "wrong: q" in str(stock.why_not)
    assert "wrong: q" in str(ours.why_not)


@pytest.mark.parametrize(
    ("name", "apart", "remark"),
    [
        ("q_proj.weight", 0.02, None),
        ("q_proj.weight", 0.04, "wrong: q_proj.weight is 4.00e-02 apart from that of fla at full length"),
        ("f_proj.1.weight", 0.09, None),
        ("dt_bias", 0.12, "beyond parity: dt_bias 1.2e-01"),
        ("a_proj.weight", 0.3, "wrong: a_proj.weight is 3.00e-01 apart from that of fla at full length"),
    ],
)
def test_arms_are_held_to_each_other_at_full_length(name: str, apart: float, remark: str | None) -> None:
    stock, ours = entry(ARMS[0]), entry()
    true = torch.ones(8, dtype=torch.float64)
    linear_attention._judge([stock, ours], {"fla": {name: true}, "fusepatch": {name: (1 + apart) * true}})
    assert ours.remark == remark


def on_a_cpu(monkeypatch: pytest.MonkeyPatch, **changes: dict[str, Any]) -> None:
    """FLA's arm and those named run here."""
    arms = tuple(
        dataclasses.replace(arm, devices=("cpu",), **changes.get(arm.name, {}))
        for arm in ARMS
        if arm.name in ("fla", *changes)
    )
    monkeypatch.setattr(linear_arms, "ARMS", arms)


def run_case(op: str) -> list[linear_attention._Entry]:
    options = linear_attention.Options(shapes=(TINY,), modes=("train",), device="cpu")
    options = dataclasses.replace(options, limits=dataclasses.replace(options.limits, repeats=2))
    with standing_in():
        return linear_attention._run_case(Case(OPS[op], TINY, "op", "cpu"), options, {}, lambda text: None)


def test_an_arm_beyond_parity_is_timed_and_its_rows_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_cpu(monkeypatch, fusepatch={})
    errors = linear_cases.errors

    def less_exact(*args: Any) -> dict[str, float]:
        ours = "FUSEPATCH_KDA_BACKEND" in os.environ
        return {**errors(*args), **({"dt_bias": 6e-2} if ours else {})}

    monkeypatch.setattr(linear_cases, "errors", less_exact)
    entries = run_case("kda")
    case = Case(OPS["kda"], TINY, "op", "cpu")
    figures = linear_attention._figures(case, entries)
    metrics = {(figure.arm, figure.metric): figure.p50 for figure in figures}
    assert metrics["fusepatch", "beyond_parity_dt_bias"] == 6e-2
    assert metrics["fusepatch", "time"] > 0
    assert metrics["fla", "time"] > 0
    assert ("fla", "beyond_parity_dt_bias") not in metrics
    assert "\nfusepatch: beyond parity: dt_bias 6.0e-02" in linear_attention._render(case, entries, figures)


# ------------------------------------------------------------------------------------------------------------ FlashQLA


@pytest.fixture
def flash_qla(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A stand-in for the package, behind FLA's own backend, which is told that this is a Hopper. What is returned gives
    the gradient of v an error."""
    module = importlib.import_module("fla.ops.gated_delta_rule.backends.flash_qla")
    monkeypatch.setattr(module, "IS_NVIDIA_HOPPER", True)
    monkeypatch.setattr(module.FlashQLABackend, "is_available", staticmethod(lambda: True))
    wrong = [1.0]

    def chunk_gated_delta_rule(auto_cp: bool, output_final_state: bool, v: Any, **given: Any) -> Any:
        v = v * wrong[0] + (v * (1 - wrong[0])).detach()
        request = arguments.read(False, v=v, **given)
        assert isinstance(request, arguments.Request), request
        return reference.run(request.call, request.inputs, output_final_state)

    stand_in = SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule)
    monkeypatch.setitem(sys.modules, "flash_qla", stand_in)
    on_a_cpu(monkeypatch, flash_qla={"packages": ()})
    return lambda error: wrong.__setitem__(0, 1 + error)


def test_flash_qla_takes_the_call_of_the_op(flash_qla: Callable[[float], None]) -> None:
    stock, arm = run_case("gated_delta_rule")
    assert (stock.remark, arm.remark) == (None, None)
    assert arm.samples["train"]
    assert arm.errors == pytest.approx(stock.errors)


def test_flash_qla_that_is_wrong(flash_qla: Callable[[float], None]) -> None:
    flash_qla(0.05)
    assert "wrong: v has a relative error" in str(run_case("gated_delta_rule")[1].why_not)


def test_flash_qla_that_is_not_asked(flash_qla: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fla.ops.gated_delta_rule.backends.flash_qla.IS_NVIDIA_HOPPER", False)
    expected = "unavailable: FLA never called flash_qla.chunk_gated_delta_rule"
    assert run_case("gated_delta_rule")[1].why_not == expected


def test_flash_qla_takes_no_call_of_the_layer() -> None:
    (arm,) = linear_arms.select(["flash_qla"], OPS["gated_delta_rule"])
    case = Case(OPS["gated_delta_rule"], TINY, "layer")
    assert "leaves gate and sigmoid to the kernel" in str(
        linear_arms.why_unavailable(dataclasses.replace(arm, packages=()), case)
    )
    assert linear_arms.select(["flash_qla"], OPS["kda"]) == []


@pytest.mark.parametrize("name", [arm.name for arm in ARMS])
def test_an_arm_has_its_own_backends_and_no_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLA_TILELANG", "1")
    before = dict(os.environ)
    (arm,) = linear_arms.select([name], OPS["gated_delta_rule"])
    common = importlib.import_module("fla.ops.common.backends.tilelang")
    with arm.context(OPS["gated_delta_rule"], "cpu"):
        assert registry("gated_delta_rule")._backends["flash_qla"].is_enabled() == (name == "flash_qla")
        assert common.CommonTileLangBackend().is_enabled() == (name == "fla_tilelang")
    assert dict(os.environ) == before


# ------------------------------------------------------------------------------------------------------------- tuning


def test_candidates_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them before the first runs, in the mode in which Triton compiles on other threads."""
    autotuner = pytest.importorskip("triton.runtime.autotuner")
    compiling = pytest.importorskip("triton.runtime._async_compile")
    monkeypatch.setattr(autotuner.Autotuner, "prune_configs", autotuner.Autotuner.prune_configs)
    for name in ("do_bench", "check_disk_cache"):
        monkeypatch.setattr(autotuner.Autotuner, name, getattr(autotuner.Autotuner, name))
    did: list[tuple[str, int, int]] = []

    class Kernel:
        fn = staticmethod(lambda size, BLOCK: None)

        def warmup(self, size: int, *, grid: Any, BLOCK: int, **options: Any) -> None:
            assert compiling.active_mode.get() is not None
            assert "warmup" not in options  # Triton's own says it a second time
            did.append(("compiled", size, BLOCK))
            if BLOCK == 2:
                raise RuntimeError("no such block")

        def run(self, size: int, *, grid: Any, warmup: bool, BLOCK: int, **options: Any) -> None:
            assert compiling.active_mode.get() is None
            did.append(("ran", size, BLOCK))

    configs = [autotuner.Config({"BLOCK": block}) for block in (1, 2, 3)]
    tuner = autotuner.Autotuner(Kernel(), ["size", "BLOCK"], configs, ["size"], None, None)
    tuning.compile_only()
    tuning.compile_side_by_side(2)
    for size in (7, 7, 8):
        tuner[(1,)](size)
    compiled, ran = ([(what, 7, block) for block in (1, 2, 3)] for what in ("compiled", "ran"))
    chosen = ran[:1]
    assert did[:8] == [*compiled, *ran, *chosen, *chosen]
    assert did[8:11] == [("compiled", 8, 1), ("compiled", 8, 2), ("compiled", 8, 3)]  # once for each key


def test_an_environment_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLA_FLASH_QLA", "1")
    with contextlib.suppress(KeyError), linear_arms.environment(FLA_FLASH_QLA="0", FLA_NEW="1"):
        assert (os.environ["FLA_FLASH_QLA"], os.environ["FLA_NEW"]) == ("0", "1")
        raise KeyError
    assert os.environ["FLA_FLASH_QLA"] == "1"
    assert "FLA_NEW" not in os.environ


@pytest.mark.parametrize(
    ("capability", "has_package", "backend"),
    [((9, 0), True, "flash_qla"), ((9, 0), False, "cudnn_frost"), ((10, 0), True, "cudnn_frost")],
)
def test_whose_kernels_are_ours(
    capability: tuple[int, int], has_package: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(linear_arms.importlib.util, "find_spec", lambda name: object() if has_package else None)
    assert linear_arms._backend_of(OPS["gated_delta_rule"]) == backend
    assert linear_arms._backend_of(OPS["kda"]) == "cudnn_hopper"
