"""`accelerate()` and its undoing: every target is resolved first, and only then is anything changed."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import multiprocessing
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType

from torch import nn

from . import catalogue, importhook, ledger, logs, patch, settings
from .catalogue import Target
from .decline import DeclinedError, Reason
from .patch import BackendPatch, Patch, Place, Slot
from .report import Status, build_status

log = logging.getLogger("fusepatch")


@dataclass
class _State:
    """What `accelerate()` has done and `restore()` has to take back. One per process, behind `lock`."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    patches: dict[Place, Patch] = field(default_factory=dict)
    """By place; kept after `restore()` for their counts, and where somebody else's wrapper still holds our forward."""
    outcomes: dict[str, Reason | None] = field(default_factory=dict)
    """By target name: None where it is on (patched or pending), else why not."""
    whole_library: set[str] = field(default_factory=set)
    """Names of the targets that are on for every model, now and when more of the library is imported."""
    named: set[str] = field(default_factory=set)
    """Ops that were asked for by name."""
    strict: bool = False
    disabled_depth: int = 0
    restores: int = 0
    """How often `restore()` was called: an `accelerated()` block that sees one inside has nothing to put back."""


_state = _State()


def _fresh_lock() -> None:
    _state.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fresh_lock)  # another thread may have held it


@dataclass(frozen=True)
class _Plan:
    """What one target would change, resolved and not applied."""

    target: Target
    places: tuple[Place, ...] = ()
    modules: tuple[nn.Module, ...] = ()
    """The modules of `model=`; empty where every instance is meant. A backend in a registry serves others too."""
    reason: Reason | None = None
    """Why nothing would be patched, now or later."""


# ------------------------------------------------------------------------------------------------------- public


def accelerate(
    ops: str | Sequence[str] | None = None, *, model: nn.Module | None = None, strict: bool = False
) -> Status:
    """Patches every target of `ops` (all ops that are on by default, where None), and returns `status()`.

    A library that is installed but not imported yet is patched when it is imported. With `model`, only the classes
    found in that built model are patched, remote code included, and only its modules are served. An op whose backend is
    registered with a function of the library (`kda`, `gated_delta_rule`) serves every model, also where `model` is
    given. `strict` makes every later call raise DeclinedError where the library's own code would run. Calling it again
    is harmless, and reads the environment again.

    Raises ValueError or TypeError for an op that does not exist, a model that is none or has no eligible module,
    SettingsError for the environment, and ImportError where an op asked for by name has no target that is installed.
    Where it raises, nothing was changed.
    """
    names = catalogue.check_ops(ops)
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(strict, bool):
        raise TypeError(f"strict must be True or False, got {strict!r}")
    new_settings = settings.read()
    named = set(names) if ops is not None else set()
    names = catalogue.ops_meant(ops, new_settings)  # the others are left as they are

    with _state.lock:
        plans = [
            _resolve(target, model, new_settings.allows(target.op, named=target.op in named))
            for name in names
            for target in catalogue.targets_of(name)
        ]
        _check_plans(plans, named, model)
        _apply(plans, new_settings, strict or new_settings.strict, named)
    _catch_up_with_imports()
    return status()


def restore(ops: str | Sequence[str] | None = None) -> None:
    """Undoes `accelerate()` for `ops` (all, where None): each class gets the very forward back that it had.

    Where another library has put its own forward over ours in the meantime, that one stays, and ours becomes a
    pass-through. In strict mode an op that was asked for by name and never ran natively raises DeclinedError, after
    everything was undone.
    """
    names = catalogue.check_ops(ops)
    with _state.lock:
        never_ran = _never_ran(names) if _state.strict else []
        _state.restores += 1
        if not any(reason is None for name, reason in _state.outcomes.items() if name.partition("/")[0] not in names):
            ledger.end_first_step()
        _undo([found for found in _state.patches.values() if found.op in names])
        for target in catalogue.TARGETS:
            if target.op in names:
                _state.whole_library.discard(target.name)
                if _state.outcomes.get(target.name, Reason.RESTORED) is None:
                    _state.outcomes[target.name] = Reason.RESTORED
        _state.named -= set(names)
        _watch_imports()
        if not is_on():
            settings.install(None)
            _state.strict = False
    if never_ran:
        raise DeclinedError(
            f"strict: {', '.join(never_ran)} was asked for by name and never ran natively "
            "(everything has been restored). fusepatch.status() says why.",
            None,
        )


@contextlib.contextmanager
def accelerated(
    ops: str | Sequence[str] | None = None, *, model: nn.Module | None = None, strict: bool = False
) -> Iterator[Status]:
    """`accelerate(...)` for the length of a `with` block; then what it added is undone, and no more than that.

    The backward pass of a model that uses activation checkpointing must run inside the block too: it runs forwards.
    """
    with _state.lock:
        before = _snapshot()
    found = accelerate(ops, model=model, strict=strict)
    completed = False
    try:
        yield found
        completed = True
    finally:
        with _state.lock:
            never_ran = _never_ran(tuple(_state.named)) if completed and _state.strict else []
            if _state.restores == before.restores:
                _return_to(before)
            else:
                with contextlib.nullcontext() if completed else contextlib.suppress(DeclinedError):
                    restore(ops)
        if never_ran:
            raise DeclinedError(f"strict: {', '.join(never_ran)} was asked for by name and never ran natively.", None)


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Every patched class runs the library's own code inside the `with` block.

    For the whole process, as `accelerate()` is: worker threads (DataParallel, autograd's own) must see it too. The
    backward pass of a model that uses activation checkpointing must run inside the block as well: it runs forwards.
    """
    _shift_disabled(+1)
    try:
        yield
    finally:
        _shift_disabled(-1)


def is_on() -> bool:
    """Whether any target is patched, or will be when its library is imported."""
    return any(reason is None for reason in _state.outcomes.values())


def live_modules(model: nn.Module) -> list[tuple[Target, nn.Module, type[nn.Module]]]:
    """(target, module, patched class) of every module in `model` that a live patch serves."""
    by_name = {target.name: target for target in catalogue.TARGETS}
    with _state.lock:
        owners = [(module, catalogue.owner_of(type(module))) for module in model.modules()]
        return [
            (by_name[found.target], module, owner)
            for module, owner in owners
            if owner is not None
            and (found := _state.patches.get(owner)) is not None
            and found.switch.why_off(module) is None
        ]


def live_backend(target: Target) -> BackendPatch | None:
    """Our backend for a target in a registry, where `accelerate()` has registered it."""
    with _state.lock:
        for found in _state.patches.values():
            if isinstance(found, BackendPatch) and found.target == target.name:
                return None if found.switch.off is Reason.RESTORED else found
    return None


@contextlib.contextmanager
def settings_in_force() -> Iterator[settings.Settings]:
    """The settings that decisions see now: those of `accelerate()`, or the environment's where it is not on."""
    with _state.lock, settings.in_force(settings.current() if is_on() else settings.read()) as found:
        yield found


def _shift_disabled(step: int) -> None:
    with _state.lock:
        _state.disabled_depth += step
        for found in _state.patches.values():
            _set_switch(found)


# ------------------------------------------------------------------------------------------------------- resolve


def _resolve(target: Target, model: nn.Module | None, allowed: bool) -> _Plan:
    if not allowed:
        return _Plan(target, reason=Reason.ENV_DISABLED)
    if model is not None:
        modules = tuple(catalogue.find_served(target, model))
        if not modules:
            return _Plan(target, reason=Reason.FORWARD_DIFFERS)
        if target.in_registry:
            return _Plan(target, tuple(catalogue.places_in_library(target)), modules)
        owners = dict.fromkeys(catalogue.owner_of(type(module)) for module in modules)
        return _Plan(target, tuple(owner for owner in owners if owner is not None), modules)
    if not importhook.is_installed(target.library):
        return _Plan(target, reason=Reason.MISSING_PACKAGE)
    return _Plan(target, tuple(catalogue.places_in_library(target)))


def _check_plans(plans: list[_Plan], named: set[str], model: nn.Module | None) -> None:
    """Raises where what was asked for can't be had at all."""
    live = [plan for plan in plans if plan.reason is not Reason.ENV_DISABLED]
    if model is not None:
        if live and not any(plan.modules for plan in live):
            raise ValueError(
                f"{type(model).__name__} has no module that an op of fusepatch serves. "
                "print(fusepatch.explain(model)) shows what was looked at, and why each did not match."
            )
        return
    by_op: dict[str, list[_Plan]] = {}
    for plan in live:
        by_op.setdefault(plan.target.op, []).append(plan)
    for op, found in by_op.items():
        if all(plan.reason is Reason.MISSING_PACKAGE for plan in found):
            reasons = "; ".join(
                f"{plan.target.library}: {Reason.MISSING_PACKAGE.value} (pip install {plan.target.distribution})"
                for plan in found
            )
            message = f"nothing to patch for the op {op!r}: no library that it serves is installed. {reasons}"
            if op in named:
                raise ImportError(message)
            warnings.warn(f"fusepatch: {message}", stacklevel=3)


# --------------------------------------------------------------------------------------------------------- apply


def _apply(plans: list[_Plan], new_settings: settings.Settings, strict: bool, named: set[str]) -> None:
    """Applies every plan; where one fails half-way, those before it are undone and the error goes on."""
    before = _snapshot()
    try:
        if not _was_on(before):
            _state.outcomes = {}
        settings.install(new_settings)
        logs.configure(new_settings.log)
        _state.strict = strict
        _state.named |= named
        for plan in plans:
            if plan.reason is None and not plan.modules:
                _state.whole_library.add(plan.target.name)
            if plan.reason is None or (
                plan.reason is Reason.MISSING_PACKAGE and _state.outcomes.get(plan.target.name, plan.reason) is not None
            ):
                _state.outcomes[plan.target.name] = plan.reason
            for place in plan.places:
                _patch(plan.target, place, plan.modules)
        for found in _state.patches.values():
            _set_switch(found)
        for plan in plans:
            if plan.reason is Reason.ENV_DISABLED:
                _undo([found for found in _state.patches.values() if found.target == plan.target.name])
                _state.whole_library.discard(plan.target.name)
                _state.outcomes[plan.target.name] = Reason.ENV_DISABLED
        _watch_imports()
        if is_on():
            _register_exit_report()
    except BaseException:
        _return_to(before)
        _state.patches, _state.outcomes = {**_leftovers(), **before.patches}, before.outcomes
        raise
    if is_on() and not _was_on(before):
        _forget_counts()
        ledger.watch_first_step(_report_first_step)


def _patch(target: Target, place: Place, modules: Sequence[nn.Module] = ()) -> None:
    known = _state.patches.get(place)
    found = _make(target, place, known)
    newly_on = known is not found or found.switch.off is Reason.RESTORED
    if target.name in _state.whole_library or target.in_registry:
        found.switch.only = None
    elif newly_on:
        found.switch.only = weakref.WeakSet(modules)
    elif found.switch.only is not None:
        found.switch.only.update(modules)
    _state.patches[place] = found  # first, so that whatever interrupts us here can be undone
    patch.apply(found)
    _set_switch(found)


def _make(target: Target, place: Place, known: Patch | None) -> Patch:
    """The patch of this place, not applied yet; the earlier one where it is still there."""
    if not isinstance(place, Slot):
        return patch.make(target.op, target.name, target.library, place, target.shim.make_forward)
    if isinstance(known, BackendPatch) and known.slot.backends is place.backends:
        return known
    return patch.make_backend(target.op, target.name, target.library, place)


def _set_switch(found: Patch) -> None:
    """Brings a patch that is applied in line with the state."""
    if found.switch.off is Reason.RESTORED:
        return
    found.switch.off = Reason.DISABLED if _state.disabled_depth else None
    found.switch.strict = _state.strict


def _watch_imports() -> None:
    if _state.whole_library:
        importhook.install(_is_wanted, _after_import)
    else:
        importhook.remove()


def _is_wanted(module_name: str) -> bool:
    return any(target.name in _state.whole_library and target.wants_module(module_name) for target in catalogue.TARGETS)


def _catch_up_with_imports() -> None:
    """Patches modules that another thread was importing when the import hook came: too late for it, too early for us.

    Without our lock, since importing takes locks of its own. Importing such a module waits until the other thread has.
    """
    for name in [name for name in list(sys.modules) if _is_wanted(name)]:
        if getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False):
            with contextlib.suppress(Exception):  # what the other thread is told when its import fails
                _after_import(importlib.import_module(name))


def _after_import(module: ModuleType) -> None:
    """Patches what a module brings that was just imported. An import never fails because of us."""
    try:
        with _state.lock:
            for target in catalogue.TARGETS:
                if target.name in _state.whole_library and target.wants_module(module.__name__):
                    for place in catalogue.places_in_module(target, module):
                        _patch(target, place)
    except Exception:
        log.exception("could not patch %s; it stays as it is", module.__name__)


# ---------------------------------------------------------------------------------------------------------- undo


def _undo(found: list[Patch]) -> None:
    traced = False
    for applied in reversed(found):
        if applied.switch.off is not Reason.RESTORED:
            traced = traced or bool(applied.record.traces)
            if not patch.undo(applied):
                log.info(
                    "%s: another library put its forward over ours; it stays, and ours passes through",
                    applied.record.class_name,
                )
        elif applied.is_in_place():  # whoever wrapped ours has put it back since
            patch.undo(applied)
    dynamo = sys.modules.get("torch._dynamo")
    if traced and dynamo is not None:
        dynamo.reset()  # compiled code does not notice that a class's forward changed


def _never_ran(names: Sequence[str]) -> list[str]:
    """Ops among `names` that were asked for by name, are on, and were served natively not once."""
    return [
        name
        for name in sorted(_state.named.intersection(names))
        if any(_state.outcomes.get(target.name, Reason.RESTORED) is None for target in catalogue.targets_of(name))
        and not any(found.record.native_calls() for found in _state.patches.values() if found.op == name)
    ]


@dataclass(frozen=True)
class _Snapshot:
    """What `_return_to` needs to put the process back to where it was."""

    on: dict[Place, tuple[Patch, frozenset[weakref.ref[nn.Module]] | None]]
    patches: dict[Place, Patch]
    outcomes: dict[str, Reason | None]
    whole_library: set[str]
    named: set[str]
    strict: bool
    settings: settings.Settings | None
    restores: int


def _snapshot() -> _Snapshot:
    on = {}
    for place, found in _state.patches.items():
        if found.switch.off is not Reason.RESTORED:
            only = found.switch.only
            on[place] = (found, None if only is None else frozenset(weakref.ref(module) for module in only))
    return _Snapshot(
        on,
        dict(_state.patches),
        dict(_state.outcomes),
        set(_state.whole_library),
        set(_state.named),
        _state.strict,
        settings.current() if on or _state.whole_library else None,
        _state.restores,
    )


def _was_on(before: _Snapshot) -> bool:
    return any(reason is None for reason in before.outcomes.values())


def _return_to(before: _Snapshot) -> None:
    """Undoes what was added since, and puts back what was taken away."""
    if not _was_on(before):
        ledger.end_first_step()
    _undo([found for place, found in _state.patches.items() if place not in before.on])
    new = {name: Reason.RESTORED for name, reason in _state.outcomes.items() if reason is None}
    _state.outcomes = {**new, **before.outcomes}
    _state.whole_library, _state.named, _state.strict = set(before.whole_library), set(before.named), before.strict
    settings.install(before.settings)
    for place, (found, only) in before.on.items():
        _state.patches[place] = found
        if found.switch.off is Reason.RESTORED:
            patch.apply(found)
        found.switch.only = None if only is None else weakref.WeakSet(m for ref in only if (m := ref()) is not None)
        _set_switch(found)
    _watch_imports()


def _leftovers() -> dict[Place, Patch]:
    """Patches that are off, and whose forward somebody else's wrapper holds or may put back."""
    return {
        place: found
        for place, found in _state.patches.items()
        if found.switch.off is Reason.RESTORED and not found.is_gone()
    }


def _forget_counts() -> None:
    """A new start: drops the counts from before the last `restore()`, and the classes that only then were patched."""
    on = {place: found for place, found in _state.patches.items() if found.switch.off is not Reason.RESTORED}
    _state.patches = {**_leftovers(), **on}
    for found in _state.patches.values():
        ledger.clear(found.record)


# ------------------------------------------------------------------------------------------------------- reporting


def status() -> Status:
    """What is patched, how often each route ran, and why others did not. Counts start at the first `accelerate()`
    after a `restore()`."""
    with _state.lock:
        return build_status(list(_state.patches.values()), _state.outcomes, _state.strict, bool(_state.disabled_depth))


def _report_first_step() -> None:
    if ledger.is_rank_zero():
        log.info("%s", status().summary())


_exit_report_registered = False


def _register_exit_report() -> None:
    global _exit_report_registered
    if not _exit_report_registered:
        atexit.register(_report_at_exit)
        _exit_report_registered = True


def _report_at_exit() -> None:
    ledger.end_first_step()
    if multiprocessing.parent_process() is not None:
        return  # a worker, such as a data loader's, is not what was asked to run natively
    never_ran = _never_ran(tuple(settings.OPS))
    if never_ran and ledger.is_rank_zero():
        level = logging.ERROR if _state.strict else logging.WARNING
        log.log(level, "%s was asked for by name and never ran natively", ", ".join(never_ran))
