"""The activations of the CuTe DSL's epilogues are the same instructions on Hopper and on Blackwell: so what
gpu/test_cute_activations.py finds on one holds on the other, as far as their approximate exp2 and reciprocal agree.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import fake_cuda
import machine_code
import pytest
from blackwell_kernels import needs_a_compiler

from fusepatch.kernels.gated_mlp import choose

pytestmark = [machine_code.needs_the_dsl]


def compiled(activation: str, arch: str, folder: Path) -> object:
    activation_kernel = pytest.importorskip("activation_kernel")
    options = f"--enable-tvm-ffi --gpu-arch {arch} --keep-cubin --keep-ptx --dump-dir={folder}"
    return activation_kernel.build(activation, options)


@pytest.mark.parametrize("activation", choose.ACTIVATIONS)
def test_the_instructions_are_the_same(activation: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    archs = ["sm_90a", "sm_100a", "sm_103a"]
    programs = [compiled(activation, arch, tmp_path_factory.mktemp(arch)).artifacts.PTX for arch in archs]
    bodies = {re.sub(r"^\.target .*$", "", ptx, flags=re.MULTILINE) for ptx in programs}
    assert len(bodies) == 1
    (body,) = bodies
    # Two special-function instructions each, and nothing else that approximates.
    assert re.findall(r"\s(\w+\.approx\S*)", body) in (
        [["ex2.approx.ftz.f32", "rcp.approx.ftz.f32"], ["rcp.approx.ftz.f32", "ex2.approx.ftz.f32"]]
    )
    assert not re.search(r"\s(div|sqrt|tanh|sin|cos|lg2)\.", body)


@needs_a_compiler
def test_it_is_launched_as_the_gpu_test_launches_it(tmp_path: Path) -> None:
    start, launched = fake_cuda.load(compiled("silu", "sm_90a", tmp_path), tmp_path)
    values, results = (fake_cuda.tensor(0x7F1000000000, shape, "float32") for shape in ((384,), (3, 384)))
    start(values, results, -math.log2(math.e))
    seen = launched()
    assert (seen.grid, seen.block) == ((3, 1, 1), (128, 1, 1))
