"""The Blackwell kernels' Triton twin on the GPU that is here: against fp64, and against what the Blackwell kernels' own
PTX computes in the model of compat_tests/ptx_machine.py.

The twin has the kernels' tiles, K step, order of tiles and roundings, and nothing else of theirs. What Hopper's kernels
have in common with Blackwell's, test_hopper.py runs.
"""

from __future__ import annotations

from pathlib import Path

import machine_code
import pytest
from blackwell_kernels import (
    EVERY,
    OFTEN,
    Build,
    Configuration,
    Launch,
    builder,
    expected,
    launcher,
    named,
    needs_a_compiler,
    results_of,
)

from fusepatch.kernels.gated_mlp.blackwell_configuration import Forward
from gpu.fused_cases import DEVICE, why_not
from support import relative_error

blackwell_twin = pytest.importorskip("blackwell_twin")  # needs Triton
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not("triton_gemm")), reason=why_not("triton_gemm"))]

SHAPES = [(1, 8, 8), (129, 520, 136), (1100, 72, 264), (2055, 1032, 1352)]
"""(M, H, I): one row; tails everywhere; more rows of tiles than a group has; more tiles than multiprocessors."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return builder(tmp_path_factory)


@pytest.fixture(scope="module")
def launch(compiled: Build) -> Launch:
    return launcher(compiled)


@pytest.mark.parametrize("configuration", EVERY, ids=named)
def test_against_fp64(configuration: Configuration) -> None:
    """Every configuration of the Blackwell kernels; results are NaN before, and nothing beside them is written."""
    for shape in SHAPES:
        tensors = blackwell_twin.run(configuration, *shape, DEVICE)
        right = expected(configuration, tensors)
        for name in set(results_of(configuration)) & tensors.keys():
            error = relative_error(tensors[name], right[name])
            assert error < blackwell_twin.BOUND[configuration.dtype], (shape, name, error)


@machine_code.needs_the_dsl
@needs_a_compiler
@pytest.mark.parametrize("configuration", OFTEN, ids=named)
def test_like_the_blackwell_kernel_in_the_model(launch: Launch, configuration: Configuration) -> None:
    """The kernel compiled for sm_100a, its PTX executed on the CPU; the twin on this GPU; the same operands."""
    for shape in SHAPES[:2]:
        call = launch(configuration, *shape, ctas=2)
        call.run(seed=1)
        twin = blackwell_twin.run(configuration, *shape, DEVICE)
        for name in set(results_of(configuration)) & twin.keys():
            error = relative_error(twin[name].cpu(), call.tensors[name])
            assert error < blackwell_twin.BOUND[configuration.dtype], (shape, name, error)


@pytest.mark.parametrize("fault", blackwell_twin.FAULTS)
def test_a_fault_is_seen(tmp_path: Path, fault: str) -> None:
    kernels = blackwell_twin.broken(fault, tmp_path)
    forward = blackwell_twin.FAULTS[fault].forward
    (configuration,) = (each for each in OFTEN[:2] if isinstance(each, Forward) is forward)
    tensors = blackwell_twin.run(configuration, *SHAPES[1], DEVICE, kernels)
    right = expected(configuration, tensors)
    errors = {
        name: relative_error(tensors[name], right[name]) for name in set(results_of(configuration)) & tensors.keys()
    }
    assert max(errors.values()) > blackwell_twin.BOUND[configuration.dtype], errors
