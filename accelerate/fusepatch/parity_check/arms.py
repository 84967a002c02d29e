"""One arm of the comparison: a fresh model with the same weights, one forward and backward pass, what came out."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import time
import traceback
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .. import catalogue, entry
from ..decline import native_of
from ..errors import type_and_first_line
from .bound import TensorName
from .surroundings import poisoned_memory, random_numbers

Build = Callable[[], nn.Module]
Batch = Mapping[str, Any] | Sequence[Any]
Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Options:
    """What all arms share."""

    batch: Batch
    loss: Loss | None
    seed: int
    gradients: bool
    poison: bool


@dataclass(frozen=True)
class Counts:
    """Calls of patched classes while an arm ran."""

    calls: Mapping[str, int] = field(default_factory=dict)
    """By route, with the sites in CUDA graphs, and the times that a compiler put a route of ours into its code."""
    declines: Mapping[str, int] = field(default_factory=dict)
    """Calls that took a slower route than the fastest, by reason."""
    functions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Those of `calls` that were of a library's function and not of a patched module, by op and by route."""

    @property
    def native(self) -> int:
        """Calls that a route of ours served."""
        return native_of(self.calls)

    @property
    def native_of_modules(self) -> int:
        """Those among them that were of patched modules."""
        return self.native - sum(map(native_of, self.functions.values()))


@dataclass(frozen=True)
class Result:
    """What an arm gave."""

    tensors: dict[TensorName, Tensor] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    seconds: float = 0.0
    error: str | None = None
    """Type and first line of the exception that ended it."""
    traceback: str | None = None


# ------------------------------------------------------------------------------------------------------- the models


class Source:
    """Models that all have the same weights: copies of a built one, or built anew with the first one's weights.

    The weights of the first are kept on the CPU, so that one model at a time is in the GPU's memory.
    """

    def __init__(self, build_or_model: Build | nn.Module, seed: int) -> None:
        self._given = build_or_model
        self._seed = seed
        self._state: dict[str, Tensor] | None = None
        self._last: weakref.ref[nn.Module] | None = None

    def make(self) -> nn.Module:
        """A new model. Raises TypeError or ValueError where none can be made that is like the others."""
        if self._last is not None and self._last() is not None:
            gc.collect()  # a model that refers to itself
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
        model = self._make()
        self._last = weakref.ref(model)
        return model

    def _make(self) -> nn.Module:
        if isinstance(self._given, nn.Module):
            _check_weights(self._given)
            try:
                return copy.deepcopy(self._given)
            except Exception as error:
                raise ValueError(
                    f"{type(self._given).__name__} can't be copied ({type(error).__name__}: {error}). Pass a function "
                    "that builds it."
                ) from error
        with random_numbers(self._seed):
            model = self._given()
        if not isinstance(model, nn.Module):
            raise TypeError(f"the function must return a torch.nn.Module, got {type(model).__name__}")
        _check_weights(model)
        state = _state_of(model)
        if self._state is None:
            self._state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
        elif {name: _kind_of(tensor) for name, tensor in state.items()} != {
            name: _kind_of(tensor) for name, tensor in self._state.items()
        }:
            raise ValueError("the function builds another model each time: names, shapes or dtypes differ")
        else:
            with torch.no_grad():
                for name, tensor in state.items():
                    tensor.copy_(self._state[name])
        return model


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, those that are not in the state dict included."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _kind_of(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _check_weights(model: nn.Module) -> None:
    for name, tensor in _state_of(model).items():
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device: parity() runs the model, and needs its weights")


_NARROW = (torch.bfloat16, torch.float16)


def reference_dtype(model: nn.Module) -> torch.dtype:
    """fp32; fp64 for a model that is in fp64 already."""
    is_double = any(tensor.dtype == torch.float64 for tensor in model.parameters())
    return torch.float64 if is_double else torch.float32


def widen(model: nn.Module) -> None:
    """Casts the weights and buffers of `model` to the reference's dtype. Quantised weights stay what they are."""
    wide = reference_dtype(model)
    casts = (*_NARROW, torch.float32) if wide == torch.float64 else _NARROW
    model._apply(lambda tensor: tensor.to(wide) if tensor.dtype in casts else tensor)  # type: ignore[no-untyped-call]


# ----------------------------------------------------------------------------------------------------------- running


@dataclass(frozen=True)
class Call:
    """One call of a module in the unpatched arm."""

    module: str
    tokens: int | None


def watch_calls(model: nn.Module, names: Sequence[str]) -> list[Call]:
    """A list that fills with the calls of the modules named, recomputations included, as they come."""
    calls: list[Call] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
            calls.append(Call(name, x.numel() // x.shape[-1] if x is not None and x.dim() and x.shape[-1] else None))

        return hook

    modules = dict(model.named_modules())
    for name in names:
        modules[name].register_forward_pre_hook(watch(name), with_kwargs=True)
    return calls


def run(model: nn.Module, options: Options, ops: tuple[str, ...], dtype: torch.dtype | None = None) -> Result:
    """One forward and backward pass, and the calls that patches of `ops` saw in it.

    `dtype` is what floating inputs are cast to; None leaves them as they are. An exception in the model, or in the
    loss, is part of the result.
    """
    before = _counts(ops)
    start = time.perf_counter()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(random_numbers(options.seed))
            if options.poison:
                stack.enter_context(poisoned_memory())
            tensors = _step(model, options, dtype)
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()  # a kernel that failed says so no later than here
    except Exception as error:
        failed = type_and_first_line(error)
        # Only text is kept: the exception's frames hold the whole model.
        return Result({}, _since(before, ops), time.perf_counter() - start, failed, traceback.format_exc())
    return Result(tensors, _since(before, ops), time.perf_counter() - start)


def _step(model: nn.Module, options: Options, dtype: torch.dtype | None) -> dict[TensorName, Tensor]:
    positional, named = _inputs(options, dtype)
    with torch.set_grad_enabled(options.gradients):
        out = model(*positional, **named)
        outputs = dict(_floating(out))
        loss = options.loss(out) if options.loss is not None else outputs.get("loss")
    if options.loss is not None:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError("loss must return a tensor of one element")
        outputs["loss"] = loss
    if options.gradients:
        _backward(loss, outputs, options.seed)
    found = {TensorName("output", name): tensor.detach() for name, tensor in outputs.items()}
    for name, parameter in model.named_parameters():
        _add_gradient(found, TensorName("gradient", name), parameter)
    for name, value in (*((str(i), value) for i, value in enumerate(positional)), *named.items()):
        if isinstance(value, Tensor):
            _add_gradient(found, TensorName("input gradient", name), value)
    return found


def _add_gradient(found: dict[TensorName, Tensor], name: TensorName, leaf: Tensor) -> None:
    if leaf.grad is not None:
        found[name] = leaf.grad.to_dense() if leaf.grad.is_sparse else leaf.grad


def _inputs(options: Options, dtype: torch.dtype | None) -> tuple[list[Any], dict[str, Any]]:
    """The batch, copied. An input is given a gradient where it asks for one, or can only be an activation."""
    batch = options.batch

    def own(name: str | int, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        copied = value.detach().clone()
        if not value.is_floating_point():
            return copied
        if dtype is not None:
            copied = copied.to(dtype)
        wanted = value.requires_grad or name in ("inputs_embeds", "hidden_states", 0)
        return copied.requires_grad_(wanted and options.gradients)

    if isinstance(batch, Mapping):
        return [], {name: own(name, value) for name, value in batch.items()}
    return [own(index, value) for index, value in enumerate(batch)], {}


def _floating(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every floating tensor in what a model returned. Caches and other objects are passed over."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name or "output", value
        return
    parts: Sequence[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        parts = list(value.items())
    elif isinstance(value, (tuple, list)):
        parts = list(enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [(each.name, getattr(value, each.name)) for each in dataclasses.fields(value)]
    for key, part in parts:
        yield from _floating(part, f"{name}.{key}" if name else str(key) if isinstance(key, str) else f"output.{key}")


def _backward(loss: Tensor | None, outputs: Mapping[str, Tensor], seed: int) -> None:
    """From the loss; where there is no single number, from a random gradient of unit scale in every output."""
    if loss is not None and loss.numel() == 1:
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        return
    generator = torch.Generator().manual_seed(seed)
    ends, gradients = [], []
    for tensor in outputs.values():
        if tensor.requires_grad:
            # Rounded to bfloat16, so that it is the same in every arm.
            random = torch.randn(tensor.shape, generator=generator).bfloat16()
            ends.append(tensor)
            gradients.append(random.to(tensor.device, tensor.dtype))
    if ends:
        torch.autograd.backward(ends, gradients)


# ---------------------------------------------------------------------------------------------------------- counting


def _counts(ops: tuple[str, ...]) -> Counts:
    calls: Counter[str] = Counter()
    declines: Counter[str] = Counter()
    functions: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for target in entry.status().targets:
        op = target.name.partition("/")[0]
        if op not in ops:
            continue
        declines.update(target.total("declines"))
        traced = {route: count for route, count in target.total("traces").items() if native_of({route: count})}
        for found in (target.total("calls"), target.total("captured"), traced):
            calls.update(found)
            if target.name in _FUNCTIONS:
                functions[op].update(found)
    return Counts(calls, declines, functions)


_FUNCTIONS = frozenset(target.name for target in catalogue.REGISTRY_TARGETS)


def _since(before: Counts, ops: tuple[str, ...]) -> Counts:
    after = _counts(ops)

    def difference(new: Mapping[str, int], old: Mapping[str, int]) -> dict[str, int]:
        return dict(Counter(new) - Counter(old))  # `-` keeps what is above zero

    functions = {op: difference(calls, before.functions.get(op, {})) for op, calls in after.functions.items()}
    return Counts(
        difference(after.calls, before.calls),
        difference(after.declines, before.declines),
        {op: calls for op, calls in functions.items() if calls},
    )
