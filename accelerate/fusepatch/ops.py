"""The public ops, for code of your own: differentiable, and right on any device."""

from __future__ import annotations

from .kernels.engram_gate.op import engram_gate, engram_gate_weight
from .kernels.engram_gate.plan import EngramGatePlan
from .kernels.gated_mlp.op import act_mul, act_mul_packed, gated_mlp, gated_mlp_packed

__all__ = [
    "EngramGatePlan",
    "act_mul",
    "act_mul_packed",
    "engram_gate",
    "engram_gate_weight",
    "gated_mlp",
    "gated_mlp_packed",
]
