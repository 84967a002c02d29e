"""How a backend of an op is chosen, and why one is not: the rules that every op's table of backends shares.

A pure function of tensor metadata and of state that changes only inside `accelerate()` and `warmup()`: never of call
counts, free memory or time. A choice that differed between a forward pass and its recomputation would give the
gradient of the wrong function.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from .. import arch, profiles, selfcheck, settings
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
    """Serves only where the environment names it: its kernels, as they are now, have run on no GPU yet, or what they
    did there is why not; the record says which."""
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
    fewest_tokens: int = 1
    """With fewer than this `admits` is false for every problem."""
    compiled: Callable[[Any, int], bool] = field(default=lambda problem, tokens: True)
    """Whether a launch would neither compile nor allocate plans: what a CUDA-graph capture needs."""
    check: str | None = None
    """The module that checks the kernels on a kind of GPU before they first serve there."""
    drift: Callable[[], tuple[str, ...]] = field(default=lambda: ())
    """Where an installed package is not what the backend was written against, in words. Imports nothing of it."""
    why_not: Callable[[Any], Reason | None] = field(default=lambda problem: None)
    """What else of a problem it can't serve. May import the backend's packages."""
    note: str = ""
    """What `status()` says where it serves."""
    choice: str = ""
    """Another way for its kernels to cut the work up, which changes speed, and results by roundings at most; empty for
    its own rules. Serves only where `fusepatch tune` measured it to be faster than those, or measures it now."""
    warmed_only: bool = False
    """Serves only the numbers of tokens that `warmup()` ran, named or not: for a new one it stops the device for long,
    and keeps what it made for good."""

    @property
    def label(self) -> str:
        """By which profiles, self-checks and operators know it: its name, and the choice after a slash."""
        return f"{self.name}/{self.choice}" if self.choice else self.name


P = TypeVar("P", bound=Problem)
B = TypeVar("B", bound=Backend)


@dataclass(frozen=True, eq=False)
class Table(Generic[P, B]):
    """One op's backends, and the rules that are the op's own."""

    op: str
    backends: Callable[[], Sequence[B]]
    """In order of preference where none is named."""
    widths: Callable[[P], Sequence[int]]
    """The sizes that `width_multiple` speaks of."""
    case: Callable[[B, P], str]
    """The self-check that covers a problem, in words that the op's check.py reads."""
    samples: Callable[[B, Route, torch.device], Sequence[P]]
    """A problem that fits for each self-check there is: what `survey` asks about."""
    choices: Callable[[], Sequence[B]] = field(default=lambda: ())
    """Records of the same backends with a choice each."""
    unfit: Callable[[B, P], Reason | None] = field(default=lambda backend, problem: None)
    """What of a problem a backend can't serve by fields that the op's own records have."""
    known: dict[tuple[settings.Settings, P, bool], B | Reason | _Tuned[B]] = field(default_factory=dict)
    """What was worked out, for choose() to take about 1 us."""
    fewest: dict[tuple[settings.Settings, torch.device], int] = field(default_factory=dict)
    """For is_too_few()."""
    warmed: set[tuple[str, P, int, int]] = field(default_factory=set)
    """Backend, problem, number of tokens and stream of what `warmup()` ran, for backends that serve nothing else."""

    def forget(self) -> None:
        """Drops what was worked out and warmed up so far, for tests that change the backends."""
        self.known.clear()
        self.fewest.clear()
        self.warmed.clear()


KNOWN_LIMIT = 4096


@functools.cache
def load(backend: Backend) -> Any:
    """The module with the backend's kernels, or its functions bound to the choice. Made once, as every call asks."""
    return with_choice(importlib.import_module(backend.module), backend.choice)


def with_choice(module: ModuleType, choice: str) -> Any:
    """The functions of a module of kernels, bound to a choice where there is one."""
    return module.with_choice(choice) if choice else module


def labelled(backends: Sequence[B], label: str) -> B | None:
    """The record of that label among these."""
    return next((backend for backend in backends if backend.label == label), None)


def choose(table: Table[P, B], problem: P, tokens: int, tensors: Sequence[Tensor], any_size: bool) -> B | Reason:
    """The backend that serves `problem` for this many tokens, or why there is none. About 1 us.

    `tensors` are those whose addresses the kernel reads; their alignment is checked where the backend asks for it.
    `any_size` admits sizes at which the kernel was not measured to win, as naming a backend does.
    """
    key = (settings.current(), problem, any_size)
    known = table.known.get(key)
    if known is None:
        if is_capturing(problem.device):
            return Reason.CAPTURE_COLD  # finding out may start a child process and compile
        if len(table.known) >= KNOWN_LIMIT:
            table.known.clear()
        known = table.known[key] = _for_problem(table, *key)
    found, tuned = known.at(tokens) if isinstance(known, _Tuned) else (known, False)
    if tuned and isinstance(found, Backend) and not _is_warm(table, found, problem, tokens):
        assert isinstance(known, _Tuned)
        found, tuned = known.table, False  # what wins, and would be served after a warm-up
    if isinstance(found, Reason):
        return found
    if found.byte_alignment > 1 and any(tensor.data_ptr() % found.byte_alignment for tensor in tensors):
        return Reason.ALIGNMENT
    if found.native:
        by_rule = not tuned and not any_size and (key[0].ops[table.op].backend == "auto" or found.choice)
        if by_rule and not found.admits(problem, tokens):
            return Reason.SIZE_NOT_ADMITTED
        if is_capturing(problem.device) and not found.compiled(problem, tokens):
            return Reason.CAPTURE_COLD
    return found if _is_warm(table, found, problem, tokens) else Reason.SIZE_NOT_ADMITTED


def _is_warm(table: Table[P, B], backend: B, problem: P, tokens: int) -> bool:
    """Whether a backend that serves only what was warmed up may serve this; true of any other."""
    return not backend.warmed_only or _warming.get() or _warm_key(backend, problem, tokens) in table.warmed


def is_too_few(table: Table[P, B], tokens: int, device: torch.device) -> bool:
    """Whether nothing serves so few tokens on this GPU, whatever the problem.

    Where a few tokens are all there is, as in decoding, the host bounds the step: it must not pay for a decision that
    is known before anything else is looked at.
    """
    key = (settings.current(), device)
    fewest = table.fewest.get(key)
    if fewest is None:
        if len(table.fewest) >= KNOWN_LIMIT:
            table.fewest.clear()
        fewest = table.fewest[key] = _fewest_tokens(table, *key)
    return tokens < fewest


def _fewest_tokens(table: Table[P, B], current: settings.Settings, device: torch.device) -> int:
    op = current.ops[table.op]
    if op.backend != "auto" or op.route is not None:
        return 1
    by_table = [
        backend.fewest_tokens
        for backend in table.backends()
        if backend.native and not backend.named_only and not missing(backend) and _has_route(backend, device)
    ]
    if not by_table:
        return 1  # that no kernel is made for this GPU is the better reason
    return min((*by_table, *profiles.fewest_tokens(table.op, device)))


_warming: ContextVar[bool] = ContextVar("fusepatch_warming", default=False)


@contextlib.contextmanager
def warming() -> Iterator[None]:
    """Within it, and in this thread, every number of tokens counts as warmed up: for `warmup()` alone."""
    token = _warming.set(True)
    try:
        yield
    finally:
        _warming.reset(token)


def admit(table: Table[P, B], backend: B, problem: P, tokens: int) -> None:
    """Notes that `warmup()` ran this number of tokens, so that calls on the current stream may be served."""
    table.warmed.add(_warm_key(backend, problem, tokens))


def _warm_key(backend: B, problem: P, tokens: int) -> tuple[str, P, int, int]:
    # Autograd runs a backward pass, and what is recomputed in it, on the stream of its forward pass.
    stream = torch.cuda.current_stream(problem.device).cuda_stream if problem.device.type == "cuda" else 0
    return backend.name, problem, tokens, stream


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True)
class _Tuned(Generic[B]):
    """What `fusepatch tune` found of one problem."""

    steps: tuple[tuple[int, B | Reason | None], ...]
    """(number of tokens that was measured, what serves from there on up to the next), ascending; None for `table`."""
    table: B | Reason
    """What the op's table says: for fewer tokens than any that was measured, too."""

    def at(self, tokens: int) -> tuple[B | Reason, bool]:
        """What serves so many tokens, and whether that was measured here."""
        found = None
        for fewest, served in self.steps:
            if tokens < fewest:
                break
            found = served
        # That a kernel lost says nothing of more tokens than any that were measured; that it won does.
        if found is None or (isinstance(found, Reason) and tokens > self.steps[-1][0]):
            return self.table, False
        return found, True


def described(problem: Any) -> str:
    """A problem in words, by which a profile knows it: all but the device, for whose kind the profile is made."""
    fields = problem._asdict().items()
    return " ".join(f"{name}={getattr(value, 'value', value)}" for name, value in fields if name != "device")


def _for_problem(table: Table[P, B], current: settings.Settings, problem: P, any_size: bool) -> B | Reason | _Tuned[B]:
    """The part that does not depend on the call, worked out once per problem and `accelerate()`."""
    profiles.note_asked(described(problem))
    found = _by_table(table, current, problem, any_size)
    if any_size or current.ops[table.op].backend != "auto" or found in _NOT_TUNED or problem.device.type != "cuda":
        return found
    winners = profiles.winners(table.op, described(problem), problem.device)
    if not winners:
        return found
    steps = tuple((tokens, _of_all(table, problem, names)) for tokens, names in winners.items())
    return _Tuned(steps, found)


_NOT_TUNED = (Reason.ROUTE_BOUND, Reason.META)


def _of_all(table: Table[P, B], problem: P, names: Sequence[str | None]) -> B | Reason | None:
    """What serves a problem that several kinds of modules pose: where one of them was slower so, nothing does."""
    found = [each for each in (_tuned(table, problem, name) for name in names) if each is not None]
    return next((each for each in found if isinstance(each, Reason)), found[0] if found else None)


def _tuned(table: Table[P, B], problem: P, label: str | None) -> B | Reason | None:
    """What serves a problem of which the backend, or the library's own code, was measured to be the fastest.

    None where that says nothing of this route: the backend is gone, or serves a faster route, which has declined.
    """
    if label is None:
        return Reason.SIZE_NOT_ADMITTED
    winner = labelled((*table.backends(), *table.choices()), label)
    if winner is None:
        return None
    if problem.route in winner.routes:
        why_not = _why_not(table, winner, problem, any_size=True)
        if why_not is not None and winner.choice:  # which may have kernels of its own, and a self-check that fails
            return _tuned(table, problem, winner.name)
        return why_not or winner
    is_faster = min(route.rank for route in winner.routes) < problem.route.rank
    return None if is_faster else Reason.SIZE_NOT_ADMITTED


def _by_table(table: Table[P, B], current: settings.Settings, problem: P, any_size: bool) -> B | Reason:
    op = current.ops[table.op]
    if op.route is not None and problem.route.rank < op.route.rank:
        return Reason.ROUTE_BOUND
    if problem.device.type == "meta":
        return Reason.META
    if op.backend != "auto":
        named = labelled((*table.backends(), *table.choices()), op.backend)
        assert named is not None, "settings.py knows them"
        return _why_not(table, named, problem, any_size=True) or named
    if problem.device.type == "cpu":
        return Reason.CPU
    reasons = []
    for backend in table.backends():
        if backend.native and not backend.named_only:
            why = _why_not(table, backend, problem, any_size=any_size)
            if why is None:
                return backend
            reasons.append(why)
    return min(reasons, key=_says_little, default=Reason.NO_KERNEL)


def _says_little(reason: Reason) -> int:
    """First comes what a backend says that is made for the route and the GPU; of several, the most preferred one."""
    return {Reason.ARCHITECTURE: 1, Reason.NO_KERNEL: 2}.get(reason, 0)


def _why_not(table: Table[P, B], backend: B, problem: P, *, any_size: bool) -> Reason | None:
    if backend.choice:  # its own self-check has only what that of the backend leaves out
        own = labelled(table.backends(), backend.name)
        reason = Reason.NO_KERNEL if own is None else _why_not(table, own, problem, any_size=True)
    else:
        reason = _why_not_unchecked(table, backend, problem)
    if reason is None and backend.native and not any_size and not backend.admits(problem, profiles.MOST_TOKENS):
        reason = Reason.SIZE_NOT_ADMITTED  # of no number of tokens; a self-check would be for nothing
    if reason is None and backend.check is not None:
        return selfcheck.verdict(check_of(table, backend, problem), problem.device).reason
    return reason


def _why_not_unchecked(table: Table[P, B], backend: B, problem: P) -> Reason | None:
    """The part that no self-check is needed for."""
    if problem.route not in backend.routes:
        return Reason.NO_KERNEL
    if backend.native and problem.device.type != "cuda":
        return Reason.CPU if problem.device.type == "cpu" else Reason.NO_KERNEL
    if backend.native and not _is_made_for(backend, problem.route, problem.device):
        return Reason.ARCHITECTURE
    if missing(backend):
        return Reason.MISSING_PACKAGE
    if backend.drift():
        return Reason.PACKAGE_DIFFERS
    if problem.dtype not in backend.dtypes:
        return Reason.DTYPE
    if (reason := table.unfit(backend, problem) or backend.why_not(problem)) is not None:
        return reason
    if any(width % backend.width_multiple for width in table.widths(problem)):
        return Reason.ALIGNMENT
    if backend.native and not all(table.widths(problem)):
        return Reason.SIZE_NOT_ADMITTED  # an empty sum, or nothing to write: no kernel has a loop of no rounds
    return None


def _has_route(backend: Backend, device: torch.device) -> bool:
    return any(_is_made_for(backend, route, device) for route in backend.routes)


def _is_made_for(backend: Backend, route: Route, device: torch.device) -> bool:
    capability = torch.cuda.get_device_capability(device)
    family = arch.ARCHITECTURES.get(capability)
    if family is None or (route is Route.FUSED and not family.fused):
        return False
    return backend.capabilities is None or capability in backend.capabilities


def missing(backend: Backend) -> tuple[str, ...]:
    """The packages that the backend needs and that are not here."""
    return tuple(package for package in backend.packages if importlib.util.find_spec(package) is None)


def check_of(table: Table[P, B], backend: B, problem: P) -> selfcheck.Check:
    """The self-check that covers a problem."""
    assert backend.check is not None
    return selfcheck.Check(backend.check, f"{backend.label} {table.case(backend, problem)}")


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
        drift=() if missing(backend) else backend.drift(),
    )
