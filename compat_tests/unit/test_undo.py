"""`restore()` puts back exactly what was there, in whatever order other libraries patch the same classes."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import itertools
import pickle
import sys
from collections.abc import Callable

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from fla.modules.mlp import GatedMLP
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

import fusepatch
from fusepatch import patch
from support import tiny_llama, tiny_llama_mlp

MODELS = ("llama", "qwen3", "gemma3", "phi3", "lfm2", "recurrent_gemma", "llama4", "granitemoeshared")
MODULES = [importlib.import_module(f"transformers.models.{name}.modeling_{name}") for name in MODELS]
X = torch.linspace(-1, 1, 3 * 64).reshape(3, 64)
STOCK_FORWARD = vars(LlamaMLP)["forward"]


def classes() -> list[type[nn.Module]]:
    found = (value for module in [*MODULES, sys.modules["fla.modules.mlp"]] for value in vars(module).values())
    return [value for value in found if isinstance(value, type) and issubclass(value, nn.Module)]


for _kind in classes():
    _kind.__annotations__  # noqa: B018  made when it is first asked for, as by the compiler in another test

STOCK = {kind: list(vars(kind).items()) for kind in classes()}
"""Before anything was ever patched: what puts a name back at the end shows only the first time."""


def patched_classes() -> list[type[nn.Module]]:
    """The classes that `accelerate()` patches, by asking it."""
    with fusepatch.accelerated():
        return [kind for kind in classes() if "forward" in vars(kind) and patch.ours(vars(kind)["forward"])]


PATCHED = patched_classes()


def llama_status() -> fusepatch.report.ClassStatus | None:
    name = f"{LlamaMLP.__module__}.{LlamaMLP.__qualname__}"
    found = [each for target in fusepatch.status().targets for each in target.classes if each.name == name]
    assert len(found) < 2
    return found[0] if found else None


def declines() -> dict[str, int]:
    return {k: v for target in fusepatch.status().targets for k, v in target.total("declines").items()}


# ---------------------------------------------------------------------------------------------- the very objects


def test_every_kind_of_class_is_patched() -> None:
    assert {kind.__name__ for kind in PATCHED} >= {
        "LlamaMLP",
        "Qwen3MLP",
        "Gemma3MLP",
        "Phi3MLP",
        "Lfm2MLP",
        "RecurrentGemmaMlp",
        "Llama4TextMLP",
        "GraniteMoeSharedMLP",
        "GatedMLP",
    }


@pytest.mark.parametrize("rounds", [1, 3])
def test_every_class_is_as_it_was(rounds: int) -> None:
    for _ in range(rounds):
        fusepatch.accelerate()
        assert all(list(vars(kind).items()) != STOCK[kind] for kind in PATCHED)
        fusepatch.restore()
        for kind in PATCHED:
            assert list(vars(kind)) == [name for name, _ in STOCK[kind]]
            assert all(vars(kind)[name] is value for name, value in STOCK[kind])


@pytest.mark.parametrize("kind", PATCHED, ids=lambda kind: kind.__name__)
def test_patched_forward_looks_like_the_stock_one(kind: type[nn.Module]) -> None:
    stock = vars(kind)["forward"]
    fusepatch.accelerate()
    ours = vars(kind)["forward"]
    assert ours is not stock
    assert inspect.signature(ours) == inspect.signature(stock)
    assert inspect.getsource(ours) == inspect.getsource(stock)
    for name in ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__"):
        assert getattr(ours, name) == getattr(stock, name)


# ------------------------------------------------------------------------------------------------- how it is called


def small(kind: str) -> nn.Module:
    if kind == "GatedMLP":
        return GatedMLP(64, intermediate_size=96)
    found = next(each for each in PATCHED if each.__name__ == kind)
    config = type("Config", (), {"hidden_size": 64, "intermediate_size": 96, "mlp_bias": False, "hidden_act": "silu"})()
    return found(config)


@pytest.mark.parametrize(("kind", "keyword"), [("LlamaMLP", "x"), ("Phi3MLP", "hidden_states"), ("GatedMLP", "x")])
def test_keyword_call(reference_backend: None, kind: str, keyword: str) -> None:
    mlp = small(kind)
    fusepatch.accelerate()
    assert torch.equal(mlp(**{keyword: X}), mlp(X))
    assert fusepatch.status().native_calls() == 2


def test_ignored_keywords_are_ignored(reference_backend: None) -> None:
    mlp = small("GatedMLP")
    fusepatch.accelerate()
    assert torch.equal(mlp(X, output_attentions=True, cu_seqlens=None), mlp(X))
    assert fusepatch.status().native_calls() == 2


WRONG_CALLS: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda mlp: mlp(),
    "two": lambda mlp: mlp(X, X),
    "twice the same": lambda mlp: mlp(X, x=X, hidden_states=X),
    "another keyword": lambda mlp: mlp(inputs=X),
    "None": lambda mlp: mlp(None),
    "self": lambda mlp: mlp(X, self=X),
    "a number": lambda mlp: mlp(3),
}


# Found: GatedMLP(x, x=...) is served: a class that ignores keywords is not asked about one that names its argument.
@pytest.mark.parametrize("call", WRONG_CALLS.values(), ids=WRONG_CALLS)
@pytest.mark.parametrize("kind", ["LlamaMLP", "Phi3MLP", "GatedMLP"])
def test_wrong_call_raises_what_the_library_raises(reference_backend: None, kind: str, call) -> None:
    mlp = small(kind)
    with pytest.raises(TypeError) as stock:
        call(mlp)
    fusepatch.accelerate()
    with pytest.raises(TypeError) as ours:
        call(mlp)
    if call is not WRONG_CALLS["self"]:
        assert str(ours.value) == str(stock.value)


# ------------------------------------------------------------------------------------------------- other libraries


class OtherLibrary:
    """Patches `LlamaMLP.forward` too, in one of the ways seen in the wild, and takes it back."""

    def __init__(self, *, wraps: bool, forced: bool) -> None:
        self.wraps, self.forced = wraps, forced
        self.calls = 0

    def on(self) -> None:
        self.before = before = LlamaMLP.forward

        def forward(module, x):
            self.calls += 1
            return before(module, x)

        self.forward = functools.wraps(before)(forward) if self.wraps else forward
        LlamaMLP.forward = self.forward

    def off(self) -> None:
        if self.forced or LlamaMLP.forward is self.forward:
            LlamaMLP.forward = self.before


def interleavings(ours: str, theirs: str) -> list[str]:
    """Every order of the steps that keeps both libraries' own order."""
    length = len(ours) + len(theirs)
    found = []
    for places in itertools.combinations(range(length), len(theirs)):
        left, right = iter(ours), iter(theirs)
        found.append("".join(next(right) if place in places else next(left) for place in range(length)))
    return found


@pytest.fixture(params=["wraps", "plain"])
def wraps(request: pytest.FixtureRequest) -> bool:
    return request.param == "wraps"


@pytest.fixture(params=["forced", "checked"])
def other(request: pytest.FixtureRequest, wraps: bool):
    yield OtherLibrary(wraps=wraps, forced=request.param == "forced")
    LlamaMLP.forward = STOCK_FORWARD


def take(step: str, other: OtherLibrary) -> None:
    """o, r: accelerate and restore; T, U: the other library's patch and its undoing."""
    {"o": fusepatch.accelerate, "r": fusepatch.restore, "T": other.on, "U": other.off}[step]()


# Found: a patch that is displaced by a wrapper without __wrapped__ is forgotten by the next accelerate(), so that it
# stays in place for ever once the other library takes its own back: order oTroUr.
@pytest.mark.parametrize("order", [*interleavings("or", "TU"), *interleavings("oror", "TU")])
def test_any_order_ends_as_it_began(reference_backend: None, other: OtherLibrary, order: str) -> None:
    mlp = tiny_llama_mlp()
    stock = mlp(X)
    for step in order:
        take(step, other)
        assert torch.allclose(mlp(X), stock, atol=1e-6)
    assert torch.equal(mlp(X), stock)
    fusepatch.restore()  # the other library may have put ours back after our restore()
    assert LlamaMLP.forward is STOCK_FORWARD
    assert torch.equal(mlp(X), stock)
    fusepatch.accelerate()
    mlp(X)
    assert fusepatch.status().native_calls() == 1
    fusepatch.restore()
    assert LlamaMLP.forward is STOCK_FORWARD


# Found: where the other library puts our forward back after restore(), status() says "restored" and nothing more.
@pytest.mark.parametrize("order", interleavings("or", "TU"))
def test_what_is_left_is_reported(other: OtherLibrary, order: str) -> None:
    for step in order:
        take(step, other)
    found = llama_status()
    is_ours = patch.ours(LlamaMLP.forward) is not None
    assert is_ours is (found is not None and found.state != "restored")


@pytest.mark.parametrize("order", interleavings("or", "T"))
def test_theirs_stays_and_is_called(reference_backend: None, other: OtherLibrary, order: str) -> None:
    mlp = tiny_llama_mlp()
    for step in order:
        take(step, other)
    assert LlamaMLP.forward is other.forward
    mlp(X)
    assert other.calls == 1
    assert fusepatch.status().native_calls() == 0
    assert declines() == ({"restored": 1} if order == "oTr" else {})


def test_wrapped_while_on_is_still_served(reference_backend: None, other: OtherLibrary) -> None:
    fusepatch.accelerate()
    other.on()
    tiny_llama_mlp()(X)
    assert (fusepatch.status().native_calls(), other.calls) == (1, 1)
    assert llama_status().state == "wrapped"


def test_accelerate_again_reaches_into_a_wrapper(reference_backend: None, other: OtherLibrary, wraps: bool) -> None:
    for step in "oTro":
        take(step, other)
    tiny_llama_mlp()(X)
    assert other.calls == 1
    assert fusepatch.status().native_calls() == int(wraps)


# Found: calls of the forgotten patch (order oTro, no __wrapped__) are counted in a record that status() does not have.
def test_displaced_patch_is_still_counted(reference_backend: None, other: OtherLibrary, wraps: bool) -> None:
    for step in "oTro":
        take(step, other)
    tiny_llama_mlp()(X)
    found = llama_status()
    assert found is not None
    assert sum(found.calls.values()) == 1


def test_replaced_for_good(reference_backend: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that never calls what was there, as Liger does: it keeps the class, before and after `restore()`."""
    mlp = tiny_llama_mlp()
    fusepatch.accelerate()

    def theirs(self, x):
        return x

    LlamaMLP.forward = theirs
    try:
        assert torch.equal(mlp(X), X)
        fusepatch.accelerate()
        fusepatch.restore()
        assert LlamaMLP.forward is theirs
    finally:
        LlamaMLP.forward = STOCK_FORWARD


# Found: patch.apply() overwrites whatever is there now when _return_to() puts back what the block had turned off.
def test_theirs_inside_a_block_that_turned_ours_off(monkeypatch: pytest.MonkeyPatch, other: OtherLibrary) -> None:
    fusepatch.accelerate()
    monkeypatch.setenv("FUSEPATCH", "0")
    with fusepatch.accelerated():
        other.on()
    assert LlamaMLP.forward is other.forward
    fusepatch.restore()
    assert LlamaMLP.forward is other.forward


# Found: where theirs lies over ours, what the block had turned off inside it stays off.
def test_theirs_over_ours_before_a_block_that_turns_ours_off(
    monkeypatch: pytest.MonkeyPatch, reference_backend: None, other: OtherLibrary
) -> None:
    fusepatch.accelerate()
    other.on()
    monkeypatch.setenv("FUSEPATCH", "0")
    with fusepatch.accelerated():
        tiny_llama_mlp()(X)
    assert fusepatch.status().native_calls() == 0
    tiny_llama_mlp()(X)
    assert (fusepatch.status().native_calls(), other.calls) == (1, 2)
    assert llama_status().state == "wrapped"


# Found: _forget_counts() reads vars(owner)["forward"], which another library may have deleted.
def test_forward_deleted_in_between() -> None:
    class Child(LlamaMLP):
        forward = STOCK_FORWARD

    mlp = Child(tiny_llama_mlp().config)
    fusepatch.accelerate(model=mlp)
    del Child.forward
    fusepatch.restore()
    try:
        fusepatch.accelerate(model=mlp)
        assert patch.ours(LlamaMLP.forward) is not None
    finally:
        Child.forward = STOCK_FORWARD


# ---------------------------------------------------------------------------------------------------- captured


def capture(how: str, mlp: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """A callable that runs `mlp` by the forward that it has now."""
    if how == "accelerate hook":
        return add_hook_to_module(mlp, ModelHook())
    if how == "instance forward":
        mlp.forward = functools.partial(LlamaMLP.forward, mlp)
        return mlp
    return {"partial": functools.partial(mlp.forward), "bound": mlp.forward, "method": mlp.forward.__func__}[how]


@pytest.mark.parametrize("how", ["accelerate hook", "instance forward", "partial", "bound"])
def test_captured_forward_passes_through_after_restore(reference_backend: None, how: str) -> None:
    mlp = tiny_llama_mlp()
    stock = mlp(X)
    fusepatch.accelerate()
    captured = capture(how, mlp)
    captured(X)
    assert fusepatch.status().native_calls() == 1
    fusepatch.restore()
    assert LlamaMLP.forward is STOCK_FORWARD
    assert torch.equal(captured(X), stock)
    assert declines() == {"restored": 1}
    assert "restored:" in str(fusepatch.status())


def test_hook_removed_after_restore(reference_backend: None) -> None:
    mlp = tiny_llama_mlp()
    stock = mlp(X)
    fusepatch.accelerate()
    add_hook_to_module(mlp, ModelHook())
    fusepatch.restore()
    remove_hook_from_module(mlp)
    assert torch.equal(mlp(X), stock)
    fusepatch.accelerate()
    assert mlp(X) is not None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_patched_model(reference_backend: None, copied) -> None:
    model, tokens = tiny_llama(), torch.arange(5)[None]
    stock = model(tokens).logits
    fusepatch.accelerate()
    twin = copied(model)
    assert torch.equal(twin(tokens).logits, model(tokens).logits)
    assert fusepatch.status().native_calls() == 4
    fusepatch.restore()
    assert torch.equal(twin(tokens).logits, stock)


def test_pickle_does_not_mention_us(reference_backend: None) -> None:
    mlp = tiny_llama_mlp()
    stock = pickle.dumps(mlp)
    fusepatch.accelerate()
    mlp(X)
    assert pickle.dumps(mlp) == stock


# -------------------------------------------------------------------------------------------------- torch.compile


def test_compiled_model(reference_backend: None, monkeypatch: pytest.MonkeyPatch) -> None:
    resets, reset = [], torch._dynamo.reset
    monkeypatch.setattr(torch._dynamo, "reset", lambda: (resets.append(1), reset()))
    model, tokens = tiny_llama(layers=1), torch.arange(5)[None]
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    stock = model(tokens, use_cache=False).logits
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    fusepatch.accelerate()
    assert torch.allclose(compiled(tokens, use_cache=False).logits, stock, rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1
    assert fusepatch.status().native_calls() == 1
    assert llama_status().traces == {"fused": 1}
    assert "fused 1" in str(fusepatch.status())

    fusepatch.restore()
    assert torch.equal(compiled(tokens, use_cache=False).logits, stock)
    assert len(graphs) == 2
    assert llama_status().traces == {"fused": 1}

    compiled(tokens, use_cache=False)
    for _ in range(2):
        fusepatch.restore()
        fusepatch.accelerate()
        model(tokens)
    assert resets == [1]  # never where nothing was traced: it drops everybody's compiled code
    assert len(graphs) == 2
