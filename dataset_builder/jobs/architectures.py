"""Sizes of well-known networks of transformers, from their published config.json where they differ from the defaults.

The owner in a repository's name ("meta-llama/") and its suffix ("-hf", "-uncased", "-v0.1") are optional.
"""

import re
from collections.abc import Mapping
from typing import Any

from vramcast.errors import UserError, suggestion

Sizes = Mapping[str, Any]


def _bert(hidden: int, layers: int, heads: int, vocabulary: int = 30522) -> Sizes:
    return {
        "vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
    }  # fmt: skip


def _gpt2(size: int, layers: int, heads: int) -> Sizes:
    return {"n_embd": size, "n_layer": layers, "n_head": heads}


def _llama(
    vocabulary: int, hidden: int, inner: int, layers: int, heads: int, groups: int, length: int, **more: Any
) -> Sizes:
    return {
        "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": groups, "max_position_embeddings": length, **more,
    }  # fmt: skip


def _t5(size: int, inner: int, layers: int, heads: int) -> Sizes:
    return {
        "d_model": size, "d_kv": 64, "d_ff": inner, "num_layers": layers, "num_heads": heads,
        "decoder_start_token_id": 0,
    }  # fmt: skip


def _whisper(size: int, layers: int, heads: int, mel: int = 80, vocabulary: int = 51865) -> Sizes:
    sides = {f"{side}_{name}": value for side in ("encoder", "decoder")
             for name, value in (("layers", layers), ("attention_heads", heads), ("ffn_dim", 4 * size))}  # fmt: skip
    return {"d_model": size, "num_mel_bins": mel, "vocab_size": vocabulary, **sides}


def _vit(hidden: int, layers: int, heads: int, **more: Any) -> Sizes:
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "intermediate_size": 4 * hidden, "num_labels": 1000, **more,
    }  # fmt: skip


ARCHITECTURES: Mapping[str, tuple[str, Sizes]] = {
    "bert-base": ("BertForMaskedLM", _bert(768, 12, 12)),
    "bert-large": ("BertForMaskedLM", _bert(1024, 24, 16)),
    "roberta-base": ("RobertaForMaskedLM", {**_bert(768, 12, 12, 50265), "max_position_embeddings": 514}),
    "roberta-large": ("RobertaForMaskedLM", {**_bert(1024, 24, 16, 50265), "max_position_embeddings": 514}),
    "distilbert-base": ("DistilBertForMaskedLM", {}),
    "electra-base": ("ElectraForMaskedLM", {**_bert(768, 12, 12), "embedding_size": 768}),
    "albert-base-v2": ("AlbertForMaskedLM", {**_bert(768, 12, 12, 30000), "embedding_size": 128}),
    "gpt2": ("GPT2LMHeadModel", _gpt2(768, 12, 12)),
    "gpt2-medium": ("GPT2LMHeadModel", _gpt2(1024, 24, 16)),
    "gpt2-large": ("GPT2LMHeadModel", _gpt2(1280, 36, 20)),
    "gpt2-xl": ("GPT2LMHeadModel", _gpt2(1600, 48, 25)),
    "llama-7b": ("LlamaForCausalLM", _llama(32000, 4096, 11008, 32, 32, 32, 4096)),
    "llama-13b": ("LlamaForCausalLM", _llama(32000, 5120, 13824, 40, 40, 40, 4096)),
    "llama-70b": ("LlamaForCausalLM", _llama(32000, 8192, 28672, 80, 64, 8, 4096)),
    "llama-3-8b": ("LlamaForCausalLM", _llama(128256, 4096, 14336, 32, 32, 8, 8192)),
    "llama-3-70b": ("LlamaForCausalLM", _llama(128256, 8192, 28672, 80, 64, 8, 8192)),
    "llama-3.2-1b": ("LlamaForCausalLM", _llama(128256, 2048, 8192, 16, 32, 8, 131072, tie_word_embeddings=True)),
    "mistral-7b": ("MistralForCausalLM", _llama(32000, 4096, 14336, 32, 32, 8, 32768)),
    "mixtral-8x7b": ("MixtralForCausalLM", _llama(32000, 4096, 14336, 32, 32, 8, 32768, num_local_experts=8)),
    "qwen2-0.5b": ("Qwen2ForCausalLM", _llama(151936, 896, 4864, 24, 14, 2, 32768, tie_word_embeddings=True)),
    "qwen2-1.5b": ("Qwen2ForCausalLM", _llama(151936, 1536, 8960, 28, 12, 2, 32768, tie_word_embeddings=True)),
    "qwen2-7b": ("Qwen2ForCausalLM", _llama(152064, 3584, 18944, 28, 28, 4, 32768)),
    "t5-small": ("T5ForConditionalGeneration", _t5(512, 2048, 6, 8)),
    "t5-base": ("T5ForConditionalGeneration", _t5(768, 3072, 12, 12)),
    "t5-large": ("T5ForConditionalGeneration", _t5(1024, 4096, 24, 16)),
    "bart-base": (
        "BartForConditionalGeneration",
        {"d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12,
         "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072},
    ),
    "xlnet-base": ("XLNetLMHeadModel", {"d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072}),
    "xlnet-large": ("XLNetLMHeadModel", {"d_model": 1024, "n_layer": 24, "n_head": 16, "d_inner": 4096}),
    "vit-base": ("ViTForImageClassification", _vit(768, 12, 12)),
    "vit-large": ("ViTForImageClassification", _vit(1024, 24, 16)),
    "vit-huge": ("ViTForImageClassification", _vit(1280, 32, 16, patch_size=14)),
    "whisper-tiny": ("WhisperForConditionalGeneration", _whisper(384, 4, 6)),
    "whisper-base": ("WhisperForConditionalGeneration", _whisper(512, 6, 8)),
    "whisper-small": ("WhisperForConditionalGeneration", _whisper(768, 12, 12)),
    "whisper-medium": ("WhisperForConditionalGeneration", _whisper(1024, 24, 16)),
    "whisper-large": ("WhisperForConditionalGeneration", _whisper(1280, 32, 20)),
    "whisper-large-v3": ("WhisperForConditionalGeneration", _whisper(1280, 32, 20, 128, 51866)),
}  # fmt: skip
_DECORATION = re.compile(r"^.*/|^(google|facebook|openai|meta)-|-(hf|uncased|cased|v\d\.\d|patch\d+.*)$|(?<=llama)-2")


def find_architecture(name: str) -> tuple[str, Sizes]:
    """Return the class and the sizes of a named network."""
    plain = name.lower()
    while (shorter := _DECORATION.sub("", plain)) != plain and plain not in ARCHITECTURES:
        plain = shorter
    if plain not in ARCHITECTURES:
        fix = suggestion(name, ARCHITECTURES, "download the config.json of that network and name hf:PATH")
        raise UserError(f"expected one of {sorted(ARCHITECTURES)} or the path of a config.json, found {name!r}: {fix}")
    return ARCHITECTURES[plain]
