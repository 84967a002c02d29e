"""`EngramGate`: the module with the weights of both norms, and the example that wires lookup, projection and gate."""

from __future__ import annotations

import copy
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fusepatch.ops import EngramGate
from support import grads_of, relative_error

EXAMPLE = Path(__file__).parents[2] / "examples" / "engram_gate.py"


class TwoNorms(nn.Module):
    """The same as models write it: two RMS norms, each with its own weight, and the gate after them."""

    def __init__(self, streams: int, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.query_weight = nn.Parameter(torch.ones(streams, width))
        self.key_weight = nn.Parameter(torch.ones(streams, width))

    def forward(self, x: Tensor, kv: Tensor, token_mask: Tensor | None = None) -> Tensor:
        streams, width = x.shape[-2:]
        key, value = kv[..., : streams * width].unflatten(-1, (streams, width)), kv[..., streams * width :]
        norm = lambda t, weight: t * torch.rsqrt(t.square().mean(-1, keepdim=True) + self.eps) * weight
        dot = (norm(x, self.query_weight) * norm(key, self.key_weight)).sum(-1, keepdim=True) / math.sqrt(width)
        gated = torch.sigmoid(dot.abs().clamp_min(1e-6).sqrt().copysign(dot)) * value.unsqueeze(-2)
        return x + gated if token_mask is None else x + gated * token_mask[..., None, None]


@pytest.mark.parametrize("masked", [False, True])
def test_drops_in_for_two_norms_and_a_gate(masked: bool) -> None:
    torch.manual_seed(0)
    theirs = TwoNorms(3, 24, 1e-6).double()
    for weight in theirs.parameters():
        nn.init.normal_(weight, 1, 0.3)
    ours = EngramGate(3, 24, eps=1e-6, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    x, kv = torch.randn(2, 5, 3, 24).double().requires_grad_(), torch.randn(2, 5, 96).double().requires_grad_()
    mask = torch.rand(2, 5) < 0.6 if masked else None
    dout = torch.randn_like(x)
    found, expected = (
        copy.deepcopy(grads_of(lambda m=m: m(x, kv, mask), {"x": x, "kv": kv, **dict(m.named_parameters())}, dout))
        for m in (ours, theirs)
    )
    assert all(relative_error(found[name], expected[name]) < 1e-10 for name in expected)


def test_what_is_asked_for_is_used() -> None:
    x, kv = torch.zeros(2, 2, 8), torch.ones(2, 24)
    gate = EngramGate(2, 8, residual=False, zero_dot="sign")
    assert torch.equal(gate(x, kv), torch.full_like(x, 0.5))
    assert repr(gate) == "EngramGate(2, 8, eps=1e-20, residual=False, zero_dot='sign')"
    half = EngramGate(2, 8, dtype=torch.bfloat16)
    assert half(x.bfloat16(), kv.bfloat16()).dtype is torch.bfloat16
    assert EngramGate(2, 8, device="meta").query_weight.is_meta


@pytest.mark.parametrize("sizes", [(0, 8), (2, 0), (2, 12)])
def test_sizes_that_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="width a multiple of 8"):
        EngramGate(*sizes)


def test_the_example_learns_from_its_memory() -> None:
    example = runpy.run_path(str(EXAMPLE))
    losses = example["train"](40)
    assert losses[-1] < 0.1 * losses[0]


def test_without_the_gate_nothing_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngramGate, "forward", lambda self, x, kv, mask: x + 0 * kv.sum() + 0 * self.query_weight.sum())
    losses = runpy.run_path(str(EXAMPLE))["train"](40)
    assert losses[-1] > 0.7 * losses[0]


def test_the_example_runs_from_a_shell() -> None:
    command = [sys.executable, str(EXAMPLE), "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "last       loss" in done.stdout
