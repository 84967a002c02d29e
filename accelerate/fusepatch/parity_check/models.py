"""Models for `fusepatch parity`: small ones of the real classes, with weights of unit scale, and local folders."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CommandError, first_line
from .arms import Build
from .surroundings import attention_in_fla, untuned_fla

HIDDEN, INTERMEDIATE, VOCABULARY, HEADS = 512, 1408, 1024, 8
"""Of the built-in models. Every weight matrix is large enough for its error to be judged."""


def _llama_like(name: str, **more: Any) -> Callable[[int], nn.Module]:
    def build(layers: int) -> nn.Module:
        transformers = _import("transformers")
        config = getattr(transformers, f"{name}Config" if name != "Gemma3" else "Gemma3TextConfig")(
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS // 2,
            vocab_size=VOCABULARY,
            tie_word_embeddings=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **more,
        )
        model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
        return model

    return build


def _fla(module: str, name: str, **more: Any) -> Callable[[int], nn.Module]:
    def build(layers: int) -> nn.Module:
        models = _import(f"fla.models.{module}", "flash-linear-attention")
        config = getattr(models, f"{name}Config")(
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            num_hidden_layers=layers,
            vocab_size=VOCABULARY,
            tie_word_embeddings=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            fuse_cross_entropy=False,
            **more,
        )
        with attention_in_fla(only_replace=False):  # FLA's attention can't be built without flash-attn
            model: nn.Module = getattr(models, f"{name}ForCausalLM")(config)
        return model

    return build


CONFIGS: dict[str, Callable[[int], nn.Module]] = {
    "llama": _llama_like("Llama"),
    "qwen3": _llama_like("Qwen3", head_dim=HIDDEN // HEADS),
    "gemma3": _llama_like("Gemma3", head_dim=HIDDEN // HEADS, query_pre_attn_scalar=HIDDEN // HEADS),
    "phi3": _llama_like("Phi3"),
    "fla-transformer": _fla("transformer", "Transformer", num_heads=HEADS),
    "fla-gdn": _fla("gated_deltanet", "GatedDeltaNet", num_heads=6, head_dim=64, expand_v=1.0),
    # Heads and gate that cuDNN's kernels take: of 128, and bounded.
    "fla-kda": _fla("kda", "KDA", num_heads=HIDDEN // 128, head_dim=128, safe_gate=True, lower_bound=-5.0),
}
"""By the name that the command line takes: builds a model of so many layers."""


def surroundings(config: str | None) -> AbstractContextManager[Any]:
    """What the built-in model `config` must be run in."""
    if config is None or not config.startswith("fla-"):
        return contextlib.nullcontext()
    _import("fla.models", "flash-linear-attention")
    stack = contextlib.ExitStack()
    stack.enter_context(attention_in_fla(only_replace=False))
    stack.enter_context(untuned_fla())
    return stack


@dataclass(frozen=True)
class Chosen:
    """A model that the command line named."""

    build: Build
    vocabulary: int


def built_in(config: str, layers: int, dtype: torch.dtype, device: torch.device) -> Chosen:
    """The built-in model of that name. Building raises CommandError where that can't be done here."""

    def build() -> nn.Module:
        try:
            model = CONFIGS[config](layers)
        except CommandError:
            raise
        except Exception as error:
            raise CommandError(f"can't build {config}: {first_line(error)}") from error
        make_unit_scale(model)
        return model.to(device=device, dtype=dtype)

    return Chosen(build, VOCABULARY)


@torch.no_grad()
def make_unit_scale(model: nn.Module) -> None:
    """Random weights that keep activations at unit scale: a library's own 0.02 makes everything near zero look right.

    Norms get gains around what they are initialised with, so that an error in one is not hidden by a neutral value.
    """
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.normal_(module.bias, std=0.1)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)
        elif "norm" in type(module).__name__.lower():
            for parameter in own.values():
                parameter.add_(0.1 * torch.randn_like(parameter))


def in_folder(folder: Path, layers: int | None, dtype: torch.dtype, device: torch.device) -> Chosen:
    """The model in a local folder. Raises CommandError where there is none; building does where it can't be loaded."""
    if not folder.is_dir():
        raise CommandError(f"there is no folder {folder}")
    if not (folder / "config.json").is_file():
        raise CommandError(f"{folder} has no file config.json")
    transformers = _import("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        text = config.get_text_config()
        if layers is not None:
            _shorten(text, layers)
        vocabulary = int(text.vocab_size)
    except Exception as error:
        raise CommandError(f"can't read the configuration in {folder}: {first_line(error)}") from error

    def build() -> nn.Module:
        try:
            model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
                str(folder), config=config, dtype=dtype, trust_remote_code=False, local_files_only=True
            )
        except Exception as error:
            raise CommandError(f"can't load {folder}: {first_line(error)}") from error
        return model.to(device)

    return Chosen(build, vocabulary)


def _shorten(config: Any, layers: int) -> None:
    """Makes the model of `config` one of its first `layers` layers."""
    config.num_hidden_layers = min(layers, config.num_hidden_layers)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[: config.num_hidden_layers]


def _import(module: str, distribution: str | None = None) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CommandError(f"needs {distribution or module}: {first_line(error)}") from None
