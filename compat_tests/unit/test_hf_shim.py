"""Gated MLPs of transformers: one class for each spelling, the activations, and whole models."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Phi3Config, Qwen3Config
from transformers.activations import ACT2FN

import fusepatch
from fusepatch.shims.activations import kind_of
from support import grads_of, is_within_parity, relative_error, tiny_llama_mlp

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh",
    "mlp_bias": False,
    "shared_intermediate_size": 96,
    "block_auto_adjust_ff_dim": False,
}


@pytest.fixture(autouse=True)
def rehearsal(reference_backend: None) -> None:
    """Every test here runs the reference backend."""


def make(name: str, *args: Any, **overrides: Any) -> nn.Module:
    """An MLP of transformers, from a stand-in for its config, with unit-scale activations inside."""
    model, _, class_name = name.partition(".")
    kind = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), class_name)
    torch.manual_seed(0)
    mlp = kind(*(args or (SimpleNamespace(**(CONFIG | overrides)),)))
    for parameter in mlp.parameters():
        nn.init.normal_(parameter, std=0.15)
    return mlp


def calls_of(mlp: nn.Module) -> tuple[dict[str, int], dict[str, int]]:
    """Calls by route and declines by reason of the class that runs for `mlp`."""
    (found,) = (
        each
        for target in fusepatch.status().to_dict()["targets"]
        for each in target["classes"]
        if each["name"] == f"{type(mlp).__module__}.{type(mlp).__qualname__}"
    )
    return found["calls"], found["declines"]


# class -> how to make one, the route, and why not a faster one
TEMPLATES: dict[str, tuple[Callable[[], nn.Module], str, str | None]] = {
    "llama": (lambda: make("llama.LlamaMLP"), "fused", None),
    "llama-swish": (lambda: make("llama.LlamaMLP", hidden_act="swish"), "fused", None),
    "llama-gelu": (lambda: make("llama.LlamaMLP", hidden_act="gelu"), "fused", None),
    "llama-bias": (lambda: make("llama.LlamaMLP", mlp_bias=True), "pointwise", "bias"),
    "gemma": (lambda: make("gemma.GemmaMLP", hidden_act="gelu_pytorch_tanh"), "fused", None),
    "pixtral": (lambda: make("pixtral.PixtralMLP", hidden_act="gelu"), "fused", None),
    "idefics2": (lambda: make("idefics2.Idefics2MLP", 64, 96, 64, "silu"), "fused", None),
    "idefics2-other-output": (lambda: make("idefics2.Idefics2MLP", 64, 96, 40, "silu"), "pointwise", "shape"),
    "qwen2.5-omni": (
        lambda: make("qwen2_5_omni.Qwen2_5OmniMLP", SimpleNamespace(**CONFIG), False),
        "fused",
        None,
    ),
    "llama4": (lambda: make("llama4.Llama4TextMLP", SimpleNamespace(**CONFIG), 96), "fused", None),
    "recurrent-gemma": (
        lambda: make("recurrent_gemma.RecurrentGemmaMlp", intermediate_size=192),
        "pointwise",
        "bias",
    ),
    "phi3": (lambda: make("phi3.Phi3MLP"), "fused", None),
    "granite": (lambda: make("granitemoeshared.GraniteMoeSharedMLP"), "fused", None),
    "lfm2": (lambda: make("lfm2.Lfm2MLP"), "fused", None),
    "voxtral-down-bias": (
        lambda: make("voxtral_realtime.VoxtralRealtimeMLP", SimpleNamespace(**CONFIG)),
        "fused",
        None,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TEMPLATES)
def test_results(name: str, dtype: torch.dtype) -> None:
    """Output and every gradient: the error against fp64 is within the parity bound of the library's own."""
    build, route, reason = TEMPLATES[name]
    mlp = build().to(dtype)
    x = torch.randn(4, 33, 64).to(dtype).requires_grad_()
    dout = torch.randn_like(mlp(x))
    exact_mlp, exact_x = copy.deepcopy(mlp).double(), x.detach().double().requires_grad_()

    exact = grads_of(lambda: exact_mlp(exact_x), {"x": exact_x, **dict(exact_mlp.named_parameters())}, dout.double())
    tensors = {"x": x, **dict(mlp.named_parameters())}
    stock = grads_of(lambda: mlp(x), tensors, dout)
    fusepatch.accelerate()
    patched = grads_of(lambda: mlp(x), tensors, dout)

    assert calls_of(mlp) == ({route: 1}, {} if reason is None else {reason: 1})
    for key, expected in exact.items():
        errors = relative_error(patched[key], expected), relative_error(stock[key], expected)
        assert is_within_parity(*errors), (key, *errors)


def test_clipped_projections_are_called() -> None:
    """Gemma4VisionMLP: the class's forward is the common one, its projections clamp."""
    config = SimpleNamespace(**CONFIG, use_clipped_linears=True)
    mlp = make("gemma4.Gemma4VisionMLP", config)
    with torch.no_grad():
        for name, limit in mlp.named_buffers():
            limit.fill_(-0.5 if name.endswith("min") else 0.5)
    x = torch.randn(5, 64)
    stock = mlp(x)
    fusepatch.accelerate()
    assert relative_error(mlp(x), stock) < 1e-6
    assert calls_of(mlp) == ({"pointwise": 1}, {"not-linear": 1})


# ------------------------------------------------------------------------------------------------------- activations

SERVED = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# gelu_accurate and others compute a GELU by a formula of their own
NOT_SERVED = sorted(set(ACT2FN) - set(SERVED))


@pytest.mark.parametrize("name", [*SERVED, *NOT_SERVED])
def test_activation_by_name(name: str) -> None:
    mlp, x = tiny_llama_mlp(), torch.randn(3, 64)
    try:
        mlp.act_fn = ACT2FN[name]
    except (ImportError, TypeError) as error:
        pytest.skip(str(error))
    stock = mlp(x)
    fusepatch.accelerate()
    patched = mlp(x)
    if name in SERVED:
        assert kind_of(mlp.act_fn) == SERVED[name]
        assert calls_of(mlp) == ({"fused": 1}, {})
        assert relative_error(patched, stock) < 1e-6
    else:
        assert calls_of(mlp) == ({"original": 1}, {"activation": 1})
        assert torch.equal(patched, stock)


def replaced(act: nn.Module, value: Any) -> nn.Module:
    act.act = value
    return act


class OwnSiLU(nn.SiLU):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def own_forward(act: nn.Module) -> nn.Module:
    act.forward = MethodType(type(act).forward, act)
    return act


def hooked(act: nn.Module) -> nn.Module:
    act.register_forward_hook(lambda module, args, out: 2 * out)
    return act


TAMPERED: dict[str, tuple[Callable[[], Any], str]] = {
    "own-forward": (lambda: own_forward(ACT2FN["silu"]), "instance-forward"),
    "hook": (lambda: hooked(ACT2FN["silu"]), "hooks"),
    "gelu-with-another-function": (lambda: replaced(ACT2FN["gelu"], torch.tanh), "activation"),
    "gelu-with-tanh-gelu": (
        lambda: replaced(ACT2FN["gelu"], functools.partial(F.gelu, approximate="tanh")),
        "activation",
    ),
    "tanh-gelu-with-erf-gelu": (lambda: replaced(ACT2FN["gelu_pytorch_tanh"], F.gelu), "activation"),
    "subclass": (OwnSiLU, "activation"),
    "wrapped": (lambda: nn.Sequential(nn.SiLU()), "activation"),
    "function": (lambda: F.relu, "activation"),
    "python-gelu": (lambda: type(ACT2FN["gelu"])(use_gelu_python=True), "activation"),
    "unknown-approximation": (lambda: vars(act := nn.GELU()).update(approximate="none ") or act, "activation"),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_tampered_activation(case: str) -> None:
    build, reason = TAMPERED[case]
    mlp, x = tiny_llama_mlp(), torch.randn(3, 64)
    del mlp.act_fn
    mlp.act_fn = build()
    try:
        stock = mlp(x)
    except RuntimeError:
        stock = None
    fusepatch.accelerate()
    if stock is not None:
        assert torch.equal(mlp(x), stock)
        assert calls_of(mlp) == ({"original": 1}, {reason: 1})
    assert [row.reason for row in fusepatch.explain(mlp).modules] == [reason]


@pytest.mark.parametrize(
    "act",
    [F.silu, nn.SiLU(), nn.SiLU(inplace=True), nn.GELU(), nn.GELU("tanh")],
    ids=["function", "SiLU", "in-place", "GELU", "tanh"],
)
def test_plain_activations_of_torch(act: Any) -> None:
    mlp, x = tiny_llama_mlp(), torch.randn(3, 64)
    del mlp.act_fn
    mlp.act_fn = act
    stock = mlp(x)
    fusepatch.accelerate()
    assert relative_error(mlp(x), stock) < 1e-6
    assert calls_of(mlp) == ({"fused": 1}, {})


def test_class_forward_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    act = ACT2FN["gelu"]
    assert kind_of(act) == "gelu"
    monkeypatch.setattr(type(act), "forward", lambda self, x: torch.tanh(x))
    assert kind_of(act) is fusepatch.Reason.FOREIGN_FORWARD


# ------------------------------------------------------------------------------------------------------ whole models

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        Qwen3Config(**SIZES, head_dim=16),
        Gemma3TextConfig(**SIZES, head_dim=16),
        Phi3Config(**SIZES),
    ],
    ids=lambda config: config.model_type,
)
def test_model(config: Any) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(2, 128, (2, 12))

    def run() -> tuple[Tensor, dict[str, Tensor]]:
        model.train().zero_grad()
        out = model(ids, labels=ids)
        out.loss.backward()
        return out.logits.detach(), {name: weight.grad.clone() for name, weight in model.named_parameters()}

    def generate() -> Tensor:
        return model.eval().generate(ids[:, :4], do_sample=False, max_new_tokens=8, min_new_tokens=8)

    stock_logits, stock_grads = run()
    stock_ids = generate()
    fusepatch.accelerate()
    logits, grads = run()
    assert fusepatch.status().native_calls() == 2
    assert relative_error(logits, stock_logits) < 1e-5
    for name, grad in grads.items():
        assert relative_error(grad, stock_grads[name]) < 1e-4, name
    assert torch.equal(generate(), stock_ids)
    assert calls_of(model.model.layers[0].mlp) == ({"fused": 2 + 2 * 8}, {})
    fusepatch.restore()
    assert torch.equal(model(ids).logits.detach(), stock_logits)
