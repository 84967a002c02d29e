"""The report: what is patched, how often each route ran, and why others did not."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import catalogue, settings, table
from .decline import Reason, Route, native_of
from .patch import Patch


@dataclass(frozen=True)
class ClassStatus:
    """One patched class, or one function of a library that asks a backend of ours."""

    name: str
    state: str
    """`patched`; `wrapped` (another library's forward lies over ours); `restored`; `left` (restored, and then another
    library put ours back, which passes through: call `restore()` again)."""
    calls: Mapping[str, int]
    """Calls by route."""
    declines: Mapping[str, int]
    """Calls that took a slower route than `fused`, by reason."""
    traces: Mapping[str, int]
    """Times a compiler traced the class, by the route of ours that it put into its code, or by the reason why the
    library's was traced; calls of compiled code can't be counted."""
    captured: Mapping[str, int]
    """Sites in CUDA graphs by route: calls while one was captured. Replays run no Python, and can't be counted."""
    errors: Mapping[str, int]
    """Exceptions that left one of our routes, by type. Each was raised."""
    notes: tuple[str, ...] = ()
    """What else there is to say of the kernels that served, such as how much more they save."""


@dataclass(frozen=True)
class TargetStatus:
    """One op in one library."""

    name: str
    library: str
    version: str | None
    state: str
    """`patched`, `pending` (installed, no class of it imported yet), `restored`, or `off`."""
    reason: str | None
    """Why it is off, or why some models' calls do not reach it."""
    fix: str | None
    classes: tuple[ClassStatus, ...]
    note: str | None = None
    """What else there is to say of it while it is on."""

    def total(self, what: str) -> dict[str, int]:
        """`calls`, `declines`, `traces`, `captured` or `errors`, summed over the classes."""
        totals: Counter[str] = Counter()
        for each in self.classes:
            totals.update(getattr(each, what))
        return dict(totals)


@dataclass(frozen=True)
class Status:
    """Everything that `status()` knows; `print()` it for people, `to_dict()` it for programs."""

    targets: tuple[TargetStatus, ...]
    strict: bool
    disabled: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, tuples, strings and numbers, fit for JSON."""
        return dataclasses.asdict(self)

    def native_calls(self) -> int:
        """Over all targets: calls that a route of ours served, its sites in CUDA graphs, and the times that a compiler
        put one into its code."""
        return sum(native_of(target.total(what)) for target in self.targets for what in ("calls", "captured", "traces"))

    def summary(self) -> str:
        """One line: calls by route and declines by reason, over all targets."""
        parts = []
        for target in self.targets:
            if target.state in ("off", "restored"):
                continue
            calls, declines = target.total("calls"), target.total("declines")
            text = ", ".join(f"{route} {calls[route]}" for route in in_order(calls)) or "no calls"
            why = ", ".join(f"{reason} {count}" for reason, count in most_first(declines))
            captured = target.total("captured")
            text += f"; captured, {_sites(captured)}" if captured else ""
            errors = sum(target.total("errors").values())
            patched = sum(each.state == "patched" for each in target.classes)
            parts.append(
                f"{target.name}: {_plural(patched, 'class', 'classes')} {'patched' if patched else 'yet'}; {text}"
                + (f" (declined: {why})" if why else "")
                + (f"; {_plural(errors, 'error', 'errors')}" if errors else "")
            )
        return " | ".join(parts) or "nothing is patched"

    def __str__(self) -> str:
        head = "fusepatch" + (", strict" if self.strict else "") + (", disabled() in force" if self.disabled else "")
        # What was captured or compiled is in no count of calls: 0 calls must not look like nothing done.
        more = [what for what in ("captured", "traces") if any(target.total(what) for target in self.targets)]
        heads = (*(route.value for route in Route), *(_HEADS[what] for what in more))
        overview = table.render(
            ("target", "version", "state", "classes", *heads),
            [
                (
                    target.name,
                    target.version or "-",
                    target.state if target.reason is None else f"{target.state}: {target.reason}",
                    len(target.classes),
                    *(target.total("calls").get(route.value, 0) for route in Route),
                    *(native_of(target.total(what)) for what in more),
                )
                for target in self.targets
            ],
        )
        lines = [head, overview]
        called = [each for target in self.targets for each in target.classes if _anything(each)]
        if called:
            lines += ["", table.render(("class", "state", "calls", "declines", "traced, errors"), map(_row, called))]
        reasons = {reason for target in self.targets for reason in (*target.total("declines"), *target.total("traces"))}
        reasons |= {target.reason for target in self.targets if target.reason is not None}
        if reasons:
            lines += ["", *(reason.in_words for reason in Reason if reason.value in reasons)]
        notes = dict.fromkeys(note for target in self.targets for each in target.classes for note in each.notes)
        notes = {**dict.fromkeys(f"{each.name}: {each.note}" for each in self.targets if each.note), **notes}
        lines += ["", *notes] if notes else []
        return "\n".join(lines)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


_HEADS = {"captured": "captured", "traces": "compiled"}
"""Of the overview's columns for what ran natively inside CUDA graphs and compiled code."""


def _anything(each: ClassStatus) -> bool:
    return bool(each.calls or each.captured or each.traces or each.errors) or each.state in ("wrapped", "left")


def _row(each: ClassStatus) -> tuple[str, ...]:
    calls = ", ".join(f"{route} {each.calls[route]}" for route in in_order(each.calls))
    if each.captured:
        calls = "; ".join(filter(None, (calls, f"captured, {_sites(each.captured)}")))
    declines = ", ".join(f"{reason} {count}" for reason, count in most_first(each.declines))
    rest = ", ".join(f"{what} {count}" for what, count in (*each.traces.items(), *each.errors.items()))
    return each.name.rpartition(".")[2], each.state, calls or "none", declines or "none", rest or "none"


def _sites(captured: Mapping[str, int]) -> str:
    """`12 sites`, or by route where the library's own code is in a graph too."""
    if Route.ORIGINAL.value in captured:
        return ", ".join(f"{route} {captured[route]}" for route in in_order(captured)) + " sites"
    return _plural(sum(captured.values()), "site", "sites")


def in_order(calls: Mapping[str, int]) -> list[str]:
    """The routes that are counted, fastest first."""
    return [route.value for route in Route if route.value in calls]


def most_first(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """The largest count first, and equal ones by name."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _plural(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


# ------------------------------------------------------------------------------------------------------- building


def build_status(
    patches: Sequence[Patch], outcomes: Mapping[str, Reason | None], strict: bool, disabled: bool
) -> Status:
    """The report on these patches and targets, at this moment. An op that is off by default and unused is left out."""
    shown = [found for found in catalogue.TARGETS if settings.OPS[found.op].default or found.name in outcomes]
    return Status(tuple(_target_status(target, patches, outcomes) for target in shown), strict, disabled)


_SERVES_ALL = "serves the calls of the library's function in every model, whatever model accelerate() was given"


def _target_status(
    target: catalogue.Target, patches: Sequence[Patch], outcomes: Mapping[str, Reason | None]
) -> TargetStatus:
    classes = tuple(_class_status(found) for found in patches if found.target == target.name)
    reason = outcomes.get(target.name, Reason.RESTORED)
    if reason is Reason.RESTORED:
        state, reason = "restored" if target.name in outcomes else "off", None
    elif reason is not None:
        state = "off"
    else:
        state = "patched" if any(each.state in ("patched", "wrapped") for each in classes) else "pending"
        reason = target.registry_shim.why_not_reached(target.op) if target.in_registry else None
        if reason in (Reason.DISPATCH_DISABLED, Reason.LIBRARY_TOO_OLD):
            state = "off"  # the library is imported, and asks nobody
    is_on = state in ("patched", "pending")
    return TargetStatus(
        target.name,
        target.library,
        target.version(),
        state,
        None if reason is None else reason.value,
        None if reason is None else reason.fix,
        classes,
        _SERVES_ALL if target.in_registry and is_on else None,
    )


def _class_status(found: Patch) -> ClassStatus:
    record = found.record
    calls: dict[str, int] = {}
    captured: dict[str, int] = {}
    declines: dict[str, int] = {}
    for into, counts in ((calls, record.calls), (captured, record.captured)):
        for made, count in list(counts.items()):
            into[made.route.value] = into.get(made.route.value, 0) + count
            if made.reason is not None:
                declines[made.reason.value] = declines.get(made.reason.value, 0) + count
    in_place = found.is_in_place()
    if found.switch.off is Reason.RESTORED:
        state = "left" if in_place else "restored"
    else:
        state = "patched" if in_place else "wrapped"
    traces = {reason.value: count for reason, count in list(record.traces.items())}
    return ClassStatus(
        record.class_name, state, calls, declines, traces, captured, dict(record.errors), tuple(sorted(record.notes))
    )
