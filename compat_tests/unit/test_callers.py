"""Which modules call a function: found by whatever holds it, in FLA, in transformers and elsewhere, and no others."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusepatch.shims import callers
from fusepatch.shims import fla_linear_attention as shim


def function(x: Tensor) -> Tensor:
    return x


def another(x: Tensor) -> Tensor:
    return x


def wrapper(inner: Callable[..., Any], like: Callable[..., Any]) -> Callable[..., Any]:
    """As transformers wraps a function of FLA: named and documented as its own code is."""

    @functools.wraps(like)
    def wrapped(x: Tensor) -> Any:
        return inner(x)

    return wrapped


class StandIn(nn.Module):
    """As transformers holds a function in whose place a kernel from the hub may come."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        super().__init__()
        type(self).forward = wrapper(wrapper(inner, another), another)


alias = function
wrapped = wrapper(function, another)
wrapped_other = wrapper(another, function)
stand_in = StandIn(function)


class ByAlias(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return alias(x)


class ByWrapper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return wrapped(x)


class ByStandIn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return stand_in(x)


class ByMethod(nn.Module):
    def helper(self, x: Tensor) -> Tensor:
        return function(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.helper(x)


class Inherits(ByAlias):
    """The forward of its base."""


class Nested(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (lambda y: function(y))(x)


class Decorated(nn.Module):
    forward = wrapper(ByAlias.forward, ByAlias.forward)


class ByAttribute(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        return self.held(x)


class Overrides(ByAlias):
    def forward(self, x: Tensor) -> Tensor:
        return another(x)


class Namesake(nn.Module):
    """An attribute of the function's name is not the function."""

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)  # type: ignore[operator]


class OfAnother(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return wrapped_other(x)


CALLERS = [
    ByAlias(), ByWrapper(), ByStandIn(), ByMethod(), Inherits(), Nested(), Decorated(), ByAttribute(function),
    ByAttribute(functools.partial(function)), ByAttribute(wrapped),
]  # fmt: skip
OTHERS = [Overrides(), Namesake(), OfAnother(), ByAttribute(another), ByAttribute(None), nn.Linear(2, 2)]


@pytest.mark.parametrize("module", CALLERS, ids=lambda module: type(module).__name__)
def test_what_holds_the_function(module: nn.Module) -> None:
    assert callers.holders(module, function)
    assert not callers.holders(nn.Sequential(module), function)  # it is the layer that calls, and not what is around it


@pytest.mark.parametrize("module", OTHERS, ids=lambda module: type(module).__name__)
def test_what_does_not(module: nn.Module) -> None:
    assert not callers.holders(module, function)


def test_a_stand_in_is_what_holds_it() -> None:
    assert callers.holders(ByStandIn(), function) == [stand_in]


def test_a_closure_that_is_not_filled_yet() -> None:
    def make() -> Any:
        def inner() -> Any:
            return later

        found = callers.holders(ByAttribute(inner), function)
        later = function
        return found, callers.holders(ByAttribute(inner), later)

    before, after = make()
    assert not before
    assert after


# ------------------------------------------------------------------------------------------------------ the libraries


def bare(kind: type[nn.Module]) -> nn.Module:
    """An instance without weights."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    return module


FLA = {
    ("kda", "KimiDeltaAttention"): {"kda"}, ("gated_deltanet", "GatedDeltaNet"): {"gated_delta_rule"},
    ("mom", "MomAttention"): {"gated_delta_rule"}, ("gla", "GatedLinearAttention"): set(),
    ("delta_net", "DeltaNet"): set(), ("gated_deltaproduct", "GatedDeltaProduct"): set(),
}  # fmt: skip


@pytest.mark.parametrize(("file", "name"), FLA)
def test_layers_of_fla(file: str, name: str) -> None:
    pytest.importorskip("fla.backends")
    layer = bare(getattr(importlib.import_module(f"fla.layers.{file}"), name))
    assert {op for op in shim._FUNCTIONS if shim.asks(layer, op)} == FLA[file, name]


@pytest.mark.parametrize("folder", ["qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear"])
def test_layers_of_transformers(folder: str) -> None:
    """Those whose text calls it, and no other class of the file."""
    pytest.importorskip("fla.backends")
    modeling = pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}")
    kinds = [kind for kind in vars(modeling).values() if isinstance(kind, type) and issubclass(kind, nn.Module)]
    found = 0
    for kind in kinds:
        if kind.__module__ != modeling.__name__:
            continue
        for op, each in shim._FUNCTIONS.items():
            calls = f"= {each.hub_name}(" in inspect.getsource(kind)
            assert shim.asks(bare(kind), op) is calls, kind
            found += calls
    assert found


def test_a_library_that_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shim.sys, "modules", {})
    assert not shim.asks(nn.Linear(2, 2), "kda")


# ---------------------------------------------------------------------------------------------------------- the copy


def test_no_hook_of_a_copy_fires_and_the_module_keeps_its_own() -> None:
    fired: list[str] = []
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    for name, each in module.named_modules():
        each.register_forward_pre_hook(lambda *_, name=name: fired.append(name))
        each.register_forward_hook(lambda *_, name=name, **__: fired.append(name), with_kwargs=True)
        each.register_full_backward_hook(lambda *_, name=name: fired.append(name))
    x = torch.ones(1, 2, requires_grad=True)
    copied = callers.without_hooks(module)
    out = copied(x)
    torch.autograd.grad(out.sum(), x)
    assert not fired
    assert all(a is b for a, b in zip(copied.parameters(), module.parameters(), strict=True))
    assert torch.equal(module(x), out)
    assert sorted(fired) == sorted(["", "0", "1", "1.0"] * 2)
