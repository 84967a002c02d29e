"""The backend `cudnn` against the installed frontend, with the GPU stubbed where the frontend calls it.

Its graphs are evaluated in plain PyTorch on a CPU, by what it asks of them; all of its own Python runs as it is.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fusepatch
from fusepatch import ledger, profiles, selfcheck, settings
from fusepatch.decline import Reason, Route
from fusepatch.doctor import kernels
from fusepatch.doctor.findings import Examination
from fusepatch.kernels import backends
from fusepatch.kernels.gated_mlp import choose, library, op
from fusepatch.kernels.gated_mlp import cudnn as ours
from support import relative_error, tiny_llama_mlp

cudnn = pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")
swiglu_mlp = pytest.importorskip("cudnn.gemm").swiglu_mlp
swiglu = importlib.import_module("cudnn.gemm.ops.swiglu_mlp")

(CUDNN,) = (backend for backend in choose.BACKENDS if backend.name == "cudnn")
NAMES = ("x", "gate", "up", "down")
TOKENS, HIDDEN, INNER = 6, 64, 96


# ------------------------------------------------------------------------------------------------------- the stub


class Node:
    """A tensor of a graph: given, or made from others by `compute`."""

    def __init__(
        self, compute: Callable[..., Tensor] | None, *sources: Node, dim: Any = None, stride: Any = None
    ) -> None:
        self.compute, self.sources, self.dim, self.stride, self.rounded = compute, sources, dim, stride, False

    def get_uid(self) -> int:
        return id(self)

    def set_output(self, flag: bool) -> Node:
        return self

    def set_data_type(self, kind: Any) -> Node:
        self.rounded = kind == cudnn.data_type.BFLOAT16
        return self

    def value(self, given: dict[int, Tensor]) -> Tensor:
        if self.compute is None:
            return given[id(self)].float()
        found = self.compute(*(source.value(given) for source in self.sources))
        return found.bfloat16().float() if self.rounded else found


class Graph:
    """What the frontend asks of a cuDNN graph, done in plain PyTorch."""

    built = 0
    refusal: Exception | None = None

    def __init__(self, **options: Any) -> None:
        self.nodes: list[Node] = []

    def _add(self, *arguments: Any, **more: Any) -> Node:
        self.nodes.append(Node(*arguments, **more))
        return self.nodes[-1]

    def tensor(self, dim: list[int], stride: list[int], data_type: Any) -> Node:
        assert data_type == cudnn.data_type.BFLOAT16
        return self._add(None, dim=dim, stride=stride)

    def matmul(self, A: Node, B: Node, name: str, compute_data_type: Any) -> Node:
        assert compute_data_type == cudnn.data_type.FLOAT
        return self._add(torch.matmul, A, B)

    def mul(self, a: Node, b: Node) -> Node:
        return self._add(torch.mul, a, b)

    def add(self, a: Node, b: Node) -> Node:
        return self._add(torch.add, a, b)

    def sub(self, a: Node, b: Node) -> Node:
        return self._add(torch.sub, a, b)

    def sigmoid(self, input: Node) -> Node:  # noqa: A002
        return self._add(torch.sigmoid, input)

    def validate(self) -> None: ...

    def build_operation_graph(self) -> None: ...

    def create_execution_plans(self, modes: Any) -> None: ...

    def check_support(self) -> None:
        if Graph.refusal is not None:
            raise Graph.refusal

    def build_plans(self, policy: Any) -> None:
        Graph.built += 1

    def get_execution_plan_count(self) -> int:
        return 1

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        return 16

    def execute_plan_at_index(self, buffers: list[Tensor], workspace: Tensor, *, tensor_uids: Any, **_: Any) -> None:
        by_uid = {node.get_uid(): node for node in self.nodes}
        bound = [(by_uid[uid], buffer) for uid, buffer in zip(tensor_uids, buffers, strict=True)]
        given = {id(node): buffer for node, buffer in bound if node.compute is None}
        for node, buffer in bound:
            assert buffer.dtype is torch.bfloat16
            if node.compute is None:
                assert (list(buffer.shape), list(buffer.stride())) == (node.dim, node.stride), "not what was declared"
            else:
                buffer.copy_(node.value(given))


class OnGpu(Tensor):
    """Says that it is on a GPU, which the frontend asks at the call; what is made of it is a plain tensor."""

    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl


class Event:
    def __init__(self, enable_timing: bool) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        return 1.0


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch):
    for name in ("_HANDLES", "_MM_CACHE", "_SWIGLU_CACHE", "_DSWIGLU_CACHE", "_FROST_DSWIGLU_CACHE"):
        monkeypatch.setattr(swiglu, name, {})
    for name, stand_in in {"pygraph": Graph, "create_handle": object, "set_stream": lambda **_: None}.items():
        monkeypatch.setattr(cudnn, name, stand_in)
    for name, stand_in in {
        "current_stream": lambda device=None: SimpleNamespace(cuda_stream=7),
        "device": lambda device: nullcontext(),
        "Event": Event,
        "synchronize": lambda device=None: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(
        ours, "_swiglu_mlp", lambda: lambda *tensors: swiglu_mlp(*(t.as_subclass(OnGpu) for t in tensors))
    )
    monkeypatch.setattr(Graph, "built", 0)
    monkeypatch.setattr(Graph, "refusal", None)
    caches = (ours.drift, ours._cudnn_version)
    for each in caches:
        each.cache_clear()
    choose.TABLE.forget()
    yield
    for each in caches:
        each.cache_clear()
    choose.TABLE.forget()


def tensors(wanted: tuple[str, ...] = NAMES) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = ((TOKENS, HIDDEN), (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    made = [torch.randn(*shape) * shape[1] ** -0.5 for shape in shapes]
    return {n: t.bfloat16().requires_grad_(n in wanted) for n, t in zip(NAMES, made, strict=True)}


# ----------------------------------------------------------------------------------------------- what is called


def test_the_installed_frontend_is_the_one_that_the_table_describes() -> None:
    assert ours.drift() == ()


def test_the_table_says_what_python_says() -> None:
    """What the source text was read as, against the imported module."""
    for name, parameters in ours.INTERFACE.items():
        found: Any = swiglu
        for part in name.split("."):
            found = getattr(found, part)
        assert parameters is None or tuple(inspect.signature(found).parameters) == parameters, name
    assert swiglu_mlp is swiglu.swiglu_mlp
    assert issubclass(cudnn.cudnnGraphNotSupportedError, Exception)
    assert callable(cudnn.backend_version)


@pytest.mark.parametrize("first", ["the function", "its module"])
def test_the_function_is_found_whichever_was_imported_first(monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    """The frontend gives the module under the function's name where that was imported first."""
    monkeypatch.undo()
    ours._swiglu_mlp.cache_clear()
    monkeypatch.setattr(cudnn.gemm, "swiglu_mlp", swiglu_mlp if first == "the function" else swiglu)
    assert ours._swiglu_mlp() is swiglu_mlp
    ours._swiglu_mlp.cache_clear()


def test_output_and_gradients() -> None:
    def run(call: Callable[..., Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        given = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in tensors().items()}
        out = call(*given.values())
        found = torch.autograd.grad(out, list(given.values()), torch.ones_like(out))
        return {"out": out, **dict(zip(NAMES, found, strict=True))}

    exact = run(lambda *t: op.run_gated_mlp(choose.REFERENCE, *t, None, None, None, "silu"), torch.float64)
    for name, result in run(lambda *t: op.run_gated_mlp(CUDNN, *t, None, None, None, "silu"), torch.bfloat16).items():
        assert result.dtype is torch.bfloat16
        assert relative_error(result, exact[name]) < 1e-2, name


@pytest.mark.parametrize("wanted", [w for count in range(5) for w in itertools.combinations(NAMES, count)], ids=str)
def test_it_is_told_which_gradients_are_wanted_and_saves_for_those_alone(wanted: tuple[str, ...]) -> None:
    given = tensors(wanted)
    out = ours.gated_mlp(*given.values())
    if not wanted:
        assert out.grad_fn is None
        return
    ((context, _),) = out.grad_fn.next_functions
    assert context.grad_mask == sum(1 << NAMES.index(name) for name in wanted)
    past_gate_up = {"x", "gate", "up"} & {*wanted}
    expected = {"x2"} if {"gate", "up"} & {*wanted} else set()
    expected |= {"Wg", "Wu"} if "x" in wanted else set()
    expected |= {"Wd", "gate", "up"} if past_gate_up else set()
    assert {*context.saved_names} == expected | ({"h"} if "down" in wanted else set())
    found = torch.autograd.grad(out, [given[name] for name in wanted], torch.ones_like(out))
    assert all(torch.isfinite(gradient).all() for gradient in found)


def test_it_saves_three_times_tokens_times_inner_elements_beside_its_inputs() -> None:
    given = tensors()
    inputs = {tensor.data_ptr() for tensor in given.values()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in inputs:
            saved[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = ours.gated_mlp(*given.values())
    assert out.requires_grad
    assert sum(saved.values()) == 3 * TOKENS * INNER
    assert "3*M*I" in CUDNN.note


def test_no_grad_saves_nothing() -> None:
    with torch.no_grad():
        assert ours.gated_mlp(*tensors().values()).grad_fn is None


@pytest.mark.parametrize("wanted", [NAMES, ()], ids=["training", "inference"])
def test_the_output_may_be_written_to(wanted: tuple[str, ...]) -> None:
    """As that of a linear layer may; a view that was made inside a Function may not."""
    out = op.run_gated_mlp(CUDNN, *tensors(wanted).values(), None, None, None, "silu")
    out += torch.zeros(HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    out.sum().backward()


def test_a_second_derivative_raises() -> None:
    given = tensors()
    out = ours.gated_mlp(*given.values())
    with pytest.raises(RuntimeError, match=r"first derivative only.*fusepatch.disabled\(\)"):
        torch.autograd.grad(out.sum(), given["x"], create_graph=True)


def test_a_second_backward_pass_gives_the_same() -> None:
    given = tensors()
    out = ours.gated_mlp(*given.values())
    first, second = (torch.autograd.grad(out.sum(), given["x"], retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_recompute_is_not_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "gated_mlp", None)
    out = op.run_gated_mlp(CUDNN, *tensors().values(), None, None, None, "silu", recompute=True)
    assert out.grad_fn is not None


# ------------------------------------------------------------------------------------------------------ warming up


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A LlamaMLP in bf16, patched, with the backend let loose on a CPU."""
    free = {"native": False, "check": None, "byte_alignment": 1}
    monkeypatch.setattr(choose, "BACKENDS", (dataclasses.replace(CUDNN, why_not=lambda problem: None, **free),))
    monkeypatch.setenv("FUSEPATCH_GATED_MLP_BACKEND", "cudnn")
    fusepatch.accelerate("gated_mlp")
    return tiny_llama_mlp(torch.bfloat16)


def route_of(module: Any, x: Tensor) -> tuple[str, str | None]:
    (row,) = fusepatch.explain(module, tokens=x.shape[:-1].numel()).modules
    before = fusepatch.status().to_dict()
    module(x)
    after = fusepatch.status().to_dict()
    assert before != after
    return row.route, row.reason


def tokens_of(count: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(count, 64).bfloat16()


def calls() -> dict[str, int]:
    return fusepatch.status().targets[0].total("calls")


def test_warmup_alone_admits_a_number_of_tokens(served: Any) -> None:
    for _ in range(3):
        assert route_of(served, tokens_of(6)) == ("original", "size-not-admitted")
    report = fusepatch.warmup(served, [6, 8])
    assert [row.route for row in report.rows] == ["fused", "fused"]
    assert route_of(served, tokens_of(6)) == ("fused", None)
    assert route_of(served, tokens_of(8).view(2, 4, 64)) == ("fused", None)
    assert route_of(served, tokens_of(7)) == ("original", "size-not-admitted")
    other = tiny_llama_mlp(torch.bfloat16, intermediate_size=104)
    assert route_of(other, tokens_of(6)) == ("original", "size-not-admitted")


def test_another_stream_is_not_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = choose.Problem(Route.FUSED, torch.device("cuda", 0), torch.bfloat16, 64, 96, "silu", bias=False)
    choose.admit(CUDNN, problem, 6)
    assert backends._warm_key(CUDNN, problem, 6) in choose.TABLE.warmed
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=8))
    assert backends._warm_key(CUDNN, problem, 6) not in choose.TABLE.warmed


@pytest.mark.parametrize("wanted", [w for count in range(5) for w in itertools.combinations(NAMES, count)], ids=str)
def test_after_a_warm_up_no_call_makes_a_plan(served: Any, wanted: tuple[str, ...]) -> None:
    fusepatch.warmup(served, 6)
    made = Graph.built
    assert made > 4
    x = tokens_of(6).requires_grad_("x" in wanted)
    for name in NAMES[1:]:
        getattr(served, f"{name}_proj").weight.requires_grad_(name in wanted)
    out = served(x)
    if wanted:
        out.sum().backward()
    with torch.no_grad():
        served(x)
    assert calls() == {"fused": 2}
    assert Graph.built == made


def test_what_it_says_it_does_not_support_is_declined(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (cudnn.cudnnGraphNotSupportedError("no engine"), NotImplementedError("not for this shape")):
        monkeypatch.setattr(Graph, "refusal", error)
        assert [row.route for row in fusepatch.warmup(served, 6).rows] == ["original"]
        assert route_of(served, tokens_of(6)) == ("original", "size-not-admitted")


def test_any_other_error_is_raised(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graph, "refusal", RuntimeError("out of luck"))
    with pytest.raises(RuntimeError, match="out of luck"):
        fusepatch.warmup(served, 6)
    monkeypatch.setattr(Graph, "refusal", None)
    assert route_of(served, tokens_of(6)) == ("original", "size-not-admitted")


def test_rows_apart_are_declined(served: Any) -> None:
    fusepatch.warmup(served, 6)
    served(torch.cat([tokens_of(6), tokens_of(6)], 1)[:, :64])
    assert fusepatch.status().targets[0].total("declines") == {"strides": 1}


def test_status_says_what_it_saves(served: Any) -> None:
    assert "3*M*I" not in str(fusepatch.status())
    fusepatch.warmup(served, 6)
    served(tokens_of(6))
    assert "3*M*I" in str(fusepatch.status())
    fusepatch.restore()
    fusepatch.accelerate("gated_mlp")
    assert "3*M*I" not in str(fusepatch.status())


def test_a_note_goes_with_the_counts() -> None:
    record = ledger.Record("gated_mlp", "transformers", "LlamaMLP")
    ledger.note(record, "something")
    assert record.notes == {"something"}
    ledger.clear(record)
    assert record.notes == set()


def test_compiled_code_never_gets_it(served: Any) -> None:
    fusepatch.warmup(served, 6)
    problem = choose.Problem(Route.FUSED, torch.device("cpu"), torch.bfloat16, 64, 96, "silu", bias=False)
    assert choose.choose(problem, 6).name == "cudnn"
    with backends.warming():
        assert choose.choose(problem, profiles.MOST_TOKENS).name == "cudnn"
        assert library.serving(problem) is None


# ------------------------------------------------------------------------------------------------- gates and drift

ON_A_GPU = choose.Problem(Route.FUSED, torch.device("cuda", 0), torch.bfloat16, 5120, 17408, "silu", bias=False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A GPU of some capability with some cuDNN; every self-check passes."""

    def put(capability: tuple[int, int], version: Any = 92600, **changes: Any) -> None:
        def backend_version() -> int:
            if isinstance(version, Exception):
                raise version
            return int(version)

        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(selfcheck, "device_kind", lambda device: f"a GPU {capability}")
        monkeypatch.setattr(cudnn, "backend_version", backend_version)
        monkeypatch.setattr(choose, "BACKENDS", (dataclasses.replace(CUDNN, check=None, **changes), choose.REFERENCE))
        choose.admit(CUDNN, ON_A_GPU, 8192)

    return put


def name() -> None:
    settings.install(settings.read({"FUSEPATCH_GATED_MLP_BACKEND": "cudnn"}))


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (92600, None),
        (91900, None),
        (91801, Reason.PACKAGE_DIFFERS),
        (RuntimeError("Unable to find symbol cudnnGetVersion"), Reason.PACKAGE_DIFFERS),
    ],
    ids=str,
)
def test_the_version_of_cudnn_that_the_frontend_found(gpu: Callable[..., None], version: Any, reason: Any) -> None:
    gpu((10, 0), version)
    name()
    found = choose.choose(ON_A_GPU, 8192)
    assert (found if isinstance(found, Reason) else None) is reason


@pytest.mark.parametrize(
    ("capability", "named", "by_itself"),
    [
        ((9, 0), None, Reason.SIZE_NOT_ADMITTED),
        ((10, 0), None, None),
        ((10, 3), None, Reason.SIZE_NOT_ADMITTED),
        ((8, 0), Reason.ARCHITECTURE, Reason.ARCHITECTURE),
        ((11, 0), Reason.ARCHITECTURE, Reason.ARCHITECTURE),
        ((12, 0), Reason.ARCHITECTURE, Reason.ARCHITECTURE),
    ],
    ids=str,
)
def test_architectures(gpu: Callable[..., None], capability: tuple[int, int], named: Any, by_itself: Any) -> None:
    """By itself once it is let serve so: on B200 alone, for which alone something was published."""
    gpu(capability, named_only=False)
    for set_up, expected in ((lambda: None, by_itself), (name, named)):
        set_up()
        found = choose.choose(ON_A_GPU, 8192)
        assert (found if isinstance(found, Reason) else None) is expected


@pytest.mark.parametrize(
    ("changes", "tokens", "version", "reason"),
    [
        ({}, 8192, 92600, None),
        ({}, 8191, 92600, Reason.SIZE_NOT_ADMITTED),
        ({"hidden": 4096}, 8192, 92600, Reason.SIZE_NOT_ADMITTED),
        ({"inner": 17416}, 8192, 92600, Reason.SIZE_NOT_ADMITTED),
        ({}, 8192, 92500, Reason.SIZE_NOT_ADMITTED),
        ({}, 16384, 92600, None),
    ],
    ids=str,
)
def test_by_itself_it_serves_what_its_vendor_published(
    gpu: Callable[..., None], changes: dict[str, Any], tokens: int, version: int, reason: Reason | None
) -> None:
    gpu((10, 0), version, named_only=False)
    with backends.warming():
        found = choose.choose(ON_A_GPU._replace(**changes), tokens)
    assert (found if isinstance(found, Reason) else None) is reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float16}, Reason.DTYPE),
        ({"activation": "gelu"}, Reason.ACTIVATION),
        ({"bias": True}, Reason.BIAS),
        ({"down_bias": True}, Reason.BIAS),
        ({"packed": True}, Reason.PACKED_WEIGHT),
        ({"hidden": 5124}, Reason.ALIGNMENT),
        ({"inner": 17404}, Reason.ALIGNMENT),
        ({"route": Route.POINTWISE}, Reason.NO_KERNEL),
    ],
    ids=str,
)
def test_what_it_declines(gpu: Callable[..., None], changes: dict[str, Any], reason: Reason) -> None:
    gpu((10, 0))
    name()
    assert choose.choose(ON_A_GPU._replace(**changes), 8192) is reason


def test_it_is_never_captured(gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu((10, 0))
    name()
    assert choose.choose(ON_A_GPU, 8192).name == "cudnn"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose.choose(ON_A_GPU, 8192) is Reason.CAPTURE_COLD


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            "def swiglu_mlp(x, Wg, Wu, Wd)",
            "def swiglu_mlp(x, Wg, Wu, Wd, bias=None)",
            "`swiglu_mlp(x, Wg, Wu, Wd, bias)`",
        ),
        ("def _mm(", "def _matmul(", "no `_mm`"),
        ("_MM_CACHE = {}", "_MM_PLANS = {}", "no `_MM_CACHE`"),
        ("class _GatedMLP(", "class _Renamed(", "no `_GatedMLP.forward`"),
        ("    save_preacts=True,\n", "", "`_swiglu_act(x, Wg, Wu, activation"),
    ],
)
def test_a_changed_interface_is_seen(
    gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Any, before: str, after: str, said: str
) -> None:
    source = ours._path().read_text()
    assert source.count(before) >= 1
    changed = tmp_path / "swiglu_mlp.py"
    changed.write_text(source.replace(before, after, 1))
    monkeypatch.setattr(ours, "_path", lambda: changed)
    assert said in " ".join(ours.drift())
    gpu((10, 0))
    name()
    assert choose.choose(ON_A_GPU, 8192) is Reason.PACKAGE_DIFFERS


@pytest.mark.parametrize(("version", "fits"), [("1.32.0", True), ("1.33.1", True), ("2.0.0", True), ("1.31.9", False)])
def test_the_version_of_the_frontend(monkeypatch: pytest.MonkeyPatch, version: str, fits: bool) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert (ours.drift() == ()) is fits


def test_doctor_says_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU too, and without importing the frontend."""
    monkeypatch.setattr(ours, "_path", lambda: ours.Path("/no/such/file"))
    settings.install(settings.read({}))
    it = Examination()
    kernels.judge_checks(it, kernels.all_kernels((), None, False, (), lambda line: None))
    (finding,) = {found for found in it.findings if "cudnn" in found.what}
    assert finding.level == "warning"
    assert "/no/such/file can't be read" in finding.what
