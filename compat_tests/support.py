"""Shared by the tests: error measures, and small models of the real libraries."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn

from fusepatch.decline import Reason

PROVOKED_BY_LINEAR_ATTENTION = {
    Reason.UNKNOWN_ARGUMENT,
    Reason.OPTION,
    Reason.UNBOUNDED,
    Reason.HEAD_SIZE,
    Reason.NO_GRADIENT,
    Reason.DISPATCH_DISABLED,
    Reason.HUB_KERNEL,
    Reason.LIBRARY_TOO_OLD,
    Reason.INDEX_RANGE,
}
"""Reasons that only unit/test_linear_attention_shim.py provokes; the rest are those of unit/test_declines.py."""


def needs_transformers(release: str) -> pytest.MarkDecorator:
    """Skips a test, or a case of it, that is about what an older transformers than `release` may not have."""
    here = importlib.metadata.version("transformers")
    reason = f"about transformers {release}, and this is {here}"
    return pytest.mark.skipif(Version(here) < Version(release), reason=reason)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected|_2 / |expected|_2 in fp64; infinite where anything is not finite."""
    actual, expected = actual.detach().double(), expected.detach().double()
    assert actual.shape == expected.shape
    if not torch.isfinite(actual).all():
        return float("inf")
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def is_within_parity(patched: float, stock: float) -> bool:
    """The parity bound of the design: the error of what we patched against that of the unpatched library."""
    return patched <= 1.25 * stock + 1e-4


def grads_of(run: Callable[[], Tensor], tensors: dict[str, Tensor], dout: Tensor | None = None) -> dict[str, Tensor]:
    """Output and gradients of `run()`: {"out": ..., name: gradient} for each of `tensors` that requires one."""
    for tensor in tensors.values():
        tensor.grad = None
    out = run()
    out.backward(torch.ones_like(out) if dout is None else dout)
    found = {name: t.grad for name, t in tensors.items() if t.requires_grad}
    assert all(grad is not None for grad in found.values())
    return {"out": out.detach(), **found}


def tiny_llama(dtype: torch.dtype = torch.float32, layers: int = 2, **overrides: object) -> nn.Module:
    """A Llama of transformers with unit-scale activations: hidden 64, intermediate 96, vocabulary 128."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **{
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 128,
            "initializer_range": 0.1,
            **overrides,
        }
    )
    return LlamaForCausalLM(config).to(dtype)


def tiny_llama_mlp(dtype: torch.dtype = torch.float32, **overrides: object) -> nn.Module:
    """One LlamaMLP: hidden 64, intermediate 96."""
    return tiny_llama(dtype, layers=1, **overrides).model.layers[0].mlp
