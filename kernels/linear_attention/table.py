"""What the tables of backends of KDA and of the gated delta rule share; see kernels/backends.py for the rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...decline import Reason, Route
from .. import backends
from ..backends import Table
from . import cudnn_frost, cudnn_hopper
from .problem import Call, Problem

CHECK = "fusepatch.kernels.linear_attention.check"


def _takes_any(problem: Problem, tokens: int, sequences: int) -> None:
    """Of a backend that takes any number of tokens and sequences."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Backend(backends.Backend):
    """Besides what every backend says of itself."""

    why_not_size: Callable[[Problem, int, int], Reason | None] = _takes_any
    """Why it can't serve so many tokens and sequences, if so."""


def not_measured(problem: Problem, tokens: int) -> bool:
    """No size is admitted: through the library's layers, the kernels have been measured on no GPU."""
    return False


def frost(op: str) -> Backend:
    """cuDNN's operator for SM100 and SM103."""
    return Backend(
        name="cudnn_frost",
        module="fusepatch.kernels.linear_attention.cudnn_frost",
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        routes=frozenset({Route.FUSED}),
        named_only=True,
        packages=("cudnn", "cutlass"),
        why_not=lambda problem: cudnn_frost.why_not(problem, op),
        why_not_size=cudnn_hopper.why_not_size,
        capabilities=frozenset({(10, 0), (10, 3)}),
        admits=not_measured,
        compiled=lambda problem, tokens: False,
        check=CHECK,
    )


REFERENCE = Backend(
    name="reference",
    module="fusepatch.kernels.linear_attention.reference",
    dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64}),
    routes=frozenset({Route.FUSED}),
    native=False,
)


def table_of(op: str, listed: Callable[[], Sequence[Backend]], call: Call) -> Table[Problem, Backend]:
    """The op's table. `call` is one that all of its backends serve, for `survey`."""

    def case(backend: Backend, problem: Problem) -> str:
        return f"{op} {str(problem.dtype).removeprefix('torch.')}"

    def samples(backend: Backend, route: Route, device: torch.device) -> list[Problem]:
        return [sample(call, device, dtype) for dtype in sorted(backend.dtypes, key=str)]

    return Table(op, listed, widths=lambda problem: (), case=case, samples=samples)


def sample(call: Call, device: torch.device, dtype: torch.dtype) -> Problem:
    """A problem that a layer of a real model poses in training."""
    parameters = (torch.float32, torch.float32)
    return Problem(device, dtype, 16, 16, 128, 128, True, call, dtype, dtype, parameters)


def choose(
    table: Table[Problem, Backend], problem: Problem, tokens: int, sequences: int, any_size: bool
) -> Backend | Reason:
    """The backend that serves `problem` for this many tokens and sequences, or why there is none: backends.choose."""
    found = backends.choose(table, problem, tokens, (), any_size)
    return found if isinstance(found, Reason) else found.why_not_size(problem, tokens, sequences) or found
