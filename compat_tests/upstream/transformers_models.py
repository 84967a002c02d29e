"""Llama and Qwen3 under transformers' own modelling tests.

Copied beside those tests by test_transformers_suite.py, and run there: hence the relative imports. transformers' own
testers, which are not on PyPI, default to an activation and to sizes that fusepatch declines; these are served.
"""

from __future__ import annotations

import unittest

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
    PretrainedConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
    Qwen3Model,
)
from transformers.testing_utils import torch_device

from .generation.test_utils import GenerationTesterMixin
from .test_modeling_common import ModelTesterMixin
from .test_training_mixin import TrainingTesterMixin

BATCH, TOKENS, LAYERS = 13, 7, 2
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}


class Tester:
    """What the mixins ask of a `model_tester`; the names are theirs."""

    batch_size, seq_length, is_training = BATCH, TOKENS, True
    hidden_size, num_hidden_layers, num_attention_heads = 32, LAYERS, 4

    def __init__(self, config_class: type[PretrainedConfig], causal_lm_class: type) -> None:
        self.config_class, self.causal_lm_class = config_class, causal_lm_class

    def get_config(self) -> PretrainedConfig:
        return self.config_class(**SIZES)

    def prepare_config_and_inputs_for_common(self) -> tuple[PretrainedConfig, dict[str, torch.Tensor]]:
        ids = torch.randint(1, SIZES["vocab_size"], (BATCH, TOKENS), device=torch_device)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}


class LlamaModelTest(ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin, unittest.TestCase):
    all_model_classes = (
        LlamaModel,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        LlamaForTokenClassification,
    )
    model_tester = Tester(LlamaConfig, LlamaForCausalLM)


class Qwen3ModelTest(ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin, unittest.TestCase):
    all_model_classes = (
        Qwen3Model,
        Qwen3ForCausalLM,
        Qwen3ForSequenceClassification,
        Qwen3ForTokenClassification,
    )
    model_tester = Tester(Qwen3Config, Qwen3ForCausalLM)
