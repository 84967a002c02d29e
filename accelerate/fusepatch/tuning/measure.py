"""One kind of module at one number of tokens: every backend that can serve it, against the library's own code."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import catalogue, entry, ledger, profiles, settings
from ..decline import DeclinedError, Reason, Route
from ..profiles import Measured
from . import timing

LIBRARY = "library"
MODES = ("train", "forward")
"""Forward + backward with all gradients that the module's weights want, and forward alone without any."""
TRANSIENT = (Reason.SELFCHECK_INCONCLUSIVE.value, Reason.GLOBAL_HOOKS.value, Reason.DISABLED.value)
"""Reasons that may not hold the next time: what they kept from being measured is not remembered."""


class UnmeasurableError(Exception):
    """Why a case can't be measured at all, in one line."""


@dataclass(frozen=True)
class Case:
    """What is measured: one kind of module, however many of it a model has."""

    target: catalogue.Target
    owner: type[nn.Module]
    module: nn.Module
    """One of the kind; it is copied, and neither run nor changed."""
    modules: int
    tokens: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """Class, sub-modules and dtype: what a profile finds it by."""
        return f"{self.owner.__module__}.{_kind_of(self.owner, self.module)} {str(self.dtype).removeprefix('torch.')}"


def _kind_of(owner: type[nn.Module], module: nn.Module) -> str:
    """What a module prints, on one line, and which of its weights want a gradient."""
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    return " ".join(f"{owner.__qualname__} {module!r}".split()) + (f" frozen {frozen}" if frozen else "")


def cases_of(model: nn.Module, token_counts: Sequence[int], dtype: torch.dtype | None) -> list[Case]:
    """Every kind of module in `model` that a class target serves, at each number of tokens; in the model's order."""
    kinds: dict[tuple[object, ...], list[tuple[catalogue.Target, type[nn.Module], nn.Module, torch.dtype]]] = {}
    current = settings.read()
    for target in catalogue.CLASS_TARGETS:
        if not current.allows(target.op):
            continue
        for _, module, owner in catalogue.find_in_model(target, model):
            own = next((each.dtype for each in module.parameters() if each.is_floating_point()), None)
            if own is None or target.shim.example_input(module, catalogue.forward_of(owner), 1) is None:
                continue
            weights = tuple((each.shape, each.dtype) for each in module.parameters())
            kinds.setdefault((owner, _kind_of(owner, module), weights), []).append(
                (target, owner, module, dtype or own)
            )
    return [
        Case(target, owner, module, len(found), tokens, its_dtype)
        for found in kinds.values()
        for target, owner, module, its_dtype in found[:1]
        for tokens in sorted(set(token_counts))
    ]


def measure(case: Case, modes: Sequence[str], seconds: float, device: torch.device) -> Measured:
    """Every backend of the op against the library's own code, in each of `modes`; the first decides which is fastest.

    A backend wins where it is not slower in any mode, and in the first is the fastest, its middle three fifths apart
    from the library's. One that raises is left out, with what it raised. Raises UnmeasurableError where the module
    can't be copied, or does not run by itself.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))  # where events are recorded
        stack.enter_context(torch.random.fork_rng([device.index] if device.type == "cuda" else []))
        module = _copied(case, device)
        found: list[Measured] = []
        # Strict mode, from the environment, complains at the end where nothing ran natively; here that is a finding.
        with contextlib.suppress(DeclinedError), entry.accelerated(case.target.op, model=module):
            ledger.watch_first_step(None)  # these are no steps of the user's
            found.append(_measured(case, module, tuple(modes), seconds, device))
        return found[0]


def _measured(case: Case, module: nn.Module, modes: tuple[str, ...], seconds: float, device: torch.device) -> Measured:
    op, forward = case.target.op, catalogue.forward_of(case.owner)
    calls = {mode: _call(module, case.target.shim.example_input(module, forward, case.tokens), mode) for mode in modes}
    arms: dict[str, dict[str, Callable[[], object]]] = {LIBRARY: {mode: _without(calls[mode]) for mode in modes}}
    problems: list[str] = []
    why_not: dict[str, str] = {}
    for name in settings.OPS[op].backends:
        if (name == "reference") is not (device.type == "cpu"):
            continue
        forced = _naming(op, name)
        try:
            with _in_force(forced), profiles.asked() as asked:
                made = case.target.shim.warm(module, forward, case.tokens)
            problems += asked
            if made.route is Route.ORIGINAL:
                why_not[name] = "-" if made.reason is None else made.reason.value
                continue
            ours = {mode: _with(calls[mode], forced) for mode in modes}
            for call in ours.values():
                call()
            timing.settle(device)
        except Exception as error:
            timing.settle(device)  # raises where the device is lost, and nothing can be measured any more
            why_not[name] = _said(error)
            continue
        arms[name] = ours
    over: dict[str, dict[str, float]] = {name: {} for name in arms if name != LIBRARY}
    apart: dict[str, bool] = {}
    for mode in modes if over else ():
        times = timing.compare({name: arm[mode] for name, arm in arms.items()}, seconds / len(modes), device)
        for name in over:
            over[name][mode] = times[name].p50 / times[LIBRARY].p50
            apart.setdefault(name, times[name].p80 < times[LIBRARY].p20)
    winners = [name for name in over if apart[name] and max(over[name].values()) <= 1.0]
    best = min(winners, key=lambda name: over[name][modes[0]], default=None)
    return Measured(op, case.name, tuple(dict.fromkeys(problems)), case.tokens, modes, best, over, why_not)


def _copied(case: Case, device: torch.device) -> nn.Module:
    """A copy of the module with random weights, on the device."""
    try:
        module = copy.deepcopy(case.module).to_empty(device=device).to(case.dtype)
        for parameter in module.parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                raise UnmeasurableError("a weight is quantised, or is not here (sharded)")
            with torch.no_grad():
                parameter.normal_(std=(parameter.shape[-1] if parameter.dim() else 1) ** -0.5)
    except (UnmeasurableError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnmeasurableError(f"it can't be copied: {_said(error)}") from error
    return module.train()


def _call(module: nn.Module, x: Tensor | None, mode: str) -> Callable[[], object]:
    assert x is not None
    x = torch.randn_like(x)
    wanted = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def forward() -> object:
        with torch.no_grad():
            return module(x)

    def train() -> object:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(module(leaf), (leaf, *wanted), grad, allow_unused=True)

    try:
        with entry.disabled():
            grad = torch.randn_like(forward())  # type: ignore[call-overload]
            call = forward if mode == "forward" else train
            call()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UnmeasurableError(f"the library's own code fails: {_said(error)}") from error
    return call


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


# ---------------------------------------------------------------------------------------------------------- the arms


def _naming(op: str, backend: str) -> settings.Settings:
    current = settings.current()
    choice = settings.OpSettings(enabled=True, route=None, backend=backend)
    return dataclasses.replace(current, strict=False, ops={**current.ops, op: choice})


@contextlib.contextmanager
def _in_force(choice: settings.Settings) -> Iterator[None]:
    before = settings.installed()
    settings.install(choice)
    try:
        yield
    finally:
        settings.install(before)


def _with(call: Callable[[], object], choice: settings.Settings) -> Callable[[], object]:
    def run() -> object:
        with _in_force(choice):
            return call()

    return run


def _without(call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with entry.disabled():
            return call()

    return run
