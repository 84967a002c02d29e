"""Small models of transformers' Qwen4-Exp, whose layers have the Engram gate; the tests that use them are skipped where
transformers has none.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig  # noqa: E402

Layer = modeling.Qwen4ExpTextPLELayer
S, D, E = 4, 16, 32


def config(**overrides: Any) -> Qwen4ExpTextConfig:
    """Three layers, of which the first two have a gate of S streams of width D."""
    sizes = {"vocab_size": 128, "hidden_size": D, "num_hidden_layers": 3, "hc_count": S, "hc_lowrank": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "linear_key_head_dim": 8}
    heads |= {"linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
    experts = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    experts |= {"num_experts": 4, "num_experts_per_tok": 2}
    ngrams = {"ple_layer_ids": [1, 2], "ple_embed_dim": E, "heads_per_ngram": 2, "ngram_vocab_size_base": 97}
    ngrams |= {"make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 1, "eos_token_id": 0, "pad_token_id": 0}
    index = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 32}
    index |= {"indexer_compress_ratio": 4, "layer_types": ["linear_attention", "linear_attention", "full_attention"]}
    return Qwen4ExpTextConfig(**{**sizes, **heads, **experts, **ngrams, **index, "initializer_range": 0.1, **overrides})


def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library calls FLA's Triton kernels where FLA is installed, and those need a GPU."""
    names = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn"
    for name in (*names, "causal_conv1d_update"):
        function = getattr(modeling, name, None)
        if function is not None:
            monkeypatch.setattr(modeling, name, getattr(function, "__wrapped__", function))


def randomised(module: nn.Module) -> nn.Module:
    """What the library starts at 0 or 1 would hide mistakes."""
    for layer in module.modules():
        if isinstance(layer, Layer):
            for norm in (layer.norm_key, layer.norm_query, layer.norm_conv):
                nn.init.normal_(norm.weight, std=0.3)
            nn.init.normal_(layer.conv1d.weight, std=0.3)
            nn.init.normal_(layer.ple_embedding.ngram_embedding.weight)
    return module
