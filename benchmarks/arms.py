"""The arms: who solves a case, what they need, and how each is called. One function and one record each.

Every arm gets the same tensors. What a peer wants in another layout is repacked while it is built, outside of what is
timed, and its gradients are brought back to the stock layout before they are compared.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusepatch
from fusepatch import catalogue, ledger
from fusepatch.decline import Route
from fusepatch.kernels.gated_mlp import choose
from fusepatch.patch import Switch
from fusepatch.shims import hf_gated_mlp

from .cases import Case
from .data import Data

Gradients = dict[str, Tensor]


def _nothing() -> str:
    return ""


@dataclass(frozen=True, eq=False)
class Built:
    """An arm made ready for one case."""

    forward: Callable[[Tensor], Tensor]
    parameters: tuple[Tensor, ...]
    """The leaves whose `.grad` a backward pass fills."""
    gradients: Callable[[], Gradients]
    """Those gradients, as `gate`, `up` and `down` of the stock layout."""
    note: Callable[[], str] = _nothing
    """What to say of the calls made since it was built."""


@dataclass(frozen=True, eq=False)
class Arm:
    """One record per arm."""

    name: str
    what: str
    build: Callable[[Case, Data], Built]
    packages: tuple[str, ...] = ()
    """What must be importable besides torch and transformers."""
    devices: tuple[str, ...] = ("cuda",)
    capability: tuple[int, int] = (0, 0)
    """The least compute capability."""
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    activations: tuple[str, ...] = ("silu", "gelu_tanh")
    layouts: tuple[str, ...] = ("separate",)
    context: Callable[[Case], AbstractContextManager[Any]] = lambda case: contextlib.nullcontext()
    """What its calls run in."""
    stacks: bool = True
    """Whether eight of it can be stacked: what the memory of a model is judged by."""
    compiles: bool = False
    """Compiles for long, or may crash: tried in a process of its own first, which also fills the caches on disk."""
    shares: Callable[[Case], Hashable] = lambda case: case
    """Cases of one value share what they compile: only the first of them is tried."""
    apart: bool = False
    """Each of those that are tried has a process of its own, since one after the other takes too long."""
    tunes: bool = False
    """That process measures candidates and keeps the result on disk, so it must have the GPU to itself."""
    by_default: bool = True


def why_unavailable(arm: Arm, case: Case) -> str | None:
    """What keeps an arm from solving a case, as far as can be told without running it."""
    if case.device not in arm.devices:
        return f"needs a {' or '.join(arm.devices)} device"
    missing = [package for package in arm.packages if importlib.util.find_spec(package) is None]
    if missing:
        return f"no package {', '.join(missing)}"
    if case.dtype not in arm.dtypes:
        return f"does not take {case.dtype}"
    if case.activation not in arm.activations:
        return f"does not know {case.activation}"
    if case.layout not in arm.layouts:
        return f"has no arm for {case.layout} weights"
    if case.device == "cuda" and torch.cuda.get_device_capability() < arm.capability:
        return f"needs compute capability {arm.capability[0]}.{arm.capability[1]}"
    return None


# -------------------------------------------------------------------------------------------- Hugging Face modules

_HF_NAME = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}


def _hf_module(case: Case, data: Data) -> nn.Module:
    """LlamaMLP, GemmaMLP or Phi3MLP of transformers, as a model of that layout and activation has it."""
    sizes = {"hidden_size": case.shape.hidden, "intermediate_size": case.shape.inner}
    config = {**sizes, "hidden_act": _HF_NAME[case.activation]}
    with torch.device("meta"):
        if case.layout == "packed":
            phi3 = importlib.import_module("transformers.models.phi3.modeling_phi3")
            module: Any = phi3.Phi3MLP(phi3.Phi3Config(**config, pad_token_id=0))
        elif case.activation == "silu":
            llama = importlib.import_module("transformers.models.llama.modeling_llama")
            module = llama.LlamaMLP(llama.LlamaConfig(**config))
        else:
            gemma = importlib.import_module("transformers.models.gemma.modeling_gemma")
            module = gemma.GemmaMLP(gemma.GemmaConfig(**config))
    if case.layout == "packed":
        module.gate_up_proj.weight = nn.Parameter(torch.cat([data.gate, data.up]))
    else:
        _set_gate_and_up(module, data)
    module.down_proj.weight = nn.Parameter(data.down)
    assert all(parameter.device.type == case.device for parameter in module.parameters())
    return module


def _set_gate_and_up(module: Any, data: Data) -> None:
    module.gate_proj.weight = nn.Parameter(data.gate)
    module.up_proj.weight = nn.Parameter(data.up)


def _of_module(module: Any, forward: Callable[[Tensor], Tensor], note: Callable[[], str] = _nothing) -> Built:
    """From a module with the projections of transformers, separate or packed."""

    def gradients() -> Gradients:
        down = module.down_proj.weight.grad
        if hasattr(module, "gate_up_proj"):
            return _concatenated(module.gate_up_proj.weight, module.down_proj.weight)
        return {"gate": module.gate_proj.weight.grad, "up": module.up_proj.weight.grad, "down": down}

    return Built(forward, tuple(module.parameters()), gradients, note)


def _concatenated(gate_up: Tensor, down: Tensor) -> Gradients:
    """The gradients where the gate's rows come first and then those of up."""
    assert gate_up.grad is not None and down.grad is not None
    gate, up = gate_up.grad.chunk(2)
    return {"gate": gate, "up": up, "down": down.grad}


def _interleaved(gate_up: Tensor, down: Tensor) -> Gradients:
    """The gradients where rows of gate and up alternate."""
    assert gate_up.grad is not None and down.grad is not None
    return {"gate": gate_up.grad[0::2], "up": gate_up.grad[1::2], "down": down.grad}


def _eager(case: Case, data: Data) -> Built:
    module = _hf_module(case, data)
    return _of_module(module, module)


def _compile(case: Case, data: Data) -> Built:
    module = _hf_module(case, data)
    return _of_module(module, torch.compile(module))


def _liger(case: Case, data: Data) -> Built:
    """As `apply_liger_kernel_to_*(model=...)` patches a built module: its own forward, on the instance."""
    module = _hf_module(case, data)
    swiglu = importlib.import_module("liger_kernel.transformers.swiglu")
    if case.layout == "separate" and case.activation == "silu":
        cls = swiglu.LigerSwiGLUMLP
    elif case.layout == "separate":
        cls = importlib.import_module("liger_kernel.transformers.geglu").LigerGEGLUMLP
    elif case.activation == "silu":
        cls = swiglu.LigerPhi3SwiGLUMLP
    else:
        raise NotImplementedError(f"Liger patches no class with packed weights and {case.activation}")
    module.forward = cls.forward.__get__(module)
    return _of_module(module, module)


# ------------------------------------------------------------------------------------------------------ other peers


def _fla(case: Case, data: Data) -> Built:
    gated_mlp = importlib.import_module("fla.modules.mlp").GatedMLP
    with torch.device("meta"):
        module = gated_mlp(case.shape.hidden, intermediate_size=case.shape.inner, hidden_act="swish")
    _set_gate_and_up(module, data)
    module.down_proj.weight = nn.Parameter(data.down)
    return _of_module(module, module)


_QUACK_NAME = {"silu": "swiglu", "gelu_tanh": "geglu"}


def _quack(case: Case, data: Data, *, interleaved: bool, tuned: bool) -> Built:
    """`quack.mlp.mlp_func`, what `quack.mlp.MLP` calls where it does not fall back to plain PyTorch."""
    mlp_func = importlib.import_module("quack.mlp").mlp_func
    if interleaved:
        gate_up = nn.Parameter(torch.stack([data.gate, data.up], dim=1).flatten(0, 1))
    else:
        gate_up = nn.Parameter(torch.cat([data.gate, data.up]))
    down = nn.Parameter(data.down)

    def forward(x: Tensor) -> Tensor:
        out: Tensor = mlp_func(
            x, gate_up, down, activation=_QUACK_NAME[case.activation], tuned=tuned, concat_layout=not interleaved
        )
        return out

    return Built(forward, (gate_up, down), partial(_interleaved if interleaved else _concatenated, gate_up, down))


def _flash_swiglu_mlp(case: Case, data: Data) -> Built:
    cls = importlib.import_module("flash_swiglu_mlp").FlashSwiGLUMLP
    module = cls(case.shape.hidden, case.shape.inner, device="meta", dtype=case.dtype)
    _set_gate_and_up(module, data)
    module.down_proj.weight = nn.Parameter(data.down)
    return _of_module(module, module)


def _cudnn(case: Case, data: Data) -> Built:
    swiglu_mlp = importlib.import_module("cudnn.gemm").swiglu_mlp
    weights = tuple(nn.Parameter(weight) for weight in (data.gate, data.up, data.down))
    gate, up, down = weights

    def forward(x: Tensor) -> Tensor:
        out: Tensor = swiglu_mlp(x, gate, up, down)
        return out

    def gradients() -> Gradients:
        assert gate.grad is not None and up.grad is not None and down.grad is not None
        return {"gate": gate.grad, "up": up.grad, "down": down.grad}

    return Built(forward, weights, gradients)


# -------------------------------------------------------------------------------------------------------- the floor


class _FloorFunction(torch.autograd.Function):
    """The GEMMs of a step alone. What lies between them was computed before: h, and the gradient of [gate | up]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, h: Tensor, d_gate_up: Tensor) -> Tensor:
        x_MH = x.flatten(0, -2)
        F.linear(x_MH, gate_up)
        ctx.save_for_backward(x, gate_up, down, h, d_gate_up)
        return F.linear(h, down).view(x.shape)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_up, down, h, d_gate_up = ctx.saved_tensors
        dout_MH = dout.flatten(0, -2)
        torch.mm(dout_MH, down)
        d_down = torch.mm(dout_MH.t(), h)
        dx = torch.mm(d_gate_up, gate_up)
        d_gate_up_weight = torch.mm(d_gate_up.t(), x.flatten(0, -2))
        return dx.view(x.shape), d_gate_up_weight, d_down, None, None


def _gemm_floor(case: Case, data: Data) -> Built:
    gate_up, down = nn.Parameter(torch.cat([data.gate, data.up])), nn.Parameter(data.down)
    activate = F.silu if case.activation == "silu" else partial(F.gelu, approximate="tanh")
    with torch.no_grad():
        both = F.linear(data.x.flatten(0, -2), gate_up)
        dh = data.dout.flatten(0, -2) @ data.down
    leaf = both.requires_grad_()
    with torch.enable_grad():
        gate, up = leaf.chunk(2, dim=-1)
        h = activate(gate) * up
        (d_gate_up,) = torch.autograd.grad(h, leaf, dh)
    h = h.detach()

    def forward(x: Tensor) -> Tensor:
        out: Tensor = _FloorFunction.apply(x, gate_up, down, h, d_gate_up)
        return out

    return Built(forward, (gate_up, down), partial(_concatenated, gate_up, down))


# ---------------------------------------------------------------------------------------------------------- our own


def _fusepatch(case: Case, data: Data, *, warm: bool = False) -> Built:
    module = _hf_module(case, data)
    if warm:
        fusepatch.warmup(module, case.shape.tokens)
    before = _counts()
    return _of_module(module, module, lambda: _route(before, _counts()))


def _counts() -> dict[str, int]:
    """Calls by route, and declines by reason in brackets, over all that is patched or was."""
    found: dict[str, int] = {}
    for target in fusepatch.status().targets:
        for route, count in target.total("calls").items():
            found[route] = found.get(route, 0) + count
        for reason, count in target.total("declines").items():
            found[f"({reason})"] = found.get(f"({reason})", 0) + count
    return found


def _route(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    taken = [name for name, count in after.items() if count > before.get(name, 0)]
    return "route " + " ".join(sorted(taken, key=lambda name: name.startswith("("))) if taken else "no route taken"


@contextlib.contextmanager
def _accelerated(case: Case, variables: Mapping[str, str], strict: bool) -> Iterator[None]:
    """`fusepatch.accelerated()` with these environment variables."""
    unless_set = {"FUSEPATCH_LOG": "warning"}
    if case.device == "cpu":
        unless_set["FUSEPATCH_GATED_MLP_BACKEND"] = "reference"
    before = dict(os.environ)
    os.environ.update({**unless_set, **before, **variables})
    try:
        with fusepatch.accelerated(strict=strict):
            yield
    finally:
        for name in (*unless_set, *variables):
            os.environ.pop(name, None)
        os.environ.update(before)


def _variant(route: str, backend: choose.Backend) -> Arm:
    """A route and a backend asked for by name, at any size, and an error where they do not serve the case."""
    variables = {"FUSEPATCH_GATED_MLP_ROUTE": route, "FUSEPATCH_GATED_MLP_BACKEND": backend.name}
    return Arm(
        f"fusepatch_{route}_{backend.name}",
        f"fusepatch, the route {route} with the backend {backend.name}, whether or not it is admitted there",
        partial(_fusepatch, warm=backend.warmed_only),
        packages=backend.packages,
        devices=("cuda",) if backend.native else ("cpu", "cuda"),
        dtypes=tuple(dtype for dtype in Arm.dtypes if dtype in backend.dtypes),
        activations=tuple(name for name in Arm.activations if name in backend.activations),
        layouts=("separate", "packed") if backend.packed else ("separate",),
        context=lambda case: _accelerated(case, variables, strict=True),
        compiles=backend.native,  # and has its self-check, whose verdict is kept on disk
        shares=lambda case: (case.activation, case.dtype),
        by_default=False,
    )


def _compile_ours(case: Case, data: Data) -> Built:
    """torch.compile of the module with our forward, in a class of its own: that of the library stays as it is."""
    module: Any = _hf_module(case, data)
    kind = type(module)
    record = ledger.Record("gated_mlp", "benchmarks", kind.__name__)
    switch = Switch()
    switch.off = None
    forward = hf_gated_mlp.make_forward(catalogue.forward_of(kind), switch, record)
    module.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return _of_module(
        module, torch.compile(module), lambda: "traced " + ", ".join(each.value for each in record.traces)
    )


def _compiled_variant(backend: choose.Backend) -> Arm:
    variables = {"FUSEPATCH_GATED_MLP_BACKEND": backend.name}
    return Arm(
        f"compile_fusepatch_{backend.name}",
        f"torch.compile of that module with the fused route of the backend {backend.name} in the graph",
        _compile_ours,
        packages=backend.packages,
        devices=("cuda",) if backend.native else ("cpu", "cuda"),
        layouts=("separate", "packed"),
        context=lambda case: _accelerated(case, variables, strict=False),
        compiles=True,
        by_default=False,
    )


# ------------------------------------------------------------------------------------------------------- the records

_HALVES = (torch.bfloat16, torch.float16)


def _quack_arm(interleaved: bool, tuned: bool) -> Arm:
    weights = "interleaved" if interleaved else "concatenated"
    return Arm(
        f"quack_{weights}{'' if tuned else '_untuned'}",
        f"QuACK's mlp_func, gate and up {weights} in one weight, {'autotuned' if tuned else 'tuned=False'}",
        partial(_quack, interleaved=interleaved, tuned=tuned),
        packages=("quack", "cutlass"),
        capability=(9, 0),
        dtypes=_HALVES,
        compiles=True,
        shares=(lambda case: case) if tuned else (lambda case: (case.activation, case.dtype)),
        tunes=tuned,
        by_default=not tuned,
    )


ARMS: tuple[Arm, ...] = (
    Arm(
        "gemm_floor",
        "the GEMMs of the step alone, through cuBLAS, with gate and up joined: 2 forward, 4 backward",
        _gemm_floor,
        devices=("cpu", "cuda"),
        layouts=("separate", "packed"),
        stacks=False,
    ),
    Arm(
        "eager",
        "LlamaMLP, GemmaMLP or Phi3MLP of transformers, unpatched",
        _eager,
        devices=("cpu", "cuda"),
        layouts=("separate", "packed"),
    ),
    Arm(
        "compile",
        "torch.compile of that module, default mode",
        _compile,
        layouts=("separate", "packed"),
        compiles=True,
    ),
    Arm(
        "fla",
        "FLA's GatedMLP, unpatched",
        _fla,
        packages=("fla",),
        activations=("silu",),
        compiles=True,  # 60 candidates
        shares=lambda case: (case.shape.inner, case.dtype),
        apart=True,
    ),
    Arm(
        "liger",
        "Liger's forward on that module",
        _liger,
        packages=("liger_kernel",),
        layouts=("separate", "packed"),
    ),
    *(_quack_arm(interleaved, tuned) for tuned in (False, True) for interleaved in (False, True)),
    Arm(
        "flash_swiglu_mlp",
        "FlashSwiGLUMLP",
        _flash_swiglu_mlp,
        packages=("flash_swiglu_mlp",),
        capability=(9, 0),
        dtypes=_HALVES,
        activations=("silu",),
        compiles=True,  # 96 candidates, and how tokens divide is compiled in
        shares=lambda case: (case.shape.tokens == 1, case.shape.tokens % 16 == 0, case.dtype),
        apart=True,
    ),
    Arm(
        "cudnn",
        "swiglu_mlp of cuDNN's frontend",
        _cudnn,
        packages=("cudnn",),
        dtypes=(torch.bfloat16,),
        activations=("silu",),
        compiles=True,  # but none of its plans stay on disk: tried once, because it may crash
        shares=lambda case: case.dtype,
    ),
    Arm(
        "fusepatch",
        "the module of transformers under fusepatch.accelerate(), by whichever route it takes",
        _fusepatch,
        devices=("cpu", "cuda"),
        layouts=("separate", "packed"),
        context=lambda case: _accelerated(case, {}, strict=False),
        compiles=True,  # and has its self-check, whose verdict is kept on disk
        shares=lambda case: (case.activation, case.dtype),
    ),
    Arm(
        "fusepatch_off",
        "a control: that arm with FUSEPATCH_GATED_MLP=0, so the library's code; where it is not level with eager, "
        "no ratio of that run holds",
        _fusepatch,
        devices=("cpu", "cuda"),
        layouts=("separate", "packed"),
        context=lambda case: _accelerated(case, {"FUSEPATCH_GATED_MLP": "0"}, strict=False),
        by_default=False,
    ),
    *(
        _variant(route.value, backend)
        for backend in choose.BACKENDS
        for route in sorted(backend.routes, key=lambda route: route.rank)
    ),
    *(_compiled_variant(each) for each in choose.BACKENDS if Route.FUSED in each.routes and not each.whole),
)


def select(names: str | None) -> list[Arm]:
    """The arms of a comma list of names, `default` and `all`. Raises ValueError for a name that is none."""
    found: dict[str, Arm] = {}
    known = {arm.name: arm for arm in ARMS}
    for name in (names or "default").split(","):
        if name == "default":
            found.update({arm.name: arm for arm in ARMS if arm.by_default})
        elif name == "all":
            found.update(known)
        elif name in known:
            found[name] = known[name]
        else:
            raise ValueError(f"there is no arm {name!r}: python -m benchmarks list")
    if "eager" not in found:  # whose error everybody's is judged by
        found = {"eager": known["eager"], **found}
    return list(found.values())
