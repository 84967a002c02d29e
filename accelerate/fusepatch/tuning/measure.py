"""One kind of module at one number of tokens: every backend that can serve it, against the library's own code; then the
choices of the one that won, against its own rules."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import catalogue, entry, ledger, profiles, settings
from ..decline import DeclinedError, Reason, Route
from ..errors import type_and_first_line
from ..profiles import Measured
from . import timing

LIBRARY = "library"
MODES = ("train", "forward")
"""Forward + backward with all gradients that the module's weights want, and forward alone without any."""
TRANSIENT = (Reason.SELFCHECK_INCONCLUSIVE.value, Reason.GLOBAL_HOOKS.value, Reason.DISABLED.value)
"""Reasons that may not hold the next time: what they kept from being measured is not remembered."""

Arm = dict[str, Callable[[], object]]
"""What is timed, by mode."""


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
    from the library's. One that raises is left out, with what it raised. Then, for `seconds` again, each choice of
    the winner that would run anything else against the winner without one; it wins in the same way, but that another
    mode, where much of the two may be the same, need only not be slower and apart. Raises UnmeasurableError where the
    module can't be copied, or does not run by itself.
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
    op, forward, per_mode = case.target.op, catalogue.forward_of(case.owner), seconds / len(modes)
    calls = {mode: _call(module, case.target.shim.example_input(module, forward, case.tokens), mode) for mode in modes}
    names = [name for name in settings.OPS[op].backends if (name == "reference") is (device.type == "cpu")]
    problems: list[str] = []
    arms, why_not = _arms(case, module, calls, names, problems, device)
    library = {mode: _without(calls[mode]) for mode in modes}
    over: dict[str, dict[str, float]] = {name: {} for name in arms}
    apart: dict[str, bool] = {}
    for mode in modes if over else ():
        times = timing.compare(_in(mode, {LIBRARY: library, **arms}), per_mode, device)
        for name in over:
            over[name][mode] = times[name].p50 / times[LIBRARY].p50
            apart.setdefault(name, times[name].p80 < times[LIBRARY].p20)
    winners = [name for name in over if apart[name] and max(over[name].values()) <= 1.0]
    best = min(winners, key=lambda name: over[name][modes[0]], default=None)
    if best is not None:
        labels = [label for label in settings.OPS[op].choices if label.partition("/")[0] == best]
        choices, why = _arms(case, module, calls, labels, problems, device)
        # One that would run nothing else says that its size is not admitted.
        why_not |= {label: each for label, each in why.items() if each != Reason.SIZE_NOT_ADMITTED.value}
        if choices:
            best = _fastest_choice(best, arms[best], choices, over, per_mode, device)
    return Measured(op, case.name, tuple(dict.fromkeys(problems)), case.tokens, modes, best, over, why_not)


def _arms(
    case: Case,
    module: nn.Module,
    calls: Arm,
    labels: Sequence[str],
    problems: list[str],
    device: torch.device,
) -> tuple[dict[str, Arm], dict[str, str]]:
    """The calls by each backend or choice, having run once; and why not, of those that can't serve them. Adds to
    `problems` what was asked about.
    """
    arms: dict[str, Arm] = {}
    why_not: dict[str, str] = {}
    for label in labels:
        forced = _naming(case.target.op, label)
        try:
            with settings.in_force(forced), profiles.asked() as asked:
                made = case.target.shim.warm(module, catalogue.forward_of(case.owner), case.tokens)
            problems += asked
            if made.route is Route.ORIGINAL:
                why_not[label] = "-" if made.reason is None else made.reason.value
                continue
            ours = {mode: _with(call, forced) for mode, call in calls.items()}
            for call in ours.values():
                call()
            timing.settle(device)
        except Exception as error:
            timing.settle(device)  # raises where the device is lost, and nothing can be measured any more
            why_not[label] = type_and_first_line(error)
            continue
        arms[label] = ours
    return arms, why_not


def _fastest_choice(
    name: str, own: Arm, choices: Mapping[str, Arm], over: dict[str, dict[str, float]], seconds: float,
    device: torch.device,
) -> str:  # fmt: skip
    """The choice that is fastest in the first mode, or the backend `name` itself; adds each one's times to `over`."""
    first, *_ = own
    wins = dict.fromkeys(choices, True)
    for mode in own:
        times = timing.compare(_in(mode, {name: own, **choices}), seconds, device)
        for label in choices:
            ratio = over[name][mode] * times[label].p50 / times[name].p50
            over.setdefault(label, {})[mode] = ratio
            is_fine = times[label].p80 < times[name].p20 if mode == first else times[label].p20 <= times[name].p80
            wins[label] = wins[label] and is_fine and ratio <= 1.0
    return min((label for label in choices if wins[label]), key=lambda label: over[label][first], default=name)


def _in(mode: str, arms: Mapping[str, Arm]) -> Arm:
    return {name: arm[mode] for name, arm in arms.items()}


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
        raise UnmeasurableError(f"it can't be copied: {type_and_first_line(error)}") from error
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
        raise UnmeasurableError(f"the library's own code fails: {type_and_first_line(error)}") from error
    return call


# ---------------------------------------------------------------------------------------------------------- the arms


def _naming(op: str, backend: str) -> settings.Settings:
    current = settings.current()
    choice = settings.OpSettings(enabled=True, route=None, backend=backend)
    return dataclasses.replace(current, strict=False, ops={**current.ops, op: choice})


def _with(call: Callable[[], object], choice: settings.Settings) -> Callable[[], object]:
    def run() -> object:
        with settings.in_force(choice):
            return call()

    return run


def _without(call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with entry.disabled():
            return call()

    return run
