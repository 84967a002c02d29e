"""The Blackwell kernels' Triton twin, run by Triton's interpreter on a CPU: what gpu/test_blackwell_twin.py runs there.

Collected by test_interpreted.py, in a process of its own. In fp16: the interpreter truncates to bf16.
"""

from __future__ import annotations

from pathlib import Path

import blackwell_twin
import machine_code
import pytest
import torch
from blackwell_kernels import EVERY, Configuration, builder, expected, launcher, named, needs_a_compiler, results_of

from fusepatch.kernels.gated_mlp import dual_gemm
from fusepatch.kernels.gated_mlp.blackwell_configuration import SQUARE, WIDE, Backward, Forward
from support import relative_error

CPU = torch.device("cpu")
HALF = [configuration for configuration in EVERY if configuration.dtype == "float16"]
SHAPES = [(1, 8, 8), (129, 200, 136), (1100, 8, 136)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("configuration", HALF, ids=named)
def test_against_fp64(configuration: Configuration, shape: tuple[int, int, int]) -> None:
    tensors = blackwell_twin.run(configuration, *shape, CPU)
    right = expected(configuration, tensors)
    for name in set(results_of(configuration)) & tensors.keys():
        assert relative_error(tensors[name], right[name]) < blackwell_twin.BOUND["float16"]


@machine_code.needs_the_dsl
@needs_a_compiler
def test_like_the_blackwell_kernel_in_the_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    launch = launcher(builder(tmp_path_factory))
    for configuration in [each for each in HALF if each.activation == "gelu"][-2:]:
        call = launch(configuration, *SHAPES[1], ctas=2)
        call.run(seed=1)
        twin = blackwell_twin.run(configuration, *SHAPES[1], CPU)
        for name in set(results_of(configuration)) & twin.keys():
            assert relative_error(twin[name], call.tensors[name]) < blackwell_twin.BOUND["float16"]


@pytest.mark.parametrize("fault", blackwell_twin.FAULTS)
def test_a_fault_is_seen(tmp_path: Path, fault: str) -> None:
    kernels = blackwell_twin.broken(fault, tmp_path)
    kind = Forward if blackwell_twin.FAULTS[fault].forward else Backward
    configuration = next(each for each in HALF if isinstance(each, kind))
    tensors = blackwell_twin.run(configuration, *SHAPES[1], CPU, kernels)
    right = expected(configuration, tensors)
    names = set(results_of(configuration)) & tensors.keys()
    assert max(relative_error(tensors[name], right[name]) for name in names) > 1.5 * blackwell_twin.BOUND["float16"]


def test_two_of_its_three_tiles_are_those_of_the_backend() -> None:
    """So gpu/test_dual_gemm.py runs them too."""
    tiles = {configuration.tile: blackwell_twin.tile_of(configuration) for configuration in EVERY}
    assert len(tiles) == 3
    assert tiles[WIDE] == tiles[SQUARE] == dual_gemm.LARGE
