"""Which backend serves a call of the Engram gate: the table of backends, and the rules by which one is chosen.

A pure function of tensor metadata and of state that changes only inside `accelerate()` and `warmup()`: never of call
counts, free memory or time. A choice that differed between a forward pass and its recomputation would give the
gradient of the wrong function.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import NamedTuple

import torch

from ... import arch, selfcheck, settings
from ...decline import Reason, Route

OP = "engram_gate"


class Problem(NamedTuple):
    """One call as a kernel sees it: `x [tokens, streams, width]`."""

    device: torch.device
    dtype: torch.dtype
    weight_dtype: torch.dtype
    streams: int
    width: int
    residual: bool
    zero_dot: str
    masked: bool


@dataclass(frozen=True, eq=False)
class Backend:
    """Whose kernels, and what they can serve. `module` holds the kernels, and is imported on first use."""

    name: str
    module: str
    dtypes: frozenset[torch.dtype]
    native: bool = True
    """Made for GPUs, and so admitted by architecture; False for plain PyTorch, which runs anywhere when asked for."""
    packages: tuple[str, ...] = ()
    """What must be importable besides torch."""
    admits: Callable[[Problem, int], bool] = field(default=lambda problem, tokens: True)
    """Whether the kernel was measured to win for this problem and number of tokens; with more tokens at least where it
    is with fewer. Not asked where the user named the backend."""
    compiled: Callable[[Problem], bool] = field(default=lambda problem: True)
    """Whether a launch would compile nothing: what a CUDA-graph capture needs."""
    check: str | None = None
    """The module that checks the kernels on a kind of GPU before they first serve there."""


def _not_measured(problem: Problem, tokens: int) -> bool:
    """No size is admitted: the kernels have run on no GPU yet, so none was measured to win."""
    return False


_MOST_TOKENS = 2**40


def _is_compiled(problem: Problem) -> bool:
    kernels = importlib.import_module("fusepatch.kernels.engram_gate.triton_kernels")
    return bool(kernels.is_compiled(*problem[1:]))


BACKENDS: tuple[Backend, ...] = (
    Backend(
        name="triton",
        module="fusepatch.kernels.engram_gate.triton_kernels",
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        packages=("triton",),
        admits=_not_measured,
        compiled=_is_compiled,
        check="fusepatch.kernels.engram_gate.check",
    ),
    Backend(
        name="reference",
        module="fusepatch.kernels.engram_gate.reference",
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64}),
        native=False,
    ),
)
"""In order of preference where none is named."""

REFERENCE = BACKENDS[-1]


def load(backend: Backend) -> ModuleType:
    """The module with the backend's kernels, imported once."""
    return importlib.import_module(backend.module)


def choose(problem: Problem, tokens: int, *, any_size: bool = False) -> Backend | Reason:
    """The backend that serves `problem` for this many tokens, or why there is none. About 1 us.

    `any_size` admits sizes at which the kernel was not measured to win, as naming a backend does.
    """
    key = (settings.current(), problem, any_size)
    found = _known.get(key)
    if found is None:
        if is_capturing(problem.device):
            return Reason.CAPTURE_COLD  # finding out may start a child process and compile
        if len(_known) >= _KNOWN_LIMIT:
            _known.clear()
        found = _known[key] = _for_problem(*key)
    if isinstance(found, Reason):
        return found
    if found.native:
        if not any_size and key[0].ops[OP].backend == "auto" and not found.admits(problem, tokens):
            return Reason.SIZE_NOT_ADMITTED
        if is_capturing(problem.device) and not found.compiled(problem):
            return Reason.CAPTURE_COLD
    return found


_known: dict[tuple[settings.Settings, Problem, bool], Backend | Reason] = {}
_KNOWN_LIMIT = 4096


def forget() -> None:
    """Drops what was worked out so far, for tests that change the table of backends."""
    _known.clear()


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _for_problem(current: settings.Settings, problem: Problem, any_size: bool) -> Backend | Reason:
    """The part that does not depend on the call, worked out once per problem and `accelerate()`."""
    op = current.ops[OP]
    if op.route is Route.ORIGINAL:
        return Reason.ROUTE_BOUND
    if problem.device.type == "meta":
        return Reason.META
    if op.backend != "auto":
        (named,) = (backend for backend in BACKENDS if backend.name == op.backend)
        return _why_not(named, problem, any_size=True) or named
    if problem.device.type == "cpu":
        return Reason.CPU
    reason = Reason.NO_KERNEL
    for backend in BACKENDS:
        if backend.native:
            why = _why_not(backend, problem, any_size=any_size)
            if why is None:
                return backend
            reason = why
    return reason


def _why_not(backend: Backend, problem: Problem, *, any_size: bool) -> Reason | None:
    reason = _why_not_unchecked(backend, problem)
    if reason is None and backend.native and not any_size and not backend.admits(problem, _MOST_TOKENS):
        reason = Reason.SIZE_NOT_ADMITTED  # of no number of tokens; a self-check would be for nothing
    if reason is None and backend.check is not None:
        return selfcheck.verdict(check_of(backend, problem.dtype), problem.device).reason
    return reason


def _why_not_unchecked(backend: Backend, problem: Problem) -> Reason | None:
    """The part that no self-check is needed for."""
    if _missing(backend):
        return Reason.MISSING_PACKAGE
    if backend.native:
        if problem.device.type == "cpu":
            return Reason.CPU
        if problem.device.type != "cuda":
            return Reason.NO_KERNEL
        if torch.cuda.get_device_capability(problem.device) not in arch.ARCHITECTURES:
            return Reason.ARCHITECTURE
    if problem.dtype not in backend.dtypes:
        return Reason.DTYPE
    return Reason.ALIGNMENT if problem.width % WIDTH_MULTIPLE else None


WIDTH_MULTIPLE = 8
"""A stream's width must be a multiple of this: 16 bytes of bf16."""


def _missing(backend: Backend) -> tuple[str, ...]:
    return tuple(package for package in backend.packages if importlib.util.find_spec(package) is None)


def check_of(backend: Backend, dtype: torch.dtype) -> selfcheck.Check:
    """The self-check that covers a problem: one per backend and dtype."""
    assert backend.check is not None
    return selfcheck.Check(backend.check, f"{backend.name} {str(dtype).removeprefix('torch.')}")


def survey(device: torch.device) -> tuple[selfcheck.Standing, ...]:
    """What the table says of every backend on `device`, for a call that fits; no self-check is run."""
    return tuple(_standing(backend, device) for backend in BACKENDS)


def _standing(backend: Backend, device: torch.device) -> selfcheck.Standing:
    dtypes = sorted(backend.dtypes, key=str)
    problem = Problem(device, dtypes[0], torch.float32, 4, 5120, True, "copysign", False)
    return selfcheck.Standing(
        backend=backend.name,
        native=backend.native,
        route=Route.POINTWISE,
        reason=_why_not_unchecked(backend, problem),
        missing=_missing(backend),
        checks=() if backend.check is None else tuple(check_of(backend, dtype) for dtype in dtypes),
    )


def for_op(problem: Problem, tokens: int) -> Backend:
    """As `choose`, for a direct call of the op, which has no library's code to decline to: plain PyTorch serves it.

    Sizes are asked for as ever, so that kernels that no GPU has run serve only where they are named.
    """
    found = choose(problem, tokens)
    return found if isinstance(found, Backend) else REFERENCE
