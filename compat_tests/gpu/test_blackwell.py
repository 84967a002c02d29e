"""The kernels for SM100 and SM103 on such a GPU: what must hold of every fused backend, and through a real model.

No GPU that this project has can run them.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fusepatch
from fusepatch import selfcheck
from fusepatch.kernels.gated_mlp import blackwell, choose, launching
from fusepatch.kernels.gated_mlp.blackwell_configuration import Size, size_of
from gpu.fused_cases import DEVICE, FusedCases, assert_nothing_outside, why_not
from gpu.graphs import assert_a_step_is_captured_and_replayed_after_warmup
from support import is_within_parity, relative_error, tiny_llama_mlp

BLACKWELL = next((backend for backend in choose.BACKENDS if backend.name == "blackwell"), None)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not("blackwell")), reason=why_not("blackwell"))]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    """One memory of self-checks for the whole file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusepatch.settings._default_cache_dir", lambda: tmp_path_factory.getbasetemp() / "cache")
        yield


class TestBlackwell(FusedCases):
    BACKEND = BLACKWELL
    KERNELS = blackwell

    # No kernel adds biases: choose.py declines them.
    test_biases_against_fp64 = None
    test_biases_in_every_dtype_and_activation = None
    test_a_bias_that_is_off_16_bytes = None

    def test_selfcheck_passes(self) -> None:
        case = selfcheck.Check("fusepatch.kernels.gated_mlp.check", "blackwell fused bfloat16 silu")
        assert selfcheck.verdict(case, DEVICE) == selfcheck.Verdict(selfcheck.Outcome.PASSED)


def test_the_shared_cases_have_one_for_each_way_of_cutting_the_work_up() -> None:
    assert size_of(72, 136, 20488) is Size.SMALL
    assert size_of(4099, 136, 1352) is size_of(2055, 2056, 3080) is Size.LARGE


@pytest.mark.parametrize("size", Size, ids=lambda size: size.value)
@pytest.mark.parametrize("tokens", [1, 257, 4099])
def test_nothing_is_written_outside_of_the_results(tokens: int, size: Size) -> None:
    family = blackwell.FAMILY
    how, ctas = (family.arch(DEVICE), torch.bfloat16, "silu"), family.most(DEVICE, size)

    def forward(given: dict[str, Tensor], h: Tensor, gate_up: Tensor) -> None:
        launch = launching.forward(family, *how, True, size)
        launch(given["x"], given["gate_weight"], given["up_weight"], h, gate_up, ctas)

    def backward(given: dict[str, Tensor], gate_up: Tensor, d_gate_up: Tensor, h: Tensor) -> None:
        launch = launching.backward(family, *how, True, size)
        launch(given["dout"], given["down_weight"], gate_up, d_gate_up, h, ctas)

    assert_nothing_outside(forward, backward, tokens)


# ------------------------------------------------------------------------------------------------- through the library


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPATCH_GATED_MLP_BACKEND", "blackwell")


def _step(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    leaf = x.detach().requires_grad_()
    out = module(leaf)
    out.backward(x.flip(0))
    return {"out": out.detach(), "x": leaf.grad, **{name: p.grad.clone() for name, p in module.named_parameters()}}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_real_module_runs_fused_and_within_parity(named: None, compiled: bool) -> None:
    mlp = tiny_llama_mlp(torch.bfloat16, hidden_size=1024, intermediate_size=3072).cuda()
    x = torch.randn(4, 1024, 1024, device="cuda", dtype=torch.bfloat16)
    stock = _step(mlp, x)
    with fusepatch.accelerated("gated_mlp", strict=True):
        patched = _step(torch.compile(mlp) if compiled else mlp, x)
        if not compiled:
            assert fusepatch.status().targets[0].total("calls") == {"fused": 1}
    exact = _step(mlp.float(), x.float())
    for name, found in patched.items():
        expected = exact[name.removeprefix("_orig_mod.")]
        errors = relative_error(found, expected), relative_error(stock[name.removeprefix("_orig_mod.")], expected)
        assert is_within_parity(*errors), (name, errors)


def test_training_step_is_captured_and_replayed_after_warmup(named: None) -> None:
    mlp = tiny_llama_mlp(torch.bfloat16, hidden_size=1024, intermediate_size=3072).cuda()
    fusepatch.accelerate("gated_mlp", strict=True)
    assert_a_step_is_captured_and_replayed_after_warmup(mlp, 2048, "fused")
