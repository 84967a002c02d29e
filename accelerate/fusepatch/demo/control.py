"""The library against itself: the same model with the inner channels of its MLPs in another order.

It computes the same function from the same weights, through the same code; only the order of the down projection's
sum is another. How far its errors are from those of the model as it is says what a difference of errors is worth.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .weights import Loaded

_ROWS = ("gate_proj.weight", "gate_proj.bias", "up_proj.weight", "up_proj.bias")
_COLUMNS = ("down_proj.weight",)


class Reordered:
    """A reordered copy of a model."""

    def __init__(self, loaded: Loaded, names: Sequence[str]) -> None:
        self.model: Any = copy.deepcopy(loaded.model)
        self._orders: dict[str, Tensor] = {}
        generator = torch.Generator().manual_seed(0)
        for name in names:
            module = self.model.get_submodule(name)
            parts = [getattr(module, part, None) for part in ("gate_proj", "up_proj", "down_proj")]
            if all(isinstance(part, nn.Linear) for part in parts):
                order = torch.randperm(module.down_proj.in_features, generator=generator).to(loaded.device)
                self._orders[name] = order
                _put_in_order(name, order, dict(self.model.named_parameters()))

    def __bool__(self) -> bool:
        return bool(self._orders)

    def in_model_order(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of the copy, as those of the model: each channel back in its place."""
        found = dict(tensors)
        for name, order in self._orders.items():
            _put_in_order(name, torch.argsort(order), found)
        return found


@torch.no_grad()
def _put_in_order(module: str, order: Tensor, tensors: dict[str, Any]) -> None:
    for parts, dim in ((_ROWS, 0), (_COLUMNS, 1)):
        for part in parts:
            tensor = tensors.get(f"{module}.{part}")
            if tensor is not None:
                tensor.copy_(tensor.index_select(dim, order))
