"""FlashQLA's kernels for the gated delta rule: what is declined and why, the table, the chunks that the kernels are
told of, and how a changed FlashQLA is noticed. What the op computes is in numerics/interpreted_gated_delta_rule.py. No
GPU has run any of it."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import emulated_flash_qla
import pytest
import torch

from fusepatch.decline import Reason
from fusepatch.doctor import packages
from fusepatch.kernels import vendor_sources
from fusepatch.kernels.backends import Backend
from fusepatch.kernels.linear_attention import flash_qla, flash_qla_pieces
from fusepatch.kernels.linear_attention.gated_delta_rule import choose
from fusepatch.kernels.linear_attention.problem import Call, Problem

CALL = Call(0.1, True, "softplus", 0.0, True)


def problem(call: Call = CALL, **changes: Any) -> Problem:
    found = Problem(
        torch.device("cuda", 0), torch.bfloat16, 4, 8, 128, 128, True, call, torch.bfloat16, torch.bfloat16,
        (torch.float32, torch.float32),
    )  # fmt: skip
    return found._replace(**changes)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    def forget() -> None:
        flash_qla.why_no_library.cache_clear()
        flash_qla.drift.cache_clear()
        choose.TABLE.forget()

    forget()
    yield
    forget()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = emulated_flash_qla.library()
    monkeypatch.setattr(flash_qla, "_library", lambda: found)
    return found


# ------------------------------------------------------------------------------------------------------------ declines


def test_what_is_served(library: SimpleNamespace) -> None:
    for fits in (
        problem(),
        problem(CALL._replace(negative_eigenvalues=True, state_v_first=True, scale=1.0)),
        problem(trains=False),
        problem(heads=8),
        problem(value_heads=64),
        problem(dtype=torch.float16, g_dtype=torch.float32, beta_dtype=torch.float16),
        problem(parameter_dtypes=(torch.bfloat16, None)),
    ):
        assert flash_qla.why_not(fits) is None, fits


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"key_width": 64}, Reason.HEAD_SIZE),
        ({"value_width": 256}, Reason.HEAD_SIZE),
        ({"call": CALL._replace(l2norm=False)}, Reason.UNBOUNDED),
        ({"call": CALL._replace(beta_sigmoid=False)}, Reason.UNBOUNDED),
        ({"call": CALL._replace(gate="given")}, Reason.UNBOUNDED),
        ({"call": CALL._replace(gate="given", safe_gate=True)}, Reason.UNBOUNDED),
        ({"call": CALL._replace(gate="bounded", lower_bound=-5.0)}, Reason.UNBOUNDED),
        ({"call": CALL._replace(scale=0.0)}, Reason.OPTION),
        ({"value_heads": 4}, Reason.NO_KERNEL),
        ({"value_heads": 12}, Reason.NO_KERNEL),
        ({"value_heads": 72}, Reason.NO_KERNEL),
        ({"g_dtype": torch.float64}, Reason.DTYPE),
        ({"beta_dtype": torch.float64}, Reason.DTYPE),
        ({"parameter_dtypes": (torch.float64, None)}, Reason.DTYPE),
    ],
)
def test_declines(changed: dict[str, Any], reason: Reason, library: SimpleNamespace) -> None:
    assert flash_qla.why_not(problem(**changed)) is reason


def test_sizes_beyond_32_bits() -> None:
    """The states of all chunks: 8 heads of 128 x 128 in at most 16383 chunks."""
    assert flash_qla.why_not_size(problem(), 16381 * 64, 1) is None
    assert flash_qla.why_not_size(problem(), 16382 * 64, 1) is Reason.INDEX_RANGE
    assert flash_qla.why_not_size(problem(), 64, 16382) is Reason.INDEX_RANGE


def test_no_tokens() -> None:
    assert flash_qla.why_not_size(problem(), 0, 1) is Reason.ZERO_TOKENS


# ----------------------------------------------------------------------------------------------------- the package


def test_a_changed_interface_is_noticed(library: SimpleNamespace) -> None:
    assert flash_qla.why_no_library() is None
    for name in flash_qla._FUNCTIONS:
        function = getattr(library, name)
        for other in (lambda **given: None, lambda unknown, **given: None, None):
            flash_qla.why_no_library.cache_clear()
            if other is None:
                delattr(library, name)
            else:
                setattr(library, name, other)
            assert flash_qla.why_no_library() is Reason.PACKAGE_DIFFERS, name
        setattr(library, name, function)
    flash_qla.why_no_library.cache_clear()
    library.CHUNK_SIZE = 32
    assert flash_qla.why_no_library() is Reason.PACKAGE_DIFFERS


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModuleNotFoundError("No module named 'tilelang'"), Reason.MISSING_PACKAGE),
        (ValueError("FlashQLA now support sm90, sm100, ... Found compute version: 8.0"), Reason.ARCHITECTURE),
    ],
)
def test_a_library_that_does_not_import(error: Exception, reason: Reason, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(flash_qla, "_library", fail)
    assert flash_qla.why_no_library() is reason


def test_other_sources_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor_sources, "path_of", lambda *parts, package: tmp_path.joinpath(*parts))
    assert flash_qla.drift() == ("flash-qla has no such kernels as 0.1.3 brings",)
    for parts in flash_qla._READ_FILES:
        path = tmp_path.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("another\n")
    flash_qla.drift.cache_clear()
    assert flash_qla.drift() == ("kernels of flash-qla is not that of 0.1.3, whose limits are known",)


@pytest.mark.skipif(importlib.util.find_spec("flash_qla") is None, reason="flash-qla is not installed")
def test_the_installed_release_is_the_one_that_was_read() -> None:
    assert flash_qla.drift() == ()


def test_what_doctor_says_to_install() -> None:
    assert packages.install(["flash_qla", "tilelang"], "13.0") == "pip install flash-qla"
    assert packages.install(["triton", "flash_qla"], "13.0") == 'pip install "fusepatch[cuda13]" flash-qla'


# ------------------------------------------------------------------------------------------------------------ the table


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, library: SimpleNamespace) -> Iterator[None]:
    """An SM90 on which everything is installed and every self-check passes."""
    monkeypatch.setattr("fusepatch.kernels.backends.missing", lambda backend: ())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("fusepatch.selfcheck.verdict", lambda check, device: SimpleNamespace(reason=None))
    (backend,) = (each for each in choose.BACKENDS if each.name == "flash_qla")
    object.__setattr__(backend, "drift", lambda: ())
    yield
    object.__setattr__(backend, "drift", flash_qla.drift)


def test_it_does_not_serve_unnamed(gpu: None) -> None:
    assert isinstance(choose.choose(problem(), 4096, 2), Reason)


def test_it_serves_where_it_is_named(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPATCH_GATED_DELTA_RULE_BACKEND", "flash_qla")
    for capability in ((9, 0), (10, 0), (10, 3), (12, 0), (8, 0)):
        choose.TABLE.forget()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        found = choose.choose(problem(), 4096, 2)
        if capability in ((9, 0), (10, 0), (10, 3)):
            assert isinstance(found, Backend)
            assert found.name == "flash_qla"
        else:
            assert found is Reason.ARCHITECTURE


def test_the_table_asks_about_sizes_and_captures(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPATCH_GATED_DELTA_RULE_BACKEND", "flash_qla")
    assert isinstance(choose.choose(problem(), 1 << 18, 1), Backend)
    assert choose.choose(problem(), 1 << 20, 1) is Reason.INDEX_RANGE
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(flash_qla, "_warm", set())
    assert choose.choose(problem(), 1 << 18, 1) is Reason.CAPTURE_COLD


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPATCH_GATED_DELTA_RULE_BACKEND", "flash_qla")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("fusepatch.kernels.backends.missing", lambda backend: ("flash_qla", "tilelang"))
    assert choose.choose(problem(), 4096, 2) is Reason.MISSING_PACKAGE


# --------------------------------------------------------------------------------------------------- pieces and chunks


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("length", "chunks"), [(1, None), (64, None), (65, None), (129, 1), (400, 2), (512, 4)])
def test_pieces_of_a_batch(batch: int, length: int, chunks: int | None) -> None:
    pieces = flash_qla_pieces.of_batch(batch, length, chunks, torch.device("cpu"))
    step = length if chunks is None else 64 * chunks
    starts = [sequence * length + place for sequence in range(batch) for place in range(0, length, step)]
    assert pieces.ends.tolist() == [*starts, batch * length]
    assert pieces.sequence_ends.tolist() == [sequence * length for sequence in range(batch + 1)]
    assert pieces.sequence_of.tolist() == [start // length for start in starts]
    per_sequence = len(starts) // batch
    assert pieces.first_of.tolist() == [per_sequence * sequence for sequence in range(batch + 1)]
    assert pieces.is_cut is (per_sequence > 1)
    assert pieces.number == len(starts)
    is_last, is_first = pieces.at_an_end()
    assert is_first.tolist() == [start % length == 0 for start in starts]
    assert is_last.tolist() == [(start + step) // length > start // length for start in starts]
    covered(pieces)
    assert pieces.ends._flash_qla_prepared_varlen[2] == sum(  # type: ignore[attr-defined]
        -(-(b - a) // 64) for a, b in itertools.pairwise(pieces.ends.tolist())
    )


@pytest.mark.parametrize("ends", [[0, 5], [0, 0, 1, 64, 64, 200], [0, 0, 0], [0, 65, 65, 129], [0, 63, 126, 189]])
def test_chunks_of_sequences(ends: list[int]) -> None:
    pieces = flash_qla_pieces.of_sequences(torch.tensor(ends), ends[-1])
    assert pieces.ends.tolist() == pieces.sequence_ends.tolist() == ends
    assert not pieces.is_cut
    covered(pieces)


def covered(pieces: flash_qla_pieces.Pieces) -> None:
    """Every token is in one chunk, and a piece's chunks begin where the table of states has room for them."""
    rows: list[int] = []
    for chunk in emulated_flash_qla.chunks_of(pieces.ends):
        rows += range(chunk.rows.start, chunk.rows.stop)
    assert sorted(rows) == list(range(int(pieces.ends[-1])))
    _, offsets, most, _ = pieces.ends._flash_qla_prepared_varlen  # type: ignore[attr-defined]
    counts = [-(-(b - a) // 64) for a, b in itertools.pairwise(pieces.ends.tolist())]
    assert offsets.tolist() == list(itertools.accumulate(counts, initial=0))
    assert offsets[-1] <= most


def test_a_tensor_that_is_written_to_again_is_read_again() -> None:
    ends = torch.tensor([0, 70, 140], dtype=torch.int32)
    first = flash_qla_pieces.of_sequences(ends, 140)
    ends[1] = 3
    second = flash_qla_pieces.of_sequences(ends, 140)
    assert first.ends.tolist() == [0, 70, 140]
    assert second.ends.tolist() == [0, 3, 140]


@pytest.mark.parametrize(("answer", "expected"), [((True, 4), 4), ((False, None), None), ((True, 16), None)])
def test_flash_qlas_model_says_how_long_pieces_are(
    answer: Any, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    model = SimpleNamespace(decide=lambda **given: asked.append(given) or answer)
    monkeypatch.setattr(flash_qla.importlib, "import_module", lambda name: model)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    flash_qla._chunks_per_piece.cache_clear()
    assert flash_qla._chunks_per_piece(2, 1000, 8, torch.device("cuda", 0)) == expected
    flash_qla._chunks_per_piece.cache_clear()
    assert asked == [{"num_chunks": [16, 16], "num_v_heads": 8, "P": 132, "chunk": 64, "is_train": True}]
