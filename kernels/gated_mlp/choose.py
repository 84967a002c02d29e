"""Which backend serves a route of the gated MLP: the table of backends, and the rules by which one is chosen.

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
from torch import Tensor

from ... import arch, selfcheck, settings
from ...decline import Reason, Route

OP = "gated_mlp"
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


class Problem(NamedTuple):
    """One call as a kernel sees it: `x [tokens, hidden]`, `Wg, Wu [inner, hidden]`, `Wd [hidden, inner]`.

    `hidden` is 0 where only the pointwise op is called, and `inner` where a module's projections have not run yet.
    """

    route: Route
    device: torch.device
    dtype: torch.dtype
    hidden: int
    inner: int
    activation: str
    bias: bool


@dataclass(frozen=True, eq=False)
class Backend:
    """Whose kernels, and what they can serve. `module` holds the kernels, and is imported on first use."""

    name: str
    module: str
    routes: frozenset[Route]
    dtypes: frozenset[torch.dtype]
    fused_bias: bool
    """Whether the fused route takes biases."""
    native: bool = True
    """Made for GPUs, and so admitted by architecture; False for plain PyTorch, which runs anywhere when asked for."""
    named_only: bool = False
    """Serves only where the environment names it: its kernels, as they are now, have run on no GPU yet."""
    packages: tuple[str, ...] = ()
    """What must be importable besides torch."""
    capabilities: frozenset[arch.Capability] | None = None
    """The only GPUs that the kernels are compiled for; None for all that arch.py lists for the route."""
    width_multiple: int = 1
    """Hidden and intermediate sizes must be multiples of this."""
    byte_alignment: int = 1
    """Every tensor must start on a multiple of this many bytes."""
    max_elements: int | None = None
    """The most elements of one tensor that the kernel can index; None for 64-bit indexing."""
    admits: Callable[[Problem, int], bool] = field(default=lambda problem, tokens: True)
    """Whether the kernel was measured to win for this problem and number of tokens; with more tokens at least where it
    is with fewer. Not asked where the user named the backend."""
    compiled: Callable[[Problem, int], bool] = field(default=lambda problem, tokens: True)
    """Whether a launch would neither compile nor allocate plans: what a CUDA-graph capture needs."""
    check: str | None = None
    """The module that checks the kernels on a kind of GPU before they first serve there."""


def _pointwise_wins(problem: Problem, tokens: int) -> bool:
    """Whether the GPU is busy for longer than the host takes to launch: below that, more Python is a slower step.

    H200, whole LlamaMLP in bf16, pointwise over eager: 0.98 to 0.95 forward and 0.99 to 0.96 forward + backward from
    (4096, 2048, 8192) up, 1.11 at half of that, 2.0 at (8192, 1024, 3072), where the host bounds both.
    """
    return tokens * problem.inner >= 2**25 and problem.hidden >= 1024


_FUSED_WINS: dict[tuple[int, int], int] = {
    (896, 4864): 8192,
    (1024, 3072): 16384,
    (1536, 8960): 8192,
    (2048, 5632): 8192,
    (2048, 6144): 8192,
    (2048, 8192): 2048,
    (2560, 9728): 2048,
    (3072, 8192): 2048,
    (3584, 18944): 2048,
    (4096, 11008): 2048,
    (4096, 12288): 2048,
    (4096, 14336): 1024,
    (5120, 17408): 1024,
    (8192, 28672): 2048,
}
"""(hidden, inner) to the fewest tokens at which the Hopper kernels won, forward and forward + backward.

H200, bf16, SiLU, the op against HF eager, by a throw-away script: to be measured again by `python -m benchmarks
gated_mlp` before `named_only` goes. With fewer tokens it lost (where the host bounds both), won by less than it varies,
or was not tried. The forward pass alone won with fewer too, but grad mode must not pick the route.
"""
_ALSO_WINS = {(torch.bfloat16, "gelu_tanh"), (torch.float16, "silu")}
"""Measured at 8192 tokens (16384 with H 1024) of `_ALSO_AT` alone."""
_ALSO_AT = {(1024, 3072), (2048, 8192), (4096, 14336), (5120, 17408)}


def _fused_wins(problem: Problem, tokens: int) -> bool:
    """Whether this was measured, and won. What was not measured declines."""
    widths, kind = (problem.hidden, problem.inner), (problem.dtype, problem.activation)
    fewest = _FUSED_WINS.get(widths)
    if kind in _ALSO_WINS and widths in _ALSO_AT:
        fewest = 16384 if problem.hidden == 1024 else 8192
    elif kind != (torch.bfloat16, "silu"):
        fewest = None
    return fewest is not None and tokens >= fewest


_MOST_TOKENS = 2**40


def _is_compiled(problem: Problem, tokens: int) -> bool:
    pointwise = importlib.import_module("fusepatch.kernels.gated_mlp.pointwise")
    return bool(pointwise.is_compiled(problem.dtype, problem.activation, tokens))


def _hopper_is_compiled(problem: Problem, tokens: int) -> bool:
    hopper = importlib.import_module("fusepatch.kernels.gated_mlp.hopper")
    return bool(hopper.is_compiled(problem, tokens))


_FLOATS = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})

BACKENDS: tuple[Backend, ...] = (
    Backend(
        name="triton",
        module="fusepatch.kernels.gated_mlp.pointwise",
        routes=frozenset({Route.POINTWISE}),
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        fused_bias=False,
        packages=("triton",),
        check="fusepatch.kernels.gated_mlp.check",
        admits=_pointwise_wins,
        compiled=_is_compiled,
    ),
    Backend(
        name="hopper",
        module="fusepatch.kernels.gated_mlp.hopper",
        routes=frozenset({Route.FUSED}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        fused_bias=False,
        packages=("cutlass", "tvm_ffi"),
        capabilities=frozenset({(9, 0)}),
        width_multiple=8,
        byte_alignment=16,
        check="fusepatch.kernels.gated_mlp.check",
        admits=_fused_wins,
        # The last change, to a race that the self-check found on the H200, was compiled and inspected, and has not run.
        named_only=True,
        compiled=_hopper_is_compiled,
    ),
    # The op itself takes biases on every route. The fused route declines them until a native kernel takes them, so
    # that the route taken in a rehearsal on a CPU is the one taken on a GPU.
    Backend(
        name="reference",
        module="fusepatch.kernels.gated_mlp.reference",
        routes=frozenset({Route.FUSED, Route.POINTWISE}),
        dtypes=_FLOATS,
        fused_bias=False,
        native=False,
    ),
)
"""In order of preference where none is named."""

REFERENCE = BACKENDS[-1]


def load(backend: Backend) -> ModuleType:
    """The module with the backend's kernels, imported once."""
    return importlib.import_module(backend.module)


def choose(problem: Problem, tokens: int, *tensors: Tensor, any_size: bool = False) -> Backend | Reason:
    """The backend that serves `problem` for this many tokens, or why there is none. About 1 us.

    `tensors` are those whose addresses the kernel reads; their alignment is checked where the backend asks for it.
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
    if found.max_elements is not None and tokens * max(problem.hidden, 2 * problem.inner) > found.max_elements:
        return Reason.INDEX_RANGE
    if found.byte_alignment > 1 and any(tensor.data_ptr() % found.byte_alignment for tensor in tensors):
        return Reason.ALIGNMENT
    if found.native:
        if not any_size and key[0].ops[OP].backend == "auto" and not found.admits(problem, tokens):
            return Reason.SIZE_NOT_ADMITTED
        if is_capturing(problem.device) and not found.compiled(problem, tokens):
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
    if op.route is not None and problem.route.rank < op.route.rank:
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
        if backend.native and not backend.named_only:
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
        return selfcheck.verdict(check_of(backend, problem), problem.device).reason
    return reason


def _why_not_unchecked(backend: Backend, problem: Problem) -> Reason | None:
    """The part that no self-check is needed for."""
    if problem.route not in backend.routes:
        return Reason.NO_KERNEL
    if _missing(backend):
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
    if problem.activation not in ACTIVATIONS:
        return Reason.ACTIVATION
    if problem.bias and problem.route is Route.FUSED and not backend.fused_bias:
        return Reason.BIAS
    widths = (problem.hidden, problem.inner) if problem.route is Route.FUSED else (problem.inner,)
    if any(width % backend.width_multiple for width in widths):
        return Reason.ALIGNMENT
    return None


def _missing(backend: Backend) -> tuple[str, ...]:
    return tuple(package for package in backend.packages if importlib.util.find_spec(package) is None)


def check_of(backend: Backend, problem: Problem) -> selfcheck.Check:
    """The self-check that covers a problem: one per backend, route, dtype and activation."""
    assert backend.check is not None
    dtype = str(problem.dtype).removeprefix("torch.")
    return selfcheck.Check(backend.check, f"{backend.name} {problem.route.value} {dtype} {problem.activation}")


def survey(device: torch.device) -> tuple[selfcheck.Standing, ...]:
    """What the table says of every backend and route on `device`, for a call that fits; no self-check is run."""
    return tuple(
        _standing(backend, route, device) for backend in BACKENDS for route in Route if route in backend.routes
    )


def _standing(backend: Backend, route: Route, device: torch.device) -> selfcheck.Standing:
    width = 1024 * backend.width_multiple
    problems = [
        Problem(route, device, dtype, width, width, activation, bias=False)
        for dtype in sorted(backend.dtypes, key=str)
        for activation in ACTIVATIONS
    ]
    return selfcheck.Standing(
        backend=backend.name,
        native=backend.native and not backend.named_only,
        route=route,
        reason=_why_not_unchecked(backend, problems[0]),
        missing=_missing(backend),
        checks=() if backend.check is None else tuple(check_of(backend, problem) for problem in problems),
    )


def for_op(problem: Problem, tokens: int, *tensors: Tensor) -> Backend:
    """As `choose`, for a direct call of the op, which has no library's code to decline to: plain PyTorch serves it."""
    found = choose(problem, tokens, *tensors, any_size=True)
    return found if isinstance(found, Backend) else REFERENCE
