"""The benchmarks, rehearsed on a CPU: what is refused, what is reported, and what is made of the results."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import arms, check, data, gated_mlp, markdown, memory, plot, prepare, results, timing, tuning  # noqa: E402
from benchmarks.__main__ import main  # noqa: E402
from benchmarks.arms import Arm, Built  # noqa: E402
from benchmarks.cases import GROUPS, Case, Shape, parse_shapes  # noqa: E402
from benchmarks.data import Data  # noqa: E402
from benchmarks.results import Figure, Provenance, Row  # noqa: E402

DESIGN_COLUMNS = "benchmark,case,mode,arm,metric,unit,p20,p50,p80,n,gpu,driver,versions,commit,date,run"
CASE = Case(Shape(24, 64, 96), device="cpu")
BY_NAME = {arm.name: arm for arm in arms.ARMS}
EAGER, FUSEPATCH = BY_NAME["eager"], BY_NAME["fusepatch"]


def run(*wanted: Arm, modes: tuple[str, ...] = ("train",), **options: Any) -> list[Figure]:
    return gated_mlp.run(
        gated_mlp.Options((EAGER, *wanted), (CASE,), modes, timing.Limits(repeats=2, seconds=1.0), **options)
    )


def line_of(text: str, arm: str) -> str:
    """The row of an arm in the table of the case."""
    return next(line for line in text.splitlines() if line.startswith(f"{arm} "))


# ----------------------------------------------------------------------------------------------------- a whole dry run


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, str]]]:
    """What a rehearsal printed, and the rows that it saved."""
    folder = tmp_path_factory.mktemp("results")
    output = folder / "output"
    words = ["gated_mlp", "--device", "cpu", "--shapes", "24,64,96", "7,64,96", "--repeats", "3", "--save", "--results"]
    with output.open("w") as file, contextlib.redirect_stdout(file):
        assert main([*words, str(folder)]) == 0
    (path,) = folder.glob("dry-run-*/gated_mlp.csv")
    with path.open(newline="") as file:
        assert file.readline() == f"{DESIGN_COLUMNS}\n"
        file.seek(0)
        return output.read_text(), list(csv.DictReader(file))


class TestDryRun:
    def test_every_arm_and_mode_has_its_rows(self, dry_run: tuple[str, list[dict[str, str]]]) -> None:
        _, rows = dry_run
        found = {(row["case"], row["mode"], row["arm"], row["metric"], row["unit"]) for row in rows}
        for arm in ("eager", "gemm_floor", "fusepatch"):
            for mode in ("train", "forward", "backward"):
                assert ("M24_H64_I96", mode, arm, "time", "ms") in found
            assert ("M24_H64_I96", "host", arm, "time", "us") in found
            assert ("M7_H64_I96", "train", arm, "backward_passes", "1") in found
        assert ("M24_H64_I96", "train", "fusepatch", "saved", "bytes") in found
        assert {row["arm"] for row in rows} == {"eager", "gemm_floor", "fusepatch"}
        for row in rows:
            assert 0 <= float(row["p20"]) <= float(row["p50"]) <= float(row["p80"])
            assert int(row["n"]) >= 1
        assert {row["benchmark"] for row in rows} == {"gated_mlp"}

    def test_where_and_when(self, dry_run: tuple[str, list[dict[str, str]]]) -> None:
        _, rows = dry_run
        assert {row["run"] for row in rows} == {results.RUN}
        assert all(row["gpu"].startswith("dry run: cpu") for row in rows)
        assert f"torch {torch.__version__}" in rows[0]["versions"]
        assert "transformers 5" in rows[0]["versions"]

    def test_says_loudly_what_it_is(self, dry_run: tuple[str, list[dict[str, str]]]) -> None:
        text, _ = dry_run
        assert text.count("DRY RUN on a CPU") == 2

    def test_says_what_ran_and_what_could_not(self, dry_run: tuple[str, list[dict[str, str]]]) -> None:
        text, _ = dry_run
        assert "route fused" in line_of(text, "fusepatch")
        for arm in ("compile", "fla", "liger", "quack_interleaved_untuned", "flash_swiglu_mlp", "cudnn"):
            assert line_of(text, arm).endswith("unavailable: needs a cuda device")

    def test_is_never_saved_among_the_results(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["gated_mlp", "--device", "cpu", "--save"]) == 1
        assert "a dry run is no result" in capsys.readouterr().err
        monkeypatch.setattr(results, "RESULTS", tmp_path)
        row = Row(figure(), dataclasses.replace(origin("a"), gpu="dry run: cpu"))
        with pytest.raises(ValueError, match="dry run"):
            results.write([row], tmp_path)
        assert not list(tmp_path.iterdir())

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
    def test_without_a_gpu(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["gated_mlp"]) == 1
        assert "--device cpu" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "words",
        [
            ["--arms", "eagre"],
            ["--shapes", "1,2"],
            ["--shapes", "0,64,96"],
            ["--shapes", "benhc"],
            ["--modes", "tran"],
            ["--activation", "sliu"],
        ],
    )
    def test_misspelt(self, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["gated_mlp", "--device", "cpu", *words]) == 1
        assert words[1] in capsys.readouterr().err

    def test_list(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["list"]) == 0
        text = capsys.readouterr().out
        assert all(name in text for name in (*BY_NAME, *GROUPS))


# ----------------------------------------------------------------------------------------------------------- the gate


def injected(name: str, forward: Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]) -> Arm:
    """An arm like eager, whose forward is made by `forward` from eager's."""

    def build(case: Case, numbers: Data) -> Built:
        built = EAGER.build(case, numbers)
        return dataclasses.replace(built, forward=forward(built.forward))

    return dataclasses.replace(EAGER, name=name, build=build)


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Tensor:
        return 1.02 * dout


class _Overwrites(torch.autograd.Function):
    """Right once: the second pass meets what the first left."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        ctx.factor = torch.ones((), dtype=out.dtype)
        return out.clone()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Tensor:
        factor, ctx.factor = ctx.factor, 2 * ctx.factor
        return factor * dout


def test_compiled_code_of_ours_beside_the_librarys(capsys: pytest.CaptureFixture[str]) -> None:
    """Our forward is in the graph, in a class of its own: eager's stays the library's."""
    arm = BY_NAME["compile_fusepatch_reference"]
    made = run(arm)
    assert {figure.arm for figure in made} == {"eager", arm.name}
    assert "traced fused" in line_of(capsys.readouterr().out, arm.name)
    with EAGER.context(CASE):
        built = EAGER.build(CASE, data.make(CASE, 0))
    assert not hasattr(type(built.forward).forward, "__wrapped__")


def not_implemented(case: Case, numbers: Data) -> Built:
    raise NotImplementedError("no kernel for this\nand more")


class TestGate:
    @pytest.mark.parametrize(
        ("forward", "what"),
        [
            (lambda real: lambda x: 1.02 * real(x), "out"),
            (lambda real: lambda x: real(x) * float("nan"), "out"),
            (lambda real: lambda x: _WrongGradient.apply(real(x)), "x"),
        ],
    )
    def test_wrong_arm_is_not_timed(
        self, forward: Callable[..., Any], what: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        figures = run(injected("injected", forward))
        assert {figure.arm for figure in figures} == {"eager"}
        assert f"wrong: {what} has a relative error of" in line_of(capsys.readouterr().out, "injected")

    def test_arm_that_goes_wrong_while_timed_is_dropped(self, capsys: pytest.CaptureFixture[str]) -> None:
        calls = []

        def forward(real: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def later_wrong(x: Tensor) -> Tensor:
                calls.append(x)
                return real(x) if len(calls) < 4 else 2 * real(x)

            return later_wrong

        assert {figure.arm for figure in run(injected("injected", forward))} == {"eager"}
        assert "wrong: after timing, out" in line_of(capsys.readouterr().out, "injected")

    def test_arm_that_raises_while_timed_is_dropped(self, capsys: pytest.CaptureFixture[str]) -> None:
        calls = []

        def forward(real: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def later_raises(x: Tensor) -> Tensor:
                calls.append(x)
                if len(calls) == 4:
                    raise RuntimeError("out of luck")
                return real(x)

            return later_raises

        assert {figure.arm for figure in run(injected("injected", forward))} == {"eager"}
        assert "unavailable: in train: RuntimeError: out of luck" in line_of(capsys.readouterr().out, "injected")

    @pytest.mark.parametrize(
        ("arm", "reason"),
        [
            (dataclasses.replace(EAGER, name="other", packages=("no_such_package",)), "no package no_such_package"),
            (dataclasses.replace(EAGER, name="other", dtypes=(torch.float16,)), "does not take torch.bfloat16"),
            (dataclasses.replace(EAGER, name="other", activations=("gelu_tanh",)), "does not know silu"),
            (dataclasses.replace(EAGER, name="other", layouts=("packed",)), "has no arm for separate weights"),
            (
                dataclasses.replace(EAGER, name="other", build=not_implemented),
                "NotImplementedError: no kernel for this",
            ),
        ],
    )
    def test_unavailable_arm_is_reported(self, arm: Arm, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert {figure.arm for figure in run(arm)} == {"eager"}
        text = capsys.readouterr().out
        assert line_of(text, "other").endswith(f"unavailable: {reason}")
        assert f"other  unavailable: {reason} (1 of the cases)" in text

    def test_lost_device_ends_the_case_and_not_the_run(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def lost(case: Case) -> None:
            raise RuntimeError("an illegal memory access was encountered")

        monkeypatch.setattr(gated_mlp, "_raise_if_device_is_lost", lost)
        assert run(dataclasses.replace(EAGER, name="other", build=not_implemented)) == []
        text = capsys.readouterr().out
        for name in ("eager", "other"):
            assert "the case ended with RuntimeError: an illegal memory access" in line_of(text, name)

    def test_nothing_is_judged_by_a_wrong_eager(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        wrong = dataclasses.replace(injected("eager", lambda real: lambda x: -real(x)))
        options = gated_mlp.Options((wrong, FUSEPATCH), (CASE,), ("train",), timing.Limits(1, 1.0))
        assert gated_mlp.run(options) == []
        text = capsys.readouterr().out
        assert "eager itself is wrong" in line_of(text, "eager")
        assert "eager failed" in line_of(text, "fusepatch")

    @pytest.mark.parametrize("keeps_graph", [True, False])
    def test_single_backward_is_flagged(self, keeps_graph: bool, capsys: pytest.CaptureFixture[str]) -> None:
        def forward(real: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda x: (_Overwrites if keeps_graph else _RefusesToStay).apply(real(x))

        figures = run(injected("injected", forward))
        passes = {figure.arm: figure.p50 for figure in figures if figure.metric == "backward_passes"}
        assert passes == {"eager": 2, "injected": 1}
        line = line_of(capsys.readouterr().out, "injected")
        assert "single-backward: a second one " + ("x has" if keeps_graph else "raises RuntimeError") in line

    def test_bound(self) -> None:
        eager = dict.fromkeys(check.TENSORS, 4e-3)
        assert not check.judge(dict.fromkeys(check.TENSORS, 1.25 * 4e-3 + 1e-3), eager).over
        over = check.judge({**eager, "gate": 1.25 * 4e-3 + 1.1e-3}, eager)
        assert len(over.over) == 1 and over.over[0].startswith("gate")
        assert check.judge({**eager, "up": float("inf")}, eager).over

    @pytest.mark.parametrize("layout", ["separate", "packed"])
    @pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
    def test_own_arms_are_right_in_every_layout(self, activation: str, layout: str) -> None:
        case = dataclasses.replace(CASE, activation=activation, layout=layout)
        numbers = data.make(case, 0)
        expected = check.reference(case, numbers)
        errors = {}
        for name in ("eager", "gemm_floor", "fusepatch", "fusepatch_pointwise_reference"):
            with BY_NAME[name].context(case):
                built = BY_NAME[name].build(case, numbers)
                errors[name] = check.errors(check.results(built, numbers), expected)
                assert check.second_backward(built, numbers, expected, errors["eager"]) is None
        assert not any(check.judge(found, errors["eager"]).over for found in errors.values())


class _RefusesToStay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        ctx.passes = 0
        return out.clone()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Tensor:
        ctx.passes += 1
        if ctx.passes > 1:
            raise RuntimeError("only once")
        return dout


# ----------------------------------------------------------------------------------------------------------- the arms


class TestArms:
    @pytest.mark.parametrize("interleaved", [True, False])
    def test_quack_is_given_its_layout_and_its_gradients_are_brought_back(
        self, interleaved: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = {}

        def mlp_func(x: Tensor, w1: Tensor, w2: Tensor, activation: str, tuned: bool, concat_layout: bool) -> Tensor:
            """As quack.mlp documents it, and as its module computes on a CPU."""
            seen.update(activation=activation, tuned=tuned, concat_layout=concat_layout)
            y = torch.nn.functional.linear(x, w1)
            gate, up = y.chunk(2, dim=-1) if concat_layout else (y[..., ::2], y[..., 1::2])
            return torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, w2)

        module = type(sys)("quack.mlp")
        module.mlp_func = mlp_func  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "quack", type(sys)("quack"))
        monkeypatch.setitem(sys.modules, "quack.mlp", module)
        name = f"quack_{'interleaved' if interleaved else 'concatenated'}_untuned"
        numbers = data.make(CASE, 0)
        expected = check.reference(CASE, numbers)
        eager = check.errors(check.results(EAGER.build(CASE, numbers), numbers), expected)
        found = check.errors(check.results(BY_NAME[name].build(CASE, numbers), numbers), expected)
        assert not check.judge(found, eager).over
        assert seen == {"activation": "swiglu", "tuned": False, "concat_layout": not interleaved}

    def test_other_arms_run_unpatched_beside_ours(self) -> None:
        cls = type(EAGER.build(CASE, data.make(CASE, 0)).forward)
        stock = cls.forward
        seen = []

        def note(real: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def forward(x: Tensor) -> Tensor:
                seen.append(cls.forward is stock)
                return real(x)

            return forward

        run(FUSEPATCH, injected("injected", note))
        assert seen and all(seen)
        assert cls.forward is stock

    def test_variant_that_does_not_serve_says_so(self, capsys: pytest.CaptureFixture[str]) -> None:
        asked = dataclasses.replace(
            BY_NAME["fusepatch_fused_reference"],
            context=lambda case: arms._accelerated(case, {"FUSEPATCH_GATED_MLP_BACKEND": "auto"}, strict=True),
        )
        assert {figure.arm for figure in run(asked)} == {"eager"}
        line = line_of(capsys.readouterr().out, "fusepatch_fused_reference")
        assert "unavailable: DeclinedError: strict" in line and "because cpu" in line

    def test_variables_are_put_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import os

        monkeypatch.setenv("FUSEPATCH_GATED_MLP_ROUTE", "original")
        before = dict(os.environ)
        with arms._accelerated(CASE, {"FUSEPATCH_GATED_MLP_ROUTE": "pointwise"}, strict=False):
            assert os.environ["FUSEPATCH_GATED_MLP_ROUTE"] == "pointwise"
            assert os.environ["FUSEPATCH_GATED_MLP_BACKEND"] == "reference"
        assert dict(os.environ) == before

    def test_modes_and_activations(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[gated_mlp.Options] = []
        monkeypatch.setattr(gated_mlp, "run", asked.append)
        words = ["gated_mlp", "--device", "cpu", "--shapes", "8,64,96", "decode", "--activation", "silu,gelu_tanh"]
        assert main(words) == 0
        assert main([*words, "--modes", "train"]) == 0
        plans = [gated_mlp._plans(options) for options in asked]
        assert [modes for _, modes in plans[0][:4]] == [("train", "forward", "backward", "memory"), *[("forward",)] * 3]
        assert [case.activation for case, _ in plans[0]] == ["silu"] * 4 + ["gelu_tanh"] * 4 + ["silu"]
        assert plans[0][-1][1] == ("host",)
        assert [modes for _, modes in plans[1]] == [("train",)] * 8

    def test_select(self) -> None:
        assert [arm.name for arm in arms.select("fusepatch")] == ["eager", "fusepatch"]
        assert {arm.name for arm in arms.select(None)} == {arm.name for arm in arms.ARMS if arm.by_default}
        assert len(arms.select("all")) == len(arms.ARMS) == len(BY_NAME)

    def test_shapes(self) -> None:
        assert parse_shapes(["decode", "1,4096,14336", "8,64,96"]) == [*GROUPS["decode"], Shape(8, 64, 96)]
        assert len(parse_shapes(["all"])) == 8
        assert str(Case(Shape(8, 64, 96), torch.float16, "gelu_tanh", "packed")) == "M8_H64_I96_fp16_gelu_tanh_packed"


class TestData:
    def test_copies(self) -> None:
        cache = 60 * 2**20
        small, large = Case(GROUPS["bench"][0]), Case(GROUPS["bench"][2])
        bytes_of = 2 * (2 * 16384 * 1024 + 3 * 1024 * 3072)
        assert data.copies(large, cache) == 1
        assert data.copies(Case(Shape(64, 1024, 3072)), cache) * 19_000_000 > cache
        assert data.copies(small, cache) == (1 if bytes_of > cache else 2)

    def test_unit_scale(self) -> None:
        numbers = data.make(Case(Shape(256, 128, 192), torch.float32, device="cpu"), 0)
        gate = torch.nn.functional.linear(numbers.x, numbers.gate)
        assert 0.9 < float(gate.detach().std()) < 1.1

    def test_saved_bytes_of_eight(self) -> None:
        """Eager saves x, gate, silu(gate), up and the product."""
        tokens, hidden, inner = CASE.shape.tokens, CASE.shape.hidden, CASE.shape.inner
        held = memory.measure(EAGER, CASE)
        assert held == memory.Held(saved=8 * 2 * tokens * (hidden + 4 * inner), peak=None)
        ours = memory.measure(FUSEPATCH, CASE)
        assert ours.saved == 8 * 2 * tokens * (hidden + 2 * inner)


# --------------------------------------------------------------------------------------------------- trials and timing


class TestTrials:
    """In the child, an arm is found by its name: so these are real arms, declared to compile for long."""

    def prepare(self, arm: Arm, seconds: float, tmp_path: Path) -> tuple[prepare.Reasons, list[str]]:
        said: list[str] = []
        reasons = prepare.prepare([dataclasses.replace(arm, compiles=True)], [CASE], seconds, said.append, tmp_path)
        return reasons, said

    def test_ready(self, tmp_path: Path) -> None:
        reasons, said = self.prepare(EAGER, 120, tmp_path)
        assert not reasons, (tmp_path / "eager.log").read_text()
        assert "ready for 1 of 1" in said[-1]

    def test_apart_and_shared(self, tmp_path: Path) -> None:
        """Three cases of which two share what they compile: two processes, and an answer for all three."""
        arm = dataclasses.replace(EAGER, compiles=True, apart=True, shares=lambda case: case.activation)
        gelu = dataclasses.replace(CASE, activation="gelu_tanh")
        cases = [CASE, gelu, dataclasses.replace(gelu, shape=Shape(7, 64, 96))]
        said: list[str] = []
        assert not prepare.prepare([arm], cases, 120, said.append, tmp_path)
        assert "eager: ready for 2 of 2" in said[-1]
        logs = sorted(path.name for path in tmp_path.glob("*.log"))
        assert logs == [f"eager_{CASE}.log", f"eager_{gelu}.log"]
        reasons = prepare.prepare([arm], cases, 0.2, said.append, tmp_path)
        assert set(reasons) == {("eager", case) for case in cases}

    def test_candidates_are_compiled_and_not_measured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tuner, ran = self.tuner(monkeypatch)
        tuning.compile_only()
        tuner.run(7)
        assert ran == [1, 2, 3, 1]

    def test_candidates_are_measured_briefly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tuner, ran = self.tuner(monkeypatch)
        asked: list[dict[str, Any]] = []

        def do_bench(kernel_call: Callable[[], None], **options: Any) -> list[float]:
            kernel_call()
            asked.append(options)
            return [float(len(ran) != 2)] * 3

        monkeypatch.setattr("triton.testing.do_bench", do_bench)
        tuning.measure_briefly()
        tuner.run(7)
        assert ran == [1, 2, 3, 2]
        assert asked == [{"warmup": 10, "rep": 40, "quantiles": (0.5, 0.2, 0.8)}] * 3

    def tuner(self, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[int]]:
        """An autotuner of Triton's with three candidates, and the candidates that ran."""
        autotuner = pytest.importorskip("triton.runtime.autotuner")
        for name in ("do_bench", "check_disk_cache"):
            monkeypatch.setattr(autotuner.Autotuner, name, getattr(autotuner.Autotuner, name))
        ran: list[int] = []

        class Kernel:
            fn = staticmethod(lambda size, BLOCK: None)  # where the autotuner looks for the function

            def run(self, size: int, BLOCK: int, **options: Any) -> None:
                ran.append(BLOCK)

        configs = [autotuner.Config({"BLOCK": block}) for block in (1, 2, 3)]
        return autotuner.Autotuner(Kernel(), ["size", "BLOCK"], configs, ["size"], None, None), ran

    def test_out_of_time(self, tmp_path: Path) -> None:
        start = time.monotonic()
        reasons, _ = self.prepare(EAGER, 0.2, tmp_path)
        assert time.monotonic() - start < 10
        assert reasons == {("eager", CASE): "not ready within 0.2 s (--prepare-seconds)"}

    def test_crash(self, tmp_path: Path) -> None:
        reasons, _ = self.prepare(dataclasses.replace(EAGER, name="no_such_arm"), 120, tmp_path)
        assert "its trial ended with status 1: ValueError" in reasons["no_such_arm", CASE]

    def test_what_was_found_there_keeps_an_arm_out(self, capsys: pytest.CaptureFixture[str]) -> None:
        entry = gated_mlp._Entry(FUSEPATCH)
        gated_mlp._make_ready(entry, CASE, [], {}, {}, {("fusepatch", CASE): "not ready within 5 s"})
        assert entry.why_not == "unavailable: not ready within 5 s"


def test_tritons_cache_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton.knobs")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    where = knobs.cache.dir
    tuning.keep_one_cache()
    assert os.environ["TRITON_CACHE_DIR"] == where  # which torch.compile then leaves alone
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    tuning.keep_one_cache()
    assert os.environ["TRITON_CACHE_DIR"] == "/somewhere"


class _Event:
    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return (end.at - self.at) * 1e3


class TestTiming:
    def steps(self, *names: str, milliseconds: float = 0.2) -> tuple[dict[str, timing.Step], list[str]]:
        ran: list[str] = []

        def step(name: str) -> timing.Step:
            def timed(state: int) -> None:
                ran.append(name)
                time.sleep(milliseconds / 1e3)

            return timing.Step(lambda number: number, timed, lambda: None, contextlib.nullcontext)

        return {name: step(name) for name in names}, ran

    def test_order_rotates(self) -> None:
        orders = [timing._order(["a", "b", "c"], number) for number in range(6)]
        assert {order[0] for order in orders} == {"a", "b", "c"}
        assert all(sorted(order) == ["a", "b", "c"] for order in orders)

    @pytest.mark.parametrize("measure", [timing.measure, timing.measure_host])
    def test_ends_in_time_but_not_before_there_is_a_spread(self, measure: Callable[..., timing.Samples]) -> None:
        steps, _ = self.steps("a", "b")
        samples = measure(steps, timing.Limits(1000, 0.0), False, pytest.fail)
        assert {name: len(found) for name, found in samples.items()} == dict.fromkeys("ab", timing.LEAST_ROUNDS)
        assert all(0.2 <= sample < 50 for found in samples.values() for sample in found)

    def test_gpu_batches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With clocks for events: how many calls make a batch, and that the GPU is kept busy for all arms alike."""
        fillers = []
        monkeypatch.setattr(torch.cuda, "Event", _Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(timing, "_keep_busy", fillers.append)
        steps, ran = self.steps("short", milliseconds=0.3)
        steps["long"] = self.steps("long", milliseconds=5)[0]["long"]
        samples = timing.measure(steps, timing.Limits(6, 60.0), True, pytest.fail)
        assert len(samples["short"]) == len(samples["long"]) == 6
        assert min(samples["long"]) >= 5
        assert min(samples["short"]) >= 0.3
        assert len(ran) > 6 * 3
        assert len(set(fillers[-12:])) == 1 and fillers[-1] >= 1.5 * 5

    def test_no_arm_finds_a_gpu_that_has_rested(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The filler comes before the context, lasts beyond its entry, and the first call in it does not count."""
        events: list[Any] = []
        monkeypatch.setattr(torch.cuda, "Event", _Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("waits"))
        monkeypatch.setattr(timing, "_keep_busy", events.append)
        cold = [False]

        @contextlib.contextmanager
        def context() -> Iterator[None]:
            events.append("enters")
            time.sleep(0.02)
            cold[0] = True
            yield

        def call(_: Any) -> None:
            events.append("calls")
            time.sleep(0.02 if cold[0] else 0.001)
            cold[0] = False

        step = timing.Step(lambda number: number, call, lambda: None, context)
        samples = timing.measure({"slow at first": step}, timing.Limits(5, 60.0), True, pytest.fail)
        assert max(samples["slow at first"]) < 10
        *_, before, _ = (place for place, what in enumerate(events) if what == "waits")
        filler, entry, *calls, end = events[before + 1 :]
        assert filler >= 1.5 * 40
        assert (entry, end) == ("enters", "waits") and calls == ["calls"] * 2 * (len(calls) // 2)


# ------------------------------------------------------------------------------------------------ what is made of rows


def figure(arm: str = "eager", p50: float = 2.0, case: str = "M1_H2_I3", mode: str = "train", **other: Any) -> Figure:
    whole = {"metric": "time", "unit": "ms", "n": 9, **other}
    return Figure("gated_mlp", case, mode, arm, p20=0.9 * p50, p50=p50, p80=1.2 * p50, **whole)


def origin(run: str) -> Provenance:
    return Provenance("NVIDIA H200", "580.1", "torch 2.11", "abc", "2026-11-30", run)


def rows_of(run: str, **medians: float) -> list[Row]:
    return [
        Row(figure(arm, p50, case, mode), origin(run))
        for case in ("M1_H2_I3", "M4_H5_I6")
        for mode in ("train", "forward")
        for arm, p50 in medians.items()
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two runs, of which the later has a figure of an arm that overwrites what it saved."""
    results.write(rows_of("old", eager=9.0, gemm_floor=3.0, fusepatch=9.0), tmp_path)
    results.write(rows_of("new", eager=2.0, gemm_floor=1.0, liger=1.8, fusepatch=1.5), tmp_path)
    once = figure("liger", 1.0, metric="backward_passes", unit="1")
    peak = [figure(arm, 1e9, metric="peak", unit="bytes") for arm in ("eager", "fusepatch")]
    results.write([Row(each, origin("new")) for each in (once, *peak)], tmp_path)
    return tmp_path


class TestRows:
    def test_a_named_commit_is_the_commit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where a machine has the history of an earlier one."""
        monkeypatch.setenv(results.COMMIT_VARIABLE, "0123456789")
        assert results.provenance(False).commit == "0123456789"

    def test_round_trip(self, folder: Path) -> None:
        (path,) = results.files_of("gated_mlp", folder)
        assert path.parent.name == "NVIDIA-H200"
        assert path.read_text().splitlines()[0] == DESIGN_COLUMNS
        rows = results.read(path)
        assert rows[: len(rows_of("old", a=1, b=2, c=3))] == rows_of("old", eager=9.0, gemm_floor=3.0, fusepatch=9.0)
        assert results.latest_run(rows) == "new"

    def test_other_columns(self, tmp_path: Path) -> None:
        (tmp_path / "x.csv").write_text("a,b\n1,2\n")
        with pytest.raises(ValueError, match="other columns"):
            results.read(tmp_path / "x.csv")

    def test_ratio(self) -> None:
        eager, ours = Row(figure(p50=2.0), origin("a")), Row(figure("fusepatch", 1.5), origin("a"))
        assert results.ratio(ours, eager) == pytest.approx((0.675, 0.75, 0.9))

    @pytest.mark.parametrize(
        "other",
        [
            Row(figure(), origin("b")),
            Row(figure(case="M9_H9_I9"), origin("a")),
            Row(figure(mode="forward"), origin("a")),
            Row(figure(metric="peak"), origin("a")),
            Row(figure(unit="us"), origin("a")),
            Row(figure(p50=0.0), origin("a")),
        ],
    )
    def test_ratio_between_what_does_not_belong_together(self, other: Row) -> None:
        with pytest.raises(results.RatioError):
            results.ratio(Row(figure("fusepatch"), origin("a")), other)

    def test_merge(self, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        here = tmp_path_factory.mktemp("here")
        results.write(rows_of("old", eager=9.0), here)
        added = results.merge(folder, here)
        assert added == 2 * 2 * (3 + 4) + 3 - 4
        assert results.merge(folder, here) == 0


class TestTable:
    def test_latest_run_only(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["table", "--results", str(folder)]) == 0
        text = capsys.readouterr().out
        assert text.count("| arm | M1_H2_I3 | M4_H5_I6 |\n| --- | --- | --- |\n| eager | 2 | 2 |\n") == 2
        assert text.count("| liger \\* | 1.8 (0.900) | 1.8 (0.900) |\n| fusepatch | 1.5 (0.750) | 1.5 (0.750) |") == 2
        assert "run new" in text and "run old" not in text

    def test_run_by_name(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["table", "--results", str(folder), "--run", "old", "--modes", "forward"]) == 0
        assert "| arm | M1_H2_I3 | M4_H5_I6 |" in capsys.readouterr().out

    def test_more_cases_than_arms(self, folder: Path) -> None:
        (path,) = results.files_of("gated_mlp", folder)
        rows = [row for row in results.read(path) if row.figure.arm in ("eager", "gemm_floor")]
        rows = [row for row in rows if row.origin.run == "old"]
        more = [dataclasses.replace(row, figure=dataclasses.replace(row.figure, case="M7_H8_I9")) for row in rows]
        text = markdown._table(rows + more, "forward", "eager")
        assert "| case | eager | gemm_floor |\n" in text and "| M4_H5_I6 | 9 | 3 (0.333) |\n" in text

    def test_between_markers(self, folder: Path, tmp_path: Path) -> None:
        readme = tmp_path / "README.md"
        begin, end = markdown.markers("gated_mlp")
        readme.write_text(f"before\n\n{begin}\nstale\n{end}\n\nafter\n")
        words = ["table", "--results", str(folder), "--write", str(readme)]
        assert main(words) == 0
        once = readme.read_text()
        assert once.startswith(f"before\n\n{begin}\n\nForward + backward, ms, NVIDIA H200")
        assert once.endswith(f"{end}\n\nafter\n") and "stale" not in once
        assert main(words) == 0
        assert readme.read_text() == once

    def test_without_markers(self, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        readme = tmp_path / "README.md"
        readme.write_text("nothing\n")
        assert main(["table", "--results", str(folder), "--write", str(readme)]) == 1
        assert "<!-- benchmarks gated_mlp" in capsys.readouterr().err
        assert readme.read_text() == "nothing\n"

    def test_no_rows(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["table", "--results", str(tmp_path)]) == 1
        assert main(["plot", "--results", str(tmp_path), "--to", str(tmp_path)]) == 1


class TestPlot:
    def test_bars_are_ratios_within_a_run(self, folder: Path) -> None:
        (path,) = results.files_of("gated_mlp", folder)
        panels = plot.bars(results.read(path), "train", "time", "gemm_floor")
        assert list(panels) == [f"{case} ({run})" for run in ("old", "new") for case in ("M1_H2_I3", "M4_H5_I6")]
        ours = next(bar for bar in panels["M1_H2_I3 (new)"] if bar.arm == "fusepatch")
        assert (ours.low, ours.middle, ours.high) == pytest.approx((1.35, 1.5, 1.8))

    def test_pictures(self, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip("matplotlib")
        assert main(["plot", "--results", str(folder), "--to", str(tmp_path / "pictures")]) == 0
        drawn = sorted(path.name for path in (tmp_path / "pictures" / "NVIDIA-H200").iterdir())
        names = ("gated_mlp_forward_time", "gated_mlp_train_peak", "gated_mlp_train_time")
        assert drawn == [f"{name}.{kind}" for name in names for kind in ("png", "svg")]
        svg = (tmp_path / "pictures" / "NVIDIA-H200" / "gated_mlp_train_time.svg").read_text()
        for text in ("over gemm_floor", "fusepatch", "1.500", "M4_H5_I6"):
            assert re.search(re.escape(text), svg)
        assert "old" not in svg

    def test_without_matplotlib(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        assert main(["plot", "--results", str(folder), "--to", str(folder)]) == 1
        assert "fusepatch[bench]" in capsys.readouterr().err
