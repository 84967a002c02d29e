"""What is taken for granted of cuDNN's KDA on Hopper, against the real wheel: only what touches a GPU is stubbed.

The wheel's host code packs the arguments of the kernels, so each address must arrive at the parameter that the CUDA
source gives that name; and its own engine must accept what `why_not` accepts.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import itertools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusepatch.decline import Reason
from fusepatch.kernels.linear_attention import cudnn_hopper
from fusepatch.kernels.linear_attention.kda import choose
from fusepatch.kernels.linear_attention.problem import Call, Problem

cudnn = pytest.importorskip("cudnn")
pytest.importorskip("cuda.bindings")
host = pytest.importorskip("cudnn.linear_attention.hopper.cuda_bwd_host")
compiler = importlib.import_module("cudnn.linear_attention.cake.compiler")
engine = importlib.import_module("cudnn.linear_attention.hopper.cuda_engine")

FITS = Problem(
    torch.device("cuda", 0), torch.bfloat16, 2, 4, 128, 128, True,
    Call(128**-0.5, l2norm=True, gate="bounded", lower_bound=-5.0, beta_sigmoid=True),
    torch.bfloat16, torch.bfloat16, (torch.float32, torch.float32),
)  # fmt: skip


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch):
    """Nothing of this process is remembered, and there are CUDA headers."""
    caches = [found for found in vars(cudnn_hopper).values() if hasattr(found, "cache_clear")]
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(compiler, "cuda_include_dirs", lambda: ())
    yield
    for cache in caches:
        cache.cache_clear()


# ------------------------------------------------------------------------------------------------------ is it there


def test_this_release_serves() -> None:
    assert cudnn_hopper.drift() == ()
    assert cudnn_hopper.why_no_library() is None
    assert cudnn_hopper.why_not(FITS) is None
    launch, workspace_bytes, load = cudnn_hopper._frontend()
    assert (launch, load) == (host.launch, host.library)
    sizes = [(tokens, 4, sequences) for tokens in (1, 64, 1000) for sequences in (1, 3)]
    assert [workspace_bytes(*size) for size in sizes * 2] == [host.workspace_bytes(*size) for size in sizes * 2]


def test_without_cuda_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise compiler.CakeCompileError("CUDA headers (cuda_bf16.h) not found")

    monkeypatch.setattr(compiler, "cuda_include_dirs", fail)
    assert cudnn_hopper.why_not(FITS) is Reason.MISSING_PACKAGE


def test_another_failure_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise PermissionError("no access to /usr/local/cuda")

    monkeypatch.setattr(compiler, "cuda_include_dirs", fail)
    with pytest.raises(PermissionError):
        cudnn_hopper.why_not(FITS)


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "an argument renamed": lambda m: m.setattr(host, "launch", lambda device, stream, query: None),
    "an argument more": lambda m: m.setattr(
        host, "launch", lambda handle, **others: None
    ),
    "a function gone": lambda m: m.delattr(host, "workspace_bytes"),
    "another width": lambda m: m.setattr(host, "DH", 256),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_another_interface(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    CHANGES[change](monkeypatch)
    assert cudnn_hopper.why_not(FITS) is Reason.PACKAGE_DIFFERS


def test_other_kernels_are_drift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Path(host.KERNEL_DIR)
    copied = tmp_path / "linear_attention" / "hopper" / "cuda_kernels"
    shutil.copytree(kernels, copied)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert cudnn_hopper.drift() == ()
    cudnn_hopper.drift.cache_clear()
    (copied / "kda_bwd_sm90.cu").write_text("// faster")
    assert "is not that of 1.32.0" in cudnn_hopper.drift()[0]
    cudnn_hopper.drift.cache_clear()
    (copied / "kda_bwd_sm90.cu").unlink()
    assert "has no such kda_bwd_sm90.cu" in cudnn_hopper.drift()[0]


# -------------------------------------------------------------------------------- addresses reach the right parameters


def parameters(source: str, kernel: str) -> list[str]:
    """The names of a kernel's parameters, in order, from the CUDA source that the wheel brings."""
    text = (Path(host.KERNEL_DIR) / source).read_text()
    (inside,) = re.findall(rf"\b{kernel}\(([^)]*)\)\s*{{", text)
    return [re.findall(r"\w+", each)[-1] for each in inside.split(",")]


class Launches:
    """Stands in for `cuLaunchKernel`: what each launch was given, by the names of the kernel's parameters."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}

    def record(
        self, source: str, func: str, grid: Any, block: Any, dynamic_smem: int, stream: int, params: Any, what: str
    ) -> None:
        kernel = func.partition("<")[0]
        values = [ctypes.cast(address, ctypes.POINTER(type(kept))).contents.value or 0
                  for address, kept in zip(params._pointers, params._keep, strict=True)]  # fmt: skip
        self.found[kernel] = {
            **dict(zip(parameters(source, kernel), values, strict=True)),
            "grid": tuple(grid), "stream": stream, "name": func,
        }  # fmt: skip


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches()
    library = SimpleNamespace(function=lambda name, dynamic_smem=0: name)
    monkeypatch.setattr(host, "library", lambda device: library)
    monkeypatch.setattr(host, "device_context", lambda device: contextlib.nullcontext())
    stubbed = {**vars(compiler), "launch": functools.partial(found.record, "kda_bwd_sm90.cu")}
    monkeypatch.setattr(host, "compiler", SimpleNamespace(**stubbed))
    return found


def addresses(names: frozenset[str]) -> dict[str, int]:
    numbers = {"device", "stream", "total_tokens", "n_seqs", "n_heads"}
    return {name: 0x10000000 * (index + 1) for index, name in enumerate(sorted(names - numbers))}


@pytest.mark.parametrize("sequences", [1, 3])
def test_the_backward_launches(sequences: int, launches: Launches) -> None:
    tokens, heads = 1000, 4
    given = addresses(cudnn_hopper._ARGUMENTS)
    size = cudnn_hopper._frontend().workspace_bytes(tokens, heads, sequences)
    given["workspace"] = max(given.values()) + 2**36
    cudnn_hopper._frontend().launch(device=0, stream=7, **given, total_tokens=tokens, n_heads=heads, n_seqs=sequences)
    assert set(launches.found) == {"k_prep", "k_scan_t", "k_bwd"} | ({"k_meta"} if sequences > 1 else set())
    reads = {"q": "q", "kk": "k", "vv": "v", "gg": "g", "beta": "beta", "dO": "dO"}
    for parameter, name in reads.items():
        assert launches.found["k_prep"][parameter] == given[name], name
    scan = {"ist": "initial_state", "dfs": "d_final_state", "dis": "d_initial_state", "dO": "dO"}
    for parameter, name in scan.items():
        assert launches.found["k_scan_t"][parameter] == given[name], name
    last = {"q": "q", "kk": "k", "vv": "v", "gg": "g", "betag": "beta", "dOg": "dO"}
    last |= {"dq": "dq", "dk": "dk", "dvo": "dv", "dgo": "dg", "dbeta": "dbeta"}
    for parameter, name in last.items():
        assert launches.found["k_bwd"][parameter] == given[name], name
    if sequences > 1:
        assert launches.found["k_meta"]["cu"] == given["cu_seqlens"]
    inside = range(given["workspace"], given["workspace"] + size)
    scratch = [
        value
        for found in launches.found.values()
        for value in found.values()
        if isinstance(value, int) and value >= given["workspace"]
    ]
    assert scratch
    assert all(value in inside for value in scratch)
    assert all(found["stream"] == 7 for found in launches.found.values())
    # The scan has a block for each sequence and head in its second dimension.
    assert launches.found["k_scan_t"]["grid"][1] == sequences * heads


# ------------------------------------------------------------------------------------ cuDNN's engine accepts what we do


def facts(**changes: Any) -> Any:
    """A node as `cudnn_hopper` would describe its own call."""
    fp32, bf16 = cudnn.data_type.FLOAT, cudnn.data_type.BFLOAT16
    found = {
        "op": "KDA", "invalid": None, "is_bwd": True, "checkpoint_every_n_tokens": 0, "safe_gate": False,
        "has_a_log": False, "has_dt_bias": False, "use_beta_sigmoid": False, "use_qk_l2norm": False,
        "allow_neg_eigval": False, "beta_guard": False, "gate_domain": "log", "scale": 128**-0.5,
        "cu_dtype": cudnn.data_type.INT32, "d_qk": 128, "d_v": 128, "h_q": 4, "h_k": 4, "h_v": 4, "io_dtype": bf16,
        "g_dtype": fp32, "beta_dtype": fp32, "final_state_dtype": fp32, "state_dtype": fp32, "thd_layout": True,
        "do_dtype": bf16, "dq_dtype": bf16, "dk_dtype": bf16, "dv_dtype": bf16, "dg_dtype": fp32, "dbeta_dtype": fp32,
        "d_initial_state_dtype": fp32, "d_final_state_dtype": fp32, "has_state_indices": False,
        "overwrite_initial_state": False,
    }  # fmt: skip
    return SimpleNamespace(**{**found, **changes})


def supported(described: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(engine.buffers, "current_sm", lambda: 90)
    monkeypatch.setattr(engine, "declared_layout_reason", lambda *node, **options: None)
    graph = SimpleNamespace(_facts_for=lambda analyze: described, nodes=(None,))
    try:
        engine.KdaHopperCudaEngine().check_support(graph)
    except NotImplementedError:
        return False
    return True


def test_cudnns_engine_accepts_what_we_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    assert supported(facts(), monkeypatch)


@pytest.mark.parametrize(
    "change",
    [
        {"use_qk_l2norm": True},
        {"use_beta_sigmoid": True},
        {"safe_gate": True, "has_a_log": True, "has_dt_bias": True},
        {"scale": 0.1},
        {"h_v": 8},
        {"g_dtype": cudnn.data_type.BFLOAT16},
        {"beta_dtype": cudnn.data_type.BFLOAT16},
        {"d_qk": 64, "d_v": 64},
        {"allow_neg_eigval": True},
    ],
    ids=str,
)
def test_what_is_done_outside_or_declined_has_no_backward(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were one of these accepted one day, it could be left to the kernel."""
    assert not supported(facts(**change), monkeypatch)


# ------------------------------------------------------------------------------------------------------- the table


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPATCH_KDA_BACKEND", "cudnn_hopper")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    passed = SimpleNamespace(reason=None)
    monkeypatch.setattr("fusepatch.selfcheck.verdict", lambda check, device: passed)
    choose.TABLE.forget()
    yield
    choose.TABLE.forget()


def test_the_table_on_hopper(on_hopper: None) -> None:
    found = choose.choose(FITS, 4096, 2)
    assert isinstance(found, choose.Backend)
    assert found.name == "cudnn_hopper"
    assert choose.choose(FITS, 4096, 65536) is Reason.INDEX_RANGE


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (10, 3), (12, 0)])
def test_the_table_on_other_gpus(capability: tuple[int, int], on_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose.choose(FITS, 4096, 2) is Reason.ARCHITECTURE


def test_a_cuda_graph_waits_for_the_kernels(on_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_hopper, "_compiled", set())
    choose.choose(FITS, 4096, 2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose.choose(FITS, 4096, 2) is Reason.CAPTURE_COLD
    kind = (FITS.dtype, FITS.g_dtype, FITS.beta_dtype, FITS.parameter_dtypes)
    cudnn_hopper._compiled.add(cudnn_hopper._kind(FITS.device, FITS.call, FITS.heads, FITS.value_heads, *kind))
    assert isinstance(choose.choose(FITS, 4096, 2), choose.Backend)


def test_without_a_name_nothing_serves_yet(on_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPATCH_KDA_BACKEND", "auto")
    assert choose.choose(FITS, 4096, 2) is Reason.NO_KERNEL


def test_the_survey_of_doctor(on_hopper: None) -> None:
    standings = {each.backend: each for each in choose.survey(torch.device("cuda", 0))}
    assert standings["cudnn_hopper"].reason is None
    assert not standings["cudnn_hopper"].native  # by name only: it is beyond parity
    assert [check.case for check in standings["cudnn_hopper"].checks] == ["cudnn_hopper kda bfloat16"]
    assert list(itertools.chain.from_iterable(each.missing for each in standings.values())) == []
