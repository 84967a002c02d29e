"""The parts of a gated MLP's training step, each against the matrix product it replaces or that a peer would run.

    gate_up     h, and [gate | up] where a gradient needs it, from x       against x [Wg | Wu]^T
    d_gate_up   [d_gate | d_up], and h again, from dout                    against dout Wd
    dx          cuBLAS's two products, one added to the other; our own     against one over gate and up joined
    d_weights   the gradients of Wg and Wu: cuBLAS's two; our own          against one over gate and up joined
    d_down      the gradient of Wd: our own                                against cuBLAS's

`columns_192` is our own with tiles of so many columns, whether or not it serves this size. Tensors: M tokens, H hidden
size, I intermediate size, M2I = [M, 2*I] with the gate in the first I columns.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusepatch import table
from fusepatch.kernels.backends import load
from fusepatch.kernels.gated_mlp import choose, op, reference

from . import data, results, timing
from .cases import Case
from .check import FACTOR, FLOOR, exact_fp32, relative_error
from .results import Figure

BENCHMARK = "gated_mlp_kernels"
BASE = "gemm"
"""The arm that the others of a part are compared with."""
TWO = "two_products"

Call = Callable[[], tuple[Tensor | None, ...]]
Parts = dict[str, dict[str, Call]]
"""What is timed, by part and arm."""


@dataclass(frozen=True)
class Options:
    """What a run is asked for."""

    backend: choose.Backend
    cases: tuple[Case, ...]
    limits: timing.Limits = field(default_factory=lambda: timing.Limits(repeats=50, seconds=2.0))
    save_to: Path | None = None

    @property
    def dry_run(self) -> bool:
        """Whether this only rehearses."""
        return any(case.device != "cuda" for case in self.cases)


@dataclass(frozen=True, eq=False)
class _Inputs:
    """What the parts read, with nothing that wants a gradient."""

    x: Tensor
    dout: Tensor
    """x and dout are [M, H]."""
    gate: Tensor
    up: Tensor
    joined: Tensor
    """The weights [I, H], [I, H] and, both in one, [2*I, H]."""
    down: Tensor
    gate_up: Tensor
    d_gate_up: Tensor
    """What the forward kernel and the backward kernel make, [M, 2*I]."""
    h: Tensor
    """[M, I]."""


def run(options: Options) -> list[Figure]:
    """Runs everything, prints a table per case, and saves its rows as soon as a case is done."""
    figures = []
    for case in options.cases:
        of_case = _run_case(case, options)
        figures += of_case
        print(_render(case, of_case), flush=True)
        if options.save_to is not None:
            results.append(of_case, options.save_to, dry_run=options.dry_run)
    print(f"run {results.RUN}", flush=True)
    return figures


def _run_case(case: Case, options: Options) -> list[Figure]:
    on_gpu = case.device == "cuda"
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size if on_gpu else 0
    figures = []
    with torch.no_grad():
        sets = [_inputs(case, seed) for seed in range(data.copies(case, cache))]
        parts = [_parts(case, options.backend, inputs) for inputs in sets]
        wrong = _wrong(case, parts[0], sets[0])
        for part in parts[0]:
            calls = {arm: [of_set[part][arm] for of_set in parts] for arm in parts[0][part] if (part, arm) not in wrong}
            figures += _time(case, part, calls, options.limits, on_gpu)
        still = _wrong(case, parts[0], sets[0])
    for (part, arm), why in {**wrong, **still}.items():
        print(f"{case} {part} {arm}: wrong, {why}")
    return [figure for figure in figures if (figure.mode, figure.arm) not in still]


def _inputs(case: Case, seed: int) -> _Inputs:
    numbers = data.make(case, seed)
    x_MH, dout_MH = numbers.x.detach()[0], numbers.dout[0]
    gate_up_2IH = torch.cat([numbers.gate, numbers.up])
    gate_up_M2I = F.linear(x_MH, gate_up_2IH)
    d_gate_up_M2I, h_MI = reference.gemm_dact(dout_MH, numbers.down, gate_up_M2I, case.activation, want_h=True)
    return _Inputs(x_MH, dout_MH, numbers.gate, numbers.up, gate_up_2IH, numbers.down, gate_up_M2I, d_gate_up_M2I, h_MI)


def _as_fp32(given: _Inputs) -> _Inputs:
    return _Inputs(**{each.name: getattr(given, each.name).float() for each in fields(given)})


def _parts(case: Case, backend: choose.Backend, given: _Inputs) -> Parts:
    """Of the matrix product the result is not what the others make."""
    kernels: Any = load(backend)
    rest = given.gate, given.up, None, None, case.activation

    def forward(keep: bool) -> Call:
        return lambda: kernels.dual_gemm_act(given.x, *rest, want_gate_up=keep)

    def backward(want_h: bool) -> Call:
        return lambda: kernels.gemm_dact(given.dout, given.down, given.gate_up, case.activation, want_h=want_h)

    def plain(*, dx: bool = False, weights: bool = False) -> tuple[Tensor | None, ...]:
        return op.gradients((dx, weights, weights, False, False), False, given.d_gate_up, given.x, given.gate, given.up)

    def own(name: str, call: Callable[[Any, int], tuple[Tensor | None, ...]]) -> dict[str, Call]:
        if backend.products is None:
            return {}
        module: Any = importlib.import_module(backend.products)
        return {f"columns_{each}": functools.partial(call, module, each) for each in module.VARIANTS[name]}

    return {
        "gate_up": {
            BASE: lambda: (F.linear(given.x, given.joined),),
            "h": forward(False),
            "h_and_gate_up": forward(True),
        },
        "d_gate_up": {
            BASE: lambda: (given.dout @ given.down,),
            "d_gate_up": backward(False),
            "d_gate_up_and_h": backward(True),
        },
        "dx": {
            BASE: lambda: (given.d_gate_up @ given.joined,),
            TWO: functools.partial(plain, dx=True),
            **own("dx", lambda module, each: (module.dx(given.d_gate_up, given.gate, given.up, columns=each),)),
        },
        "d_weights": {
            BASE: lambda: (given.d_gate_up.t() @ given.x,),
            TWO: functools.partial(plain, weights=True),
            **own(
                "d_weights",
                lambda module, each: module.d_weights(given.d_gate_up, given.x, packed=False, columns=each),
            ),
        },
        "d_down": {
            BASE: lambda: (given.dout.t() @ given.h,),
            **own("d_down", lambda module, each: (module.d_down(given.dout, given.h, columns=each),)),
        },
    }


def _wrong(case: Case, parts: Parts, given: _Inputs) -> dict[tuple[str, str], str]:
    """By part and arm: what is further from fp32 than PyTorch in the same dtype by more than the gate allows."""
    plain, exact = _parts(case, choose.REFERENCE, given), _parts(case, choose.REFERENCE, _as_fp32(given))
    found = {}
    for part, calls in parts.items():
        for arm, call in calls.items():
            same = next(name for name in (arm, TWO, BASE) if name in plain[part])  # what makes the same of the same
            with exact_fp32():
                expected = _made(exact[part][same])
            for mine, theirs, true in zip(_made(call), _made(plain[part][same]), expected, strict=True):
                error, allowed = relative_error(mine, true), FACTOR * relative_error(theirs, true) + FLOOR
                if not error <= allowed:
                    found[part, arm] = f"{error:.2e} from fp32, and {allowed:.2e} is allowed"
    return found


def _made(call: Call) -> list[Tensor]:
    return [each for each in call() if each is not None]


def _time(case: Case, part: str, calls: Mapping[str, list[Call]], limits: timing.Limits, on_gpu: bool) -> list[Figure]:
    """The rows of one part."""

    def step(copies: list[Call]) -> timing.Step:
        return timing.Step(lambda number: copies[number % len(copies)], _call, lambda: None, nullcontext)

    def failed(arm: str, what: str) -> None:
        print(f"{case} {part} {arm}: {what}", flush=True)

    samples = timing.measure({arm: step(copies) for arm, copies in calls.items()}, limits, on_gpu, failed)
    return [
        Figure(BENCHMARK, str(case), part, arm, "time", "ms", *results.summary(found), len(found))
        for arm, found in samples.items()
    ]


def _call(call: Call) -> None:
    call()


def _render(case: Case, figures: list[Figure]) -> str:
    base = {figure.mode: figure.p50 for figure in figures if figure.arm == BASE}
    rows = [
        (
            figure.mode,
            figure.arm,
            *(f"{number:.4g}" for number in (figure.p20, figure.p50, figure.p80)),
            f"{figure.p50 / base[figure.mode]:.3f}" if figure.mode in base else "",
            figure.n,
        )
        for figure in figures
    ]
    return f"\n{case}, ms\n{table.render(('part', 'arm', 'p20', 'p50', 'p80', '/ gemm', 'n'), rows)}"
