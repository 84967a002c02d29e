"""The arms of the Engram gate: who computes it, alone or in the whole that consumes it, and how each is called.

Scope `gate`: x [M, S, D], kv [M, (S+1)*D], weight [S, D]. Scope `consumer`: the projection to kv of a looked-up
embedding [M, E] too, with both norms' weights and all five gradients. Every arm gets the same tensors, which stay where
they are: `Data.fill` writes other numbers into them, so that replayed graphs see them too.

Tensors: M tokens, S streams, D width of a stream, E width of an embedding.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusepatch import ops, settings
from fusepatch.kernels.engram_gate import sizes
from fusepatch.kernels.engram_gate.op import unpacked

EPS = 1e-20
SCOPES = ("gate", "consumer")
GENERATIONS = ("random", "other", "holes", "masked", "no_embedding", "no_x", "tiny")
"""Input generations. Arms are timed on the first, whose tokens are all gated; a hole is a token that is not."""
_LEAVES = {"gate": ("x", "kv", "weight"), "consumer": ("x", "embedding", "projection", "query_norm", "key_norm")}

Results = dict[str, Tensor]
Gate = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """One problem that every arm solves."""

    tokens: int
    streams: int = 4
    width: int = 5120
    embedding: int = 6144
    scope: str = "gate"
    device: str = "cuda"

    def __str__(self) -> str:
        """The name in the results."""
        whole = f"_E{self.embedding}" if self.scope == "consumer" else ""
        return f"M{self.tokens}_S{self.streams}_D{self.width}{whole}"

    def least_bytes(self, mode: str) -> int:
        """What the gate must move, each tensor once: `forward`, `backward`, or both for `train`."""
        rows = self.tokens * self.width * 2
        saved, weight = self.tokens * self.streams * 16, self.streams * self.width * 4
        x, kv = self.streams * rows, (self.streams + 1) * rows
        forward = 2 * x + kv + saved + weight
        backward = 3 * x + 2 * kv + saved + 2 * weight
        return {"forward": forward, "backward": backward}.get(mode, forward + backward)


@dataclass(frozen=True, eq=False)
class Data:
    """The tensors that all arms of a case read, and none may write to."""

    case: Case
    tensors: dict[str, Tensor]
    """The leaves of the scope; every one wants a gradient."""
    mask: Tensor
    grad_out: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        """In the order in which a gate or consumer takes them."""
        return list(self.tensors.values())

    @torch.no_grad()
    def fill(self, generation: str) -> None:
        """Writes the numbers of an input generation."""
        generator = torch.Generator(self.case.device).manual_seed(GENERATIONS.index(generation))

        def normal(t: Tensor, scale: float = 1.0, mean: float = 0.0) -> None:
            t.copy_(torch.randn(t.shape, generator=generator, device=t.device).mul_(scale).add_(mean))

        size = 1e-4 if generation == "tiny" else 1.0
        for name, tensor in self.tensors.items():
            if name == "projection":
                normal(tensor, tensor.shape[1] ** -0.5)
            elif tensor.dtype is torch.float32:
                normal(tensor, 0.2, 1.0)
            else:
                normal(tensor, size)
        if generation == "no_x":
            self.tensors["x"].zero_()
        if generation == "no_embedding":
            self.tensors["kv" if self.case.scope == "gate" else "embedding"].zero_()
        normal(self.grad_out)
        self.mask.fill_(generation != "masked")
        if generation in ("other", "holes"):
            self.mask.copy_(torch.rand(self.mask.shape, generator=generator, device=self.mask.device) > 0.13)


def make(case: Case) -> Data:
    """Tensors for a case, with the numbers of the first generation."""
    bf16 = partial(torch.empty, dtype=torch.bfloat16, device=case.device)
    norm = partial(torch.empty, case.streams, case.width, dtype=torch.float32, device=case.device)
    kv_width = (case.streams + 1) * case.width
    makers: Mapping[str, Callable[[], Tensor]] = {
        "x": lambda: bf16(case.tokens, case.streams, case.width),
        "kv": lambda: bf16(case.tokens, kv_width),
        "embedding": lambda: bf16(case.tokens, case.embedding),
        "projection": lambda: bf16(kv_width, case.embedding),
        **dict.fromkeys(("weight", "query_norm", "key_norm"), norm),
    }
    tensors = {name: makers[name]().requires_grad_() for name in _LEAVES[case.scope]}
    mask = torch.empty(case.tokens, dtype=torch.bool, device=case.device)
    data = Data(case, tensors, mask, bf16(case.tokens, case.streams, case.width))
    data.fill(GENERATIONS[0])
    return data


# ---------------------------------------------------------------------------------------------------------- the truth


def plain_gate(x: Tensor, kv: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
    """The gate as DeepSeek's reference code has it: in fp32, or in fp64 for fp64 inputs; rounded once."""
    streams, width = x.shape[-2:]
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    query, key = x.to(wide), kv[:, : streams * width].reshape(-1, streams, width).to(wide)
    value = kv[:, streams * width :].to(wide)
    rstd_x = torch.rsqrt(query.square().mean(-1) + EPS)
    rstd_key = torch.rsqrt(key.square().mean(-1) + EPS)
    dot = (query * weight * key).sum(-1) * rstd_x * rstd_key * width**-0.5
    root = dot.abs().clamp_min(1e-6).sqrt()
    gate = torch.sigmoid(torch.copysign(root, dot.detach())) * mask.unsqueeze(-1)
    return (query + gate.unsqueeze(-1) * value.unsqueeze(1)).to(x.dtype)


def consume(
    gate: Gate, x: Tensor, embedding: Tensor, projection: Tensor, query: Tensor, key: Tensor, mask: Tensor
) -> Tensor:
    """The whole consumer around a gate."""
    return gate(x, F.linear(embedding, projection), query * key, mask)


def reference(data: Data, chunk: int = 1024) -> Results:
    """Output and gradients in fp64, of the gate; of the consumer too, with kv rounded as every arm's GEMM does."""
    case = data.case
    kv_of = data.tensors.get("kv")
    with torch.no_grad():
        if case.scope == "gate":
            assert kv_of is not None
            kv, weight = kv_of, data.tensors["weight"]
        else:
            kv = F.linear(data.tensors["embedding"].float(), data.tensors["projection"].float()).to(torch.bfloat16)
            weight = data.tensors["query_norm"] * data.tensors["key_norm"]
    grad_x = torch.empty_like(data.grad_out, dtype=torch.float32)
    grad_kv = torch.empty_like(kv, dtype=torch.float32)
    out = torch.empty_like(data.grad_out, dtype=torch.float32)
    grad_weight = torch.zeros_like(weight, dtype=torch.float64)
    for start in range(0, case.tokens, chunk):
        part = slice(start, start + chunk)
        leaves = [t.detach().double().requires_grad_() for t in (data.tensors["x"][part], kv[part], weight)]
        found = plain_gate(*leaves, data.mask[part])
        gradients = torch.autograd.grad(found, leaves, data.grad_out[part].double())
        out[part], grad_x[part], grad_kv[part] = found.detach(), gradients[0], gradients[1]
        grad_weight += gradients[2]
    if case.scope == "gate":
        return {"out": out, "x": grad_x, "kv": grad_kv, "weight": grad_weight.float()}
    embedding, projection = data.tensors["embedding"].detach().float(), data.tensors["projection"].detach().float()
    return {
        "out": out, "x": grad_x, "embedding": grad_kv @ projection, "projection": grad_kv.t() @ embedding,
        "query_norm": (grad_weight * data.tensors["key_norm"]).detach().float(),
        "key_norm": (grad_weight * data.tensors["query_norm"]).detach().float(),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ the arms


@dataclass(frozen=True, eq=False)
class Built:
    """An arm made ready for one case."""

    forward: Callable[[], Tensor]
    begin: Callable[[], Any]
    """The forward pass of a training step; returns what `finish` takes."""
    finish: Callable[[Any], Results]
    """The backward pass; returns output and gradients."""
    owned: tuple[Tensor, ...] = ()
    """All that it writes to and that lives as long as the arm, to be poisoned before a check."""
    splits: bool = True
    """Whether a backward pass can be timed alone."""
    captured: Built | None = None
    """What a CUDA graph was made of: the graph replays addresses, and keeps nothing alive that lies there."""

    def train(self) -> Results:
        """Both passes."""
        return self.finish(self.begin())


def _nothing(case: Case) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


@dataclass(frozen=True, eq=False)
class Arm:
    """One record per arm."""

    name: str
    what: str
    build: Callable[[Data], Built]
    devices: tuple[str, ...] = ("cuda",)
    packages: tuple[str, ...] = ()
    scopes: tuple[str, ...] = SCOPES
    context: Callable[[Case], contextlib.AbstractContextManager[Any]] = _nothing
    native: bool = False
    """Whether it is a control that ours must beat."""
    graphed: bool = False
    by_default: bool = True


def why_unavailable(arm: Arm, case: Case) -> str | None:
    """What keeps an arm from solving a case, as far as can be told without running it."""
    if case.device not in arm.devices:
        return f"needs a {' or '.join(arm.devices)} device"
    missing = [package for package in arm.packages if importlib.util.find_spec(package) is None]
    if missing:
        return f"no package {', '.join(missing)}"
    return None if case.scope in arm.scopes else f"has no {case.scope}"


def _function(gate: Gate, data: Data) -> Gate:
    if data.case.scope == "gate":
        return gate

    def consumer(*tensors: Tensor) -> Tensor:
        return consume(gate, *tensors)

    return consumer


def _of_function(function: Gate, data: Data, before: Callable[[], None] = lambda: None) -> Built:
    """Through autograd."""

    def forward() -> Tensor:
        before()
        with torch.no_grad():
            return function(*data.leaves, data.mask)

    def begin() -> Tensor:
        before()
        return function(*data.leaves, data.mask)

    def finish(out: Tensor) -> Results:
        gradients = torch.autograd.grad(out, data.leaves, data.grad_out)
        return {"out": out.detach(), **dict(zip(data.tensors, gradients, strict=True))}

    return Built(forward, begin, finish)


def _eager(data: Data) -> Built:
    return _of_function(_function(plain_gate, data), data)


def _compile(data: Data, mode: str | None) -> Built:
    compiled = torch.compile(_function(plain_gate, data), mode=mode, dynamic=False)
    before = torch.compiler.cudagraph_mark_step_begin if mode in ("reduce-overhead", "max-autotune") else lambda: None
    return _of_function(compiled, data, before)


@contextlib.contextmanager
def _gemms_of_cublas(case: Case) -> Iterator[None]:
    """Every arm has the same GEMMs, which are not what is measured: tuning them takes minutes."""
    with importlib.import_module("torch._inductor.config").patch(max_autotune_gemm_backends="ATEN"):
        yield


def _three_kernels(data: Data) -> Built:
    gate = importlib.import_module("benchmarks.engram_three_kernels").gate
    return _of_function(_function(lambda *tensors: gate(*tensors, EPS), data), data)


def _fusepatch(data: Data) -> Built:
    return _of_function(_function(lambda *tensors: ops.engram_gate(*tensors, eps=EPS), data), data)


@contextlib.contextmanager
def named_backend(case: Case) -> Iterator[None]:
    """The kernels, at any size, by name; on a CPU plain PyTorch."""
    name = "triton" if case.device == "cuda" else "reference"
    with settings.in_force(settings.read({**os.environ, "FUSEPATCH_ENGRAM_GATE_BACKEND": name})):
        yield


def _plan(data: Data, changes: Mapping[str, int] | None = None) -> Built:
    """The prepared plan, with memory of its own; with `changes`, its kernels launched in another shape."""
    case = data.case
    device = torch.device(case.device, 0) if case.device == "cuda" else torch.device("cpu")
    plan = ops.EngramGatePlan(case.tokens, case.streams, case.width, device, EPS, masked=True)
    plan.compile()
    out, grad_x = torch.empty_like(data.grad_out), torch.empty_like(data.grad_out)
    bf16, fp32 = (partial(torch.empty, dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.float32))
    kv_width = (case.streams + 1) * case.width
    grad_kv, grad_weight = bf16(case.tokens, kv_width), fp32(case.streams, case.width)
    saved = fp32(case.tokens, case.streams, 4)
    # Other shapes may have more programs, each with its row of the workspace.
    room = 4 if changes else 1
    workspace = torch.empty(room * plan.workspace_bytes, dtype=torch.uint8, device=device)
    leaves = {name: tensor.detach() for name, tensor in data.tensors.items()}
    is_gate = case.scope == "gate"
    kv = leaves["kv"] if is_gate else bf16(case.tokens, kv_width)
    weight = leaves["weight"] if is_gate else fp32(case.streams, case.width)
    forward_of, backward_of = (plan.forward, plan.backward) if changes is None else _in_shape(case, changes)

    def forward() -> Tensor:
        if not is_gate:
            torch.mm(leaves["embedding"], leaves["projection"].t(), out=kv)
            torch.mul(leaves["query_norm"], leaves["key_norm"], out=weight)
        forward_of(leaves["x"], kv, weight, data.mask, out=out, saved=saved)
        return out

    def finish(_: Any) -> Results:
        backward_of(
            data.grad_out, leaves["x"], kv, weight, saved,
            grad_x=grad_x, grad_kv=grad_kv, grad_weight=grad_weight, workspace=workspace,
        )  # fmt: skip
        if is_gate:
            return {"out": out, "x": grad_x, "kv": grad_kv, "weight": grad_weight}
        return {
            "out": out, "x": grad_x, "embedding": grad_kv @ leaves["projection"],
            "projection": grad_kv.t() @ leaves["embedding"],
            "query_norm": grad_weight * leaves["key_norm"], "key_norm": grad_weight * leaves["query_norm"],
        }  # fmt: skip

    owned = (out, saved, grad_x, grad_kv, grad_weight, workspace.view(torch.float32))
    return Built(forward, forward, finish, owned=owned if is_gate else (*owned, kv, weight))


def _in_shape(case: Case, changes: Mapping[str, int]) -> tuple[Callable[..., None], Callable[..., None]]:
    """Forward and backward of a plan, straight from the kernels in a shape that is not the usual one."""
    kernels = importlib.import_module("fusepatch.kernels.engram_gate.triton_kernels")
    shape = sizes.shape_of(case.streams, case.width)._replace(**changes)
    split = partial(unpacked, streams=case.streams)

    def forward(x: Tensor, kv: Tensor, weight: Tensor, mask: Tensor, *, out: Tensor, saved: Tensor) -> None:
        kernels.engram_forward(
            x, *split(kv), weight, mask, EPS, True, "copysign", out_MSD=out, saved_MS4=saved, _shape=shape
        )

    def backward(
        grad_out: Tensor, x: Tensor, kv: Tensor, weight: Tensor, saved: Tensor, *,
        grad_x: Tensor, grad_kv: Tensor, grad_weight: Tensor, workspace: Tensor,
    ) -> None:  # fmt: skip
        programs = kernels.programs_of(case.tokens, case.width, x.device, shape)
        used = (
            workspace[: programs * case.streams * case.width * 4]
            .view(torch.float32)
            .view(programs, case.streams, case.width)
        )
        grad_key, grad_value = split(grad_kv)
        kernels.engram_backward(
            grad_out, x, *split(kv), weight, saved, True, True, grad_x_MSD=grad_x, grad_key_MSD=grad_key,
            grad_value_MD=grad_value, grad_weight_SD=grad_weight, partial_PSD=used, _shape=shape,
        )  # fmt: skip

    return forward, backward


def _graphed(build: Callable[[Data], Built], data: Data) -> Built:
    """An arm as two CUDA graphs: the forward pass, and both passes."""
    built = build(data)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            built.forward()
            built.train()
    torch.cuda.current_stream().wait_stream(side)
    forward_graph, train_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward_graph):
        out = built.forward()
    with torch.cuda.graph(train_graph):
        results = built.train()

    def forward() -> Tensor:
        forward_graph.replay()
        return out

    def begin() -> None:
        train_graph.replay()

    owned = (*built.owned, out, *results.values())
    return Built(forward, begin, lambda _: results, owned=owned, splits=False, captured=built)


_HOST = ("cpu", "cuda")
_ONE_BY_ONE = (
    Arm("eager", "plain PyTorch in fp32, rounded once", _eager, devices=_HOST, native=True),
    Arm("compile", "torch.compile of that, default mode", partial(_compile, mode=None), native=True),
    Arm(
        "compile_reduce_overhead", "torch.compile, mode reduce-overhead",
        partial(_compile, mode="reduce-overhead"), native=True,
    ),
    Arm(
        "compile_max_autotune", "torch.compile, mode max-autotune, GEMMs of cuBLAS",
        partial(_compile, mode="max-autotune"), context=_gemms_of_cublas, native=True,
    ),
    Arm(
        "three_kernels", "the structure of NVIDIA's cudnn.engram, in Triton", _three_kernels, packages=("triton",),
        native=True,
    ),
    Arm("fusepatch", "ops.engram_gate", _fusepatch, devices=_HOST, context=named_backend),
    Arm("fusepatch_plan", "ops.EngramGatePlan", _plan, devices=_HOST, context=named_backend),
)  # fmt: skip


def _graph_of(arm: Arm) -> Arm:
    return Arm(
        f"{arm.name}_graph", f"{arm.what}, as a CUDA graph", partial(_graphed, arm.build), packages=arm.packages,
        context=arm.context, native=arm.native, graphed=True,
    )  # fmt: skip


VARIANTS: Mapping[str, Mapping[str, int]] = {
    "forward_2_programs_3_stages": {"forward_programs": 2, "forward_stages": 3},
    "forward_one_stream": {"forward_one_stream": True},
    "forward_one_stream_4_stages": {"forward_one_stream": True, "forward_programs": 2, "forward_stages": 4},
    "forward_8_warps_3_programs": {"forward_warps": 8, "forward_programs": 3},
    "two_sums": {"by_thread": False},
    "backward_3_stages": {"backward_stages": 3},
    "backward_16_warps": {"backward_warps": 16},
    "backward_sum_128_rows": {"sum_rows": 128},
}
"""Other launch shapes of the kernels, to be measured against the usual one: `--arms fusepatch_plan,variants`."""

ARMS: tuple[Arm, ...] = (
    *_ONE_BY_ONE,
    *(_graph_of(arm) for arm in _ONE_BY_ONE if arm.name not in ("compile_reduce_overhead", "compile_max_autotune")),
    *(
        Arm(
            f"variant_{name}", f"the plan's kernels with {dict(changes)}", partial(_plan, changes=changes),
            packages=("triton",), scopes=("gate",), context=named_backend, by_default=False,
        )
        for name, changes in VARIANTS.items()
    ),
)  # fmt: skip


def select(names: str | None) -> list[Arm]:
    """The arms of a comma list of names, `default` and `variants`. Raises ValueError for a name that is none."""
    known = {arm.name: arm for arm in ARMS}
    found: dict[str, Arm] = {"eager": known["eager"]}  # whose error everybody's is judged by
    for name in (names or "default").split(","):
        if name == "default":
            found |= {arm.name: arm for arm in ARMS if arm.by_default}
        elif name == "variants":
            found |= {arm.name: arm for arm in ARMS if arm.name.startswith("variant_")}
        elif name in known:
            found[name] = known[name]
        else:
            raise ValueError(f"there is no arm {name!r}: known are {', '.join(known)}, default and variants")
    return list(found.values())
