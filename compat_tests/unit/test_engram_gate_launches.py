"""How the Engram gate's Triton kernels are launched: compiled once for a kind of call, as Triton would for each call.

Kernels that note their calls stand in for those that need a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from fusepatch.kernels.engram_gate import choose, op, sizes
from fusepatch.kernels.engram_gate import triton_kernels as kernels

S, D = 2, 16
TRITON = choose.BACKENDS[0]


def specialization(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """All that Triton looks at in a call to find the compiled kernel."""
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
    _, found, left = bind(*arguments, **options)
    return tuple(found), tuple(left.items())


@dataclasses.dataclass(eq=False)
class Compiled:
    """What Triton compiles a kernel to."""

    serves: Any
    launches: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)

    def _init_handles(self) -> None:
        pass

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.launches.append((grid, arguments))


@dataclasses.dataclass(eq=False)
class Kernel:
    """A kernel before that."""

    real: Any
    compiled: list[Compiled] = dataclasses.field(default_factory=list)
    by_triton: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    """Launches that Triton was left to find the compiled kernel for."""

    def run(self, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Compiled:
        assert warmup
        self.compiled.append(Compiled(specialization(self.real, arguments, options)))
        return self.compiled[-1]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: self.by_triton.append((grid, arguments))


NAMES = ("_forward_kernel", "_backward_kernel", "_weight_kernel")
CACHES = (kernels._forward_launch, kernels._backward_launch, kernels._sum_launch)


@pytest.fixture
def stood_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-ins by name. Each launch is held to what was compiled."""
    found = {name: Kernel(getattr(kernels, name)) for name in NAMES}
    right = kernels._run

    def run(launch: Any, programs: int, tensors: Any, numbers: Any, compile_only: bool) -> None:
        by_triton = len(launch.kernel.by_triton)
        right(launch, programs, tensors, numbers, compile_only)
        if not compile_only and len(launch.kernel.by_triton) == by_triton:
            arguments = (*tensors, *numbers, *launch.constants)
            assert len(arguments) == len(launch.kernel.real.params)
            assert specialization(launch.kernel.real, arguments, launch.options) == launch.compiled.serves
            addresses = (*(t.data_ptr() for t in tensors), *numbers, *launch.constants)
            assert launch.compiled.launches[-1] == ((programs, 1, 1), addresses)

    monkeypatch.setattr(kernels, "_compiled", set())
    monkeypatch.setattr(kernels, "_run", run)
    for name, kernel in found.items():
        monkeypatch.setattr(kernels, name, kernel)
    for cache in CACHES:
        cache.cache_clear()
    yield found
    for cache in CACHES:
        cache.cache_clear()


def count(stood_in: dict[str, Kernel]) -> tuple[int, ...]:
    return tuple(len(kernel.compiled) for kernel in stood_in.values())


def call(
    tokens: int = 5, streams: int = S, width: int = D, dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype = torch.float32, residual: bool = True, zero_dot: str = "copysign",
    masked: bool = False, rounded: torch.dtype | None = None, wanted: tuple[bool, bool, bool] = (True, True, True),
    change: Callable[[Tensor], Tensor] = lambda t: t,
) -> None:  # fmt: skip
    """Both passes, of x and kv as `change` lays them out."""
    x = change(torch.zeros(tokens, streams, width, dtype=dtype))
    kv = change(torch.zeros(tokens, (streams + 1) * width, dtype=dtype))
    leaves = [x, kv, torch.zeros(streams, width, dtype=weight_dtype)]
    for leaf, wants in zip(leaves, wanted, strict=True):
        leaf.requires_grad_(wants)
    mask = torch.ones(tokens + 3, dtype=torch.bool)[3:] if masked else None  # on no boundary
    norms = (torch.zeros(streams, width), torch.zeros(streams, width, dtype=rounded)) if rounded else None
    out = op.run_engram_gate(
        op.Call(TRITON, 1e-6, residual, zero_dot), leaves[0], leaves[1], None, leaves[2], mask, norms
    )
    if any(wanted):
        torch.autograd.grad(out, [leaf for leaf in leaves if leaf.requires_grad], torch.zeros_like(out))


KINDS: dict[str, dict[str, Any]] = {
    "": {},
    "streams": {"streams": 3},
    "width": {"width": 24},
    "dtype": {"dtype": torch.float16},
    "weight": {"weight_dtype": torch.bfloat16},
    "gated": {"residual": False},
    "sign": {"zero_dot": "sign"},
    "masked": {"masked": True},
    "rounded": {"rounded": torch.float32},
    "rounded, with a weight of another dtype": {"rounded": torch.float16},
}


def test_each_kind_of_call_has_its_own_kernels(stood_in: dict[str, Kernel]) -> None:
    for _ in range(2):
        for kind in KINDS.values():
            call(**kind)
    forward = stood_in["_forward_kernel"].compiled
    assert len(forward) == len({each.serves for each in forward}) == len(KINDS)
    assert not any(kernel.by_triton for kernel in stood_in.values())


LAYOUTS: dict[str, dict[str, Any]] = {
    "one token": {"tokens": 1},
    "a token at any distance": {"tokens": 1, "change": lambda t: t.as_strided(t.shape, (12345, *t.stride()[1:]))},
    "sixteen": {"tokens": 16},
    "many": {"tokens": 3000},
    "rows of a wider tensor": {"change": lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]]},
    "on no boundary": {"change": lambda t: torch.cat((t, t), -1)[..., 3 : 3 + t.shape[-1]]},
}
WANTED = [(True, False, False), (False, True, False), (False, False, True), (True, True, False), (False, False, False)]


def test_nothing_else_compiles_again(stood_in: dict[str, Kernel]) -> None:
    """All that a graph may capture after a first forward pass of the kind."""
    call(wanted=(False, False, False))
    first = count(stood_in)
    assert first == (1, 2, 1)
    for layout in LAYOUTS.values():
        call(**layout)
    for wanted in WANTED:
        call(wanted=wanted)
    assert count(stood_in) == first
    assert kernels.is_compiled(torch.device("cpu"), torch.bfloat16, torch.float32, S, D, True, "copysign", False, False)


def test_a_plan_compiles_all_that_it_launches(stood_in: dict[str, Kernel]) -> None:
    kernels.compile_for(
        torch.device("cpu"), 5, torch.bfloat16, torch.float32, S, D, True, "copysign", True
    )  # fmt: skip
    first = count(stood_in)
    assert first == (1, 2, 1)
    assert not any(each.launches for kernel in stood_in.values() for each in kernel.compiled)
    call(masked=True)
    assert count(stood_in) == first


def test_numbers_beyond_32_bits_are_left_to_triton(stood_in: dict[str, Kernel]) -> None:
    """They are arguments of another type."""
    call()
    far = kernels.ROW_UNIT * 2**31
    call(tokens=1, change=lambda t: t.as_strided(t.shape, (far, *t.stride()[1:])))
    assert len(stood_in["_forward_kernel"].by_triton) == 1
    assert len(stood_in["_backward_kernel"].by_triton) == 1
    ((grid, arguments),) = stood_in["_forward_kernel"].by_triton
    assert grid == (1,) and 2**31 in [each for each in arguments if not isinstance(each, Tensor)]


def test_each_device_has_its_own() -> None:
    shape = sizes.shape_of(S, D)
    kind = (torch.bfloat16, torch.float32, S, D, True, "copysign", False, None, shape)
    devices = [torch.device("cuda", index) for index in (0, 1)]
    assert kernels._forward_launch(devices[0], *kind) is not kernels._forward_launch(devices[1], *kind)
    assert kernels._forward_launch(devices[0], *kind) is kernels._forward_launch(devices[0], *kind)
