"""The Blackwell kernels' Triton twin, compiled for SM90 as gpu/test_blackwell_twin.py launches it there; and what
Hopper's kernels, which run there too, have in common with Blackwell's.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import machine_code
import pytest
import torch
from blackwell_kernels import EVERY, Configuration, named

pytest.importorskip("triton")

import blackwell_twin
from compile_only import test_dual_gemm as compiling

from fusepatch.kernels.gated_mlp import dual_gemm
from fusepatch.kernels.gated_mlp.blackwell_configuration import NARROW, Forward

USUAL = [each for each in EVERY if each.tile == NARROW and each.activation == ("silu", "gelu")[each.dtype == "float16"]]
"""The twin's other tiles are the backend's own, which test_dual_gemm.py compiles."""


def launches_of(configuration: Configuration, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `blackwell_twin.run` launches."""
    made: list[Any] = []
    for name in ("_forward_kernel", "_backward_kernel"):
        monkeypatch.setattr(dual_gemm, name, compiling._Recorder(getattr(dual_gemm, name), made))
    blackwell_twin.run(configuration, 129, 136, 136, torch.device("cpu"))
    return made


@pytest.mark.parametrize(
    "configuration",
    [pytest.param(each, marks=[] if each in USUAL else [pytest.mark.slow], id=named(each)) for each in EVERY],
)
def test_it_fits_and_spills_nothing(
    configuration: Configuration, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (launch,) = launches_of(configuration, monkeypatch)
    tile, options = configuration.tile, launch.options
    columns = configuration.half if isinstance(configuration, Forward) else tile.columns
    assert (options["ROWS"], options["COLUMNS"], options["DEPTH"], options["GROUP"]) == (128, columns, 64, tile.group)
    built = compiling.compiled(launch, 90)
    assert built.metadata.shared <= compiling.MOST_SHARED
    # The K step of the tensor cores is 16 on both, and each adds to its own sums: two chains forward, one backward.
    assert len(set(compiling._accumulators(compiling.loop(built), 90))) == (
        2 if isinstance(configuration, Forward) else 1
    )
    assert set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+(k\d+)\.f32", built.asm["ptx"])) == {"k16"}
    code = compiling.machine_code(built, tmp_path) if compiling.NVDISASM.exists() else None
    if code is None:
        pytest.skip("no nvdisasm for this target: PTX alone was looked at")
    assert not any(line.startswith(("LDL", "STL")) for line in code)


@machine_code.needs_the_dsl
def test_what_hopper_and_blackwell_share_is_one_thing() -> None:
    """What gpu/test_hopper.py runs of it: see docs/evidence.md."""
    from fusepatch.kernels.gated_mlp import blackwell_backward, blackwell_forward, hopper_backward, hopper_forward

    for one, other, names in [
        (blackwell_forward, hopper_forward, ["gemm", "activate", "round_to", "MINUS_LOG2E", "WIDTH_K"]),
        (blackwell_backward, hopper_backward, ["gemm", "activate_and_slope", "round_to", "MINUS_LOG2E", "WIDTH_K"]),
    ]:
        assert all(getattr(one, name) is getattr(other, name) for name in names)
    # Where a tile lies, TMA's boxes, the halves of gate_up, and the ring between TMA and the epilogue.
    shared = "place_of", "load_atom", "store_atom", "boxes", "shares", "halves", "fake", "fake_stream"
    for module, more in [
        (blackwell_forward, ()),
        (hopper_forward, ()),
        (blackwell_backward, ("ring", "hint")),
        (hopper_backward, ("ring", "hint")),
    ]:
        text = Path(module.__file__).read_text()
        assert all(f"gemm.{name}(" in text for name in (*shared, *more)), module
