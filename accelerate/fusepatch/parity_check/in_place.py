"""What every patched module gave on the very call that it served inside the patched model.

Its output and gradients are compared with an fp32 copy of the module and with the library's own code, each given the
same input and the same incoming gradient. No error of another layer is in it, so that each tensor can be judged.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import entry
from . import arms, bound
from .bound import TensorError, TensorName
from .surroundings import exact_arithmetic

OUTPUT, INPUT_GRADIENT = "output", "gradient of the input"


@dataclass
class Seen:
    """One call of a module, its tensors copied to the CPU."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    x: int | str
    """Which argument is the input: a position, or a name."""
    device: torch.device
    autocast: torch.dtype | None
    """The dtype of the autocast that the call was in; None where it was in none."""
    out: Tensor | None = None
    dout: Tensor | None = None
    dx: Tensor | None = None

    @property
    def tokens(self) -> int:
        """How many rows the input has."""
        x: Tensor = self.kwargs[self.x] if isinstance(self.x, str) else self.args[self.x]
        return x.numel() // max(1, x.shape[-1]) if x.dim() else 1


@dataclass(frozen=True)
class Judged:
    """The errors, and what could not be judged."""

    errors: tuple[TensorError, ...] = ()
    notes: tuple[str, ...] = ()


# ---------------------------------------------------------------------------------------------------------- watching


@contextlib.contextmanager
def watch(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, list[Seen]]]:
    """A dictionary that fills with the calls of the modules named, recomputations included, while the block runs."""
    seen: dict[str, list[Seen]] = {name: [] for name in names}
    modules = dict(model.named_modules())
    handles = []
    for name in names:
        before, after = _hooks(seen[name])
        handles.append(modules[name].register_forward_pre_hook(before, with_kwargs=True))
        handles.append(modules[name].register_forward_hook(after))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _hooks(calls: list[Seen]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    running: list[Seen | None] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = _input_of(args, kwargs)
        running.append(None)
        if found is None:
            return None
        which, x = found
        type_ = x.device.type
        autocast = torch.get_autocast_dtype(type_) if torch.is_autocast_enabled(type_) else None
        given = tuple(map(_on_cpu, args)), {key: _on_cpu(value) for key, value in kwargs.items()}
        call = running[-1] = Seen(*given, which, x.device, autocast)
        if not x.requires_grad:
            return None
        x = x.view_as(x)  # of its own, so that its gradient is this module's alone
        x.register_hook(lambda dx: _keep(call, "dx", dx))  # type: ignore[no-untyped-call]
        if isinstance(which, str):
            return args, {**kwargs, which: x}
        return (*args[:which], x, *args[which + 1 :]), kwargs

    def after(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        call = running.pop()
        if call is None or not isinstance(out, Tensor):
            return
        call.out = _on_cpu(out)
        if out.requires_grad:
            out.register_hook(lambda dout: _keep(call, "dout", dout))  # type: ignore[no-untyped-call]
        calls.append(call)

    return before, after


def _input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, Tensor] | None:
    every: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return next(((at, x) for at, x in every if isinstance(x, Tensor) and x.is_floating_point()), None)


def _on_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _keep(call: Seen, name: str, gradient: Tensor) -> None:
    setattr(call, name, _on_cpu(gradient))


# ----------------------------------------------------------------------------------------------------------- judging


def judge(model: nn.Module, seen: dict[str, list[Seen]], ops: tuple[str, ...]) -> Judged:
    """The errors of what was seen in `model`, whose gradients are still those of that pass."""
    shared = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    errors: list[TensorError] = []
    notes: list[str] = []
    with entry.disabled(), exact_arithmetic(model):
        expected = {name: _reference(model, name, calls) for name, calls in seen.items() if calls}
    for name, reference in expected.items():
        module, call = _module(model, name), _call_of(seen[name])
        gave = {OUTPUT: call.out, INPUT_GRADIENT: call.dx}
        if sum(each.dout is not None for each in seen[name]) == 1:
            own = module.named_parameters()
            gave |= {_of(weight): p.grad for weight, p in own if p.requires_grad and shared[id(p)] == 1}
        try:
            if isinstance(reference, Exception):
                raise reference
            with entry.disabled():
                library = _run(module, call, None)
        except Exception as error:
            notes.append(f"{name} can't be judged alone: {type(error).__name__}: {error}")
            continue
        found = _errors(name, call, gave, library, reference, ops)
        usable = [error for error in found if error.unpatched <= bound.USABLE_ERROR]
        if len(usable) < len(found):
            notes.append(f"{name} is not judged alone: run again, the library itself gives something else")
        errors += usable
    return Judged(tuple(errors), tuple(notes))


def _reference(model: nn.Module, name: str, calls: list[Seen]) -> dict[str, Tensor | None] | Exception:
    try:
        wide = copy.deepcopy(_module(model, name))
        arms.widen(wide)
        found = _run(wide, replace(_call_of(calls), autocast=None), arms.reference_dtype(model))
    except Exception as error:  # the library's: told in a note
        return error
    return {what: None if tensor is None else tensor.cpu() for what, tensor in found.items()}


def _module(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name) if name else model


def _call_of(calls: list[Seen]) -> Seen:
    """The first call that a gradient came back to, else the first."""
    return next((call for call in calls if call.dout is not None), calls[0])


def _of(weight: str) -> str:
    return f"gradient of {weight}"


def _run(module: nn.Module, call: Seen, dtype: torch.dtype | None) -> dict[str, Tensor | None]:
    """Output and gradients of `module`, given what the call was given; floating inputs as `dtype`."""

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(call.device, dtype if dtype is not None and value.is_floating_point() else value.dtype)

    args, kwargs = list(map(own, call.args)), {key: own(value) for key, value in call.kwargs.items()}
    x: Tensor = kwargs[call.x] if isinstance(call.x, str) else args[call.x]
    wanted: dict[str, Tensor] = {}
    if call.dout is not None:
        if call.dx is not None:
            wanted[INPUT_GRADIENT] = x.requires_grad_()
        wanted |= {_of(name): p for name, p in module.named_parameters() if p.requires_grad}
    with torch.set_grad_enabled(bool(wanted)), _autocast(call):
        out = module(*args, **kwargs)
    found: dict[str, Tensor | None] = {OUTPUT: out.detach()}
    if wanted:
        assert call.dout is not None
        dout = call.dout.to(call.device, out.dtype)
        found |= zip(wanted, torch.autograd.grad(out, list(wanted.values()), dout, allow_unused=True), strict=True)
    return found


def _autocast(call: Seen) -> contextlib.AbstractContextManager[Any]:
    if call.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(call.device.type, call.autocast)


def _errors(
    module: str,
    call: Seen,
    gave: dict[str, Tensor | None],
    library: dict[str, Tensor | None],
    reference: dict[str, Tensor | None],
    ops: tuple[str, ...],
) -> list[TensorError]:
    errors = []
    for what, actual in gave.items():
        expected = reference.get(what)
        if expected is None and actual is None:
            continue
        name = TensorName("in place", f"{module}: {what}" if module else what)
        size = expected if expected is not None else actual
        assert size is not None
        errors.append(
            TensorError(
                *name,
                size.numel(),
                _error(name, library.get(what), expected),
                _error(name, actual, expected),
                bound.bound_in_place(name, size, ops, call.tokens),
            )
        )
    return errors


def _error(name: TensorName, actual: Tensor | None, expected: Tensor | None) -> float:
    if actual is None or expected is None:
        return 0.0 if actual is expected else float("inf")
    return bound.error_of(name, actual, expected)
