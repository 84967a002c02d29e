"""`explain(model)`: per module, which route would run and why, without running it."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import catalogue, entry, patch, settings, table
from .catalogue import Assumed, Target
from .decline import FUSED, Decision, Reason, original

ITSELF = "(the model itself)"
"""The name of the model among its modules."""


@dataclass(frozen=True)
class ModuleRoute:
    """One module of the model."""

    name: str
    class_name: str
    op: str
    route: str
    reason: str | None
    fix: str | None
    patched: bool
    """Whether the class is patched now. Where it is not, `route` is what `accelerate()` would bring."""
    backend: str | None = None
    """Of a layer that calls a function of its library: what would serve the call, if it fits."""
    note: str = ""
    """What else there is to say of the kernels that would serve: the choice that `fusepatch tune` made, or what they
    save."""

    @property
    def certain(self) -> bool:
        """Whether a call takes this route whatever a layer passes to the library's function."""
        return self.backend is None


@dataclass(frozen=True)
class Explanation:
    """What `explain()` found; `print()` it for people, `to_dict()` it for programs."""

    model: str
    tokens: int
    modules: tuple[ModuleRoute, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, tuples, strings and numbers, fit for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        head = f"{self.model}, {self.tokens} tokens a call, plain eager calls"
        if not self.modules:
            return f"{head}\nno module that an op of fusepatch could serve"

        def key(module: ModuleRoute) -> tuple[str, ...]:
            why = (module.reason or "", module.backend or "", str(module.patched))
            return (_pattern(module.name), module.class_name, module.route, *why)

        groups = [list(found) for _, found in itertools.groupby(sorted(self.modules, key=key), key=key)]
        rows = [
            (
                _pattern(found[0].name),
                len(found),
                found[0].class_name.rpartition(".")[2],
                found[0].route if found[0].backend is None else f"{found[0].route} ({found[0].backend}), if it fits",
                found[0].reason or "-",
                "yes" if found[0].patched else "no",
            )
            for found in groups
        ]
        lines = [head, table.render(("module", "count", "class", "route", "why not faster", "patched"), rows)]
        functions = dict.fromkeys(module.op for module in self.modules if not module.certain)
        if functions:
            lines.append(
                f"if it fits: what a layer passes to the function of {', '.join(functions)} (options, sizes of heads) "
                "is seen only when it calls. warmup() makes such a call, and status() counts those that declined."
            )
        reasons = {module.reason for module in self.modules}
        lines += [reason.in_words for reason in Reason if reason.value in reasons]
        lines += dict.fromkeys(module.note for module in self.modules if module.note)
        return "\n".join(lines)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)


def explain(
    model: nn.Module,
    *,
    tokens: int = 2048,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Explanation:
    """Walks a built model and says, per module that an op serves, which route a plain eager call would take, and why.

    Layers that call a function of FLA for which a backend of ours can be registered are found by what their code reads.
    What they pass is not known before they do, so for them it is said what would serve a call that fits.

    `tokens` is the number of tokens in one call (batch times sequence length). `device` and `dtype` are what to assume
    instead of those of the weights: a model on the meta device can be explained for the GPU it will be loaded on.
    Nothing is run or changed, and `accelerate()` need not have been called. Raises TypeError or ValueError for
    arguments of another kind.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"explain() takes a torch.nn.Module, got {type(model).__name__}")
    if isinstance(tokens, bool) or not isinstance(tokens, int):
        raise TypeError(f"tokens must be a whole number, got {tokens!r}")
    if tokens < 0:
        raise ValueError(f"tokens must not be negative, got {tokens}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
    assumed = Assumed(tokens, None if device is None else _device(device), dtype)
    with entry.settings_in_force() as current:
        rows = [
            row
            for name, module in model.named_modules()
            for row in (
                _explain_module(name, module, assumed, current),
                *_explain_calls(name, module, assumed, current),
            )
            if row is not None
        ]
    return Explanation(type(model).__name__, tokens, tuple(rows))


def _device(device: str | torch.device) -> torch.device:
    """The device, with its index; raises ValueError for one that is not there."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device {device!r} is none: {error}") from None
    if found.type != "cuda":
        return found
    if not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but this machine has no CUDA device to judge by")
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)


def _explain_module(name: str, module: nn.Module, assumed: Assumed, current: settings.Settings) -> ModuleRoute | None:
    owner = catalogue.owner_of(type(module))
    if owner is None:
        return None
    forward = catalogue.forward_of(owner)
    in_place = patch.ours_within(vars(owner)["forward"])
    for target in catalogue.CLASS_TARGETS:
        if target.shim.matches(forward):
            made = _decide(target, module, forward, assumed, current, in_place)
            live = in_place is not None and in_place.switch.off is not Reason.RESTORED
            return _row(name, owner, target, made, patched=live)
    for target in catalogue.CLASS_TARGETS:
        if target.shim.looks_alike(module):
            foreign = catalogue.matches_below(target, forward)
            made = original(Reason.FOREIGN_FORWARD if foreign else Reason.FORWARD_DIFFERS)
            return _row(name, owner, target, made, patched=False)
    return None


def _explain_calls(name: str, module: nn.Module, assumed: Assumed, current: settings.Settings) -> Iterator[ModuleRoute]:
    """What becomes of the calls that a layer makes of functions which ask a registry."""
    for target in catalogue.REGISTRY_TARGETS:
        if not target.registry_shim.asks(module, target.op):
            continue
        backend = entry.live_backend(target)
        live = backend is not None
        found: str | Reason
        if not current.allows(target.op, named=live):
            found = Reason.ENV_DISABLED
        elif backend is not None and backend.switch.off is not None:
            found = backend.switch.off
        else:
            found = target.registry_shim.serving(module, target.op, assumed)
        made = original(found) if isinstance(found, Reason) else FUSED
        row = _row(name, type(module), target, made, patched=live)
        yield row if isinstance(found, Reason) else dataclasses.replace(row, backend=found)


def _decide(
    target: Target,
    module: nn.Module,
    forward: Any,
    assumed: Assumed,
    current: settings.Settings,
    in_place: patch.ForwardPatch | None,
) -> Decision:
    live = in_place is not None and in_place.switch.off is not Reason.RESTORED
    if not current.allows(target.op, named=live):  # an op that is off by default was named where it is live
        return original(Reason.ENV_DISABLED)
    if in_place is not None and live:
        off = in_place.switch.why_off(module)
        if off is not None:
            return original(off)
    if "forward" in module.__dict__ and not _leads_to_ours(module, in_place):
        return original(Reason.ACCELERATE_HOOKS if "_hf_hook" in module.__dict__ else Reason.INSTANCE_FORWARD)
    return target.shim.decide(module, forward, assumed)


def _leads_to_ours(module: nn.Module, in_place: patch.ForwardPatch | None) -> bool:
    """Whether an instance's own forward was bound, or wrapped by accelerate's hooks, while the class's was ours."""
    if in_place is None:
        return False
    own, before_hooks = module.__dict__["forward"], module.__dict__.get("_old_forward")
    functions = (getattr(own, "__func__", None), getattr(own, "func", None), getattr(before_hooks, "__func__", None))
    return any(function is in_place.replacement for function in functions)


def _row(name: str, owner: type, target: Target, made: Decision, *, patched: bool) -> ModuleRoute:
    return ModuleRoute(
        name=name or ITSELF,
        class_name=f"{owner.__module__}.{owner.__qualname__}",
        op=target.op,
        route=made.route.value,
        reason=None if made.reason is None else made.reason.value,
        fix=None if made.reason is None else made.reason.fix,
        patched=patched,
        note=made.note,
    )
