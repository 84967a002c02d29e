"""The public ops, for code of your own: differentiable, and right on any device."""

from __future__ import annotations

from .kernels.engram_gate.module import EngramGate
from .kernels.engram_gate.op import engram_gate, engram_gate_weight
from .kernels.engram_gate.plan import EngramGatePlan
from .kernels.gated_mlp.op import act_mul, act_mul_packed, gated_mlp, gated_mlp_packed
from .kernels.linear_attention.gated_delta_rule.op import gated_delta_rule
from .kernels.linear_attention.kda.op import kda

__all__ = [
    "EngramGate",
    "EngramGatePlan",
    "act_mul",
    "act_mul_packed",
    "engram_gate",
    "engram_gate_weight",
    "gated_delta_rule",
    "gated_mlp",
    "gated_mlp_packed",
    "kda",
]
