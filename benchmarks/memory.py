"""What a training step of eight MLPs holds: one alone would reward a kernel that overwrites what it saved."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import data
from .arms import Arm, Built
from .cases import Case

DEPTH = 8


@dataclass(frozen=True)
class Held:
    """Bytes of the whole stack."""

    saved: int
    """What autograd saved for the backward pass, each storage once, without parameters."""
    peak: int | None
    """The most that was allocated during the step, beyond parameters, input and gradients; None without a GPU."""


def measure(arm: Arm, case: Case) -> Held:
    """Runs `h = h + mlp(h)` eight times, forward and backward, with weights of its own in each MLP."""
    with arm.context(case):
        first = data.make(case, seed=100)
        mlps = [arm.build(case, first if index == 0 else data.make(case, seed=100 + index)) for index in range(DEPTH)]
        x, dout = first.x, first.dout
        del first
        _step(mlps, x, dout)  # compiles, and makes the gradients that later steps add to
        return Held(_saved(mlps, x, dout), _peak(mlps, x, dout) if case.device == "cuda" else None)


def _step(mlps: list[Built], x: Tensor, dout: Tensor) -> None:
    _forward(mlps, x).backward(dout)


def _forward(mlps: list[Built], x: Tensor) -> Tensor:
    h = x
    for mlp in mlps:
        h = h + mlp.forward(h)
    return h


def _peak(mlps: list[Built], x: Tensor, dout: Tensor) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _step(mlps, x, dout)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _saved(mlps: list[Built], x: Tensor, dout: Tensor) -> int:
    parameters = {parameter.untyped_storage().data_ptr() for mlp in mlps for parameter in mlp.parameters}
    kept: dict[int, torch.UntypedStorage] = {}  # held, so that no address is given out twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = _forward(mlps, x)
    total = sum(storage.nbytes() for storage in kept.values())
    out.backward(dout)
    return total
