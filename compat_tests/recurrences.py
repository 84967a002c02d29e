"""Output, state and every gradient of KDA and the gated delta rule: by a kernel, a library, or the definition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fusepatch.kernels.linear_attention import reference
from fusepatch.kernels.linear_attention.problem import Call, Inputs
from support import relative_error

Run = Callable[..., tuple[Tensor, Tensor | None]]


def errors(run: Run, call: Call, given: Mapping[str, Tensor], final: bool, **more: Any) -> dict[str, float]:
    """Of `run(call, inputs, output_final_state)` in fp32, against the definition in fp64."""
    results = []
    for run_op, dtype in ((run, torch.float32), (reference.run, torch.float64)):
        leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in given.items()}
        outs = [t for t in run_op(call, Inputs(**leaves, **more), final) if t is not None]
        torch.manual_seed(2)
        incoming = [torch.randn(t.shape).to(dtype) for t in outs]
        grads = torch.autograd.grad(outs, list(leaves.values()), incoming)
        results.append(dict(zip(("out", "state"), outs, strict=False)) | dict(zip(leaves, grads, strict=True)))
    assert results[0].keys() == results[1].keys()
    return {name: relative_error(results[0][name], expected) for name, expected in results[1].items()}


def results_on_gpu(
    run: Run, given: Mapping[str, Tensor], dtype: torch.dtype | None = None, **options: Any
) -> dict[str, Tensor]:
    """Of `run(**tensors, **options, output_final_state=True)`, in `dtype` where one is given."""
    leaves = {name: t.detach().to(dtype or t.dtype).requires_grad_() for name, t in given.items()}
    out, state = run(**leaves, **options, output_final_state=True)
    assert state is not None
    generator = torch.Generator("cuda").manual_seed(1)
    incoming = [torch.randn(t.shape, generator=generator, device="cuda").bfloat16().to(t.dtype) for t in (out, state)]
    grads = torch.autograd.grad((out, state), list(leaves.values()), incoming)
    return {"out": out.detach(), "state": state.detach(), **dict(zip(leaves, grads, strict=True))}
