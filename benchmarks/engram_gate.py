"""The Engram gate: every arm, alone and in the whole that consumes it, checked, timed in turns, and checked again."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fusepatch import table

from . import engram_arms, results, timing
from .check import FACTOR, FLOOR, first_line
from .engram_arms import GENERATIONS, Arm, Built, Case, Data, Results, why_unavailable
from .results import Figure

BENCHMARK = "engram_gate"
MODES = ("forward", "train", "backward", "host")
"""Forward where nothing wants a gradient; both passes; the backward pass alone; the host's time for both passes."""
TOKENS: tuple[int, ...] = (4096, 16384)
HOST_TOKENS = 64
"""So few that the GPU is done before the host is."""
TINY = ((48,), 40, 24)
"""Tokens, width and width of the embedding for a rehearsal on a CPU."""


@dataclass(frozen=True)
class Options:
    """What a run is asked for."""

    arms: tuple[Arm, ...]
    cases: tuple[Case, ...]
    modes: tuple[str, ...] = MODES
    limits: timing.Limits = field(default_factory=lambda: timing.Limits(repeats=50, seconds=4.0))
    save_to: Path | None = None

    @property
    def dry_run(self) -> bool:
        """Whether this only rehearses: a CPU tells nothing of a GPU."""
        return any(case.device != "cuda" for case in self.cases)


@dataclass(eq=False)
class _Entry:
    """What became of one arm in one case."""

    arm: Arm
    built: Built | None = None
    why_not: str | None = None
    error_ratio: float = 0.0
    samples: dict[str, list[float]] = field(default_factory=dict)

    def drop(self, why: str) -> None:
        self.why_not, self.built = why, None
        self.samples.clear()


Say = Callable[[str], None]
Errors = dict[str, float]


def run(options: Options) -> list[Figure]:
    """Runs everything, prints a table per case, and saves its rows as soon as a case is done."""
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - start:6.1f} s] {text}", flush=True)

    if options.dry_run:
        print("DRY RUN on a CPU: this shows that the harness works. Its times are not results.", flush=True)
    origin = results.provenance(options.dry_run)
    say(f"{origin.gpu}; {origin.versions}; commit {origin.commit}")
    figures: list[Figure] = []
    plans = [(case, tuple(mode for mode in options.modes if mode != "host")) for case in options.cases]
    if "host" in options.modes:
        of_host = {dataclasses.replace(case, tokens=min(case.tokens, HOST_TOKENS)) for case in options.cases}
        plans += [(case, ("host",)) for case in sorted(of_host, key=str)]
    for case, modes in plans:
        if not modes:
            continue
        say(f"{case} {case.scope}: {', '.join(modes)}")
        entries, copies = _run_case(case, modes, options, say)
        of_case = _figures(case, entries, copies)
        figures += of_case
        print(_render(case, entries, of_case), flush=True)
        if options.save_to is not None:
            for path in results.append(of_case, options.save_to, dry_run=options.dry_run):
                say(f"appended to {path}")
    print(arrival(figures), flush=True)
    say(f"done; run {results.RUN}")
    return figures


# --------------------------------------------------------------------------------------------------------- one case


def _run_case(
    case: Case, modes: Sequence[str], options: Options, say: Say
) -> tuple[list[_Entry], dict[str, list[float]]]:
    on_gpu = case.device == "cuda"
    torch.compiler.reset()
    data = engram_arms.make(case)
    entries = [_Entry(arm) for arm in options.arms]
    for entry in entries:
        began = time.monotonic()
        why_not = why_unavailable(entry.arm, case)
        if why_not is None:
            try:
                with entry.arm.context(case):
                    entry.built = entry.arm.build(data)
            except Exception as error:
                why_not = first_line(error)
        if why_not is not None:
            entry.drop(f"unavailable: {why_not}")
        say(f"  {entry.arm.name}: {entry.why_not or 'built'} ({time.monotonic() - began:.1f} s)")
    _check(case, data, entries, GENERATIONS, say)
    copies: dict[str, list[float]] = {}
    for mode in modes:
        copies[mode] = _time(case, mode, entries, options, on_gpu, say)
    _check(case, data, entries, GENERATIONS[:3], say, "after timing, ")
    for entry in entries:
        entry.built = None
    del data
    gc.collect()
    if on_gpu:
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
    return entries, copies


def _check(
    case: Case, data: Data, entries: Sequence[_Entry], generations: Sequence[str], say: Say, when: str = ""
) -> None:
    """Drops every arm that is wrong on an input generation; leaves the numbers of the first one in place."""
    stale: Results | None = None
    for generation in (*generations[1:], generations[0]):  # the last is the one that is timed
        data.fill(generation)
        expected = engram_arms.reference(data)
        baseline: Errors = {}
        for entry in entries:
            if entry.built is None:
                continue
            try:
                with entry.arm.context(case):
                    found = _results(entry.built)
                    errors = {name: error_of(found[name], expected[name]) for name in expected}
                    what = _what_is_wrong(data, found, errors, baseline or errors)
                    if what is None:
                        alone = error_of(_forward(entry.built), expected["out"])
                        if not alone <= FACTOR * (baseline or errors)["out"] + FLOOR:
                            what = f"the forward pass alone has a relative error of {alone:.2e}"
                if not baseline:
                    baseline = errors
                    _test_the_metric(data, expected, baseline, stale)
            except Exception as error:
                what = first_line(error)
            if what is not None:
                entry.drop(f"wrong: {when}on {generation}: {what}")
                say(f"  {entry.arm.name}: {entry.why_not}")
            elif generation == generations[0]:
                entry.error_ratio = max(errors[name] / max(baseline[name], 1e-6) for name in errors)
        if not _is_as_filled(data, generation):
            raise RuntimeError("an arm wrote to its inputs")
        stale = expected
    data.fill(generations[0])


def _is_as_filled(data: Data, generation: str) -> bool:
    given = [t.detach().clone() for t in (*data.leaves, data.grad_out)]
    data.fill(generation)
    return all(torch.equal(t, g) for t, g in zip((*data.leaves, data.grad_out), given, strict=True))


def _results(built: Built) -> Results:
    """One training step, into memory that was poisoned before."""
    _poison(built)
    return built.train()


def _forward(built: Built) -> Tensor:
    _poison(built)
    return built.forward()


def _poison(built: Built) -> None:
    for tensor in built.owned:
        tensor.detach().fill_(math.nan)


def error_of(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected|_2 / |expected|_2; of what must be 0, 0 or infinite."""
    if actual.shape != expected.shape:
        return math.inf
    difference = float(torch.linalg.vector_norm(actual.detach().float() - expected, dtype=torch.float64))
    size = float(torch.linalg.vector_norm(expected, dtype=torch.float64))
    error = difference / size if size else (0.0 if difference == 0 else math.inf)
    return error if math.isfinite(error) else math.inf


def _what_is_wrong(data: Data, found: Results, errors: Errors, baseline: Errors) -> str | None:
    for name, error in errors.items():
        if not error <= FACTOR * baseline[name] + FLOOR:
            return f"{name} has a relative error of {error:.2e} (eager {baseline[name]:.2e})"
    off = ~data.mask
    if not torch.equal(found["out"][off], data.tensors["x"].detach()[off]):
        return "a masked token is not its x, bit for bit"
    if not torch.equal(found["x"][off], data.grad_out[off]):
        return "the gradient of a masked token's x is not what came in, bit for bit"
    return None


def _test_the_metric(data: Data, expected: Results, baseline: Errors, stale: Results | None) -> None:
    """Raises where NaN, zeros or the numbers of another generation would pass."""
    wrong: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("NaN", lambda t: torch.full_like(t, math.nan)),
        ("zeros", torch.zeros_like),
    ]
    for what, make in wrong:
        for name, tensor in expected.items():
            is_zero = what == "zeros" and not bool(tensor.any())
            if not is_zero and error_of(make(tensor), tensor) <= FACTOR * baseline[name] + FLOOR:
                raise ValueError(f"the check is no check: {what} would pass for {name}")
    if stale is not None and error_of(stale["out"], expected["out"]) <= FACTOR * baseline["out"] + FLOOR:
        raise ValueError("the check is no check: the output of other inputs would pass")


# ---------------------------------------------------------------------------------------------------------- the times


def _time(case: Case, mode: str, entries: Sequence[_Entry], options: Options, on_gpu: bool, say: Say) -> list[float]:
    """Times every arm in a mode, and beside them a copy of as many bytes; returns the times of that."""
    began = time.monotonic()
    by_name = {entry.arm.name: entry for entry in entries}
    steps = {}
    for name, entry in by_name.items():
        if entry.built is not None and (mode != "backward" or entry.built.splits):
            steps[name] = _step(entry.arm, entry.built, case, mode)
    if mode != "host" and case.scope == "gate":
        steps[_COPY] = _copy_step(case, mode)

    def failed(name: str, what: str) -> None:
        if name in by_name:
            by_name[name].drop(f"unavailable: in {mode}: {what}")
        say(f"  {name}: in {mode}: {what}")

    measure = timing.measure_host if mode == "host" else timing.measure
    copies: list[float] = []
    for name, samples in measure(steps, options.limits, on_gpu, failed).items():
        if name == _COPY:
            copies = samples
        else:
            by_name[name].samples[mode] = samples
    rounds = max((len(entry.samples.get(mode, ())) for entry in entries), default=0)
    say(f"  {mode}: {rounds} samples of each arm ({time.monotonic() - began:.1f} s)")
    return copies


_COPY = "copy"


def _step(arm: Arm, built: Built, case: Case, mode: str) -> timing.Step:
    context = functools.partial(arm.context, case)
    if mode == "forward":
        return timing.Step(lambda number: None, lambda _: _drop(built.forward()), _nothing, context)
    if mode == "backward":
        return timing.Step(lambda number: built.begin(), lambda state: _drop(built.finish(state)), _nothing, context)
    return timing.Step(lambda number: None, lambda _: _drop(built.train()), _nothing, context)


def _copy_step(case: Case, mode: str) -> timing.Step:
    source = torch.ones(case.least_bytes(mode) // 2, dtype=torch.uint8, device=case.device)
    target = torch.empty_like(source)
    return timing.Step(lambda number: None, lambda _: _drop(target.copy_(source)), _nothing, contextlib.nullcontext)


def _drop(_: object) -> None:
    """Lets go of what a call returned."""


def _nothing() -> None:
    pass


# ------------------------------------------------------------------------------------------------- what is made of it


def _rival(name: str, entries: Sequence[_Entry], mode: str) -> list[_Entry]:
    """The correct native controls of the same kind: graphs against graphs."""
    graphed = name.endswith("_graph")
    return [e for e in entries if e.arm.native and e.arm.graphed is graphed and mode in e.samples]


def _figures(case: Case, entries: Sequence[_Entry], copies: Mapping[str, list[float]]) -> list[Figure]:
    found = []

    def add(mode: str, arm: str, metric: str, unit: str, samples: Sequence[float]) -> None:
        rounded = results.summary(samples)
        found.append(Figure(BENCHMARK, str(case), mode, arm, metric, unit, *rounded, len(samples)))

    for mode, samples in copies.items():
        if samples:
            add(mode, _COPY, "time", "ms", samples)
    for entry in entries:
        if entry.why_not is not None:
            continue
        name = entry.arm.name
        for mode, samples in entry.samples.items():
            if mode == "host":
                add(mode, name, "time", "us", [1e3 * sample for sample in samples])
            else:
                add(mode, name, "time", "ms", samples)
            if copies.get(mode):
                add(mode, name, "bandwidth_fraction", "1", [statistics.median(copies[mode]) / s for s in samples])
            rivals = [] if entry.arm.native else _rival(name, entries, mode)
            if rivals:
                best = [min(times) for times in zip(*(rival.samples[mode] for rival in rivals), strict=False)]
                won = [float(mine < other) for mine, other in zip(samples, best, strict=False)]
                add(mode, name, "blocks_won", "1", [sum(won) / len(won)])
        add("train", name, "error_ratio", "1", [entry.error_ratio])
    return found


def _render(case: Case, entries: Sequence[_Entry], figures: Sequence[Figure]) -> str:
    by_key = {(f.arm, f.mode, f.metric): f for f in figures}
    rows = []
    for figure in (f for f in figures if f.metric == "time"):
        key = (figure.arm, figure.mode)
        fraction, won = by_key.get((*key, "bandwidth_fraction")), by_key.get((*key, "blocks_won"))
        eager = by_key.get(("eager", figure.mode, "time"))
        rows.append(
            (
                figure.mode, figure.arm, *(f"{number:.4g}" for number in (figure.p20, figure.p50, figure.p80)),
                figure.unit, f"{figure.p50 / eager.p50:.3f}" if eager else "",
                f"{fraction.p50:.3f}" if fraction else "", f"{won.p50:.2f}" if won else "", figure.n,
            )
        )  # fmt: skip
    rows.sort(key=lambda row: row[0])
    headers = ("mode", "arm", "p20", "p50", "p80", "unit", "/ eager", "of copy", "blocks won", "n")
    missing = [f"{entry.arm.name}: {entry.why_not}" for entry in entries if entry.why_not is not None]
    return "\n".join((f"\n{case}, {case.scope}", table.render(headers, rows), *missing, ""))


def arrival(figures: Sequence[Figure]) -> str:
    """How much of the time that the gate alone saves over each control arrives at the consumer."""
    medians = {(f.case, f.mode, f.arm): f.p50 for f in figures if f.metric == "time"}
    lines = []
    for (case, mode, arm), consumer in medians.items():
        gate_case, whole, _ = case.partition("_E")
        mine = "fusepatch_graph" if arm.endswith("_graph") else "fusepatch"
        if not whole or arm.startswith("fusepatch") or mode == "host":
            continue
        keys = [(gate_case, mode, arm), (gate_case, mode, mine), (case, mode, mine)]
        if not all(key in medians for key in keys):
            continue
        gate, gate_mine, consumer_mine = (medians[key] for key in keys)
        if gate > gate_mine:
            part = (consumer - consumer_mine) / (gate - gate_mine)
            lines.append(f"{case} {mode}: of what {mine} saves over {arm} in the gate alone, {part:.2f} arrives")
    return "\n".join(lines)
