"""`tune(model, token_counts)`: every kind of module that is not in the profile yet, for as long as there is time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from .. import entry, profiles, selfcheck, settings, table
from ..profiles import Measured
from ..warming import check_token_counts
from .measure import MODES, TRANSIENT, Case, UnmeasurableError, cases_of, measure


@dataclass(frozen=True)
class TuningReport:
    """What `tune()` measured, now and before, of one model."""

    measured: tuple[Measured, ...]
    new: int
    """How many of them were measured now."""
    left: int
    """How many the time did not suffice for: the next `tune()` goes on with them."""
    left_out: tuple[str, ...]
    """What could not be measured or kept, and why."""
    profile: Path | None
    """Where it is kept; None where nothing is."""

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, tuples, strings and numbers, fit for JSON."""
        return {**asdict(self), "profile": None if self.profile is None else str(self.profile)}

    def __str__(self) -> str:
        rows = [
            (
                each.module.partition(" ")[0].rpartition(".")[2],
                each.tokens,
                _fastest(each),
                ", ".join(f"{name} {_ratios(ratios)}" for name, ratios in each.over_library.items()) or "-",
                ", ".join(f"{name}: {why}" for name, why in each.why_not.items()) or "-",
            )
            for each in self.measured
        ]
        text = table.render(("class", "tokens", "fastest", "time over the library's own", "could not serve"), rows)
        where = "kept nowhere" if self.profile is None else f"kept in {self.profile}"
        end = f"{self.new} measured now, {len(rows) - self.new} before; {where}"
        end += f"; {self.left} left: run it again to go on" if self.left else ""
        return "\n".join([text, *(f"left out: {each}" for each in self.left_out), end])


def _fastest(found: Measured) -> str:
    return found.backend or "the library's own"


def _ratios(ratios: Any) -> str:
    return " / ".join(f"{value:.3f} {mode}" for mode, value in ratios.items())


def tune(
    model: nn.Module,
    token_counts: int | Sequence[int],
    *,
    modes: Sequence[str] = MODES,
    seconds: float = 600.0,
    seconds_per_case: float = 4.0,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cuda",
    again: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> TuningReport:
    """Measures which backend is fastest for each kind of module of `model`, and keeps it for later `accelerate()`s; of
    the fastest backend, which of the ways to cut up its kernels' work, too.

    `model` may lie on the meta device: one module of each kind is copied to `device`, hooks and all, with random
    weights; the model itself is neither run nor changed. `token_counts` are numbers of tokens in one call: batch times
    sequence length; name the most that you use, since what is measured says little of more. `modes` are `train`
    (forward + backward) and `forward` (without gradients), the most important first. What the profile has already is
    not measured again, unless `again`. After `seconds` no further case is begun; one takes `seconds_per_case` for the
    backends, and as long for the ways to cut up the work of the fastest. `tell` is given a line per case. On a CPU it
    rehearses with the reference backend, and keeps nothing.

    Raises TypeError or ValueError for arguments of another kind or a model without a module that could be served, and
    RuntimeError while `accelerate()` is on, inside `disabled()`, and where global module hooks are set.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"tune() takes a torch.nn.Module, got {type(model).__name__}")
    counts = check_token_counts(token_counts)
    if not modes or not set(modes) <= set(MODES) or len(set(modes)) != len(modes):
        raise ValueError(f"modes must be some of {', '.join(MODES)}, got {modes!r}")
    if entry.is_on():
        raise RuntimeError(
            "tune() measures the library's own code too: call it before accelerate(), or after restore()"
        )
    if entry.status().disabled:
        raise RuntimeError("tune() is called inside disabled(), where nothing of fusepatch runs")
    if _has_any_global_hook():  # type: ignore[no-untyped-call]
        raise RuntimeError("global module hooks are set (by a profiler?), under which nothing runs natively")
    device = torch.device(device)
    if not settings.read().enabled:
        raise ValueError(f"{settings.PREFIX}=0 turns every op off")
    cases = cases_of(model, counts, dtype)
    if not cases:
        raise ValueError(
            f"{type(model).__name__} has no module that could be tuned: print(fusepatch.explain(model)) shows what was "
            "looked at"
        )
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _run(cases, tuple(modes), seconds, seconds_per_case, device, again, tell)


def _run(
    cases: list[Case],
    modes: tuple[str, ...],
    seconds: float,
    seconds_per_case: float,
    device: torch.device,
    again: bool,
    tell: Callable[[str], None],
) -> TuningReport:
    start, on_gpu = time.monotonic(), device.type == "cuda"
    identity = profiles.identity(selfcheck.device_kind(device))
    profile = profiles.read(identity) or profiles.Profile(identity)
    found: list[Measured] = []
    left_out: list[str] = []
    new = left = kept = 0
    for number, case in enumerate(cases, 1):
        head = f"[{number}/{len(cases)}] {case.owner.__qualname__} x{case.modules}, {case.tokens} tokens"
        before = None if again else profile.find(case.target.op, case.name, case.tokens, modes)
        if before is not None:
            found.append(before)
            kept += 1
            tell(f"{head}: measured before, {_fastest(before)}")
            continue
        if time.monotonic() - start > seconds:
            left += 1
            continue
        try:
            made = measure(case, modes, seconds_per_case, device)
        except (UnmeasurableError, torch.OutOfMemoryError) as error:
            why = "not enough memory" if isinstance(error, torch.OutOfMemoryError) else str(error)
            left_out.append(f"{case.owner.__qualname__}, {case.tokens} tokens: {why}")
            tell(f"{head}: left out, {why}")
            continue
        finally:
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
        new += 1
        found.append(made)
        tell(f"{head}: {_fastest(made)}")
        passing = sorted({why for why in made.why_not.values() if why in TRANSIENT})
        if passing:
            left_out.append(f"{case.owner.__qualname__}, {case.tokens} tokens, is not kept: {', '.join(passing)}")
        elif on_gpu:  # at once, so that what is stopped keeps what it had
            kept += profiles.add(identity, made)
    return TuningReport(tuple(found), new, left, tuple(left_out), profiles.place(identity) if kept else None)
