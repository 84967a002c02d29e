"""The activations that the CuTe DSL's epilogues share, for every 16-bit number: they rest on the GPU's approximate exp2
and reciprocal, which no model of ours has. compile_only/test_cute_activations.py shows that Blackwell's code is the
same as Hopper's.
"""

from __future__ import annotations

import math

import machine_code
import pytest
import torch
from torch import Tensor

from fusepatch.kernels.gated_mlp import choose

ARCHS = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
HERE = ARCHS.get(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None
pytestmark = [
    pytest.mark.gpu,
    machine_code.needs_the_dsl,
    pytest.mark.skipif(
        torch.cuda.is_available() and HERE is None, reason="the DSL's kernels are not made for this GPU"
    ),
]


def every_number() -> Tensor:
    """Finite bf16 and fp16 values up to fp16's largest, in fp32, as a multiple of 128 of them."""
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    values = torch.cat([words.view(torch.bfloat16).float(), words.view(torch.float16).float()])
    values = values[torch.isfinite(values) & (values.abs() <= torch.finfo(torch.float16).max)].unique()
    return torch.cat([values, values.new_zeros(-len(values) % 128)])


def exact(values: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """act and act' in fp64, as formulas that keep their accuracy in the tails."""
    x = values.double().requires_grad_()
    if activation == "silu":
        value = x * torch.sigmoid(x)
    elif activation == "gelu":
        value = x * 0.5 * torch.special.erfc(-x / math.sqrt(2))
    else:
        value = x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    (slope,) = torch.autograd.grad(value.sum(), x)
    return value.detach(), slope


def worst(found: Tensor, right: Tensor, values: Tensor) -> float:
    """The largest error, as a part of what is allowed: 2^-16 of the number, and 2^-21 of the terms that cancel in it,
    since erf's polynomial is good to 1.5e-7 and each step of fp32 to 2^-24."""
    allowed = 2**-16 * right.abs() + 2**-21 * (1 + values.double().abs()).clamp(max=64)
    return float(((found.double() - right).abs() / allowed).max())


@pytest.mark.parametrize("activation", choose.ACTIVATIONS)
def test_every_number(activation: str) -> None:
    activation_kernel = pytest.importorskip("activation_kernel")
    launch = activation_kernel.build(activation, f"--enable-tvm-ffi --gpu-arch {HERE}")
    values = every_number().cuda()
    results = torch.full((len(activation_kernel.ROWS), len(values)), float("nan"), device="cuda")
    launch(values, results, -math.log2(math.e))
    value, slope = exact(values, activation)
    assert torch.equal(results[0], results[1])  # the backward pass's h is the forward pass's
    assert worst(results[1], value, values) < 1
    assert worst(results[2], slope, values) < 1
    # What is off by little in the exponent is seen.
    launch(values, results, -math.log2(math.e) * (1 + 2**-12))
    assert worst(results[1], value, values) > 2
    assert worst(results[2], slope, values) > 2
