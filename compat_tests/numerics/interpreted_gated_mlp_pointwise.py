"""The Triton pointwise kernels, run by Triton's interpreter on a CPU, against the reference in fp64.

Collected by test_interpreted.py, in a process of its own.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusepatch.kernels.gated_mlp import pointwise, reference
from support import relative_error

LAYOUTS = {
    "one": lambda: torch.randn(1, 1),
    "flat": lambda: torch.randn(7, 33),
    "wide": lambda: torch.randn(2, 2500),
    "half of packed": lambda: torch.randn(3, 5, 80)[..., 40:],
    "transposed rows": lambda: torch.randn(5, 3, 40).transpose(0, 1),
    "three strides": lambda: torch.randn(4, 3, 2, 5).permute(2, 1, 0, 3),
    "columns": lambda: torch.randn(6, 4)[:, 1:2],
    "no unit stride": lambda: torch.randn(8, 4).t(),
    "expanded": lambda: torch.randn(1, 8).expand(6, 8),
    "no rows": lambda: torch.randn(0, 8),
}
# The interpreter truncates to bf16 where the hardware rounds to nearest: twice the error, and checked on the GPU.
BOUND = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 8e-3}


def like(layout: str, dtype: torch.dtype) -> Tensor:
    base = LAYOUTS[layout]()
    if layout == "expanded":
        return base[:1].to(dtype).expand(6, 8)
    return torch.empty_strided(base.shape, base.stride(), dtype=dtype).copy_(base)


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_and_backward(layout: str, activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, up, dh = (like(layout, dtype) for _ in range(3))
    wide = [tensor.double() for tensor in (dh, gate, up)]
    before = [tensor.clone() for tensor in (gate, up, dh)]

    h = pointwise.act_mul(gate, up, activation)
    assert h.dtype is dtype
    assert h.is_contiguous()
    if gate.numel():
        assert relative_error(h, reference.act_mul(*wide[1:], activation)) < BOUND[dtype]

    for wanted in ((True, True), (True, False), (False, True)):
        ours = [torch.empty(gate.shape, dtype=dtype) if want else None for want in wanted]
        exact = [torch.empty(gate.shape, dtype=torch.float64) if want else None for want in wanted]
        pointwise.act_mul_backward(dh, gate, up, activation, d_gate=ours[0], d_up=ours[1])
        reference.act_mul_backward(*wide, activation, d_gate=exact[0], d_up=exact[1])
        for actual, expected in zip(ours, exact, strict=True):
            if actual is not None and actual.numel():
                assert relative_error(actual, expected) < BOUND[dtype]
    assert all(torch.equal(a, b) for a, b in zip((gate, up, dh), before, strict=True)), "an input was written to"


def test_gradients_into_the_halves_of_one_tensor() -> None:
    gate_up, dh = torch.randn(6, 2, 48), torch.randn(6, 2, 24)
    d_gate_up = torch.empty(6, 2, 48)
    pointwise.act_mul_backward(dh, *gate_up.chunk(2, -1), "silu", d_gate=d_gate_up[..., :24], d_up=d_gate_up[..., 24:])
    leaf = gate_up.clone().requires_grad_()
    gate, up = leaf.chunk(2, -1)
    (torch.nn.functional.silu(gate) * up).backward(dh)
    assert relative_error(d_gate_up, leaf.grad) < 1e-6


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_extreme_values_are_those_of_pytorch(activation: str) -> None:
    gate = torch.tensor([[-300.0, -88.0, -20.0, -0.0, 0.0, 20.0, 88.0, 300.0]])
    up = torch.ones_like(gate)
    expected = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
    }[activation](gate)
    assert torch.allclose(pointwise.act_mul(gate, up, activation), expected, rtol=1e-5, atol=1e-30)
    d_gate = torch.empty_like(gate)
    pointwise.act_mul_backward(up, gate, up, activation, d_gate=d_gate, d_up=None)
    assert torch.isfinite(d_gate).all()


def test_compiled_means_that_this_size_ran() -> None:
    gate = torch.randn(11, 8)
    size = {"device": gate.device, "dtype": gate.dtype, "activation": "silu", "tokens": 11, "inner": 8, "packed": False}
    assert not pointwise.is_compiled(**size)
    pointwise.act_mul(gate, gate, "silu")
    assert pointwise.is_compiled(**size)
    for other in ({"activation": "gelu"}, {"tokens": 12}, {"inner": 16}, {"packed": True}):
        assert not pointwise.is_compiled(**{**size, **other})
