"""Sizes of well-known networks of transformers, from their published config.json where they differ from the defaults.

The owner in a repository's name ("meta-llama/"), its suffix ("-hf", "-uncased", "-v0.1") and the variant ("-Instruct")
are optional. `tests/test_architectures.py` compares the numbers of parameters with the published ones.
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


_ROBERTA: Sizes = {"max_position_embeddings": 514, "type_vocab_size": 1}


def _gpt2(size: int, layers: int, heads: int) -> Sizes:
    return {"n_embd": size, "n_layer": layers, "n_head": heads}


def _llama(
    vocabulary: int, hidden: int, inner: int, layers: int, heads: int, groups: int, length: int, **more: Any
) -> Sizes:
    return {
        "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": groups, "max_position_embeddings": length, **more,
    }  # fmt: skip


def _qwen3(hidden: int, inner: int, layers: int, heads: int, groups: int = 8, *, tied: bool, **more: Any) -> Sizes:
    sizes = _llama(151936, hidden, inner, layers, heads, groups, 40960, head_dim=128, **more)
    return {**sizes, "tie_word_embeddings": tied}


def _gemma(vocabulary: int, hidden: int, inner: int, layers: int, heads: int, groups: int, head: int) -> Sizes:
    return _llama(vocabulary, hidden, inner, layers, heads, groups, 8192, head_dim=head)


def _gpt_oss(layers: int, experts: int) -> Sizes:
    return _llama(201088, 2880, 2880, layers, 64, 8, 131072, head_dim=64, num_local_experts=experts)


_DEEPSEEK_V2_LITE: Sizes = {
    "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
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
    "roberta-base": ("RobertaForMaskedLM", {**_bert(768, 12, 12, 50265), **_ROBERTA}),
    "roberta-large": ("RobertaForMaskedLM", {**_bert(1024, 24, 16, 50265), **_ROBERTA}),
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
    "llama-3.1-8b": ("LlamaForCausalLM", _llama(128256, 4096, 14336, 32, 32, 8, 131072)),
    "llama-3.1-70b": ("LlamaForCausalLM", _llama(128256, 8192, 28672, 80, 64, 8, 131072)),
    "llama-3.1-405b": ("LlamaForCausalLM", _llama(128256, 16384, 53248, 126, 128, 8, 131072)),
    "llama-3.2-1b": ("LlamaForCausalLM", _llama(128256, 2048, 8192, 16, 32, 8, 131072, tie_word_embeddings=True)),
    "llama-3.2-3b": ("LlamaForCausalLM", _llama(128256, 3072, 8192, 28, 24, 8, 131072, tie_word_embeddings=True)),
    "llama-3.3-70b": ("LlamaForCausalLM", _llama(128256, 8192, 28672, 80, 64, 8, 131072)),
    "tinyllama-1.1b": ("LlamaForCausalLM", _llama(32000, 2048, 5632, 22, 32, 4, 2048)),
    "mistral-7b": ("MistralForCausalLM", _llama(32000, 4096, 14336, 32, 32, 8, 32768)),
    "mistral-7b-v0.3": ("MistralForCausalLM", _llama(32768, 4096, 14336, 32, 32, 8, 32768)),
    "mistral-nemo": ("MistralForCausalLM", _llama(131072, 5120, 14336, 40, 32, 8, 131072, head_dim=128)),
    "mistral-small-24b": ("MistralForCausalLM", _llama(131072, 5120, 32768, 40, 32, 8, 32768, head_dim=128)),
    "ministral-8b": ("MistralForCausalLM", _llama(131072, 4096, 12288, 36, 32, 8, 32768, head_dim=128)),
    "mixtral-8x7b": ("MixtralForCausalLM", _llama(32000, 4096, 14336, 32, 32, 8, 32768, num_local_experts=8)),
    "mixtral-8x22b": ("MixtralForCausalLM", _llama(32768, 6144, 16384, 56, 48, 8, 65536, num_local_experts=8)),
    "qwen2-0.5b": ("Qwen2ForCausalLM", _llama(151936, 896, 4864, 24, 14, 2, 32768, tie_word_embeddings=True)),
    "qwen2-1.5b": ("Qwen2ForCausalLM", _llama(151936, 1536, 8960, 28, 12, 2, 32768, tie_word_embeddings=True)),
    "qwen2-7b": ("Qwen2ForCausalLM", _llama(152064, 3584, 18944, 28, 28, 4, 32768)),
    "qwen2-72b": ("Qwen2ForCausalLM", _llama(152064, 8192, 29568, 80, 64, 8, 32768)),
    "qwen2.5-3b": ("Qwen2ForCausalLM", _llama(151936, 2048, 11008, 36, 16, 2, 32768, tie_word_embeddings=True)),
    "qwen2.5-14b": ("Qwen2ForCausalLM", _llama(152064, 5120, 13824, 48, 40, 8, 131072)),
    "qwen2.5-32b": ("Qwen2ForCausalLM", _llama(152064, 5120, 27648, 64, 40, 8, 131072)),
    "qwen3-0.6b": ("Qwen3ForCausalLM", _qwen3(1024, 3072, 28, 16, tied=True)),
    "qwen3-1.7b": ("Qwen3ForCausalLM", _qwen3(2048, 6144, 28, 16, tied=True)),
    "qwen3-4b": ("Qwen3ForCausalLM", _qwen3(2560, 9728, 36, 32, tied=True)),
    "qwen3-8b": ("Qwen3ForCausalLM", _qwen3(4096, 12288, 36, 32, tied=False)),
    "qwen3-14b": ("Qwen3ForCausalLM", _qwen3(5120, 17408, 40, 40, tied=False)),
    "qwen3-32b": ("Qwen3ForCausalLM", _qwen3(5120, 25600, 64, 64, tied=False)),
    "qwen3-30b-a3b": ("Qwen3MoeForCausalLM", _qwen3(2048, 6144, 48, 32, 4, tied=False, num_experts=128,
                                                    num_experts_per_tok=8, moe_intermediate_size=768)),
    "gemma-2-2b": ("Gemma2ForCausalLM", _gemma(256000, 2304, 9216, 26, 8, 4, 256)),
    "gemma-2-9b": ("Gemma2ForCausalLM", _gemma(256000, 3584, 14336, 42, 16, 8, 256)),
    "gemma-2-27b": ("Gemma2ForCausalLM", _gemma(256000, 4608, 36864, 46, 32, 16, 128)),
    "gemma-3-270m": ("Gemma3ForCausalLM", _gemma(262144, 640, 2048, 18, 4, 1, 256)),
    "gemma-3-1b": ("Gemma3ForCausalLM", _gemma(262144, 1152, 6912, 26, 4, 1, 256)),
    "gemma-3-4b-text": ("Gemma3ForCausalLM", _gemma(262208, 2560, 10240, 34, 8, 4, 256)),
    "gemma-3-12b-text": ("Gemma3ForCausalLM", _gemma(262208, 3840, 15360, 48, 16, 8, 256)),
    "gemma-3-27b-text": ("Gemma3ForCausalLM", _gemma(262208, 5376, 21504, 62, 32, 16, 128)),
    "phi-2": ("PhiForCausalLM", _llama(51200, 2560, 10240, 32, 32, 32, 2048)),
    "phi-3-mini": ("Phi3ForCausalLM", _llama(32064, 3072, 8192, 32, 32, 32, 4096)),
    "phi-3-medium": ("Phi3ForCausalLM", _llama(32064, 5120, 17920, 40, 40, 10, 4096)),
    "phi-4": ("Phi3ForCausalLM", _llama(100352, 5120, 17920, 40, 40, 10, 16384)),
    "phi-4-mini": ("Phi3ForCausalLM", _llama(200064, 3072, 8192, 32, 24, 8, 131072, tie_word_embeddings=True)),
    "deepseek-v2-lite": ("DeepseekV2ForCausalLM", _DEEPSEEK_V2_LITE),
    "deepseek-r1-distill-qwen-1.5b": ("Qwen2ForCausalLM", _llama(151936, 1536, 8960, 28, 12, 2, 131072)),
    "gpt-oss-20b": ("GptOssForCausalLM", _gpt_oss(24, 32)),
    "gpt-oss-120b": ("GptOssForCausalLM", _gpt_oss(36, 128)),
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
_SAME: Mapping[str, str] = {
    "qwen2.5-0.5b": "qwen2-0.5b",
    "qwen2.5-1.5b": "qwen2-1.5b",
    "qwen2.5-7b": "qwen2-7b",
    "qwen2.5-72b": "qwen2-72b",
    "deepseek-r1-distill-qwen-7b": "qwen2-7b",
    "deepseek-r1-distill-qwen-14b": "qwen2.5-14b",
    "deepseek-r1-distill-qwen-32b": "qwen2.5-32b",
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b",
    "deepseek-r1-distill-llama-70b": "llama-3.3-70b",
}
"""Networks with the sizes of others."""
_POSITIONS: Mapping[str, int] = {
    "GPT2LMHeadModel": 1024, "BartForConditionalGeneration": 1024,
    **{f"{name}ForMaskedLM": 512 for name in ("Bert", "Roberta", "DistilBert", "Electra", "Albert")},
}  # fmt: skip
"""Positions by class where the table leaves them to the configuration; RoBERTa's first two stand for padding."""
_LONGEST_NAME = 96
"""Of a network on Hugging Face (huggingface_hub/utils/_validators.py); a longer one has too many forms to try."""
_DECORATION = re.compile(
    r"^.*/|^(google|facebook|openai|meta)-|(?<=llama)-2|"
    r"-(hf|uncased|cased|v\d\.\d|patch\d+.*|instruct|chat|base|it|pt|\d+k|2[3-9]\d\d)(?=-|$)"
)


def architecture_names() -> list[str]:
    """Return the names, each without its decorations."""
    return sorted([*ARCHITECTURES, *_SAME])


def positions_of(target: str) -> int | None:
    """Return the positions of a network named as hf:NAME, if the table has them."""
    library, _, name = target.partition(":")
    if library != "hf":
        return None
    try:
        architecture, sizes = find_architecture(name)
    except UserError:  # a path
        return None
    return _POSITIONS.get(architecture) or sizes.get("max_position_embeddings")


def find_architecture(name: str) -> tuple[str, Sizes]:
    """Return the class and the sizes of a named network."""
    names = {**{item: item for item in ARCHITECTURES}, **_SAME}
    forms = [name.lower()] if len(name) <= _LONGEST_NAME else []
    for form in forms:  # grows: each form without one of its decorations
        if form in names:
            return ARCHITECTURES[names[form]]
        shorter = (form[: match.start()] + form[match.end() :] for match in _DECORATION.finditer(form))
        forms += [item for item in shorter if item not in forms]
    fix = suggestion(name, names, "download the config.json of that network and name hf:PATH")
    raise UserError(f"expected one of {sorted(names)} or the path of a config.json, found {name!r}: {fix}")
