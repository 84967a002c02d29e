"""A training step of one gated MLP in a CUDA graph: what must hold of every backend that may be captured."""

from __future__ import annotations

import torch

import fusepatch


def assert_a_step_is_captured_and_replayed_after_warmup(mlp: torch.nn.Module, tokens: int, route: str) -> None:
    """Captured once after `warmup()` and one step, then replayed on other data: the bits of an eager step."""
    x = torch.randn(tokens, mlp.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert fusepatch.warmup(mlp, tokens).native == 1
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        mlp(x).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    mlp.zero_grad(set_to_none=True)
    x.grad = None
    (target,) = (each for each in fusepatch.status().targets if each.total("calls"))
    assert target.total("calls") == {route: 1}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mlp(x)
        out.sum().backward()
    (target,) = (each for each in fusepatch.status().targets if each.total("calls"))
    assert (target.total("calls"), target.total("captured")) == ({route: 1}, {route: 1})
    captured = [x.grad, *(parameter.grad for parameter in mlp.parameters())]
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        for grad in captured:
            grad.fill_(torch.nan)
    graph.replay()
    replayed = [out.clone(), *(grad.clone() for grad in captured)]
    x.grad = None
    mlp.zero_grad(set_to_none=True)
    fresh = mlp(x)
    fresh.sum().backward()
    expected = [fresh, x.grad, *(parameter.grad for parameter in mlp.parameters())]
    assert all(torch.equal(one, other) for one, other in zip(replayed, expected, strict=True))
