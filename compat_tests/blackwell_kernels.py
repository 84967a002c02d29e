"""The kernels of the Blackwell backend, as tests compile, launch and judge them. Legend as in blackwell_forward.py."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fake_cuda
import numpy as np
import ptx_machine
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusepatch.kernels.gated_mlp.blackwell_configuration import (
    NARROW,
    SQUARE,
    WIDE,
    Backward,
    Forward,
    backward_configuration,
    forward_configuration,
)
from support import relative_error

needs_a_compiler = pytest.mark.skipif(fake_cuda.COMPILER is None, reason="no C compiler")

ARCHS = ["sm_100a", "sm_103a"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
Configuration = Forward | Backward
Build = Callable[..., tuple[Any, Path]]
EVERY = [
    configuration
    for dtype in (torch.bfloat16, torch.float16)
    for activation in ACTIVATIONS
    for second in (False, True)
    for configuration in (
        forward_configuration(dtype, activation, second, WIDE),
        forward_configuration(dtype, activation, second, NARROW),
        backward_configuration(dtype, activation, second, SQUARE),
    )
]
OFTEN = [
    forward_configuration(torch.bfloat16, "silu", True, WIDE),
    backward_configuration(torch.bfloat16, "silu", True, SQUARE),
    forward_configuration(torch.bfloat16, "silu", False, NARROW),
    forward_configuration(torch.float16, "gelu", True, NARROW),
    backward_configuration(torch.float16, "gelu", False, SQUARE),
    forward_configuration(torch.float16, "gelu", False, WIDE),
]


def named(configuration: Configuration) -> str:
    if isinstance(configuration, Forward):
        results = "h and gate_up" if configuration.keep_gate_up else "h"
    else:
        results = "d_gate_up and h" if configuration.want_h else "d_gate_up"
    return f"{configuration.dtype}-{configuration.activation}-{results}-{configuration.tile.columns}"


def kinds(often: int) -> list[Any]:
    """Two dtypes, three activations, three tiles, with and without the second result; all but a few are slow."""
    return [
        pytest.param(each, marks=[] if each in OFTEN[:often] else [pytest.mark.slow], id=named(each)) for each in EVERY
    ]


def builder(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """A kernel, once for all tests of a file, and the folder with its machine code."""

    @functools.cache
    def build(configuration: Configuration, arch: str = ARCHS[0]) -> tuple[Any, Path]:
        kernel = "blackwell_forward" if isinstance(configuration, Forward) else "blackwell_backward"
        module = importlib.import_module(f"fusepatch.kernels.gated_mlp.{kernel}")
        folder = tmp_path_factory.mktemp("kernel")
        options = f"--enable-tvm-ffi --gpu-arch {arch} --keep-cubin --keep-ptx --dump-dir={folder} warnings{{nvvm}}"
        return module.build(configuration, options), folder

    return build


def shapes_of(configuration: Configuration, tokens: int, hidden: int, inner: int) -> dict[str, tuple[int, int]]:
    """Of every operand, in the order of the kernel's arguments; the last one may be absent."""
    if isinstance(configuration, Forward):
        weights = {"w_gate": (inner, hidden), "w_up": (inner, hidden)}
        shapes = {"x": (tokens, hidden), **weights, "h": (tokens, inner), "gate_up": (tokens, 2 * inner)}
        return {name: shape for name, shape in shapes.items() if configuration.keep_gate_up or name != "gate_up"}
    both = dict.fromkeys(("gate_up", "d_gate_up"), (tokens, 2 * inner))
    shapes = {"dout": (tokens, hidden), "w_down": (hidden, inner), **both, "h": (tokens, inner)}
    return {name: shape for name, shape in shapes.items() if configuration.want_h or name != "h"}


def operands(configuration: Configuration, tokens: int, hidden: int, inner: int) -> dict[str, Tensor]:
    """All of unit scale, results too, and the same each time."""
    generator = torch.Generator().manual_seed(tokens * hidden + inner)
    dtype = getattr(torch, configuration.dtype)
    return {
        name: (torch.randn(shape, generator=generator) * (hidden**-0.5 if name.startswith("w_") else 1.0)).to(dtype)
        for name, shape in shapes_of(configuration, tokens, hidden, inner).items()
    }


def results_of(configuration: Configuration) -> tuple[str, ...]:
    return ("h", "gate_up") if isinstance(configuration, Forward) else ("d_gate_up", "h")


def expected(configuration: Configuration, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """In fp64, with the roundings of reference.py and of the kernels."""
    act = ACTIVATIONS[configuration.activation]
    dtype = getattr(torch, configuration.dtype)
    exact = {name: tensor.double() for name, tensor in tensors.items()}
    if isinstance(configuration, Forward):
        gate_MI, up_MI = ((exact["x"] @ exact[name].T).to(dtype) for name in ("w_gate", "w_up"))
        h_MI = (act(gate_MI.double()) * up_MI.double()).to(dtype)
        return {"h": h_MI, "gate_up": torch.cat([gate_MI, up_MI], dim=1)}
    gate_MI, up_MI = (half.requires_grad_() for half in exact["gate_up"].chunk(2, dim=1))
    h_MI = act(gate_MI) * up_MI
    d_gate_MI, d_up_MI = torch.autograd.grad(h_MI, [gate_MI, up_MI], exact["dout"] @ exact["w_down"])
    return {"h": h_MI.detach().to(dtype), "d_gate_up": torch.cat([d_gate_MI, d_up_MI], dim=1).to(dtype)}


@dataclass(frozen=True)
class Call:
    """One launch of the exported kernel, and its operands."""

    configuration: Configuration
    program: ptx_machine.Program
    launched: fake_cuda.Launched
    memory: dict[int, Any]
    tensors: dict[str, Tensor]

    def run(self, seed: int, program: ptx_machine.Program | None = None) -> None:
        """Every CTA, one after the other."""
        for name in results_of(self.configuration):
            if name in self.tensors:
                self.tensors[name].fill_(float("nan"))
        blocks = self.launched.grid[0]
        for block in range(blocks):
            ptx_machine.Machine(
                program or self.program,
                self.launched.arguments,
                self.memory,
                block,
                blocks,
                self.configuration.dtype,
                seed * 1000 + block,
                self.launched.shared_bytes,
            ).run()

    def errors(self) -> dict[str, float]:
        """Of each result."""
        right = expected(self.configuration, self.tensors)
        return {name: relative_error(self.tensors[name], right[name]) for name in right if name in self.tensors}


Launch = Callable[..., Call]


def launcher(compiled: Build) -> Launch:
    """Exports a kernel and launches it under a CUDA runtime that launches nothing."""

    @functools.cache
    def loaded(configuration: Configuration) -> tuple[Any, Any, ptx_machine.Program]:
        kernel, folder = compiled(configuration)
        return *fake_cuda.load(kernel, folder), ptx_machine.parse(kernel.artifacts.PTX)

    def run(configuration: Configuration, tokens: int, hidden: int, inner: int, ctas: int) -> Call:
        start, launched, program = loaded(configuration)
        shapes = shapes_of(configuration, tokens, hidden, inner)
        tensors = operands(configuration, tokens, hidden, inner)
        at = {name: 0x7F1000000000 + index * 0x10000000 for index, name in enumerate(tensors)}
        given = [fake_cuda.tensor(at[name], shape, configuration.dtype) for name, shape in shapes.items()]
        start(*given, *[None] * (5 - len(given)), ctas)
        memory = {at[name]: tensor.view(torch.int16).numpy().view(np.uint16) for name, tensor in tensors.items()}
        return Call(configuration, program, launched(), memory, tensors)

    return run


def edited(ptx: str, pattern: str, replacement: Any, count: int = 0, flags: int = re.DOTALL) -> str:
    """With as many places as `count` says (0: all) changed, of which there must be one."""
    changed, places = re.subn(pattern, replacement, ptx, count=count, flags=flags)
    assert places, f"nothing to change: {pattern}"
    return changed
