"""Products that follow the backward kernel in plain PyTorch, as a backend's module of them: see hopper_products.py."""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest
import torch
from torch import Tensor

from fusepatch.kernels.gated_mlp import choose, op


class PlainProducts(types.ModuleType):
    """They say what they were asked for, and leave out what they are told to."""

    def __init__(self, *left_out: str) -> None:
        super().__init__("products_in_plain_pytorch")
        self.left_out, self.asked = left_out, list[str]()
        self.sizes: dict[str, tuple[int, int, int]] = {}  # that compilers asked about
        self.VARIANTS = {"dx": (192, 160), "d_weights": (192,), "d_down": (192,)}

    def serves(self, name: str, device: torch.device, tokens: int, hidden: int, inner: int) -> bool:
        self.sizes[name] = tokens, hidden, inner
        return name not in self.left_out

    def _serves(self, name: str) -> bool:
        self.asked.append(name)
        return name not in self.left_out

    def dx(self, d_gate_up: Tensor, gate: Tensor, up: Tensor | None, *, columns: int | None = None) -> Tensor | None:
        weights = gate if up is None else torch.cat([gate, up])
        return d_gate_up @ weights if self._serves("dx") else None

    def d_weights(
        self, d_gate_up: Tensor, x: Tensor, *, packed: bool, columns: int | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        if not self._serves("d_weights"):
            return None, None
        joined = d_gate_up.t() @ x
        return (joined, None) if packed else (joined.chunk(2)[0].clone(), joined.chunk(2)[1].clone())

    def d_down(self, dout: Tensor, h: Tensor, *, columns: int | None = None) -> Tensor | None:
        return dout.t() @ h if self._serves("d_down") else None


def with_products(
    monkeypatch: pytest.MonkeyPatch, products: PlainProducts, backend: choose.Backend = choose.REFERENCE
) -> choose.Backend:
    """The backend, with these."""
    monkeypatch.setitem(sys.modules, products.__name__, products)
    op.products_of.cache_clear()
    return dataclasses.replace(backend, products=products.__name__)
