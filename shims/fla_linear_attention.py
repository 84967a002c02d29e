"""`chunk_kda` and `chunk_gated_delta_rule` of flash-linear-attention (0.5.2 to 0.6.0), by way of its own registry.

Both functions ask a registry of backends on every call, so a backend of ours is reached by FLA's layers and models, by
transformers (whose Qwen3-Next, Qwen3.5 and Kimi-Linear keep a reference to the function in a closure) and by whoever
imported the function under another name. Nothing of FLA is replaced.

The registry takes an exception in a backend's verifier for a "no", and says nothing. So what `decide` raises is kept,
the verifier says yes, and the implementation raises it.

What a layer will pass can't be read off it. So `explain()` is told what a call that fits would take, and `warmup()`
runs the layer up to the function, where the call is seen.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import guard
from ..catalogue import Assumed
from ..decline import FUSED, Decision, DeclinedError, Reason, original
from ..errors import type_and_first_line
from ..kernels.backends import Backend
from ..kernels.linear_attention import arguments, dispatch
from ..kernels.linear_attention.arguments import Misfit, Request
from ..kernels.linear_attention.gated_delta_rule import choose as gated_delta_rule
from ..kernels.linear_attention.kda import choose as kda
from ..kernels.linear_attention.problem import Problem
from ..ledger import Record, count, count_error, note
from ..patch import BACKEND_NAME, Slot, Switch
from . import callers
from .strict import raise_if_short


@dataclass(frozen=True)
class _Function:
    """One function of FLA that asks a registry."""

    package: str
    name: str
    operation: str
    """By which a registry of several functions is found."""
    per_channel: bool
    choose: Callable[..., Backend | Reason]
    sample: Callable[[torch.device, torch.dtype], Problem]
    hub_name: str
    """What the models of transformers call it."""

    @property
    def full_name(self) -> str:
        return f"{self.package}.{self.name}"


_FUNCTIONS: Mapping[str, _Function] = {
    "kda": _Function("fla.ops.kda", "chunk_kda", "kda", True, kda.choose, kda.sample, "chunk_kimi_delta_attention"),
    "gated_delta_rule": _Function(
        "fla.ops.gated_delta_rule",
        "chunk_gated_delta_rule",
        "gated_delta_rule",
        False,
        gated_delta_rule.choose,
        gated_delta_rule.sample,
        "torch_chunk_gated_delta_rule",
    ),
}


# ------------------------------------------------------------------------------------------------------ the registry


def wants_module(name: str) -> bool:
    """Whether the function is there once the module `name` is imported: the packages, whose backends come with them."""
    return any(name == function.package for function in _FUNCTIONS.values())


def slots(module: ModuleType, op: str) -> list[Slot]:
    """The registry that the op's function asks; nothing where it asks none."""
    function = _FUNCTIONS[op]
    public = vars(module).get(function.name)
    if module.__name__ != function.package or public is None or _is_disabled():
        return []
    registry = _registry(function, public)
    backends = getattr(registry, "_backends", None)
    if not isinstance(backends, dict):
        return []
    base = importlib.import_module(_registry_module()).BaseBackend

    def make_backend(switch: Switch, record: Record) -> Any:
        return _make_backend(base, function, public, switch, record)

    def forget() -> None:
        logged = getattr(registry, "_logged", None)
        if isinstance(logged, set):
            logged -= {key for key in logged if BACKEND_NAME in str(key).split(":")}

    return [Slot(function.full_name, make_backend, backends, forget)]


def why_not_reached(op: str) -> Reason | None:
    """Why calls of FLA's function, or those of some model of transformers, do not come to our backend."""
    function = _FUNCTIONS[op]
    module = sys.modules.get(function.package)
    if module is not None and hasattr(module, function.name):
        if _is_disabled():
            return Reason.DISPATCH_DISABLED
        if not slots(module, op):
            return Reason.LIBRARY_TOO_OLD
    return Reason.HUB_KERNEL if _hub_kernel(function) is not None else None


def _registry_module() -> str:
    return "fla.backends" if "fla.backends" in sys.modules else "fla.ops.backends"


def _is_disabled() -> bool:
    return bool(getattr(sys.modules.get(_registry_module()), "_DISPATCH_DISABLED", False))


def _registry(function: _Function, public: Any) -> Any:
    """0.6 has a registry for a function or for an operation; 0.5.2 has them all by operation, filled at first use."""
    module = sys.modules.get(_registry_module())
    of_functions = getattr(module, "_function_registries", {})
    of_operations = getattr(module, "_operation_registries", {})
    found = of_functions.get(inspect.unwrap(public)) or of_operations.get(function.operation)
    kind: Any = getattr(module, "BackendRegistry", None)
    if found is None and hasattr(kind, "_registries") and hasattr(kind, "ensure_initialized"):
        kind.ensure_initialized(function.operation)
        found = kind._registries.get(function.operation)
    return found


def _hub_kernel(function: _Function) -> str | None:
    """The modelling file of transformers in which a kernel from the hub stands in for the function, if one does."""
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and module is not None:
            stand_in = vars(module).get(function.hub_name)
            if isinstance(stand_in, nn.Module) and "forward" in vars(stand_in):
                return name
    return None


# ------------------------------------------------------------------------------------------- the layers of a model


def asks(module: nn.Module, op: str) -> bool:
    """Whether the code of `module` calls the op's function, wherever it got it from."""
    return bool(_holders(module, op))


def _holders(module: nn.Module, op: str) -> list[Any]:
    function = _FUNCTIONS[op]
    public = getattr(sys.modules.get(function.package), function.name, None)
    return [] if public is None else callers.holders(module, public)


def serving(module: nn.Module, op: str, assumed: Assumed) -> str | Reason:
    """The backend that would serve a call of `module` in training if what it passes fits, or why none would."""
    function = _FUNCTIONS[op]
    reason = why_not_reached(op)
    if reason in (Reason.DISPATCH_DISABLED, Reason.LIBRARY_TOO_OLD):
        return reason
    if _is_hidden(module, op):
        return Reason.HUB_KERNEL
    weight = _a_projection(module)
    if weight is None:
        return Reason.STRUCTURE
    if not assumed.tokens:
        return Reason.ZERO_TOKENS
    problem = function.sample(assumed.device or weight.device, assumed.dtype or weight.dtype)
    found = function.choose(problem, assumed.tokens, 1)
    return found if isinstance(found, Reason) else found.name


def _is_hidden(module: nn.Module, op: str) -> bool:
    """Whether a kernel from the hub stands in for the function where the layer calls it."""
    return any(isinstance(holder, nn.Module) and "forward" in vars(holder) for holder in _holders(module, op))


def _a_projection(module: nn.Module) -> Tensor | None:
    """A weight of the dtype and on the device of what the layer passes. Parameters of its gate may be in fp32."""
    return next((each for each in module.parameters() if each.dim() == 2 and each.is_floating_point()), None)


def size_of(module: nn.Module) -> tuple[object, ...]:
    """What two layers of one class must share to make the same call: their weights' sizes, and their options."""
    weights = ((name, each.shape, each.dtype, each.device) for name, each in module.named_parameters())
    # Not whole numbers: those that count make the weights' sizes, and the number of the layer means nothing.
    options = (
        (name, value) for name, value in vars(module).items() if isinstance(value, (str, float, bool, type(None)))
    )
    return (*weights, *sorted(options, key=lambda option: option[0]))


def warm(module: nn.Module, op: str, tokens: int) -> Decision | str:
    """Runs the call that `module` makes for one sequence of zeros, forward and backward; text says why it could not.

    The layer runs up to the function, for its call to be seen, and no further; hooks of it and in it do not fire.
    """
    made = Reason.HUB_KERNEL if _is_hidden(module, op) else _call_of(module, tokens)
    if isinstance(made, str):
        return made
    if isinstance(made, Reason):
        return original(made)
    request, backend, output_final_state = made
    leaves = {name: t.detach().requires_grad_() for name, t in request.inputs._asdict().items() if _has_gradient(t)}
    request = request._replace(inputs=request.inputs._replace(**leaves))
    with torch.enable_grad():
        try:
            out, _ = dispatch.run_by(backend, request, output_final_state)
        except dispatch.not_supported(backend):
            return original(Reason.NO_KERNEL)
        torch.autograd.grad(out, list(leaves.values()), torch.zeros_like(out), allow_unused=True)
    return FUSED


def _has_gradient(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


class _Seen(BaseException):
    """Leaves a layer at its call of the function. No Exception, which the layer might handle."""

    def __init__(self, made: tuple[Request, Backend, bool] | Reason | Exception) -> None:
        self.made = made


_thread = threading.local()


@contextlib.contextmanager
def _calls_only_seen() -> Iterator[None]:
    """In it, and in this thread, a call that reaches a backend of ours is decided, and raises `_Seen`."""
    _thread.only_sees = True
    try:
        yield
    finally:
        _thread.only_sees = False


def _call_of(module: nn.Module, tokens: int) -> tuple[Request, Backend, bool] | Reason | str:
    """What `decide` made of the layer's call in training; text says why the layer made none."""
    weight, width = _a_projection(module), getattr(module, "hidden_size", None)
    if weight is None or not isinstance(width, int):
        return "the layer does not say how wide its input is"
    try:
        bare = callers.without_hooks(module)
        x = torch.zeros(1, tokens, width, dtype=weight.dtype, device=weight.device, requires_grad=True)
        with torch.enable_grad(), _calls_only_seen():
            bare(x)
    except _Seen as seen:
        if isinstance(seen.made, Exception):
            raise seen.made from None
        return seen.made
    except Exception as error:
        return type_and_first_line(error)
    return "the layer made no call"


# ------------------------------------------------------------------------------------------------------ one call


_IGNORED = frozenset({"disable_recompute", "cu_seqlens_cpu", "output_final_state"})
"""What changes no result: how much FLA keeps for its backward pass, a copy on the host; and what is asked later."""
_OPTIONS: Mapping[str, tuple[object, ...]] = {
    "return_intermediate_states": (None, False),
    "cp_context": (None,),
    "use_graph": (None, False),
    "max_num_seqs": (None,),
    "chunk_indices": (None,),
    "chunk_size": (64,),
    "transpose_state_layout": (),
}
"""What no kernel of ours does, and the values that ask for nothing. FLA refuses a `chunk_size` of None, and says that
`transpose_state_layout` is deprecated whatever it is."""
_READ = frozenset(inspect.signature(arguments.read).parameters) - {"per_channel"}
_TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")


def decide(
    function: _Function, names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Request, Backend, bool] | Reason:
    """The request, the backend that serves it and whether the final state is wanted; or why the library's code runs.

    A pure function of the tensors' metadata, the options and the settings.
    """
    given = dict(zip(names, args, strict=False))
    if len(args) > len(names) or not given.keys().isdisjoint(kwargs):
        return Reason.UNKNOWN_ARGUMENT  # the library raises the proper error
    given.update(kwargs)
    reason = _why_not_call(given)
    if reason is not None:
        return reason
    request = arguments.read(function.per_channel, **{name: value for name, value in given.items() if name in _READ})
    if isinstance(request, Misfit):
        return request.reason
    if not request.tokens or not request.sequences:
        return Reason.ZERO_TOKENS
    backend = function.choose(request.problem, request.tokens, request.sequences)
    if isinstance(backend, Reason):
        return backend
    return request, backend, bool(given.get("output_final_state", False))


def _why_not_call(given: Mapping[str, Any]) -> Reason | None:
    if not given.keys() >= {"q", "k", "v", "g", "beta"}:
        return Reason.UNKNOWN_ARGUMENT
    reason = guard.why_not_plain_call(given["q"])
    if reason is not None and reason is not Reason.GLOBAL_HOOKS:  # of modules: a function fires none
        return reason
    for name in _TENSORS:
        tensor = given.get(name)
        if tensor is not None and type(tensor) not in (Tensor, nn.Parameter):
            return guard.why_not_plain_call(tensor) if isinstance(tensor, Tensor) else Reason.UNKNOWN_ARGUMENT
    for name, harmless in _OPTIONS.items():
        if name in given and not any(type(given[name]) is type(value) and given[name] == value for value in harmless):
            return Reason.OPTION
    return Reason.UNKNOWN_ARGUMENT if given.keys() - _READ - _OPTIONS.keys() - _IGNORED else None


def _make_backend(base: type[Any], function: _Function, public: Any, switch: Switch, record: Record) -> Any:
    """The object to register: asked first, and for this one function alone."""
    names = tuple(inspect.signature(public).parameters)
    waiting = threading.local()

    class Fusepatch(base):  # type: ignore[misc]
        backend_type = BACKEND_NAME
        priority = -1

        @classmethod
        def is_available(cls) -> bool:
            return True

        def is_enabled(self) -> bool:
            return switch.off is not Reason.RESTORED

        def verify(self, function_name: str, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            if function_name != function.name:
                return False, "another function"
            only_sees = getattr(_thread, "only_sees", False)
            made: Any
            try:
                made = switch.off or decide(function, names, args, kwargs)
                if isinstance(made, Reason) and switch.strict and not only_sees:
                    raise_if_short(original(made), record)
            except Exception as error:
                made = error
            if only_sees:
                made = _Seen(made)
            if isinstance(made, Reason):
                count(record, original(made), _who(kwargs, record))
                return False, made.value
            waiting.made = made
            return True, None

    def implementation(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        made = vars(waiting).pop("made")
        try:
            if isinstance(made, BaseException):
                raise made
            request, backend, output_final_state = made
            typed = dispatch.not_supported(backend)
            if not typed:
                _count_served(record, backend, kwargs)
                return dispatch.run_by(backend, request, output_final_state)
            try:
                found = dispatch.run_by(backend, request, output_final_state)
            except typed:
                if switch.strict:
                    raise_if_short(original(Reason.NO_KERNEL), record)
                count(record, original(Reason.NO_KERNEL), _who(kwargs, record))
                return _own_code(public)(*args, **kwargs)
            _count_served(record, backend, kwargs)
            return found
        except DeclinedError:
            raise
        except Exception as error:
            count_error(record, error)
            raise

    backend = Fusepatch()
    setattr(backend, function.name, implementation)
    return backend


def _own_code(public: Any) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The library's function below the one that asks the registry."""
    return cast("Callable[..., tuple[Tensor, Tensor | None]]", inspect.unwrap(public))


def _count_served(record: Record, backend: Backend, kwargs: Mapping[str, Any]) -> None:
    count(record, FUSED, _who(kwargs, record))
    if backend.note:
        note(record, backend.note)


def _who(kwargs: Mapping[str, Any], record: Record) -> object:
    """Who calls, as far as can be told: a layer passes parameters of its own. By this the first step's end is seen."""
    A_log = kwargs.get("A_log")
    return record if A_log is None else A_log
