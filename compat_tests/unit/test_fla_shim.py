"""`fla.modules.GatedMLP`: one class that all of the library's models share. Its own code needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fla.modules
import fla.modules.mlp
import pytest
import torch
from fla.modules.mlp import GatedMLP
from torch import Tensor, nn
from torch.nn import functional as F

import fusepatch
from fusepatch.shims import fla_gated_mlp
from support import grads_of, is_within_parity, relative_error

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def rehearsal(reference_backend: None) -> None:
    """The reference backend, in force."""
    fusepatch.accelerate()


def make(dtype: torch.dtype = torch.float32, **options: Any) -> GatedMLP:
    torch.manual_seed(0)
    mlp = GatedMLP(64, intermediate_size=96, **options)
    for parameter in mlp.parameters():
        nn.init.normal_(parameter, std=0.15)
    return mlp.to(dtype)


def formula(mlp: GatedMLP, x: Tensor) -> Tensor:
    return mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))


def counted() -> tuple[dict[str, int], dict[str, int]]:
    (target,) = (each for each in fusepatch.status().targets if each.library == "fla")
    return target.total("calls"), target.total("declines")


def outcome(run: Callable[[], Any]) -> type | None:
    """The type of what `run()` raises. Without a GPU the library's own kernels raise RuntimeError."""
    try:
        run()
    except Exception as error:
        return type(error)
    return None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fuse_swiglu", [True, False])
def test_results(rehearsal: None, fuse_swiglu: bool, dtype: torch.dtype) -> None:
    """Output and every gradient, against the formula in fp64 as the formula in `dtype` is."""
    mlp = make(dtype, fuse_swiglu=fuse_swiglu)
    x = torch.randn(4, 33, 64).to(dtype).requires_grad_()
    dout = torch.randn(4, 33, 64).to(dtype)
    exact_mlp, exact_x = make(fuse_swiglu=fuse_swiglu).to(dtype).double(), x.detach().double().requires_grad_()
    tensors = {"x": x, **dict(mlp.named_parameters())}
    exact_tensors = {"x": exact_x, **dict(exact_mlp.named_parameters())}

    patched = grads_of(lambda: mlp(x), tensors, dout)
    stock = grads_of(lambda: formula(mlp, x), tensors, dout)
    exact = grads_of(lambda: formula(exact_mlp, exact_x), exact_tensors, dout.double())
    assert counted() == ({"fused": 1}, {})
    for name, expected in exact.items():
        errors = relative_error(patched[name], expected), relative_error(stock[name], expected)
        assert is_within_parity(*errors), (name, *errors)


def test_keywords_are_ignored_as_the_library_ignores_them(rehearsal: None) -> None:
    mlp, x = make(), torch.randn(1, 6, 64)
    expected = formula(mlp, x)
    assert relative_error(mlp(x, cu_seqlens=torch.tensor([0, 2, 6]), anything="else"), expected) < 1e-6
    assert relative_error(mlp(x=x), expected) < 1e-6
    assert counted() == ({"fused": 2}, {})
    with pytest.raises(TypeError):
        mlp(x, x)
    with pytest.raises(TypeError):
        mlp(cu_seqlens=None)


def adapted(mlp: nn.Module) -> None:
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["up_proj"], r=4), mlp)


def own_forward(module: nn.Module) -> None:
    module.forward = lambda *args: type(module).forward(module, *args)


DECLINED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "hooked-swiglu": ("hooks", lambda mlp: mlp.swiglu_linear.register_forward_hook(lambda *args: None)),
    "swiglu-with-a-forward": ("hooks", lambda mlp: own_forward(mlp.swiglu_linear)),
    "hooked-down": ("hooks", lambda mlp: mlp.down_proj.register_forward_hook(lambda *args: None)),
    "lora": ("peft", adapted),
    "another-activation": ("activation", lambda mlp: setattr(mlp, "hidden_act", "gelu")),
}


@pytest.mark.parametrize("case", DECLINED)
def test_declined(rehearsal: None, case: str) -> None:
    """There is no pointwise route: the library is pointwise already, and does not call down_proj."""
    reason, change = DECLINED[case]
    mlp = make()
    change(mlp)
    raised = outcome(lambda: mlp(torch.randn(3, 64)))
    assert counted() == ({"original": 1}, {reason: 1})
    (row,) = fusepatch.explain(mlp).modules
    assert (row.route, row.reason) == ("original", reason)
    fusepatch.restore()
    assert outcome(lambda: mlp(torch.randn(3, 64))) is raised


def test_powlu(rehearsal: None) -> None:
    mlp = make(hidden_act="powlu")
    outcome(lambda: mlp(torch.randn(3, 64)))
    assert counted() == ({"original": 1}, {"activation": 1})


@pytest.mark.parametrize("route", ["pointwise", "original"])
def test_route_bound(monkeypatch: pytest.MonkeyPatch, reference_backend: None, route: str) -> None:
    monkeypatch.setenv("FUSEPATCH_GATED_MLP_ROUTE", route)
    fusepatch.accelerate()
    outcome(lambda: make()(torch.randn(3, 64)))
    assert counted() == ({"original": 1}, {"route-bound": 1})


def test_autocast_declines(rehearsal: None) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        outcome(lambda: make()(torch.randn(3, 64)))
    assert counted() == ({"original": 1}, {"autocast": 1})


def test_cpu_without_a_backend_runs_the_library() -> None:
    mlp, x = make(), torch.randn(3, 64)
    stock = outcome(lambda: mlp(x))
    fusepatch.accelerate()
    assert outcome(lambda: mlp(x)) is stock
    assert counted() == ({"original": 1}, {"cpu": 1})
    (found,) = (each for target in fusepatch.status().targets if target.library == "fla" for each in target.classes)
    assert found.errors == {}  # it was the library that raised


def test_models_share_the_class(rehearsal: None) -> None:
    from fla.models.gla import modeling_gla

    assert modeling_gla.GLAMLP is GatedMLP is fla.modules.GatedMLP
    assert "fusepatch" in vars(GatedMLP)["forward"].__code__.co_filename
    config = modeling_gla.GLAConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_heads=2)
    rows = fusepatch.explain(modeling_gla.GLAForCausalLM(config)).modules
    assert [(row.name, row.route, row.patched) for row in rows] == [
        (f"model.layers.{layer}.mlp", "fused", True) for layer in range(2)
    ]


def test_restore(reference_backend: None) -> None:
    before = dict(vars(GatedMLP))
    assert fla_gated_mlp.matches(before["forward"])
    fusepatch.accelerate()
    assert vars(GatedMLP)["forward"] is not before["forward"]
    fusepatch.restore()
    assert dict(vars(GatedMLP)) == before
    assert list(vars(GatedMLP)) == list(before)


@pytest.mark.parametrize("name", ["swiglu", "powglu", "swiglu_linear", "powglu_linear"])
def test_template_names_what_the_library_has(name: str) -> None:
    assert callable(getattr(fla.modules.mlp, name))


# ----------------------------------------------------------------------------------------------------- known faults


class Doubled(nn.Module):
    def forward(self, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return 2 * F.linear(F.silu(gate) * up, weight, bias)


def test_another_swiglu_linear(rehearsal: None) -> None:
    mlp, x = make(), torch.randn(3, 64)
    mlp.swiglu_linear = Doubled()
    assert relative_error(mlp(x), 2 * formula(mlp, x)) < 1e-6
