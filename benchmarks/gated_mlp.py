"""The gated MLP: every arm on every case, checked, timed against each other, and checked again."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fusepatch import table

from . import check, data, memory, power, prepare, results, timing, tuning
from .arms import Arm, Built, why_unavailable
from .cases import HOST_SHAPE, Case, modes_of
from .results import Figure

BENCHMARK = "gated_mlp"


@dataclass(frozen=True)
class Options:
    """What a run is asked for."""

    arms: tuple[Arm, ...]
    cases: tuple[Case, ...]
    modes: tuple[str, ...] | None = None
    """None for those that suit each shape."""
    limits: timing.Limits = field(default_factory=lambda: timing.Limits(repeats=50, seconds=4.0))
    prepare_seconds: float = 120.0
    logs: Path | None = None
    """The folder that keeps what arms printed while they were tried."""
    save_to: Path | None = None

    @property
    def dry_run(self) -> bool:
        """Whether this only rehearses: a CPU tells nothing of a GPU."""
        return any(case.device != "cuda" for case in self.cases)


@dataclass(eq=False)
class _Entry:
    """What became of one arm in one case."""

    arm: Arm
    built: list[Built] = field(default_factory=list)
    """One for each copy of the data."""
    why_not: str | None = None
    """Why there are no figures of it: `unavailable: ...` or `wrong: ...`."""
    notes: list[str] = field(default_factory=list)
    error_ratio: float | None = None
    single_backward: bool | None = None
    samples: dict[str, list[float]] = field(default_factory=dict)
    held: memory.Held | None = None
    drawn: power.Drawn | None = None

    def drop(self, why: str) -> None:
        self.why_not = why
        self.built.clear()
        self.samples.clear()


Say = Callable[[str], None]


def run(options: Options) -> list[Figure]:
    """Runs everything, prints a table per case, and saves its rows as soon as a case is done."""
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - start:6.1f} s] {text}", flush=True)

    if options.dry_run:
        print(_LOUD, flush=True)
        torch.set_num_threads(1)  # more would only wait for each other at the sizes of a rehearsal
    origin = results.provenance(options.dry_run)
    say(f"{origin.gpu}; {origin.versions}; commit {origin.commit}")
    plans = _plans(options)
    reasons: prepare.Reasons = {}
    if not options.dry_run:
        tuning.keep_one_cache()
        tuning.measure_briefly()
        cases = list(dict.fromkeys(case for case, _ in plans))
        reasons = prepare.prepare(options.arms, cases, options.prepare_seconds, say, options.logs)
    figures: list[Figure] = []
    left_out: dict[str, list[str]] = {}
    for case, modes in plans:
        say(f"{case}: {', '.join(modes)}")
        entries = _run_case_or_say_why(case, modes, options, reasons, say)
        of_case = _figures(case, entries)
        figures += of_case
        for entry in entries:
            if entry.why_not is not None:
                left_out.setdefault(f"{entry.arm.name}  {entry.why_not}", []).append(str(case))
        print(_render(case, entries), flush=True)
        if options.save_to is not None:
            for path in results.append(of_case, options.save_to, dry_run=options.dry_run):
                say(f"appended to {path}")
    print(_summary(figures, left_out), flush=True)
    say(f"done; run {results.RUN}")
    if options.dry_run:
        print(_LOUD, flush=True)
    return figures


_LOUD = """
********************************************************************
*  DRY RUN on a CPU: this shows that the harness works. Its times  *
*  say nothing about any GPU and are not results.                  *
********************************************************************
"""


def _plans(options: Options) -> list[tuple[Case, tuple[str, ...]]]:
    """The cases with their modes. The host's time is measured last, at a small shape of its own."""
    wanted = {case: modes_of(case.shape) if options.modes is None else options.modes for case in options.cases}
    without_host = {case: tuple(mode for mode in modes if mode != "host") for case, modes in wanted.items()}
    plans = [(case, modes) for case, modes in without_host.items() if modes]
    with_host = [case for case, modes in wanted.items() if "host" in modes]
    if with_host:
        case = with_host[0]
        plans.append((case if options.dry_run else dataclasses.replace(case, shape=HOST_SHAPE), ("host",)))
    return plans


# --------------------------------------------------------------------------------------------------------- one case


def _run_case_or_say_why(
    case: Case, modes: Sequence[str], options: Options, reasons: prepare.Reasons, say: Say
) -> list[_Entry]:
    """`_run_case`; a fault of the device, after which nothing runs in this process, ends the case and not the run."""
    try:
        return _run_case(case, modes, options, reasons, say)
    except RuntimeError as error:
        why = f"unavailable: the case ended with {check.first_line(error)}"
    say(f"  {why}")
    entries = [_Entry(arm) for arm in options.arms]
    for entry in entries:
        entry.drop(why)
    _free(case.device == "cuda")
    return entries


def _run_case(case: Case, modes: Sequence[str], options: Options, reasons: prepare.Reasons, say: Say) -> list[_Entry]:
    on_gpu = case.device == "cuda"
    entries = [_Entry(arm) for arm in sorted(options.arms, key=lambda arm: arm.name != "eager")]
    _compile_anew()
    sets = [data.make(case, seed) for seed in range(_copies(case, modes))]
    expected = check.reference(case, sets[0])
    baseline: check.Errors = {}
    for entry in entries:
        began = time.monotonic()
        if not baseline and entry.arm.name != "eager":
            entry.drop("unavailable: eager failed, and there is nothing to judge by")
            continue
        found = _make_ready(entry, case, sets, expected, baseline, reasons)
        if entry.arm.name == "eager" and found is not None:
            baseline = found
        say(f"  {entry.arm.name}: {entry.why_not or 'right'} ({time.monotonic() - began:.1f} s)")
    for mode in modes:
        if mode not in ("memory", "power"):
            _time(case, mode, entries, sets, options, on_gpu, say)
    if "power" in modes:
        _draw(case, entries, sets, say)
    for entry in entries:
        if entry.why_not is None:
            _check_again(entry, case, sets[0], expected, baseline)
    for entry in entries:
        entry.built.clear()
    del sets, expected
    if "memory" in modes:
        _weigh(case, entries, say)
    _free(on_gpu)
    return entries


def _copies(case: Case, modes: Sequence[str]) -> int:
    if case.device != "cuda":
        return 2
    if tuple(modes) == ("host",):
        return 1  # the host's time does not depend on where the numbers are
    return data.copies(case, torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


def _compile_anew() -> None:
    """Each shape is compiled for itself, as in a program that has this one alone."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _make_ready(
    entry: _Entry,
    case: Case,
    sets: Sequence[data.Data],
    expected: check.Results,
    baseline: check.Errors,
    reasons: prepare.Reasons,
) -> check.Errors | None:
    """Builds an arm for every set of data and checks it on the first; returns its errors, or None where it is out."""
    arm = entry.arm
    why_not = why_unavailable(arm, case)
    if why_not is None:
        why_not = reasons.get((arm.name, case))
    if why_not is not None:
        entry.drop(f"unavailable: {why_not}")
        return None
    try:
        with arm.context(case):
            first = arm.build(case, sets[0])
            errors = check.errors(check.results(first, sets[0]), expected)
            judgement = check.judge(errors, baseline or errors)
            entry.built = [first, *(arm.build(case, other) for other in sets[1:])]
            if first.note():
                entry.notes.append(first.note())
    except Exception as error:
        entry.drop(f"unavailable: {check.first_line(error)}")
        _raise_if_device_is_lost(case)
        return None
    if judgement.over:
        entry.drop(f"wrong: {judgement.over[0]}")
        return None
    entry.error_ratio = judgement.error_ratio
    return errors


def _time(
    case: Case,
    mode: str,
    entries: Sequence[_Entry],
    sets: Sequence[data.Data],
    options: Options,
    on_gpu: bool,
    say: Say,
) -> None:
    began = time.monotonic()
    by_name = {entry.arm.name: entry for entry in entries}
    steps = {entry.arm.name: _step(entry, case, mode, sets) for entry in entries if entry.why_not is None}

    def failed(name: str, what: str) -> None:
        by_name[name].drop(f"unavailable: in {mode}: {what}")
        say(f"  {name}: {by_name[name].why_not}")
        _raise_if_device_is_lost(case)

    measure = timing.measure_host if mode == "host" else timing.measure
    for name, samples in measure(steps, options.limits, on_gpu, failed).items():
        by_name[name].samples[mode] = samples
    rounds = max((len(entry.samples.get(mode, ())) for entry in entries), default=0)
    say(f"  {mode}: {rounds} samples of each arm ({time.monotonic() - began:.1f} s)")


def _step(entry: _Entry, case: Case, mode: str, sets: Sequence[data.Data]) -> timing.Step:
    built = entry.built

    def of(number: int) -> tuple[Built, data.Data]:
        return built[number % len(sets)], sets[number % len(sets)]

    def forward(state: tuple[Built, data.Data]) -> None:
        with torch.no_grad():
            state[0].forward(state[1].x)

    def train(state: tuple[Built, data.Data]) -> None:
        state[0].forward(state[1].x).backward(state[1].dout)

    def begin(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        one, numbers = of(number)
        return one.forward(numbers.x), numbers.dout

    def backward(state: tuple[torch.Tensor, torch.Tensor]) -> None:
        state[0].backward(state[1])

    def forget() -> None:
        for one, numbers in zip(built, sets, strict=True):
            check.forget_gradients(one, numbers)

    context = lambda: entry.arm.context(case)  # noqa: E731
    if mode == "forward":
        return timing.Step(of, forward, lambda: None, context)
    if mode == "backward":
        return timing.Step(begin, backward, forget, context)
    return timing.Step(of, train, forget, context)


def _check_again(
    entry: _Entry, case: Case, numbers: data.Data, expected: check.Results, baseline: check.Errors
) -> None:
    try:
        with entry.arm.context(case):
            over = check.judge(check.errors(check.results(entry.built[0], numbers), expected), baseline).over
            if over:
                entry.drop(f"wrong: after timing, {over[0]}")
                return
            wrong = check.second_backward(entry.built[0], numbers, expected, baseline)
    except Exception as error:
        entry.drop(f"wrong: after timing, {check.first_line(error)}")
        _raise_if_device_is_lost(case)
        return
    entry.single_backward = wrong is not None
    if wrong is not None:
        entry.notes.append(f"single-backward: a second one {wrong}")


def _weigh(case: Case, entries: Sequence[_Entry], say: Say) -> None:
    began = time.monotonic()
    for entry in entries:
        if entry.why_not is None and entry.arm.stacks:
            _free(case.device == "cuda")
            try:
                entry.held = memory.measure(entry.arm, case)
            except Exception as error:
                entry.notes.append(f"memory unavailable: {check.first_line(error)}")
                _raise_if_device_is_lost(case)
    say(f"  memory ({time.monotonic() - began:.1f} s)")


def _draw(case: Case, entries: Sequence[_Entry], sets: Sequence[data.Data], say: Say) -> None:
    began = time.monotonic()
    for entry in entries:
        if entry.why_not is None:
            try:
                entry.drawn = power.measure(_step(entry, case, "train", sets))
            except Exception as error:
                say(f"  {entry.arm.name}: power unavailable: {check.first_line(error)}")
                _raise_if_device_is_lost(case)
    say(f"  power ({time.monotonic() - began:.1f} s)")


def _raise_if_device_is_lost(case: Case) -> None:
    """Raises after a fault that leaves a device which no other arm can use."""
    if case.device == "cuda":
        torch.cuda.synchronize()


def _free(on_gpu: bool) -> None:
    gc.collect()
    if on_gpu:
        with contextlib.suppress(RuntimeError):  # after a fault of the device nothing can be freed
            torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------- what is made of it


def _figures(case: Case, entries: Sequence[_Entry]) -> list[Figure]:
    found = []
    for entry in entries:
        if entry.why_not is not None:
            continue

        def add(mode: str, metric: str, unit: str, samples: Sequence[float], arm: str = entry.arm.name) -> None:
            rounded = results.summary(samples)
            found.append(Figure(BENCHMARK, str(case), mode, arm, metric, unit, *rounded, len(samples)))

        for mode, samples in entry.samples.items():
            if mode == "host":
                add(mode, "time", "us", [1e3 * sample for sample in samples])
            else:
                add(mode, "time", "ms", samples)
        if entry.error_ratio is not None:
            add("train", "error_ratio", "1", [entry.error_ratio])
        if entry.single_backward is not None:
            add("train", "backward_passes", "1", [1.0 if entry.single_backward else 2.0])
        if entry.drawn is not None:
            add("train", "clock", "MHz", entry.drawn.clock)
            add("train", "power", "W", entry.drawn.power)
        if entry.held is not None:
            add("train", "saved", "bytes", [float(entry.held.saved)])
            if entry.held.peak is not None:
                add("train", "peak", "bytes", [float(entry.held.peak)])
    return found


_HEADERS = ("arm", "mode", "p20", "p50", "p80", "unit", "/ floor", "/ eager", "n", "remarks")


def _render(case: Case, entries: Sequence[_Entry]) -> str:
    figures = _figures(case, entries)
    shown = [figure for figure in figures if figure.metric in ("time", "saved", "peak", "clock", "power")]
    medians = {(figure.arm, figure.mode, figure.metric): figure.p50 for figure in shown}
    rows = []
    for entry in sorted(entries, key=lambda entry: entry.why_not is not None):
        name = entry.arm.name
        if entry.why_not is not None:
            rows.append((name, *[""] * 8, entry.why_not))
            continue
        remarks = "; ".join(entry.notes)
        for figure in (figure for figure in shown if figure.arm == name):
            key = (figure.mode, figure.metric)
            is_time = figure.metric == "time"
            scale, unit = (2.0**-20, "MiB") if figure.unit == "bytes" else (1.0, figure.unit)
            rows.append(
                (
                    name,
                    figure.mode if is_time else figure.metric,
                    *(f"{number * scale:.4g}" for number in (figure.p20, figure.p50, figure.p80)),
                    unit,
                    _over(figure.p50, medians.get(("gemm_floor", *key))),
                    _over(figure.p50, medians.get(("eager", *key))),
                    figure.n,
                    remarks,
                )
            )
            remarks = ""
    return f"\n{case}\n{table.render(_HEADERS, rows)}\n"


def _summary(figures: Sequence[Figure], left_out: dict[str, list[str]]) -> str:
    """Every median in one table, and why arms are missing: what is read where only the end of the output is kept."""
    times = [figure for figure in figures if figure.metric == "time"]
    arms = list(dict.fromkeys(figure.arm for figure in times))
    rows = []
    for case, mode, unit in dict.fromkeys((figure.case, figure.mode, figure.unit) for figure in times):
        medians = {figure.arm: figure.p50 for figure in times if (figure.case, figure.mode) == (case, mode)}
        floor = medians.get("gemm_floor")
        cells = [f"{medians[arm]:.4g} {_over(medians[arm], floor)}" if arm in medians else "" for arm in arms]
        rows.append((case, mode, unit, *cells))
    lines = [f"medians, and over gemm_floor\n{table.render(('case', 'mode', 'unit', *arms), rows)}", ""]
    lines += [f"{what} ({len(cases)} of the cases)" for what, cases in left_out.items()]
    return "\n".join(lines)


def _over(number: float, base: float | None) -> str:
    return f"{number / base:.3f}" if base else ""
