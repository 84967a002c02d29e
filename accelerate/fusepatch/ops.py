"""The public ops, for code of your own: differentiable, and right on any device."""

from __future__ import annotations

from .kernels.gated_mlp.op import act_mul, act_mul_packed, gated_mlp, gated_mlp_packed

__all__ = ["act_mul", "act_mul_packed", "gated_mlp", "gated_mlp_packed"]
