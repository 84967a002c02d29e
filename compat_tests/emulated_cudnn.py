"""cuDNN's backward pass of KDA on Hopper, played on a CPU: it reads and writes memory by address alone, as the kernels
do, and knows nothing of tensors. For tests of everything around it."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

from fusepatch.kernels.linear_attention import cudnn_hopper, reference
from fusepatch.kernels.linear_attention.problem import Call, Inputs

WIDTH = 128
CALL = Call(WIDTH**-0.5, state_v_first=True)
STREAM = 1234
WORKSPACE = 4096


def at(address: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """The memory at this address as a tensor."""
    assert address % 16 == 0, "the kernels read 16 bytes at once"
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    size = count * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype, count=count).view(shape)


class Emulated:
    """What `cudnn_hopper._frontend()` gives; `io` is the dtype of q, k, v and the output (bf16 on the device)."""

    def __init__(self, io: torch.dtype = torch.bfloat16) -> None:
        self.io = io
        self.launches: list[dict[str, Any]] = []
        self.loads = 0
        self.as_frontend = cudnn_hopper._Frontend(self.launch, lambda *sizes: WORKSPACE, self.load)

    def load(self, device: int) -> None:
        self.loads += 1

    def _inputs(self, a: dict[str, Any]) -> tuple[list[Tensor], Tensor]:
        tokens, heads, sequences = a["total_tokens"], a["n_heads"], a["n_seqs"]
        wide = (tokens, heads, WIDTH)
        q, k, v = (at(a[name], wide, self.io) for name in ("q", "k", "v"))
        g, beta = at(a["g"], wide), at(a["beta"], (tokens, heads))
        state = at(a["initial_state"], (sequences, heads, WIDTH, WIDTH))
        cu_seqlens = at(a["cu_seqlens"], (sequences + 1,), torch.int32)
        assert int(cu_seqlens[0]) == 0
        # What the kernels take for granted.
        assert float(k.float().norm(dim=-1).max()) < 1.01
        assert float(beta.min()) >= 0
        assert float(beta.max()) <= 1
        assert float(g.min()) >= -5
        assert float(g.max()) <= 0
        return [t.double() for t in (q, k, v, g, beta, state)], cu_seqlens

    def _run(self, leaves: list[Tensor], cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta, state = leaves
        inputs = Inputs(*(t.unsqueeze(0) for t in (q, k, v, g, beta)), initial_state=state, cu_seqlens=cu_seqlens)
        out, final = reference.run(CALL, inputs, True)
        assert final is not None
        return out.squeeze(0), final

    def launch(self, **a: Any) -> None:
        self.launches.append(a)
        at(a["workspace"], (WORKSPACE,), torch.uint8).fill_(255)
        leaves, cu_seqlens = self._inputs(a)
        with torch.enable_grad():
            leaves = [t.requires_grad_() for t in leaves]
            out, final = self._run(leaves, cu_seqlens)
        grad_out = at(a["dO"], tuple(out.shape), self.io).double()
        grad_final = at(a["d_final_state"], tuple(final.shape)).double()
        grads = torch.autograd.grad((out, final), leaves, (grad_out, grad_final))
        names = ("dq", "dk", "dv", "dg", "dbeta", "d_initial_state")
        for name, grad in zip(names, grads, strict=True):
            dtype = self.io if name in ("dq", "dk", "dv") else torch.float32
            at(a[name], tuple(grad.shape), dtype).copy_(grad)
