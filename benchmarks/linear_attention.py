"""Linear attention: FLA's kernels, other backends in FLA's registry and fusepatch's, as an op, in FLA's layer.

Checked on the first 256 tokens of the same data against the definition in fp64, which at the full length would keep a
state for every token; at the full length the arms are held to each other. FLA's autotuner measures its candidates in
this process, before anything is timed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fusepatch import table

from . import linear_arms, linear_cases, results, timing, tuning
from .check import first_line
from .linear_arms import Arm
from .linear_cases import OPS, SCOPES, Built, Case, Shape, build
from .results import Figure

BENCHMARK = "linear_attention"
MODES = ("train", "train_graph", "forward", "host", "memory")
"""Forward and backward with all gradients; the same replayed as a CUDA graph; forward alone, where nothing requires a
gradient; the host's time for both passes; and what one call keeps and needs."""

# `error <= _FACTOR * FLA's error + _FLOOR` is within parity; of what belongs to the gate, _GATE_FACTOR.
_FACTOR, _FLOOR, _GATE_FACTOR = 1.25, 1e-3, 2.0
_ALONE = 2e-2
"""The most error where FLA's own kernels do not run, and of FLA's own."""
_APART, _GATE_APART = 0.03, 0.1
"""How far two arms may be apart at the full length."""
_GATE_WRONG = 0.25
"""Beyond parity up to here, an arm is timed, and its rows say so: cuDNN's KDA is known for it (docs/evidence.md). What
is off by more than a quarter of its length is wrong; up to there it points within 14.5 degrees of the true gradient."""
_OF_THE_GATE = ("g", "A_log", "dt_bias", "f_proj", "a_proj")


@dataclass(frozen=True)
class Options:
    """What a run is asked for."""

    shapes: tuple[Shape, ...]
    ops: tuple[str, ...] = ("kda",)
    arms: tuple[str, ...] | None = None
    """By name; all where None."""
    scopes: tuple[str, ...] = SCOPES
    modes: tuple[str, ...] = MODES
    device: str = "cuda"
    limits: timing.Limits = field(default_factory=lambda: timing.Limits(repeats=50, seconds=4.0))
    save_to: Path | None = None
    only_prepare: bool = False
    """Compiles what would be timed, into the caches on disk, and times nothing: others may use the GPU meanwhile."""

    def cases(self) -> list[Case]:
        """The cases, op by op."""
        return [
            Case(OPS[op], shape, scope, self.device)
            for op in self.ops
            for scope in self.scopes
            for shape in self.shapes
        ]


# ------------------------------------------------------------------------------------------------------------ one run


@dataclass(eq=False)
class _Entry:
    arm: Arm
    why_not: str | None = None
    errors: dict[str, float] = field(default_factory=dict)
    beyond_parity: dict[str, float] = field(default_factory=dict)
    """Errors of what belongs to the gate that are larger than parity allows."""
    samples: dict[str, list[float]] = field(default_factory=dict)
    saved: int | None = None
    peak: int | None = None

    @property
    def remark(self) -> str | None:
        """What is to be read beside its figures, or instead of them."""
        beyond = ", ".join(f"{name} {error:.1e}" for name, error in self.beyond_parity.items())
        return self.why_not or (f"beyond parity: {beyond}" if beyond else None)


Say = Callable[[str], None]
_Known = dict[tuple[str, Shape, str], dict[str, float]]
"""Errors by op, shape and arm: the layer's are those of the op that it calls."""


def run(options: Options) -> list[Figure]:
    """Every arm on every case: checked, timed in turns, and compared at the full length. Saves case by case."""
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - start:6.1f} s] {text}", flush=True)

    dry_run = options.device != "cuda"
    origin = results.provenance(dry_run)
    say(f"{origin.gpu}; {origin.versions}; commit {origin.commit}")
    if dry_run:
        say("DRY RUN on a CPU: this shows that the harness works. Its times are not results.")
    elif options.only_prepare:
        tuning.compile_only()
    else:
        tuning.measure_briefly()
    if not dry_run:
        tuning.compile_side_by_side(max(1, (os.cpu_count() or 2) - 2))
    if options.only_prepare:
        for case in options.cases():
            _prepare(case, linear_arms.select(options.arms, case.op), say)
        say("prepared")
        return []
    figures: list[Figure] = []
    known: _Known = {}
    for case in options.cases():
        entries = _run_case(case, options, known, say)
        of_case = _figures(case, entries)
        figures += of_case
        print(_render(case, entries, of_case), flush=True)
        if options.save_to is not None:
            for path in results.append(of_case, options.save_to, dry_run=dry_run):
                say(f"appended to {path}")
    say(f"done; run {results.RUN}")
    return figures


def _prepare(case: Case, arms: Iterable[Arm], say: Say) -> None:
    """Runs once, for each arm, all that will be checked and timed."""
    trains, frozen = build(case), build(case, trains=False)
    for arm in arms:
        began = time.monotonic()
        why_not = linear_arms.why_unavailable(arm, case)
        if why_not is None:
            try:
                with arm.context(case.op, case.device):
                    linear_cases.errors(case.op, case.shape, case.device)
                    trains.step()
                    with torch.no_grad():
                        frozen.run()
                    _wait(case)
            except Exception as error:
                why_not = f"unavailable: {first_line(error)}"
        say(f"{case}, {arm.name}: {why_not or 'ready'} ({time.monotonic() - began:.1f} s)")


def _wait(case: Case) -> None:
    if case.device == "cuda":
        torch.cuda.synchronize()


def _run_case(case: Case, options: Options, known: _Known, say: Say) -> list[_Entry]:
    on_gpu = case.device == "cuda"
    entries = [_Entry(arm) for arm in linear_arms.select(options.arms, case.op)]
    outputs: dict[str, dict[str, Tensor]] = {}
    built = build(case)
    for entry in entries:
        began = time.monotonic()
        entry.why_not = linear_arms.why_unavailable(entry.arm, case)
        if entry.why_not is None:
            try:
                outputs[entry.arm.name] = _check(entry, case, built, known)
            except Exception as error:
                entry.why_not = f"unavailable: {first_line(error)}"
        say(f"{case}, {entry.arm.name}: {entry.why_not or 'ran'} ({time.monotonic() - began:.1f} s)")
    running = [entry for entry in entries if entry.why_not is None]
    _judge(running, outputs)
    outputs.clear()
    for entry in running:
        if entry.remark is not None:
            say(f"{case}, {entry.arm.name}: {entry.remark}")
    right = [entry for entry in running if entry.why_not is None]
    for mode in options.modes if right else ():
        if mode == "memory" or (mode == "train_graph" and not on_gpu):
            continue
        _time(case, mode, right, built, options, on_gpu, say)
    if "memory" in options.modes and on_gpu:
        for entry in right:
            if entry.why_not is None:
                _weigh(entry, case, built)
    del built
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return entries


def _check(entry: _Entry, case: Case, built: Built, known: _Known) -> dict[str, Tensor]:
    """Notes the arm's errors, and what there is to say against it; returns its results at the full length."""
    arm, place = entry.arm, (case.op.name, case.shape, entry.arm.name)
    with arm.context(case.op, case.device), linear_arms.watched(arm) as why_not_it:
        if place not in known:
            known[place] = linear_cases.errors(case.op, case.shape, case.device)
        entry.errors = known[place]
        found = built.step()
        _wait(case)
        why_not = why_not_it()
    if why_not is not None:
        entry.why_not = f"unavailable: {why_not}"
    return found


def _judge(running: Sequence[_Entry], outputs: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Holds each arm to FLA, where that is right: its errors over the first tokens, its results at the full length."""
    stock: _Entry | None = None
    for entry in running:
        for name, error in entry.errors.items():
            if stock is None:
                allowed, beside = _ALONE, ""
            else:
                factor = _GATE_FACTOR if _is_of_the_gate(name) else _FACTOR
                allowed, beside = factor * stock.errors[name] + _FLOOR, f" (FLA {stock.errors[name]:.2e})"
            _hold(entry, name, error, allowed, f"has a relative error of {error:.2e}{beside}")
        if entry.arm is linear_arms.ARMS[0] and entry.why_not is None:
            stock = entry
    right = [entry for entry in running if entry.why_not is None]
    for entry in right[1:]:
        for name, expected in outputs[right[0].arm.name].items():
            apart = linear_cases.error(outputs[entry.arm.name][name], expected)
            allowed = _GATE_APART if _is_of_the_gate(name) else _APART
            _hold(entry, name, apart, allowed, f"is {apart:.2e} apart from that of {right[0].arm.name} at full length")


def _is_of_the_gate(name: str) -> bool:
    return name.partition(".")[0] in _OF_THE_GATE


def _hold(entry: _Entry, name: str, error: float, allowed: float, what: str) -> None:
    if error <= allowed or entry.why_not is not None:
        return
    if _is_of_the_gate(name) and error <= _GATE_WRONG:
        entry.beyond_parity[name] = max(error, entry.beyond_parity.get(name, 0.0))
    else:
        entry.why_not = f"wrong: {name} {what}"


def _time(
    case: Case, mode: str, entries: Sequence[_Entry], built: Built, options: Options, on_gpu: bool, say: Say
) -> None:
    by_name = {entry.arm.name: entry for entry in entries}
    # Forward alone is that of a model that is not trained: where a parameter requires a gradient, the route is that
    # of training.
    frozen = build(case, trains=False) if mode == "forward" else built
    steps = {}
    for entry in entries:
        if entry.why_not is None:
            with contextlib.suppress(Exception):
                steps[entry.arm.name] = _step(entry.arm, case, mode, frozen)
    for entry in entries:
        if entry.why_not is None and entry.arm.name not in steps:
            say(f"  {entry.arm.name}: can't be captured")

    def failed(name: str, what: str) -> None:
        by_name[name].why_not = f"unavailable: in {mode}: {what}"
        say(f"  {name}: {by_name[name].why_not}")

    measure = timing.measure_host if mode == "host" else timing.measure
    began = time.monotonic()
    for name, samples in measure(steps, options.limits, on_gpu, failed).items():
        by_name[name].samples[mode] = samples
    say(f"  {mode} ({time.monotonic() - began:.1f} s)")


def _step(arm: Arm, case: Case, mode: str, built: Built) -> timing.Step:
    def train(state: None) -> None:
        built.run().backward(built.dout)

    def forward(state: None) -> None:
        with torch.no_grad():
            built.run()

    def forget() -> None:
        for leaf in built.leaves.values():
            leaf.grad = None

    def nothing() -> None:
        pass

    if mode == "train_graph":
        with arm.context(case.op, case.device):
            graph = _captured(built)
        return timing.Step(lambda number: None, lambda state: graph.replay(), nothing, contextlib.nullcontext)
    timed, after = (forward, nothing) if mode == "forward" else (train, forget)
    return timing.Step(lambda number: None, timed, after, lambda: arm.context(case.op, case.device))


def _captured(built: Built) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            built.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        built.step()
    return graph


def _weigh(entry: _Entry, case: Case, built: Built) -> None:
    """What autograd keeps between the passes, each storage once and without the leaves, and the most allocated."""
    own = {leaf.untyped_storage().data_ptr() for leaf in built.leaves.values()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with entry.arm.context(case.op, case.device):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = built.run()
        entry.saved = sum(storage.nbytes() for storage in kept.values())
        del out
        kept.clear()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        built.step()
        torch.cuda.synchronize()
        entry.peak = torch.cuda.max_memory_allocated() - before


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
            scale, unit = (1e3, "us") if mode == "host" else (1.0, "ms")
            add(mode, "time", unit, [scale * sample for sample in samples])
        for name, error in entry.errors.items():
            add("train", f"error_{name}", "1", [error])
        for name, error in entry.beyond_parity.items():
            add("train", f"beyond_parity_{name}", "1", [error])
        for metric, number in (("saved", entry.saved), ("peak", entry.peak)):
            if number is not None:
                add("train", metric, "bytes", [float(number)])
    return found


_HEADERS = ("arm", "mode", "metric", "p20", "p50", "p80", "unit", "fla /", "n")


def _render(case: Case, entries: Sequence[_Entry], figures: Sequence[Figure]) -> str:
    stock = {(figure.mode, figure.metric): figure.p50 for figure in figures if figure.arm == linear_arms.ARMS[0].name}
    rows = [
        (
            figure.arm,
            figure.mode,
            figure.metric,
            *(f"{number:.4g}" for number in (figure.p20, figure.p50, figure.p80)),
            figure.unit,
            f"{stock[figure.mode, figure.metric] / figure.p50:.3f}"
            if figure.p50 and (figure.mode, figure.metric) in stock
            else "",
            figure.n,
        )
        for figure in figures
    ]
    remarks = [f"{entry.arm.name}: {entry.remark}" for entry in entries if entry.remark is not None]
    return "\n".join(["", str(case), table.render(_HEADERS, rows), *remarks])
