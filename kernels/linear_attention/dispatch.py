"""Runs a call of an op by the backend that its table chooses."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...decline import Reason
from ..backends import Backend, load
from .arguments import Misfit, Request
from .problem import Problem

Choose = Callable[[Problem, int, int], "Backend | Reason"]


def run(
    choose: Choose, reference: Backend, found: Request | Misfit, output_final_state: bool
) -> tuple[Tensor, Tensor | None]:
    """A direct call of an op: plain PyTorch serves what no kernel does. Raises ValueError for a misfit."""
    if isinstance(found, Misfit):
        raise ValueError(found.message)
    chosen = choose(found.problem, found.tokens, found.sequences)
    return run_by(chosen if isinstance(chosen, Backend) else reference, found, output_final_state)


def run_by(backend: Backend, request: Request, output_final_state: bool) -> tuple[Tensor, Tensor | None]:
    """The call by this backend, which was chosen for it."""
    result: tuple[Tensor, Tensor | None] = load(backend).run(request.call, request.inputs, output_final_state)
    return result


def not_supported(backend: Backend) -> tuple[type[Exception], ...]:
    """What a library raises for a call that its kernels do not support, where that can't be told before."""
    tell = getattr(load(backend), "not_supported", tuple)
    found: tuple[type[Exception], ...] = tell()
    return found
