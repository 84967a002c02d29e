"""One training step: its loss, its time, and the memory it takes."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .weights import Loaded, wider

_SELF = Path("/proc/self")


FORWARDS = 3
"""How often `measure()` runs the model."""


@dataclass(frozen=True)
class Step:
    """What one training step of one arm gave."""

    loss: float
    saved: int
    """Bytes kept from the forward pass for the backward one, besides parameters."""
    peak: int | None
    """Bytes of memory that the step took at most, above what was there before it; None where it can't be told."""


def widen(loaded: Loaded, dtype: torch.dtype | None = None) -> Any:
    """A copy of the model for the reference arm: the same rounded weights, in `dtype`, or else in a wider one."""
    return copy.deepcopy(loaded.model).to(dtype or wider(loaded.dtype))


def measure(model: Any, ids: Tensor) -> Step:
    """A training step on the tokens `ids` [1, n]. It is run once before, so that nothing is done for the first time."""
    run_step(model, ids)
    saved = _bytes_saved(model, ids)
    (loss, _), peak = _with_peak(lambda: run_step(model, ids), ids.device)
    forget_gradients(model)
    return Step(float(loss), saved, peak)


def run_step(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Forward and backward; (loss, logits). The gradients are left in the parameters, and are this step's alone."""
    forget_gradients(model)
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    return out.loss.detach(), out.logits.detach()


def gradients(model: Any) -> dict[str, Tensor]:
    """Every gradient, by the parameter's name."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def forget_gradients(model: Any) -> None:
    """Frees every gradient."""
    model.zero_grad(set_to_none=True)


Arms = dict[str, tuple[Any, Callable[[], contextlib.AbstractContextManager[None]]]]
"""By name: a model, and the context to run it in."""


def time_arms(arms: Arms, ids: Tensor, rounds: int) -> dict[str, float]:
    """Median seconds of a training step, by arm. The arms take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name, (model, context) in arms.items():
            with context():
                _wait_for(ids.device)
                start = time.perf_counter()
                run_step(model, ids)
                _wait_for(ids.device)
                took = time.perf_counter() - start
            forget_gradients(model)
            if number:  # the first round warms up
                seconds[name].append(took)
    return {name: statistics.median(found) for name, found in seconds.items()}


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ----------------------------------------------------------------------------------------------------------- memory


def _bytes_saved(model: Any, ids: Tensor) -> int:
    """Every storage counts once, however many tensors in it are saved."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # held, so that no address comes up twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, labels=ids, use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


def _with_peak(run: Callable[[], Any], device: torch.device) -> tuple[Any, int | None]:
    """(what `run()` returned, the most memory that it took above what was there before it)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = run()
        return result, torch.cuda.max_memory_allocated(device) - before
    _return_free_memory()
    try:
        (_SELF / "clear_refs").write_text("5")  # the peak starts again from here
        before = _resident("VmRSS")
    except (OSError, ValueError):  # not Linux, or not allowed
        return run(), None
    result = run()
    return result, _resident("VmHWM") - before


def _return_free_memory() -> None:
    """Gives what the allocator keeps for later back to the system; else an arm that comes after others looks lean."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _resident(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", (_SELF / "status").read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(field)
    return int(found[1]) * 1024
