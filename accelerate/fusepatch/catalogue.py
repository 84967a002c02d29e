"""Which op is patched into which library, and by which shim: the framework's only way to the shims."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, cast

import torch
from torch import nn

from . import patch, settings
from .decline import Decision, Reason
from .ledger import Record
from .patch import Place, Slot


@dataclass(frozen=True)
class Assumed:
    """What `explain()` takes for granted of a call that is not made."""

    tokens: int
    device: torch.device | None = None
    """None for where the weights are."""
    dtype: torch.dtype | None = None
    """None for that of the weights."""


class Shim(Protocol):
    """What a module in shims/ provides. A shim reads modules of one library and calls one op's kernels."""

    def wants_module(self, name: str) -> bool:
        """Whether importing the module `name` may bring classes to patch."""

    def matches(self, forward: Any) -> bool:
        """Whether `forward`, as a class defines it, is one that this shim can stand in for."""

    def looks_alike(self, module: nn.Module) -> bool:
        """Whether `module` is built like a target though its class does not match."""

    def make_forward(self, original: Callable[..., Any], switch: patch.Switch, record: Record) -> Callable[..., Any]:
        """The function that stands in for `original`."""

    def size_of(self, module: nn.Module) -> tuple[object, ...]:
        """What two modules of one class must share for their kernels to be the same."""

    def warm(self, module: nn.Module, forward: Callable[..., Any], tokens: int) -> Decision:
        """Runs the route that `decide` gives, forward and backward, on dummy data; returns the decision."""

    def example_input(self, module: nn.Module, forward: Callable[..., Any], tokens: int) -> torch.Tensor | None:
        """What `module(x)` takes, for `tune()`; None where it is not tuned."""

    def decide(self, module: nn.Module, forward: Callable[..., Any], assumed: Assumed) -> Decision:
        """The route that a plain eager call would take, judged from `module` and what is assumed of the rest."""


class RegistryShim(Protocol):
    """What a module in shims/ provides for a function that asks a registry of backends: it serves every model."""

    def wants_module(self, name: str) -> bool:
        """Whether the function is there once the module `name` is imported."""

    def slots(self, module: ModuleType, op: str) -> list[Slot]:
        """Where a backend for `op` is registered; nothing where the library has no registry for it."""

    def why_not_reached(self, op: str) -> Reason | None:
        """Why calls of the library's function, or those of some models, do not reach a registered backend."""

    def asks(self, module: nn.Module, op: str) -> bool:
        """Whether `module` is a layer that calls the op's function."""

    def serving(self, module: nn.Module, op: str, assumed: Assumed) -> str | Reason:
        """The backend that would serve a call of `module` if what it passes fits, or why none would."""

    def size_of(self, module: nn.Module) -> tuple[object, ...]:
        """What two layers of one class must share to make the same call."""

    def warm(self, module: nn.Module, op: str, tokens: int) -> Decision | str:
        """Runs the call that `module` makes, forward and backward, on dummy data; text says why it could not."""


@dataclass(frozen=True)
class Target:
    """One op in one library."""

    op: str
    library: str
    """Import name of the library."""
    distribution: str
    """Name under which it is installed, for its version."""
    shim_module: str
    in_registry: bool = False
    """Patched by a backend in the library's own registry, and not by the forwards of classes."""

    @property
    def name(self) -> str:
        """What `status()` calls it."""
        return f"{self.op}/{self.library}"

    @property
    def shim(self) -> Shim:
        """The shim, imported on first use; importing it imports no patched library."""
        return cast(Shim, _import_shim(self.shim_module))

    @property
    def registry_shim(self) -> RegistryShim:
        """The same, of a target that is patched in a registry."""
        return cast(RegistryShim, _import_shim(self.shim_module))

    def wants_module(self, name: str) -> bool:
        """Whether importing the module `name` may bring something to patch."""
        return (self.registry_shim if self.in_registry else self.shim).wants_module(name)

    def version(self) -> str | None:
        """The installed version of the library, None where it is not installed."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            loaded = sys.modules.get(self.library)
            return getattr(loaded, "__version__", None)


@functools.cache
def _import_shim(name: str) -> ModuleType:
    return importlib.import_module(name)


TARGETS: tuple[Target, ...] = (
    Target("gated_mlp", "transformers", "transformers", "fusepatch.shims.hf_gated_mlp"),
    Target("gated_mlp", "fla", "flash-linear-attention", "fusepatch.shims.fla_gated_mlp"),
    Target("engram_gate", "transformers", "transformers", "fusepatch.shims.hf_engram_gate"),
    Target("kda", "fla", "flash-linear-attention", "fusepatch.shims.fla_linear_attention", in_registry=True),
    Target(
        "gated_delta_rule", "fla", "flash-linear-attention", "fusepatch.shims.fla_linear_attention", in_registry=True
    ),
)
CLASS_TARGETS = tuple(target for target in TARGETS if not target.in_registry)
"""Those that patch the forwards of classes."""
REGISTRY_TARGETS = tuple(target for target in TARGETS if target.in_registry)
"""Those that register a backend for a function."""


def targets_of(op: str) -> tuple[Target, ...]:
    """The targets of one op."""
    return tuple(target for target in TARGETS if target.op == op)


def check_ops(ops: object) -> tuple[str, ...]:
    """The op names in `ops` (None, one name, or several), each known. Raises TypeError or ValueError otherwise."""
    if ops is None:
        return tuple(settings.OPS)
    names = (ops,) if isinstance(ops, str) else ops
    if not isinstance(names, (tuple, list, set, frozenset)) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"ops must be an op name or a list of them, got {ops!r}. Ops: {', '.join(settings.OPS)}.")
    if not names:
        raise ValueError(f"ops is empty: name at least one, or pass None for all. Ops: {', '.join(settings.OPS)}.")
    for name in names:
        if name not in settings.OPS:
            raise ValueError(f"unknown op {name!r}. Ops: {', '.join(settings.OPS)}.")
    return tuple(dict.fromkeys(cast("list[str]", names)))


def ops_meant(ops: object, current: settings.Settings) -> tuple[str, ...]:
    """The ops that `ops` names; where it is None, those that are on by default or turned on in the environment."""
    names = check_ops(ops)
    return names if ops is not None else tuple(name for name in names if current.considers(name))


# ---------------------------------------------------------------------------------------- finding what is to patch


def forward_of(owner: type) -> Any:
    """The forward that `owner` itself defines, as the library wrote it: under ours, where ours is in place."""
    forward = vars(owner).get("forward")
    within = patch.ours_within(forward)
    return forward if within is None else within.original


def matches_below(target: Target, forward: Any) -> bool:
    """Whether another library's `forward` wraps one that the target's shim would stand in for."""
    for _ in range(32):
        forward = getattr(forward, "__wrapped__", None)
        if forward is None:
            return False
        if target.shim.matches(forward):
            return True
    return False


def owner_of(kind: type) -> type[nn.Module] | None:
    """The class whose `forward` an instance of `kind` runs."""
    for owner in kind.__mro__:
        if "forward" in vars(owner):
            return owner if issubclass(owner, nn.Module) and owner is not nn.Module else None
    return None


def places_in_library(target: Target) -> list[Place]:
    """What there is to patch in the modules of the library that are imported now."""
    modules = [sys.modules.get(name) for name in list(sys.modules) if target.wants_module(name)]
    if target.in_registry:  # a registry whose module is still being imported may not be whole
        modules = [found for found in modules if not getattr(getattr(found, "__spec__", None), "_initializing", False)]
    return [place for module in modules for place in places_in_module(target, module)]


def places_in_module(target: Target, module: ModuleType | None) -> list[Place]:
    """What there is to patch in one module of the library."""
    if not target.in_registry:
        return list(find_in_module(target, module))
    return [] if module is None else list(target.registry_shim.slots(module, target.op))


def find_in_module(target: Target, module: ModuleType | None) -> list[type[nn.Module]]:
    """The matching classes that one module of the library defines."""
    if module is None:
        return []
    return [
        value
        for value in list(vars(module).values())
        if isinstance(value, type)
        and issubclass(value, nn.Module)
        and value.__module__ == module.__name__
        and target.shim.matches(forward_of(value))
    ]


def find_in_model(target: Target, model: nn.Module) -> Iterator[tuple[str, nn.Module, type[nn.Module]]]:
    """(name, module, class to patch) of every module in `model` whose class matches, whoever wrote the class."""
    for name, module in model.named_modules():
        owner = owner_of(type(module))
        if owner is not None and target.shim.matches(forward_of(owner)):
            yield name, module, owner


def find_callers(target: Target, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of every layer in `model` that calls the function of a target in a registry."""
    for name, module in model.named_modules():
        if target.registry_shim.asks(module, target.op):
            yield name, module


def find_served(target: Target, model: nn.Module) -> list[nn.Module]:
    """The modules in `model` that the target could serve, of either kind."""
    if target.in_registry:
        return [module for _, module in find_callers(target, model)]
    return [module for _, module, _ in find_in_model(target, model)]
