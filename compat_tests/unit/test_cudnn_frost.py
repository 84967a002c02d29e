"""cuDNN's FROST kernels of linear attention: what is passed to the operators, with these played by the definition; and,
where the wheel is installed, against the real operators and engines. No GPU has run any of it."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fusepatch
from fusepatch.decline import DeclinedError, Reason
from fusepatch.kernels.backends import Backend
from fusepatch.kernels.linear_attention import arguments, cudnn_frost, dispatch, reference
from fusepatch.kernels.linear_attention.gated_delta_rule import choose as gdn_choose
from fusepatch.kernels.linear_attention.kda import choose as kda_choose
from fusepatch.kernels.linear_attention.problem import Call, Inputs, Problem
from fusepatch.shims import fla_linear_attention as shim
from support import relative_error

OPS = pytest.mark.parametrize("op", ["kda", "gated_delta_rule"])
CHOOSE = {"kda": kda_choose, "gated_delta_rule": gdn_choose}


def played(op: str) -> Any:
    """cuDNN's operator as its documentation describes it, in PyTorch: packed tokens, states with the values first."""

    def operator(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, *, scale: float,
        initial_state: Tensor | None, output_final_state: bool, use_qk_l2norm_in_kernel: bool,
        use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool, batch_invariant: bool, plan_name: str,
        safe_gate: bool = False, gate_lower_bound: float | None = None, a_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert all(t.is_contiguous() for t in (q, k, v, g, beta))
        assert cu_seqlens.dtype is torch.int32
        assert beta.dtype in (torch.float32, q.dtype)
        assert plan_name == ("kda_frost" if op == "kda" else "gdn_frost")
        gate = ("bounded" if op == "kda" else "softplus") if safe_gate else "given"
        assert (gate_lower_bound is not None) is (gate == "bounded")
        call = Call(
            scale, use_qk_l2norm_in_kernel, gate, gate_lower_bound or 0.0, use_beta_sigmoid_in_kernel, allow_neg_eigval,
            True,
        )  # fmt: skip
        rows = (t.unsqueeze(0) for t in (q, k, v, g, beta))
        out, state = reference.run(call, Inputs(*rows, a_log, dt_bias, initial_state, cu_seqlens), True)
        assert state is not None
        return out.squeeze(0), state if output_final_state else state.new_empty(0)

    return operator


@pytest.fixture
def frost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_frost, "_function", played)


def given(op: str, *, gate: bool = True, batch: int = 2, sequences: int = 2, groups: int = 2) -> dict[str, Any]:
    torch.manual_seed(0)
    channels = (64,) if op == "kda" else ()
    found: dict[str, Any] = {
        "q": torch.randn(batch, 6, 1, 64), "k": torch.randn(batch, 6, 1, 64), "v": torch.randn(batch, 6, groups, 128),
        "g": torch.randn(batch, 6, groups, *channels), "beta": torch.randn(batch, 6, groups),
        "initial_state": torch.randn(sequences, groups, 64, 128),
    }  # fmt: skip
    if not gate:
        return {**found, "g": -found["g"].abs()}
    return {**found, "A_log": torch.randn(groups), "dt_bias": torch.randn(groups * (64 if channels else 1))}


def options(op: str, *, gate: bool = True) -> dict[str, Any]:
    found = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_gate_in_kernel": gate}
    return {**found, **({"safe_gate": True, "lower_bound": -5.0 if gate else None} if op == "kda" else {})}


def both(op: str, tensors: dict[str, Any], **more: Any) -> None:
    results = []
    for run, dtype in ((cudnn_frost.run, torch.float32), (reference.run, torch.float64)):
        leaves = {name: t.to(dtype).requires_grad_() for name, t in tensors.items()}
        request = arguments.read(op == "kda", **leaves, **more)
        assert isinstance(request, arguments.Request), request
        out, state = run(request.call, request.inputs, True)
        grads = torch.autograd.grad(out.sin().sum() + state.sin().sum(), list(leaves.values()))
        results.append([out, state, *grads])
    for found, expected in zip(*results, strict=True):
        assert relative_error(found, expected) < 1e-5


@OPS
@pytest.mark.parametrize("gate", [True, False])
def test_what_is_passed_means_what_was_asked(op: str, gate: bool, frost: None) -> None:
    both(op, given(op, gate=gate), **options(op, gate=gate))


@OPS
def test_the_other_layout_negative_eigenvalues_and_a_scale(op: str, frost: None) -> None:
    tensors = given(op)
    tensors["initial_state"] = tensors["initial_state"].transpose(-1, -2)
    both(op, tensors, **options(op), state_v_first=True, allow_neg_eigval=True, scale=0.2)


@OPS
def test_sequences_of_a_row_and_no_parameters(op: str, frost: None) -> None:
    tensors = {name: t for name, t in given(op, batch=1, sequences=3).items() if name != "dt_bias"}
    both(op, tensors, **options(op), cu_seqlens=torch.tensor([0, 1, 4, 6]))


def problem(op: str, call: Call, **changes: Any) -> Problem:
    found = Problem(
        torch.device("cuda", 0), torch.bfloat16, 2, 4, 128, 128, True, call, torch.bfloat16, torch.bfloat16,
        (torch.float32, None),
    )  # fmt: skip
    return found._replace(**changes)


BOUNDED = Call(0.1, True, "bounded", -5.0, True, safe_gate=True)
SOFTPLUS = Call(0.1, True, "softplus", 0.0, True)


def test_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_frost, "why_no_library", lambda op: None)
    for op, call in (("kda", BOUNDED), ("gated_delta_rule", SOFTPLUS)):
        assert cudnn_frost.why_not(problem(op, call), op) is None
        assert cudnn_frost.why_not(problem(op, call, trains=False), op) is None
        assert cudnn_frost.why_not(problem(op, call._replace(l2norm=False)), op) is Reason.UNBOUNDED
        assert cudnn_frost.why_not(problem(op, call, key_width=96), op) is Reason.HEAD_SIZE
        assert cudnn_frost.why_not(problem(op, call, g_dtype=torch.float64), op) is Reason.DTYPE
    for call in (SOFTPLUS, BOUNDED._replace(lower_bound=-6.0), Call(0.1, True, "given", 0.0, True)):
        assert cudnn_frost.why_not(problem("kda", call), "kda") is Reason.UNBOUNDED


@OPS
def test_a_typed_decline_runs_the_librarys_code_and_anything_else_is_raised(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fla.backends")
    module = importlib.import_module(f"fla.ops.{op}")
    public = getattr(module, "chunk_kda" if op == "kda" else "chunk_gated_delta_rule")

    class NotSupported(Exception):
        pass

    not_supported = NotSupported("no gdn_frost plan for this graph")
    raised: list[Exception] = [not_supported, RuntimeError("a failed launch"), not_supported]

    def fail(*tensors: Any, **more: Any) -> Any:
        raise raised.pop(0)

    monkeypatch.setattr(dispatch, "not_supported", lambda backend: (NotSupported,))
    monkeypatch.setattr(dispatch, "run_by", fail)
    monkeypatch.setattr(shim, "_own_code", lambda public: lambda *args, **kwargs: ("the library's", None))
    monkeypatch.setenv(f"FUSEPATCH_{op.upper()}_BACKEND", "reference")
    fusepatch.accelerate(op)
    call = {name: t for name, t in given(op, gate=False).items() if name != "initial_state"}
    assert public(**call) == ("the library's", None)
    with pytest.raises(RuntimeError, match="a failed launch"):
        public(**call)
    with pytest.raises(DeclinedError, match="because no-kernel: "), fusepatch.accelerated(op, strict=True):
        public(**call)
    (target,) = (each for each in fusepatch.status().targets if each.name == f"{op}/fla")
    assert (target.total("calls"), target.total("declines")) == ({"original": 1}, {"no-kernel": 1})
    assert target.total("errors") == {"RuntimeError": 1}


# ------------------------------------------------------------------------------------------------------- the real wheel


@pytest.fixture
def wheel() -> Any:
    pytest.importorskip("cuda.bindings")
    return pytest.importorskip("cudnn")


@OPS
def test_the_operators_of_this_release(op: str, wheel: Any) -> None:
    cudnn_frost.why_no_library.cache_clear()
    assert cudnn_frost.why_no_library(op) is None
    assert cudnn_frost.not_supported() == (NotImplementedError, wheel.cudnnGraphNotSupportedError)
    manifest = importlib.util.find_spec("cudnn.engines.manifest")
    assert manifest is not None
    assert f'"{cudnn_frost.FUNCTIONS[op][1]}"' in Path(str(manifest.origin)).read_text()


@OPS
def test_the_table_on_blackwell(op: str, wheel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    choose, call = CHOOSE[op], BOUNDED if op == "kda" else SOFTPLUS
    monkeypatch.setenv(f"FUSEPATCH_{op.upper()}_BACKEND", "cudnn_frost")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("fusepatch.selfcheck.verdict", lambda check, device: SimpleNamespace(reason=None))
    for capability, serves in (((10, 0), True), ((10, 3), True), ((9, 0), False), ((12, 0), False)):
        choose.TABLE.forget()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        found = choose.choose(problem(op, call), 4096, 2)
        if serves:
            assert isinstance(found, Backend)
            assert found.name == "cudnn_frost"
        else:
            assert found is Reason.ARCHITECTURE
    choose.TABLE.forget()
