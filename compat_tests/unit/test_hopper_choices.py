"""The choices of the Hopper backend: that each says what it launches, and is checked before it does."""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusepatch import settings
from fusepatch.decline import Route
from fusepatch.kernels import backends
from fusepatch.kernels.cute import compiling
from fusepatch.kernels.gated_mlp import (
    check,
    choose,
    hopper,
    hopper_configuration,
    hopper_products,
    launching,
    op,
    reference,
)
from fusepatch.kernels.gated_mlp.hopper_configuration import ARCH, CUTS, Size, size_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PLAIN = choose.Problem(Route.FUSED, CUDA, torch.bfloat16, 4096, 14336, "silu", bias=False)
CHOICES = pytest.mark.parametrize("choice", choose.CHOICES, ids=lambda choice: choice.choice)
SIZES = [
    (tokens, hidden, inner)
    for tokens in (1, 64, 129, 2047, 2048, 4099, 8191, 8192, 16384)
    for hidden, inner in ((64, 96), (1024, 3072), (2048, 8192), (4096, 14336), (5120, 17408))
]


@pytest.fixture(autouse=True)
def an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_products, "clusters_of", lambda device: 66)


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Callable[[choose.Backend], set[Any]]:
    """What the self-check of a record has compiled, for problems like PLAIN."""
    asked: list[set[Any]] = []
    monkeypatch.setattr(launching, "side_by_side", lambda found, build, arch: asked.append(set(found)))

    def compiled(backend: choose.Backend, biased: bool = False) -> set[Any]:
        asked.clear()
        backend.compile_ahead(CUDA, torch.bfloat16, "silu", biased)
        return asked[0]

    return compiled


def needed(problem: choose.Problem, tokens: int, choice: str) -> set[Any]:
    return set(itertools.chain.from_iterable(hopper._needed(problem, tokens, choice)))


def test_every_list_names_the_same_choices() -> None:
    assert tuple(each.label for each in choose.CHOICES) == settings.OPS["gated_mlp"].choices
    assert {"", *(each.choice for each in choose.CHOICES)} == set(CUTS)
    assert all(each.choice == "" and each.label == each.name for each in choose.BACKENDS)
    assert all(each.note.startswith(f"{each.label}: ") for each in choose.CHOICES)


@CHOICES
@pytest.mark.parametrize("biased", [False, True])
def test_its_self_check_and_the_backends_cover_what_it_launches(
    ahead: Callable[..., set[Any]], choice: choose.Backend, biased: bool
) -> None:
    """And it has one only where it launches a kernel, or one for other sizes, that the backend's does not."""
    by_backend, problem = ahead(choose.labelled("hopper"), biased), PLAIN._replace(bias=biased)
    by_choice = ahead(choice, biased) if choice.check is not None else set()
    for tokens, hidden, inner in SIZES:
        launched = needed(problem._replace(hidden=hidden, inner=inner), tokens, choice.choice)
        assert launched <= by_backend | by_choice
    assert {size_of(*shape) for shape in check._FUSED_SHAPES} == set(Size), "each kernel runs in a self-check"
    assert not any(each.kernel == "hopper_product" for each in by_choice)
    own = {each for each in by_choice if each.kernel != "hopper_product"} - by_backend
    assert bool(own) == (choice.choice in ("small-groups", "large-groups"))
    assert (choice.check is None) == choice.choice.endswith("-products")


@CHOICES
def test_it_is_measured_where_it_would_launch_anything_else(choice: choose.Backend) -> None:
    differ = 0
    for tokens, hidden, inner in SIZES:
        problem = PLAIN._replace(hidden=hidden, inner=inner)
        admitted = choice.admits(problem, tokens)
        assert admitted == (needed(problem, tokens, choice.choice) != needed(problem, tokens, ""))
        differ += admitted
        if tokens <= 128:
            assert not admitted
    assert 0 < differ < len(SIZES)


def test_what_each_is() -> None:
    """At a size where the backend multiplies for one of the products."""

    def tiles(choice: str) -> tuple[Any, ...]:
        kernels, products = hopper._needed(PLAIN, 8192, choice)
        return tuple(each.tile.group for each in kernels), len(products)

    assert tiles("") == ((4, 4, 8, 8), 1)
    assert tiles("small-groups") == ((2, 2, 4, 4), 1)
    assert tiles("large-groups") == ((16, 16, 16, 16), 1)
    assert tiles("own-products") == ((4, 4, 8, 8), 3)
    assert tiles("cublas-products") == ((4, 4, 8, 8), 0)
    shallow = PLAIN._replace(hidden=1024)
    for one, other in ((PLAIN, shallow), (shallow, PLAIN)):
        swapped, plain = hopper._needed(one, 8192, "swapped-backward")[0], hopper._needed(other, 8192, "")[0]
        assert swapped[2:] == plain[2:]
    assert [len(hopper._needed(PLAIN, tokens, "own-products")[1]) for tokens in (2047, 2048)] == [0, 3]


@CHOICES
def test_capture_waits_for_its_kernels(monkeypatch: pytest.MonkeyPatch, choice: choose.Backend) -> None:
    launched = needed(PLAIN, 8192, choice.choice)
    monkeypatch.setattr(compiling, "_compiled", {(each, ARCH): print for each in launched})
    assert choice.compiled(PLAIN, 8192)
    for missing in launched:
        monkeypatch.setattr(compiling, "_compiled", {(each, ARCH): print for each in launched - {missing}})
        assert not choice.compiled(PLAIN, 8192)


# ------------------------------------------------------------------------------------------------ a call, and its check


class Played:
    """Kernels played by plain PyTorch, with all that would have been launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: set[Any] = set()
        self.ahead: list[set[Any]] = []
        self.spoilt: Any = None
        monkeypatch.setattr(launching, "dual_gemm_act", self._forward)
        monkeypatch.setattr(launching, "gemm_dact", self._backward)
        monkeypatch.setattr(launching, "side_by_side", lambda found, build, arch: self.ahead.append(set(found)))
        self.made_ready: list[Any] = []
        monkeypatch.setattr(hopper_products, "compile_all", lambda *case: self.made_ready.append(case[2:]))
        monkeypatch.setattr(hopper_products, "_kernel", self._product)

    def _forward(self, family: Any, x: Any, gate: Any, up: Any, b: Any, b_up: Any, activation: str, want: bool) -> Any:
        size = family.size_of(x.shape[0], x.shape[1], gate.shape[0])
        kernel = family.configurations(x.dtype, activation, size, biased=b is not None)[want]
        self.launched.add(kernel)
        h, gate_up = reference.dual_gemm_act(x, gate, up, b, b_up, activation, want_gate_up=want)
        return h * 1.05 if kernel == self.spoilt else h, gate_up

    def _backward(self, family: Any, dout: Any, down: Any, gate_up: Any, activation: str, want: bool) -> Any:
        size = family.size_of(dout.shape[0], dout.shape[1], down.shape[1])
        kernel = family.configurations(dout.dtype, activation, size)[2 + want]
        self.launched.add(kernel)
        d_gate_up, h = reference.gemm_dact(dout, down, gate_up, activation, want_h=want)
        return d_gate_up * 1.05 if kernel == self.spoilt else d_gate_up, h

    def _product(self, kind: Any, dtype: Any, device: Any, *sizes: Any) -> Any:
        *sizes, columns, choice = sizes
        columns = columns or hopper_configuration.columns_for(kind, *sizes, 66, choice=choice)
        self.launched |= set() if columns is None else {hopper_configuration.product(kind, dtype, columns)}
        return None


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(monkeypatch)


STEPS = types.SimpleNamespace(reference=lambda: None, kernel=lambda case: None)
SMALL_SHAPES = {(7, 72, 136): Size.SMALL, (31, 24, 56): Size.SHALLOW, (31, 40, 56): Size.DEEP}
"""In place of those of check.py, as one of each size."""


@pytest.mark.parametrize("choice", [each for each in choose.CHOICES if each.check], ids=lambda choice: choice.choice)
def test_the_self_check_of_a_choice(monkeypatch: pytest.MonkeyPatch, played: Played, choice: choose.Backend) -> None:
    """It launches what it had compiled, all of it, and sees a fault in any kernel that is not the backend's."""
    monkeypatch.setattr(check, "_FUSED_SHAPES", tuple(SMALL_SHAPES))
    monkeypatch.setattr(hopper, "size_of", lambda *shape: SMALL_SHAPES[shape])
    monkeypatch.setattr(hopper, "_family", functools.cache(hopper._family.__wrapped__))
    case = f"{choice.label} fused bfloat16 silu"
    assert check.run(case, CPU, STEPS) == []
    assert [played.launched] == played.ahead
    for size in (Size.SHALLOW, Size.DEEP):
        by_choice, own = (hopper.configurations(torch.bfloat16, "silu", size, choice=c) for c in (choice.choice, ""))
        for kernel in set(by_choice) - set(own):
            played.spoilt = kernel
            assert check.run(case, CPU, STEPS)


@CHOICES
def test_a_call_runs_with_its_choice(played: Played, choice: choose.Backend) -> None:
    """Forward and backward pass, eager: all that it says it needs, and the same results."""
    given = [torch.randn(2048, 64), torch.randn(5120, 64), torch.randn(5120, 64), torch.randn(64, 5120)]
    results = []
    for backend in (choose.labelled("hopper"), choice):
        played.launched.clear()
        leaves = [each.clone().requires_grad_() for each in given]
        out = op.run_gated_mlp(backend, *leaves, None, None, None, "silu")
        results.append([out.detach(), *torch.autograd.grad(out.sum(), leaves)])
        problem = PLAIN._replace(dtype=torch.float32, hidden=64, inner=5120)
        unwanted = {*hopper.configurations(torch.float32, "silu", Size.SHALLOW, choice=backend.choice)[::2]}
        assert played.launched == needed(problem, 2048, backend.choice) - unwanted
        assert played.made_ready.pop() == (2048, 64, 5120, backend.choice)  # for its backward pass to be captured
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@CHOICES
def test_it_has_the_backends_functions(choice: choose.Backend) -> None:
    own = choose.labelled("hopper")
    for name in ("dual_gemm_act", "gemm_dact"):
        function = getattr(backends.load(choice), name)
        assert (function.func, function.keywords) == (getattr(backends.load(own), name), {"choice": choice.choice})
    for name in ("serves", *hopper_products.VARIANTS):
        function = getattr(op.products_of(choice), name)
        assert (function.func, function.keywords) == (getattr(op.products_of(own), name), {"choice": choice.choice})
        assert inspect.signature(function.func).parameters["choice"].default == ""
