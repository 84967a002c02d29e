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
from ..decline import Route
from ..profiles import Measured
from . import timing

LIBRARY = "library"
MODES = ("train", "forward")
"""Forward + backward with all gradients, and forward alone without any."""


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
        """Class, sizes and dtype: what a profile finds it by."""
        shapes = ", ".join(
            f"{name} {'x'.join(map(str, parameter.shape))}" for name, parameter in self.module.named_parameters()
        )
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.owner.__module__}.{self.owner.__qualname__} ({shapes}) {kind}"


def cases_of(model: nn.Module, token_counts: Sequence[int], dtype: torch.dtype | None) -> list[Case]:
    """Every kind of module in `model` that a class target serves, at each number of tokens; in the model's order."""
    kinds: dict[tuple[object, ...], list[tuple[catalogue.Target, type[nn.Module], nn.Module]]] = {}
    current = settings.read()
    for target in catalogue.CLASS_TARGETS:
        if not current.allows(target.op):
            continue
        for _, module, owner in catalogue.find_in_model(target, model):
            if target.shim.example_input(module, catalogue.forward_of(owner), 1) is not None:
                kinds.setdefault((owner, *target.shim.size_of(module)), []).append((target, owner, module))
    return [
        Case(*found[0], len(found), tokens, dtype or next(found[0][2].parameters()).dtype)
        for found in kinds.values()
        for tokens in sorted(set(token_counts))
    ]


def measure(case: Case, modes: Sequence[str], seconds: float, device: torch.device) -> Measured:
    """Every backend of the op against the library's own code, in each of `modes`; the first decides which is fastest.

    A backend wins where it is not slower in any mode, and in the first is the fastest, its middle three fifths apart
    from the library's.
    """
    op, why_not, problems = case.target.op, {}, []
    module = _materialised(case, device)
    forward = catalogue.forward_of(case.owner)
    names = [name for name in settings.OPS[op].backends if (name == "reference") is (device.type == "cpu")]
    choices: dict[str, settings.Settings] = {}
    with entry.accelerated(op, model=module):
        ledger.watch_first_step(None)  # these are no steps of the user's
        for name in names:
            forced = _naming(op, name)
            with _in_force(forced), profiles.asked() as asked:
                made = case.target.shim.warm(module, forward, case.tokens)
            problems += asked
            if made.route is Route.ORIGINAL:
                why_not[name] = "-" if made.reason is None else made.reason.value
            else:
                choices[name] = forced
        over: dict[str, dict[str, float]] = {name: {} for name in choices}
        apart: dict[str, bool] = {}
        for mode in modes if choices else ():
            call = _call(module, case.target.shim.example_input(module, forward, case.tokens), mode)
            arms = {LIBRARY: _without(call), **{name: _with(call, choice) for name, choice in choices.items()}}
            times = timing.compare(arms, seconds / len(modes), device)
            for name in choices:
                over[name][mode] = times[name].p50 / times[LIBRARY].p50
                apart.setdefault(name, times[name].p80 < times[LIBRARY].p20)
    winners = [name for name in choices if apart[name] and max(over[name].values()) <= 1.0]
    best = min(winners, key=lambda name: over[name][modes[0]], default=None)
    return Measured(op, case.name, tuple(dict.fromkeys(problems)), case.tokens, best, over, why_not)


def _materialised(case: Case, device: torch.device) -> nn.Module:
    """A copy of the module with random weights, on the device."""
    module = copy.deepcopy(case.module).to_empty(device=device).to(case.dtype).requires_grad_()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return module.train()


def _call(module: nn.Module, x: Tensor | None, mode: str) -> Callable[[], object]:
    assert x is not None
    x = torch.randn_like(x)
    parameters = list(module.parameters())

    def forward() -> object:
        with torch.no_grad():
            return module(x)

    def train() -> object:
        leaf = x.detach().requires_grad_()
        out = module(leaf)
        return torch.autograd.grad(out, (leaf, *parameters), grad)

    if mode == "forward":
        return forward
    grad = torch.randn_like(forward())  # type: ignore[call-overload]
    return train


# ---------------------------------------------------------------------------------------------------------- the arms


def _naming(op: str, backend: str) -> settings.Settings:
    current = settings.current()
    choice = settings.OpSettings(enabled=True, route=None, backend=backend)
    return dataclasses.replace(current, ops={**current.ops, op: choice})


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
