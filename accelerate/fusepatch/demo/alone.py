"""Each patched module alone, given what it gets inside the model: where the parity bound can be held to the letter.

In the whole model it can't be, tensor by tensor: a difference of one rounding in an early layer moves every later one,
and the library differs from itself by more than the bound when only the order of a sum changes (`control.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .. import entry
from . import bound, training
from .weights import Loaded, wider


@dataclass
class Given:
    """What a module got in the reference run, rounded to the model's dtype."""

    x: Tensor
    dout: Tensor | None = None


def record(loaded: Loaded, reference: Any, ids: Tensor, names: Sequence[str]) -> dict[str, Given]:
    """Input and incoming gradient of each module named, in a training step of the reference."""
    given: dict[str, Given] = {}

    def watch(name: str) -> Any:
        def hook(module: Any, inputs: tuple[Tensor, ...], out: Tensor) -> None:
            got = given[name] = Given(inputs[0].detach().to(loaded.dtype))

            def keep(dout: Tensor) -> None:
                got.dout = dout.detach().to(loaded.dtype)

            out.register_hook(keep)  # type: ignore[no-untyped-call]

        return reference.get_submodule(name).register_forward_hook(hook)

    handles = [watch(name) for name in names]
    try:
        training.run_step(reference, ids)
    finally:
        for handle in handles:
            handle.remove()
    return given


def compare(loaded: Loaded, given: dict[str, Given]) -> tuple[list[bound.TensorError], int]:
    """(errors of the output and every gradient of each module, how many of the patched calls ran natively)."""
    errors: list[bound.TensorError] = []
    native = 0
    for name, got in given.items():
        module = copy.deepcopy(loaded.model.get_submodule(name))
        reference = _run(copy.deepcopy(module).to(wider(loaded.dtype)), got)
        unpatched = bound.errors_of(_run(module, got), reference)
        with entry.accelerated():
            patched = bound.errors_of(_run(module, got), reference)
            native += entry.status().native_calls()
        errors += [
            bound.TensorError(f"{name}: {what}", tensor.numel(), unpatched[what], patched[what])
            for what, tensor in reference.items()
        ]
    return errors, native


def _run(module: Any, got: Given) -> dict[str, Tensor]:
    dtype = next(module.parameters()).dtype
    module.zero_grad(set_to_none=True)
    x = got.x.to(dtype, copy=True).requires_grad_()
    assert got.dout is not None
    out = module(x)
    out.backward(got.dout.to(dtype))
    gradients = {f"gradient of {name}": p.grad for name, p in module.named_parameters()}
    return {"output": out.detach(), "gradient of the input": x.grad, **gradients}
