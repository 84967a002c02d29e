"""How a backend of an op is chosen, and why one is not: the rules that every op's table of backends shares.

A pure function of tensor metadata and of state that changes only inside `accelerate()` and `warmup()`: never of call
counts, free memory or time. A choice that differed between a forward pass and its recomputation would give the
gradient of the wrong function.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from .. import arch, selfcheck, settings
from ..decline import Reason, Route


class Problem(Protocol):
    """What every op's record of one call has besides its own sizes. Hashable, and free of the number of tokens."""

    @property
    def route(self) -> Route:
        """The route that asks."""

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""

    @property
    def dtype(self) -> torch.dtype:
        """What the tensors hold."""


@dataclass(frozen=True, eq=False)
class Backend:
    """Whose kernels, and what they can serve. `module` holds the kernels, and is imported on first use."""

    name: str
    module: str
    dtypes: frozenset[torch.dtype]
    routes: frozenset[Route]
    native: bool = True
    """Made for GPUs, and so admitted by architecture; False for plain PyTorch, which runs anywhere when asked for."""
    named_only: bool = False
    """Serves only where the environment names it: its kernels, as they are now, have run on no GPU yet."""
    packages: tuple[str, ...] = ()
    """What must be importable besides torch."""
    capabilities: frozenset[arch.Capability] | None = None
    """The only GPUs that the kernels are compiled for; None for all that arch.py lists for the route."""
    width_multiple: int = 1
    """Every width of the problem must be a multiple of this."""
    byte_alignment: int = 1
    """Every tensor must start on a multiple of this many bytes."""
    admits: Callable[[Any, int], bool] = field(default=lambda problem, tokens: True)
    """Whether the kernel was measured to win for this problem and number of tokens; with more tokens at least where it
    is with fewer. Not asked where the user named the backend."""
    compiled: Callable[[Any, int], bool] = field(default=lambda problem, tokens: True)
    """Whether a launch would neither compile nor allocate plans: what a CUDA-graph capture needs."""
    check: str | None = None
    """The module that checks the kernels on a kind of GPU before they first serve there."""


P = TypeVar("P", bound=Problem)
B = TypeVar("B", bound=Backend)


@dataclass(frozen=True, eq=False)
class Table(Generic[P, B]):
    """One op's backends, and the rules that are the op's own."""

    op: str
    backends: Callable[[], Sequence[B]]
    """In order of preference where none is named."""
    unfit: Callable[[B, P], Reason | None]
    """What of a problem a backend can't serve, besides what the fields of `Backend` say."""
    widths: Callable[[P], Sequence[int]]
    """The sizes that `width_multiple` speaks of."""
    case: Callable[[B, P], str]
    """The self-check that covers a problem, in words that the op's check.py reads."""
    samples: Callable[[B, Route, torch.device], Sequence[P]]
    """A problem that fits for each self-check there is: what `survey` asks about."""
    known: dict[tuple[settings.Settings, P, bool], B | Reason] = field(default_factory=dict)
    """What was worked out, for choose() to take about 1 us."""


KNOWN_LIMIT = 4096
MOST_TOKENS = 2**40


def load(backend: Backend) -> ModuleType:
    """The module with the backend's kernels, imported once."""
    return importlib.import_module(backend.module)


def choose(table: Table[P, B], problem: P, tokens: int, tensors: Sequence[Tensor], any_size: bool) -> B | Reason:
    """The backend that serves `problem` for this many tokens, or why there is none. About 1 us.

    `tensors` are those whose addresses the kernel reads; their alignment is checked where the backend asks for it.
    `any_size` admits sizes at which the kernel was not measured to win, as naming a backend does.
    """
    key = (settings.current(), problem, any_size)
    found = table.known.get(key)
    if found is None:
        if is_capturing(problem.device):
            return Reason.CAPTURE_COLD  # finding out may start a child process and compile
        if len(table.known) >= KNOWN_LIMIT:
            table.known.clear()
        found = table.known[key] = _for_problem(table, *key)
    if isinstance(found, Reason):
        return found
    if found.byte_alignment > 1 and any(tensor.data_ptr() % found.byte_alignment for tensor in tensors):
        return Reason.ALIGNMENT
    if found.native:
        if not any_size and key[0].ops[table.op].backend == "auto" and not found.admits(problem, tokens):
            return Reason.SIZE_NOT_ADMITTED
        if is_capturing(problem.device) and not found.compiled(problem, tokens):
            return Reason.CAPTURE_COLD
    return found


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _for_problem(table: Table[P, B], current: settings.Settings, problem: P, any_size: bool) -> B | Reason:
    """The part that does not depend on the call, worked out once per problem and `accelerate()`."""
    op = current.ops[table.op]
    if op.route is not None and problem.route.rank < op.route.rank:
        return Reason.ROUTE_BOUND
    if problem.device.type == "meta":
        return Reason.META
    if op.backend != "auto":
        (named,) = (backend for backend in table.backends() if backend.name == op.backend)
        return _why_not(table, named, problem, any_size=True) or named
    if problem.device.type == "cpu":
        return Reason.CPU
    reason = Reason.NO_KERNEL
    for backend in table.backends():
        if backend.native and not backend.named_only:
            why = _why_not(table, backend, problem, any_size=any_size)
            if why is None:
                return backend
            reason = why
    return reason


def _why_not(table: Table[P, B], backend: B, problem: P, *, any_size: bool) -> Reason | None:
    reason = _why_not_unchecked(table, backend, problem)
    if reason is None and backend.native and not any_size and not backend.admits(problem, MOST_TOKENS):
        reason = Reason.SIZE_NOT_ADMITTED  # of no number of tokens; a self-check would be for nothing
    if reason is None and backend.check is not None:
        return selfcheck.verdict(check_of(table, backend, problem), problem.device).reason
    return reason


def _why_not_unchecked(table: Table[P, B], backend: B, problem: P) -> Reason | None:
    """The part that no self-check is needed for."""
    if problem.route not in backend.routes:
        return Reason.NO_KERNEL
    if missing(backend):
        return Reason.MISSING_PACKAGE
    if backend.native:
        if problem.device.type == "cpu":
            return Reason.CPU
        if problem.device.type != "cuda":
            return Reason.NO_KERNEL
        capability = torch.cuda.get_device_capability(problem.device)
        family = arch.ARCHITECTURES.get(capability)
        if family is None or (problem.route is Route.FUSED and not family.fused):
            return Reason.ARCHITECTURE
        if backend.capabilities is not None and capability not in backend.capabilities:
            return Reason.ARCHITECTURE
    if problem.dtype not in backend.dtypes:
        return Reason.DTYPE
    if (reason := table.unfit(backend, problem)) is not None:
        return reason
    if any(width % backend.width_multiple for width in table.widths(problem)):
        return Reason.ALIGNMENT
    return None


def missing(backend: Backend) -> tuple[str, ...]:
    """The packages that the backend needs and that are not here."""
    return tuple(package for package in backend.packages if importlib.util.find_spec(package) is None)


def check_of(table: Table[P, B], backend: B, problem: P) -> selfcheck.Check:
    """The self-check that covers a problem."""
    assert backend.check is not None
    return selfcheck.Check(backend.check, f"{backend.name} {table.case(backend, problem)}")


def survey(table: Table[P, B], device: torch.device) -> tuple[selfcheck.Standing, ...]:
    """What the table says of every backend and route on `device`, for a call that fits; no self-check is run."""
    return tuple(
        _standing(table, backend, route, device)
        for backend in table.backends()
        for route in Route
        if route in backend.routes
    )


def _standing(table: Table[P, B], backend: B, route: Route, device: torch.device) -> selfcheck.Standing:
    problems = table.samples(backend, route, device)
    return selfcheck.Standing(
        backend=backend.name,
        native=backend.native and not backend.named_only,
        route=route,
        reason=_why_not_unchecked(table, backend, problems[0]),
        missing=missing(backend),
        checks=() if backend.check is None else tuple(check_of(table, backend, problem) for problem in problems),
    )
