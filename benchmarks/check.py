"""The gate before and after timing: an arm whose numbers are wrong has no speed.

The output and the gradients of x and of each weight are compared with an fp32 reference of the same rounded weights.
The bound is wider than that of `fusepatch.parity` by its floor alone, since peers may round where stock code does not.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fusepatch.errors import type_and_first_line

from .arms import Built
from .cases import Case
from .data import Data

FACTOR, FLOOR = 1.25, 1e-3
"""`error <= FACTOR * eager's error + FLOOR`, of relative L2 errors, for each tensor."""

TENSORS = ("out", "x", "gate", "up", "down")
"""The output, and the gradients by what they are of."""

Results = dict[str, Tensor]
Errors = dict[str, float]


@contextlib.contextmanager
def exact_fp32() -> Iterator[None]:
    """Products of fp32 are those of fp32 inside."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def reference(case: Case, data: Data) -> Results:
    """What an arm should give, computed in fp32."""
    with exact_fp32():
        leaves = {
            name: tensor.detach().float().requires_grad_()
            for name, tensor in (("x", data.x), ("gate", data.gate), ("up", data.up), ("down", data.down))
        }
        gate = F.linear(leaves["x"], leaves["gate"])
        gate = F.silu(gate) if case.activation == "silu" else F.gelu(gate, approximate="tanh")
        out = F.linear(gate * F.linear(leaves["x"], leaves["up"]), leaves["down"])
        gradients = torch.autograd.grad(out, list(leaves.values()), data.dout.float())
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def forget_gradients(built: Built, data: Data) -> None:
    """Drops every gradient that a backward pass left."""
    for leaf in (data.x, *built.parameters):
        leaf.grad = None


def results(built: Built, data: Data) -> Results:
    """One forward and backward pass."""
    forget_gradients(built, data)
    out = built.forward(data.x)
    out.backward(data.dout)
    return _collect(built, data, out)


def _collect(built: Built, data: Data, out: Tensor) -> Results:
    assert data.x.grad is not None
    found = {"out": out.detach(), "x": data.x.grad, **built.gradients()}
    forget_gradients(built, data)
    return found


def errors(actual: Results, expected: Results) -> Errors:
    """|actual - expected|_2 / |expected|_2 of each tensor; infinite where its shape differs or it is not finite."""
    return {name: relative_error(actual[name], expected[name]) for name in TENSORS}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Of the whole tensor, in L2; infinite where the shapes differ or something is not finite."""
    if actual.shape != expected.shape:
        return math.inf
    difference = torch.linalg.vector_norm(actual.float() - expected, dtype=torch.float64)
    error = float(difference / torch.linalg.vector_norm(expected, dtype=torch.float64))
    return error if math.isfinite(error) else math.inf


@dataclass(frozen=True)
class Judgement:
    """How an arm's errors compare with eager's."""

    over: tuple[str, ...]
    """What exceeds the bound, in words."""
    error_ratio: float
    """The largest error over eager's, among the tensors."""


def judge(found: Mapping[str, float], eager: Mapping[str, float]) -> Judgement:
    """Compares an arm's errors with eager's. Raises ValueError where eager's own are no measure."""
    unusable = [name for name in TENSORS if not eager[name] < 0.5]
    if unusable:
        raise ValueError(f"eager itself is wrong: {', '.join(unusable)}")
    over = [
        f"{name} has a relative error of {found[name]:.2e} (eager {eager[name]:.2e})"
        for name in TENSORS
        if not found[name] <= FACTOR * eager[name] + FLOOR
    ]
    return Judgement(tuple(over), max(found[name] / max(eager[name], 1e-6) for name in TENSORS))


def second_backward(built: Built, data: Data, expected: Results, eager: Errors) -> str | None:
    """What is wrong with a second backward pass through one forward, if something is.

    An arm that overwrites what it saved passes the first and fails the second, or refuses to keep its graph.
    """
    forget_gradients(built, data)
    try:
        out = built.forward(data.x)
        out.backward(data.dout, retain_graph=True)
        forget_gradients(built, data)
        out.backward(data.dout)
        over = judge(errors(_collect(built, data, out), expected), eager).over
    except Exception as error:
        return f"raises {first_line(error)}"
    finally:
        forget_gradients(built, data)
    return over[0] if over else None


def first_line(error: BaseException) -> str:
    """Type and first line of an exception, cut to what a row can hold."""
    return type_and_first_line(error)[:300]
