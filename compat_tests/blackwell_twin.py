"""The Blackwell kernels' twin: the Triton kernels of dual_gemm.py, with their tiles, K step, order of tiles, roundings.

What the twin shows on a GPU that is here is that this way of cutting the work up, and of rounding, gives the right
numbers; of tcgen05, tensor memory and the pipelines it shows nothing.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from blackwell_kernels import Configuration, operands, results_of
from torch import Tensor

from fusepatch.kernels.cute.tile import WIDTH_K
from fusepatch.kernels.gated_mlp import dual_gemm
from fusepatch.kernels.gated_mlp.blackwell_configuration import Forward

BOUND = {"bfloat16": 6e-4, "float16": 1.5e-4}
"""Of an error against fp64 with the same roundings. Sums in another order round one value in thousands the other way,
which moves it by one in its last place; a rounding more or less than the kernels have moves half of all values."""


def tile_of(configuration: Configuration) -> dual_gemm.Tile:
    """How many warps there are is Triton's own affair."""
    tile = configuration.tile
    columns = configuration.half if isinstance(configuration, Forward) else tile.columns
    return dual_gemm.Tile(tile.rows, columns, warps=8, stages=tile.stages, depth=WIDTH_K, group=tile.group)


def run(
    configuration: Configuration,
    tokens: int,
    hidden: int,
    inner: int,
    device: torch.device,
    kernels: ModuleType = dual_gemm,
) -> dict[str, Tensor]:
    """Operands, and the results in their places, which lie in the middle of larger tensors and are NaN before.

    Complains where something besides them is written.
    """
    tensors = {name: t.to(device) for name, t in operands(configuration, tokens, hidden, inner).items()}
    around = {}
    for name in results_of(configuration):
        if name in tensors:
            around[name] = torch.full(
                (tokens + 2, tensors[name].shape[1]), 7.0, device=device, dtype=tensors[name].dtype
            )
            tensors[name] = around[name][1:-1].fill_(float("nan"))
    before = {name: t.clone() for name, t in tensors.items() if name not in around}
    how = kernels.Run(device, getattr(torch, configuration.dtype), configuration.activation, tile_of(configuration))
    if isinstance(configuration, Forward):
        reads = tensors["x"], tensors["w_gate"], tensors["w_up"]
        kernels._forward(how, *reads, (None, None), tensors["h"], tensors.get("gate_up"))
    else:
        reads = tensors["dout"], tensors["w_down"], tensors["gate_up"]
        kernels._backward(how, *reads, tensors["d_gate_up"], tensors.get("h"))
    for name, whole in around.items():
        assert (whole[0] == 7).all() and (whole[-1] == 7).all(), f"something is written beside {name}"
    assert all(torch.equal(tensors[name], t) for name, t in before.items()), "an operand was written to"
    return tensors


@dataclass(frozen=True)
class Fault:
    """What is put in the place of what, and whether the forward kernel has it, or the backward kernel."""

    right: str
    wrong: str
    forward: bool


FAULTS = {
    "gate is not rounded before the activation": Fault(
        "_activate(gate_rounded.to(tl.float32), activation)", "_activate(gate, activation)", forward=True
    ),
    "the last step of K is left out": Fault("range(0, hidden, DEPTH)", "range(0, hidden - DEPTH, DEPTH)", forward=True),
    "dh is rounded": Fault("(dh * up * derivative)", "(dh.to(d_gate_out.dtype) * up * derivative)", forward=False),
    "groups of tiles are as high at the edge": Fault("min(row_tiles - first, GROUP)", "GROUP", forward=False),
}


def broken(fault: str, folder: Path) -> ModuleType:
    """A copy of dual_gemm.py with a fault in it."""
    text, change = Path(dual_gemm.__file__).read_text(), FAULTS[fault]
    assert change.right in text, fault
    path = folder / f"dual_gemm_{list(FAULTS).index(fault)}.py"
    path.write_text(text.replace(change.right, change.wrong))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
