"""The networks of xMem's runs: classifiers of torchvision, and language networks by their configuration.

A configuration is that of the name on the Hugging Face hub, without the settings that are defaults of its class.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

IMAGE = (3, 86, 86)
_FEW_CLASSES = 10
_MANY_CLASSES = 1000


@dataclass(frozen=True)
class Classifier:
    """A network of torchvision in xMem's runs."""

    name: str
    parameters: int
    """Of the network with its number of classes."""
    num_classes: int = _MANY_CLASSES
    least_missing_mib: int = 0
    """The memory of weights that is missing at least in every measurement, as runs of this network show."""


CLASSIFIERS: Mapping[str, Classifier] = {
    "ConvNeXtBase": Classifier("convnext_base", 88_591_464, least_missing_mib=218),
    "ConvNeXtTiny": Classifier("convnext_tiny", 28_589_128, least_missing_mib=82),
    "MnasNet": Classifier("mnasnet1_0", 3_115_122, _FEW_CLASSES),
    "MobeNetV3Large": Classifier("mobilenet_v3_large", 4_214_842, _FEW_CLASSES),
    "MobeNetV3Small": Classifier("mobilenet_v3_small", 1_528_106, _FEW_CLASSES),
    "MobileNetV2": Classifier("mobilenet_v2", 3_504_872),
    "RegNetX400MF": Classifier("regnet_x_400mf", 5_495_976),
    "RegNetY400MF": Classifier("regnet_y_400mf", 4_344_144),
    "ResNet101": Classifier("resnet101", 44_549_160, least_missing_mib=98),
    "ResNet152": Classifier("resnet152", 60_192_808, least_missing_mib=80),
    "VGG16": Classifier("vgg16", 138_357_544, least_missing_mib=126),
    "VGG19": Classifier("vgg19", 143_667_240, least_missing_mib=512),
}
"""By the name in the table."""


@dataclass(frozen=True)
class LanguageNetwork:
    """A class of transformers with its configuration."""

    architecture: str
    config: Mapping[str, Any] = field(default_factory=dict)
    always_padded: bool = False
    """True if every batch has the full length; else a batch is as long as its longest text."""


_T5_SMALL = {"decoder_start_token_id": 0}
_T5_BASE = {**_T5_SMALL, "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
_OPT_350M = {
    "hidden_size": 1024,
    "ffn_dim": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "word_embed_proj_dim": 512,
    "do_layer_norm_before": False,
}
_GPT_NEO = {
    "hidden_size": 768,
    "num_layers": 12,
    "num_heads": 12,
    "attention_types": [[["global", "local"], 6]],
}
_CEREBRAS = {"n_embd": 768, "n_layer": 10, "n_head": 12, "n_inner": 3072, "activation_function": "gelu"}
_LLAMA_3B = {
    "vocab_size": 128_256,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
_DEEPSEEK = {
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}
_QWEN3_4B = {
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
_QWEN3_600M = {
    **_QWEN3_4B,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}
_PYTHIA_1B = {
    "vocab_size": 50_304,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
}

LANGUAGE_NETWORKS: Mapping[str, LanguageNetwork] = {
    "cerebras-gpt-111m": LanguageNetwork("GPT2LMHeadModel", _CEREBRAS),
    "deepseek-r1-distill-qwen-1.5b": LanguageNetwork("Qwen2ForCausalLM", _DEEPSEEK, always_padded=True),
    "distilgpt2": LanguageNetwork("GPT2LMHeadModel", {"n_layer": 6}),
    "gemma-2-2b-it": LanguageNetwork("Gemma2ForCausalLM", {"attn_implementation": "eager"}),
    "gpt-neo-125m": LanguageNetwork("GPTNeoForCausalLM", _GPT_NEO),
    "gpt2": LanguageNetwork("GPT2LMHeadModel"),
    "llama-3.2-3b-instruct": LanguageNetwork("LlamaForCausalLM", _LLAMA_3B),
    "opt-125m": LanguageNetwork("OPTForCausalLM"),
    "opt-350m": LanguageNetwork("OPTForCausalLM", _OPT_350M),
    "pythia-1b": LanguageNetwork("GPTNeoXForCausalLM", _PYTHIA_1B),
    "qwen3-0.6b": LanguageNetwork("Qwen3ForCausalLM", _QWEN3_600M, always_padded=True),
    "qwen3-4b": LanguageNetwork("Qwen3ForCausalLM", _QWEN3_4B, always_padded=True),
    "t5-base": LanguageNetwork("T5ForConditionalGeneration", _T5_BASE),
    "t5-small": LanguageNetwork("T5ForConditionalGeneration", _T5_SMALL),
}
"""By the name on the hub, in lower case and without its owner."""
