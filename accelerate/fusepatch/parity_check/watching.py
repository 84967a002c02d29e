"""Keeps what each call of a module was given, and gave, while a model runs forward and backward."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


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
    random: tuple[Tensor, Tensor | None]
    """The states of the CPU's and the device's generator."""
    wants_dx: bool
    holds_state: bool = False
    """It was given something, such as a cache, that the call may have changed."""
    out: Tensor | None = None
    dout: Tensor | None = None
    dx: Tensor | None = None
    weights: dict[str, dict[tuple[int, int], Tensor]] = field(default_factory=dict)
    """What the call added to each weight's gradient, by the place in its graph: the sum counts."""

    @property
    def input(self) -> Tensor:
        """What the module was given."""
        x: Tensor = self.kwargs[self.x] if isinstance(self.x, str) else self.args[self.x]
        return x

    @property
    def tokens(self) -> int:
        """How many rows the input has."""
        return self.input.numel() // max(1, self.input.shape[-1]) if self.input.dim() else 1


@contextlib.contextmanager
def watch(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, list[Seen]]]:
    """A dictionary that fills with the calls of the modules named, recomputations included, while the block runs."""
    seen: dict[str, list[Seen]] = {name: [] for name in names}
    modules = dict(model.named_modules())
    handles = []
    for name in names:
        before, after = _hooks(seen[name])
        handles.append(modules[name].register_forward_pre_hook(before, with_kwargs=True))
        handles.append(modules[name].register_forward_hook(after, with_kwargs=True))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _hooks(calls: list[Seen]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    running: dict[int, list[Seen | None]] = {}
    """The calls that have not returned yet, by thread: a wrapper may run a module in several."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = _input_of(args, kwargs)
        mine = running.setdefault(threading.get_ident(), [])
        mine.append(None)
        if found is None:
            return None
        which, x = found
        type_ = x.device.type
        autocast = torch.get_autocast_dtype(type_) if torch.is_autocast_enabled(type_) else None
        given = tuple(map(_on_cpu, args)), {key: _on_cpu(value) for key, value in kwargs.items()}
        # A parameter is left as it is: our patches decline it, and would serve a view of it.
        wants_dx = x.requires_grad and torch.is_grad_enabled() and type(x) is Tensor
        holds_state = not _is_plain((args, kwargs))
        call = mine[-1] = Seen(*given, which, x.device, autocast, _random_states(x.device), wants_dx, holds_state)
        if not wants_dx:
            return None
        x = x.view_as(x)  # of its own, so that its gradient is this module's alone
        x.register_hook(lambda dx: _keep(call, "dx", dx))  # type: ignore[no-untyped-call]
        if isinstance(which, str):
            return args, {**kwargs, which: x}
        return (*args[:which], x, *args[which + 1 :]), kwargs

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], gave: Any) -> None:
        call, out = running[threading.get_ident()].pop(), output_of(gave)
        if call is None or out is None:
            return
        call.out = _on_cpu(out)
        if out.requires_grad and out.grad_fn is not None:
            shape = out.shape
            _end_of(out).register_hook(  # type: ignore[no-untyped-call]
                lambda dout: _keep(call, "dout", dout.reshape(shape))
            )
            _watch_weights(call, module, out, (*args, *kwargs.values()))
        calls.append(call)

    return before, after


def output_of(gave: Any) -> Tensor | None:
    """What a module gave, or the first of several things, as FLA's layers give them."""
    first = gave[0] if isinstance(gave, tuple) and gave else gave
    return first if isinstance(first, Tensor) else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (Tensor, bool, int, float, str, torch.dtype, torch.device))


def _end_of(out: Tensor) -> Tensor:
    """`out`, or the tensor that it is a view of, all of it: to write to a view in place takes it off its own history,
    and a hook with it.
    """
    base = out._base
    if base is None or base.grad_fn is None or base.numel() != out.numel():
        return out
    return base if base.is_contiguous() and out.is_contiguous() else out


def _watch_weights(call: Seen, module: nn.Module, out: Tensor, given: Sequence[Any]) -> None:
    """Keeps what this call alone adds to the gradient of each weight.

    `.grad` also has what other uses of the weight add and what its hooks do; an optimizer in such a hook empties it.
    """
    names = {id(weight): name for name, weight in module.named_parameters()}
    seen: set[Any] = {None, *(x.grad_fn for x in given if isinstance(x, Tensor))}
    nodes: list[Any] = [out.grad_fn]
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        for index, (parent, _) in enumerate(node.next_functions):
            weight = names.get(id(getattr(parent, "variable", None)))
            if weight is None:
                nodes.append(parent)
            else:
                parts = call.weights.setdefault(weight, {})
                node.register_hook(functools.partial(_keep_part, parts, (len(seen), index)))


def _keep_part(
    parts: dict[tuple[int, int], Tensor],
    place: tuple[int, int],
    gradients: tuple[Tensor | None, ...],
    _: tuple[Tensor | None, ...],
) -> None:
    gradient = gradients[place[1]]
    if gradient is not None:
        parts[place] = _on_cpu(gradient)


def _random_states(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, Tensor] | None:
    every: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return next(((at, x) for at, x in every if isinstance(x, Tensor) and x.is_floating_point()), None)


def _on_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _keep(call: Seen, name: str, gradient: Tensor) -> None:
    setattr(call, name, _on_cpu(gradient))
