"""Which tensors the products of Hopper hand to their kernel: the kernel played by PyTorch, which reads as TMA does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusepatch.kernels.gated_mlp import hopper_products
from fusepatch.kernels.gated_mlp.hopper_configuration import ARCH, Kind, Product, product
from support import relative_error

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def _is_readable(t: Tensor) -> bool:
    row, column = t.stride()
    return column == 1 and row * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0 and row >= t.shape[1]


def _launch(configuration: Product) -> Callable[..., None]:
    """What the docstring of hopper_product.py says, of the arguments of its build()."""

    def launch(a: Any, a2: Any, b: Any, b2: Any, c: Any, c2: Any, clusters: int) -> None:
        assert clusters == 66
        assert all(_is_readable(t) for t in (a, a2, b, b2, c, c2) if t is not None)
        assert (a2 is not None, c2 is not None) == (configuration.sources == 2, configuration.outputs == 2)
        assert (b2 is not None) == (configuration.sources == 2 or configuration.outputs == 2)

        def made(a: Tensor, b: Tensor) -> Tensor:
            return a.double().t() @ (b.double().t() if configuration.b_by_k else b.double())

        def stored(result: Tensor) -> Tensor:
            return result.t() if configuration.transposed else result

        c.copy_(stored(made(a, b) + (made(a2, b2) if a2 is not None else 0)))
        if c2 is not None:
            c2.copy_(stored(made(a, b2)))

    return launch


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Product]]:
    """What was compiled, on a GPU that looks like an H200."""
    made: list[Product] = []

    def compile_it(configuration: Product, build: object, arch: str) -> Callable[..., None]:
        assert arch == ARCH
        made.append(configuration)
        return _launch(configuration)

    monkeypatch.setattr(hopper_products.compiling, "compiled", compile_it)
    monkeypatch.setattr(hopper_products, "clusters_of", lambda device: 66)
    for cached in (hopper_products._kernel, hopper_products.compile_all):
        cached.cache_clear()
    yield made
    for cached in (hopper_products._kernel, hopper_products.compile_all):
        cached.cache_clear()


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda t: t,
    "columns": lambda t: t.t().contiguous().t(),
    "wide rows": lambda t: torch.cat([t, t[:, :8]], 1)[:, : t.shape[1]],
    "odd rows": lambda t: torch.cat([t, t[:, :3]], 1)[:, : t.shape[1]],
    "off 16 bytes": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view_as(t),
    "one row": lambda t: t[:1].expand_as(t),
}


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape).to(BF16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(1, 8, 16), (7, 24, 40), (33, 72, 136)])
def test_whatever_the_layout(tokens: int, hidden: int, inner: int, layout: str) -> None:
    strange = LAYOUTS[layout]
    d_gate_up, h = rand(tokens, 2 * inner), strange(rand(tokens, inner))
    weights, x = strange(rand(2 * inner, hidden)), strange(rand(tokens, hidden))
    exact = d_gate_up.double() @ weights.double()
    for columns in hopper_products.VARIANTS["dx"]:
        for given in ((weights, None), (weights[:inner], weights[inner:])):
            made = hopper_products.dx(d_gate_up, *given, columns=columns)
            assert relative_error(made, exact) < 4e-3
    exact = d_gate_up.double().t() @ x.double()
    joined, nothing = hopper_products.d_weights(d_gate_up, x, packed=True, columns=192)
    gate, up = hopper_products.d_weights(d_gate_up, x, packed=False, columns=192)
    assert nothing is None
    assert gate.untyped_storage().data_ptr() != up.untyped_storage().data_ptr()
    assert relative_error(joined, exact) < 4e-3
    assert relative_error(torch.cat([gate, up]), exact) < 4e-3
    assert relative_error(hopper_products.d_down(x, h, columns=192), x.double().t() @ h.double()) < 4e-3


def test_the_rule_is_asked_where_no_columns_are_given(compiled: list[Product]) -> None:
    assert hopper_products.dx(rand(7, 80), rand(80, 24), None) is None
    assert hopper_products.d_weights(rand(7, 80), rand(7, 24), packed=True) == (None, None)
    assert hopper_products.d_down(rand(7, 24), rand(7, 40)) is None
    assert compiled == []


def test_what_is_compiled_before_it_is_needed(compiled: list[Product]) -> None:
    expected = [product(Kind.DX, BF16, 160), product(Kind.D_WEIGHTS, BF16, 192), product(Kind.D_DOWN, BF16, 192)]
    hopper_products.compile_all(BF16, CPU, 8192, 5120, 17408)
    assert compiled == expected
    assert hopper_products.needed(BF16, CPU, 8192, 5120, 17408) == tuple(expected)
    for kind in Kind:
        assert hopper_products.serves(kind.value, CPU, 8192, 5120, 17408)
    assert not hopper_products.serves("dx", CPU, 8192, 4096, 14336)
    assert hopper_products.serves("d_weights", CPU, 8192, 4096, 14336)
