"""What the benchmark of linear attention runs: KDA and the gated delta rule, alone and in FLA's layer.

Tensors: B batch, T tokens, H heads, of q and k as of v, K = V = 128.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusepatch.kernels.linear_attention import arguments, reference
from fusepatch.kernels.relative_error import relative_error

from .cases import three_sizes

WIDTH = 128
SCOPES = ("op", "layer")
_CHECKED_TOKENS = 256


@dataclass(frozen=True)
class Shape:
    """Batch, tokens, heads of 128."""

    batch: int
    tokens: int
    heads: int

    def __str__(self) -> str:
        return f"B{self.batch}_T{self.tokens}_H{self.heads}_D{WIDTH}"


def parse_shape(word: str) -> Shape:
    """`B,T,H`. Raises ValueError for anything else."""
    return Shape(*three_sizes(word, "is not B,T,H such as 4,2048,16"))


SHAPES = (Shape(1, 8192, 32), Shape(4, 2048, 16))
TINY = (Shape(1, 5, 1),)


# ------------------------------------------------------------------------------------------------------------ the ops

Normal = Callable[..., Tensor]
"""Takes sizes, and `to`, a dtype; bf16 where none is given."""


@dataclass(frozen=True, eq=False)
class Op:
    """A function of FLA, and the layer that calls it."""

    name: str
    function: str
    per_channel: bool
    """Whether the gate is KDA's, one per channel of a key."""
    options: Mapping[str, Any]
    """With which the function is called where it is timed alone."""
    inputs: Callable[[Normal, Shape], dict[str, Tensor]]
    layer: str
    layer_options: Mapping[str, Any]

    def chunk(self) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """FLA's function, which asks its registry of backends."""
        found: Callable[..., tuple[Tensor, Tensor | None]] = getattr(
            importlib.import_module(f"fla.ops.{self.name}"), self.function
        )
        return found


def _kda_inputs(normal: Normal, shape: Shape) -> dict[str, Tensor]:
    heads = shape.heads
    return {
        **{name: normal(shape.batch, shape.tokens, heads, WIDTH) for name in ("q", "k", "v", "g")},
        "beta": normal(shape.batch, shape.tokens, heads),
        "A_log": 0.3 * normal(heads, to=torch.float32),
        "dt_bias": 0.3 * normal(heads * WIDTH, to=torch.float32),
    }


def _gated_delta_rule_inputs(normal: Normal, shape: Shape) -> dict[str, Tensor]:
    """The decay is that of a new layer: rates up to 16, time steps of 0.001 to 0.1."""
    batch, tokens, heads = shape.batch, shape.tokens, shape.heads

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.special.ndtr(normal(heads, to=torch.float32))

    found = {name: normal(batch, tokens, heads, WIDTH) for name in ("q", "k", "v")}
    bias = torch.log(torch.expm1(torch.exp(uniform(math.log(1e-3), math.log(0.1)))))
    raw = 0.5 * normal(batch, tokens, heads, to=torch.float32)
    found["g"] = -uniform(0.0, 16.0) * F.softplus(raw + bias)
    found["beta"] = torch.sigmoid(normal(batch, tokens, heads))
    return found


OPS: Mapping[str, Op] = {
    op.name: op
    for op in (
        # As FLA's layer calls it, with a gate that the kernels can be right for.
        Op(
            "kda",
            "chunk_kda",
            True,
            {
                "use_qk_l2norm_in_kernel": True,
                "use_gate_in_kernel": True,
                "use_beta_sigmoid_in_kernel": True,
                "safe_gate": True,
                "lower_bound": -5.0,
                "state_v_first": True,
            },
            _kda_inputs,
            "KimiDeltaAttention",
            {"safe_gate": True, "lower_bound": -5.0},
        ),
        # As the models of transformers call it: what every arm can serve. FLA's layer leaves the gate to the kernel.
        Op(
            "gated_delta_rule",
            "chunk_gated_delta_rule",
            False,
            {"use_qk_l2norm_in_kernel": True},
            _gated_delta_rule_inputs,
            "GatedDeltaNet",
            {"expand_v": 1.0},
        ),
    )
}


@dataclass(frozen=True)
class Case:
    """One shape of an op, in one surrounding."""

    op: Op
    shape: Shape
    scope: str
    device: str = "cuda"

    def __str__(self) -> str:
        # KDA was first, and its rows bear no name.
        words = [] if self.op.name == "kda" else [self.op.name]
        return "_".join([*words, str(self.shape), *([] if self.scope == "op" else [self.scope])])


# ---------------------------------------------------------------------------------------------------------- made ready


@dataclass(frozen=True, eq=False)
class Built:
    """A case made ready: `run()` is a forward pass on the leaves."""

    run: Callable[[], Tensor]
    leaves: dict[str, Tensor]
    dout: Tensor

    def step(self) -> dict[str, Tensor]:
        """Output and every gradient."""
        out = self.run()
        grads = torch.autograd.grad(out, list(self.leaves.values()), self.dout)
        return {"out": out.detach(), **dict(zip(self.leaves, grads, strict=True))}


def inputs(op: Op, shape: Shape, device: str) -> dict[str, Tensor]:
    """Random inputs, the same each time."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int, to: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device).to(to)

    return op.inputs(normal, shape)


def build(case: Case, *, trains: bool = True) -> Built:
    """The case's op or layer with random numbers; without gradients, nothing of it requires one."""
    op, shape = case.op, case.shape
    if case.scope == "op":
        leaves = {name: t.requires_grad_(trains) for name, t in inputs(op, shape, case.device).items()}
        function = op.chunk()
        return Built(lambda: function(**leaves, **op.options)[0], leaves, torch.randn_like(leaves["v"].detach()))
    torch.manual_seed(0)
    hidden = shape.heads * WIDTH
    layer: nn.Module = getattr(importlib.import_module("fla.layers"), op.layer)(
        hidden_size=hidden, head_dim=WIDTH, num_heads=shape.heads, **op.layer_options
    )
    layer = layer.to(case.device, torch.bfloat16).requires_grad_(trains)
    x = torch.randn(shape.batch, shape.tokens, hidden, device=case.device, dtype=torch.bfloat16).requires_grad_(trains)
    return Built(lambda: layer(x)[0], {"x": x, **dict(layer.named_parameters())}, torch.randn_like(x.detach()))


# ----------------------------------------------------------------------------------------------- against the definition


def errors(op: Op, shape: Shape, device: str) -> dict[str, float]:
    """Relative L2 of output and gradients against fp64, over the first tokens of one row, by whoever computes now."""
    first = Shape(1, min(_CHECKED_TOKENS, shape.tokens), shape.heads)
    expected = _by_definition(op, first, device)
    actual = _results(op, first, device, op.chunk(), None)
    return {name: error(actual[name], tensor) for name, tensor in expected.items()}


@functools.lru_cache(maxsize=4)
def _by_definition(op: Op, shape: Shape, device: str) -> dict[str, Tensor]:
    def definition(output_final_state: bool, **given: Any) -> tuple[Tensor, Tensor | None]:
        request = arguments.read(op.per_channel, **given)
        assert isinstance(request, arguments.Request), request
        return reference.run(request.call, request.inputs, output_final_state)

    return _results(op, shape, device, definition, torch.float64)


def _results(
    op: Op, shape: Shape, device: str, run: Callable[..., tuple[Tensor, Any]], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    given = inputs(op, shape, device)
    dout = torch.randn(given["v"].shape, generator=torch.Generator(device).manual_seed(1), device=device).bfloat16()
    leaves = {name: t.detach().to(dtype or t.dtype).requires_grad_() for name, t in given.items()}
    out, _ = run(**leaves, **op.options, output_final_state=False)
    grads = torch.autograd.grad(out, list(leaves.values()), dout.to(out.dtype))
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative L2; infinite where it is not a number."""
    found = relative_error(actual, expected)
    return found if found == found else float("inf")
