"""The Engram gate as a module, for models in the style of DeepSeek-V4.1: the gate with the weights of its two norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .choose import WIDTH_MULTIPLE
from .op import engram_gate, engram_gate_weight


class EngramGate(nn.Module):
    """`x + sigmoid(sqrt'(<rms(x) * query_weight, rms(key) * key_weight> / sqrt(D))) * value`, a gate for each stream.

    forward(x [..., S, D], kv [..., (S+1)*D], token_mask [...] bool) returns [..., S, D]: ops.engram_gate says what
    each is. The weights are [S, D], one norm's each, start at 1, and may be of the dtype of x or wider. Nothing else
    is learned: the lookup and the projection that makes kv are the model's own (examples/engram_gate.py).

    Raises ValueError for sizes that no kernel takes.
    """

    def __init__(
        self,
        streams: int,
        width: int,
        *,
        eps: float = 1e-20,
        residual: bool = True,
        zero_dot: str = "copysign",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if streams < 1 or width < WIDTH_MULTIPLE or width % WIDTH_MULTIPLE:
            raise ValueError(
                f"streams must be positive and width a multiple of {WIDTH_MULTIPLE}, got {streams} and {width}"
            )
        self.streams, self.width = streams, width
        self.eps, self.residual, self.zero_dot = eps, residual, zero_dot
        self.query_weight = nn.Parameter(torch.ones(streams, width, device=device, dtype=dtype))
        self.key_weight = nn.Parameter(torch.ones(streams, width, device=device, dtype=dtype))

    def forward(self, x: Tensor, kv: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """The gated value, added to x unless `residual=False`."""
        weight = engram_gate_weight(self.query_weight, self.key_weight, self.streams)
        return engram_gate(x, kv, weight, token_mask, eps=self.eps, residual=self.residual, zero_dot=self.zero_dot)

    def extra_repr(self) -> str:
        """What was asked for."""
        return f"{self.streams}, {self.width}, eps={self.eps}, residual={self.residual}, zero_dot={self.zero_dot!r}"
