"""Classes of transformers 5.24 that are built like a gated MLP, or nearly, and compute something else: left alone."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig

import fusepatch
from fusepatch.shims import hf_gated_mlp
from support import needs_transformers

# class -> what it computes besides, or instead of, down(act(gate(x)) * up(x))
SAME_PROJECTIONS = {
    "deepseek_v4.DeepseekV4MLP": "clamps gate and up",
    "glm5_next.Glm5NextTextMLP": "clamps gate and up",
    "glm5_next.Glm5NextVisionMLP": "clamps gate and up",
    "glm5_next.Glm5NextVisionPatchMerger": "clamps gate and up",
    "step3p7.Step3p7MLP": "clamps after the activation",
    "falcon_h1.FalconH1MLP": "multipliers",
    "inkling.InklingMLP": "a scale parameter",
    "dory.DoryMLP": "scales per channel, and an inner norm",
    "bitnet.BitNetMLP": "an inner norm",
    "beam.BeamMLP": "activation and product in fp32",
    "gemma3n.Gemma3nTextMLP": "sparsity",
    "t5gemma.T5GemmaMLP": "dropout",
    "t5gemma2.T5Gemma2MLP": "dropout",
    "seed_oss.SeedOssMLP": "dropout",
    "gte.GteMLP": "dropout",
    "doge.DogeCDMoE": "experts by embedding",
    "diffusion_gemma.DiffusionGemmaSelfConditioning": "two inputs, norms",
    "glm4v.Glm4vVisionPatchMerger": "a projection and a norm before",
    "glm4v_moe.Glm4vMoeVisionPatchMerger": "a projection and a norm before",
    "glm_ocr.GlmOcrVisionPatchMerger": "a projection and a norm before",
    "phi4_multimodal.Phi4MultimodalAudioMLP": "swapped halves, a norm, dropout",
    "zamba2.Zamba2MLP": "adapters",
    "minimax_m3_vl.MiniMaxM3VLDenseMLP": "clamps, up + 1, a scaled sigmoid",
}
OTHER_PROJECTIONS = {
    "modernbert.ModernBertMLP": "dropout",
    "modernbert_decoder.ModernBertDecoderMLP": "dropout",
    "moonshine.MoonshineDecoderMLP": "swapped halves",
    "moonshine_streaming.MoonshineStreamingDecoderMLP": "swapped halves",
    "moshi.MoshiGatingMLP": "halves by view",
    "kyutai_speech_to_text.KyutaiSpeechToTextGatingMLP": "halves by view",
    "cohere2_vision.Cohere2VisionMultiModalProjector": "swapped halves, pixel shuffle",
    "aya_vision.AyaVisionMultiModalProjector": "swapped halves, pixel shuffle",
    "cpmant.CpmAntDenseGatedACT": "no down projection",
    "kosmos2_5.Kosmos2_5VisionMlp": "dropout",
    "longt5.LongT5DenseGatedActDense": "dropout",
    "mt5.MT5DenseGatedActDense": "dropout",
    "pix2struct.Pix2StructVisionMlp": "dropout",
    "pop2piano.Pop2PianoDenseGatedActDense": "dropout",
    "t5.T5DenseGatedActDense": "dropout",
    "udop.UdopDenseGatedActDense": "dropout",
    "umt5.UMT5DenseGatedActDense": "dropout",
    "inkling.InklingSharedExperts": "experts",
    "mixtral.MixtralExperts": "experts",
    "gpt_oss.GptOssExperts": "experts",
    "deepseek_v4.DeepseekV4Experts": "experts",
    "llama4.Llama4TextExperts": "experts",
    "longcat_flash.LongcatFlashExperts": "experts",
    "step3p7.Step3p7Experts": "experts",
    "nemotron_h.NemotronHExperts": "experts",
    "beam.BeamExperts": "experts",
    "arcee.ArceeMLP": "no gate",
    "nemotron.NemotronMLP": "no gate",
    "apertus.ApertusMLP": "no gate",
    "clip.CLIPMLP": "no gate",
}
NOT_IN_5_17 = ("beam.BeamExperts", "beam.BeamMLP", "dory.DoryMLP", "gte.GteMLP")
ARGUMENTS = {"dim": 64, "context_dim": 96, "hidden_act": "silu", "swiglu_limit": 7.0, "layer_idx": 0}
NEEDED = {"num_fwd_mem_blocks": 1}  # has a default, which does not work


def class_of(name: str) -> type[nn.Module]:
    model, _, class_name = name.partition(".")
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), class_name)


def build(kind: type[nn.Module]) -> nn.Module:
    """An instance on the meta device, of the first config class of its model that it takes, with default values."""
    parameters = inspect.signature(kind.__init__).parameters
    required = {
        name: (ARGUMENTS | NEEDED)[name]
        for name, each in parameters.items()
        if name in NEEDED or (name in ARGUMENTS and each.default is inspect.Parameter.empty)
    }
    if "config" not in parameters:
        with torch.device("meta"):
            return kind(**required)
    module = importlib.import_module(kind.__module__.replace("modeling_", "configuration_"))
    errors: list[Exception] = []
    for config in vars(module).values():
        if isinstance(config, type) and issubclass(config, PretrainedConfig) and config is not PretrainedConfig:
            try:
                with torch.device("meta"):
                    return kind(config(dropout_rate=0.1), **required)
            except Exception as error:
                errors.append(error)
    raise AssertionError(f"{kind.__name__} takes no config of its model: {errors}")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_transformers("5.24") if name in NOT_IN_5_17 else ())
        for name in (*SAME_PROJECTIONS, *OTHER_PROJECTIONS)
    ],
)
def test_left_alone(name: str) -> None:
    kind = class_of(name)
    library = vars(kind)["forward"]
    assert not hf_gated_mlp.matches(library)
    fusepatch.accelerate()
    assert vars(kind)["forward"] is library
    rows: list[Any] = [(row.route, row.reason, row.patched) for row in fusepatch.explain(build(kind)).modules]
    assert rows == ([("original", "forward-differs", False)] if name in SAME_PROJECTIONS else [])
