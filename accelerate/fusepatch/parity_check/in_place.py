"""What every patched module gave on each call that it served inside the patched model.

Its output and gradients are compared with an fp32 copy of the module and with the library's own code, each given the
same input, random numbers and incoming gradient. No error of another layer is in it, so that each tensor can be judged.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import entry
from ..errors import type_and_first_line
from . import arms, bound
from .bound import TensorError, TensorName
from .surroundings import exact_arithmetic, random_numbers
from .watching import Seen, output_of

OUTPUT, INPUT_GRADIENT = "output", "gradient of the input"


@dataclass(frozen=True)
class Judged:
    """The errors, and what could not be judged."""

    errors: tuple[TensorError, ...] = ()
    notes: tuple[str, ...] = ()


# ----------------------------------------------------------------------------------------------------------- judging


def judge(model: nn.Module, seen: dict[str, list[Seen]]) -> Judged:
    """The errors of what was seen in `model`, whose gradients are still those of that pass."""
    shared = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    dtype = arms.reference_dtype(model)
    errors: list[TensorError] = []
    notes: list[str] = []
    for calls in seen.values():
        for call in calls:
            if call.dout is not None and not _is_finite(call.dout):
                call.dout = None  # from NaN nobody gives a gradient that can be compared; the output can be
    with random_numbers(0), entry.disabled():
        with exact_arithmetic(model):
            expected = {name: _replay(model, name, calls, dtype) for name, calls in seen.items() if calls}
        for name, references in expected.items():
            libraries = _replay(model, name, seen[name], None)
            for number, (call, reference, library) in enumerate(
                zip(seen[name], references, libraries, strict=True), start=1
            ):
                title = name if number == 1 else f"{name}, call {number}"
                failed = next((each for each in (reference, library) if isinstance(each, str)), None)
                if failed is not None:
                    notes.append(f"{title} can't be judged alone: {failed}")
                    continue
                assert not isinstance(reference, str)
                assert not isinstance(library, str)
                gave = _gave(_module(model, name), call, seen[name], shared)
                found = _errors(title, call, gave, library, reference)
                usable = [error for error in found if error.unpatched <= bound.USABLE_ERROR]
                if len(usable) < len(found):
                    notes.append(f"{title} is not judged alone: run again, the library itself gives something else")
                errors += usable
    return Judged(tuple(errors), tuple(notes))


def _gave(module: nn.Module, call: Seen, calls: list[Seen], shared: Counter[int]) -> dict[str, Tensor | None]:
    """What is to be judged of a call.

    Of a weight that its graph does not lead to, `.grad` tells, where only this call can have a part in it.
    """
    gave = {OUTPUT: call.out}
    if call.dout is None:
        return gave
    gave[INPUT_GRADIENT] = call.dx
    alone = sum(each.dout is not None for each in calls) == 1
    for name, weight in module.named_parameters():
        if not weight.requires_grad:
            continue
        parts = list(call.weights.get(name, {}).values())
        if parts and (alone or call.autocast is None):  # autocast casts a weight once for several calls
            gave[_of(name)] = sum(parts[1:], start=parts[0])
        elif not parts and alone and shared[id(weight)] == 1:
            gave[_of(name)] = weight.grad
    return gave


def _replay(
    model: nn.Module, name: str, calls: list[Seen], dtype: torch.dtype | None
) -> list[dict[str, Tensor | None] | str]:
    """What a copy of the module, in `dtype` where given, gives for each call; text says why it gives nothing."""
    found: list[dict[str, Tensor | None] | str] = []
    try:
        # A copy: hooks on the model's own weights would change their gradients.
        module = copy.deepcopy(_module(model, name))
    except Exception as error:
        return [type_and_first_line(error)] * len(calls)
    if dtype is not None:
        arms.widen(module)
    for call in calls:
        why_not = _why_not_again(call)
        if why_not is not None:
            found.append(why_not)
            continue
        try:
            given = _run(module, call if dtype is None else replace(call, autocast=None), dtype)
        except Exception as error:  # the library's: told in a note
            found.append(type_and_first_line(error))
        else:
            found.append({what: None if tensor is None else tensor.cpu() for what, tensor in given.items()})
    return found


def _why_not_again(call: Seen) -> str | None:
    if call.holds_state:
        return "it was given a cache or another object that the call may have changed"
    return None if _is_finite(call.input) else "what it was given is not finite"


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _module(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name) if name else model


def _of(weight: str) -> str:
    return f"gradient of {weight}"


def _run(module: nn.Module, call: Seen, dtype: torch.dtype | None) -> dict[str, Tensor | None]:
    """Output and gradients of `module`, given what the call was given; floating inputs as `dtype`."""

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
        return value.to(call.device, wanted, copy=True)  # the module may write to it

    args, kwargs = list(map(own, call.args)), {key: own(value) for key, value in call.kwargs.items()}
    x: Tensor = kwargs[call.x] if isinstance(call.x, str) else args[call.x]
    wanted: dict[str, Tensor] = {}
    if call.dout is not None:
        if call.wants_dx:
            wanted[INPUT_GRADIENT] = x.requires_grad_()
        wanted |= {_of(name): p for name, p in module.named_parameters() if p.requires_grad}
    torch.set_rng_state(call.random[0])
    if call.random[1] is not None:
        torch.cuda.set_rng_state(call.random[1], call.device)
    with torch.set_grad_enabled(bool(wanted)), _autocast(call):
        out = output_of(module(*args, **kwargs))
    if out is None:
        raise TypeError("it gave no tensor")
    found: dict[str, Tensor | None] = {OUTPUT: out.detach()}
    if wanted:
        assert call.dout is not None
        dout = call.dout.to(call.device, out.dtype)
        found |= zip(wanted, torch.autograd.grad(out, list(wanted.values()), dout, allow_unused=True), strict=True)
    return found


def _autocast(call: Seen) -> contextlib.AbstractContextManager[Any]:
    if call.autocast is None and not torch.is_autocast_enabled(call.device.type):
        return contextlib.nullcontext()
    return torch.autocast(call.device.type, call.autocast, enabled=call.autocast is not None)


def _errors(
    module: str,
    call: Seen,
    gave: dict[str, Tensor | None],
    library: dict[str, Tensor | None],
    reference: dict[str, Tensor | None],
) -> list[TensorError]:
    errors = []
    for what, actual in gave.items():
        expected = reference.get(what)
        if expected is None and actual is None:
            continue
        name = TensorName("in place", f"{module}: {what}" if module else what)
        size = expected if expected is not None else actual
        assert size is not None
        stock = library.get(what)
        off_stock, off_ours = _error(name, stock, expected), _error(name, actual, expected)
        held_to = bound.bound_in_place(name, size, call.tokens)
        errors.append(TensorError(*name, size.numel(), off_stock, off_ours, held_to))
        if expected is None or stock is None or actual is None or size.dim() < 2 or held_to == bound.SMALL:
            continue
        off_stock, off_ours = bound.worst_row_of(stock, expected), bound.worst_row_of(actual, expected)
        errors.append(TensorError(name.kind, f"{name.name}, worst row", size.shape[-1], off_stock, off_ours, bound.ROW))
    return errors


def _error(name: TensorName, actual: Tensor | None, expected: Tensor | None) -> float:
    if actual is None or expected is None:
        return 0.0 if actual is expected else float("inf")
    return bound.error_of(name, actual, expected)
