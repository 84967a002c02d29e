"""The table of backends of the Engram gate, and which one serves a call; the rules are those of kernels/backends.py."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ...decline import Reason, Route
from ...selfcheck import Standing
from .. import backends
from . import cudnn_engram

OP = "engram_gate"
WIDTH_MULTIPLE = 8
"""A stream's width must be a multiple of this: 16 bytes of bf16."""


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
    rounded: bool = False
    """Whether query and key are rounded apart (reference.py)."""

    @property
    def route(self) -> Route:
        """The module's own projections and norms are called, and what lies between them is fused."""
        return Route.POINTWISE


@dataclass(frozen=True, eq=False, kw_only=True)
class Backend(backends.Backend):
    """Besides what every backend says of itself."""

    takes: Callable[[int], bool] = field(default=lambda tokens: True)
    """Whether it can serve so many tokens."""
    prepared: bool = True
    """Whether it serves prepared plans (plan.py), whose memory is the caller's."""


def _not_measured(problem: Problem, tokens: int) -> bool:
    """No size is admitted: none was measured against a library's code."""
    return False


def _is_compiled(problem: Problem, tokens: int) -> bool:
    kernels = importlib.import_module("fusepatch.kernels.engram_gate.triton_kernels")
    return bool(kernels.is_compiled(*problem))


BACKENDS: tuple[Backend, ...] = (
    Backend(
        name="triton",
        module="fusepatch.kernels.engram_gate.triton_kernels",
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        routes=frozenset({Route.POINTWISE}),
        width_multiple=WIDTH_MULTIPLE,
        packages=("triton",),
        admits=_not_measured,
        compiled=_is_compiled,
        check="fusepatch.kernels.engram_gate.check",
    ),
    Backend(
        name="cudnn_engram",
        module="fusepatch.kernels.engram_gate.cudnn_engram",
        dtypes=frozenset({torch.bfloat16}),
        routes=frozenset({Route.POINTWISE}),
        width_multiple=WIDTH_MULTIPLE,
        packages=("cudnn", "cutlass", "cuda", "triton"),
        drift=cudnn_engram.drift,
        why_not=cudnn_engram.why_not,
        takes=cudnn_engram.takes,
        prepared=False,
        capabilities=frozenset({(10, 0)}),
        admits=_not_measured,
        # Through this package it has run on no GPU yet.
        named_only=True,
        compiled=lambda problem, tokens: False,  # plans depend on eps, which a problem does not have
        check="fusepatch.kernels.engram_gate.check",
    ),
    Backend(
        name="reference",
        module="fusepatch.kernels.engram_gate.reference",
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64}),
        routes=frozenset({Route.POINTWISE}),
        width_multiple=WIDTH_MULTIPLE,
        native=False,
    ),
)
"""In order of preference where none is named."""

REFERENCE = BACKENDS[-1]


def _case(backend: Backend, problem: Problem) -> str:
    return str(problem.dtype).removeprefix("torch.")


def _samples(backend: Backend, route: Route, device: torch.device) -> list[Problem]:
    return [
        Problem(device, dtype, torch.float32, 4, 5120, True, "copysign", False)
        for dtype in sorted(backend.dtypes, key=str)
    ]


TABLE: backends.Table[Problem, Backend] = backends.Table(
    OP,
    lambda: BACKENDS,
    widths=lambda problem: (problem.width,),
    case=_case,
    samples=_samples,
)


def choose(problem: Problem, tokens: int, *, any_size: bool = False) -> Backend | Reason:
    """The backend that serves `problem` for this many tokens, or why there is none: backends.choose."""
    found = backends.choose(TABLE, problem, tokens, (), any_size)
    return found if isinstance(found, Reason) or found.takes(tokens) else Reason.SIZE_NOT_ADMITTED


def for_op(problem: Problem, tokens: int) -> Backend:
    """As `choose`, for a direct call of the op, which has no library's code to decline to: plain PyTorch serves it.

    Sizes are asked for as ever, so that kernels that no GPU has run serve only where they are named.
    """
    found = choose(problem, tokens)
    return found if isinstance(found, Backend) else REFERENCE


def survey(device: torch.device) -> tuple[Standing, ...]:
    """What the table says of every backend on `device`; no self-check is run."""
    return backends.survey(TABLE, device)
