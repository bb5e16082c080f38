"""Configurations around the architectures of libraries: names to draw from, and sizes under each library's own keys."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from vramcast.errors import UserError, check_choice
from vramcast.jobs.families.libraries import import_library

_KEYS: Mapping[str, tuple[str, ...]] = {
    "width": ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "d_embed", "hidden_dim"),
    "layers": ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers",
               "num_decoder_layers", "num_encoder_layers"),
    "heads": ("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads",
              "decoder_attention_heads", "encoder_num_attention_heads", "decoder_num_attention_heads"),
    "groups": ("num_key_value_heads", "num_kv_heads"),
    "head": ("head_dim", "d_kv", "d_head"),
    "inner": ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "d_inner",
              "ffn_hidden_size", "hidden_dim_ff", "moe_intermediate_size", "ffn_config"),
    "vocabulary": ("vocab_size",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "active": ("num_experts_per_tok",),
    "positions": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "image": ("image_size",),
    "patch": ("patch_size",),
    "classes": ("num_labels",),
}  # fmt: skip
"""The names of a size in the configurations of transformers."""
_RANDOM_DEPTHS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
"""Shares of layers that a step leaves out at random, which would make the label of a row random."""
_START = "decoder_start_token_id"
"""Shifted labels begin with it, and some configurations have no default."""
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, _START: 0}
_GROUPS: Mapping[str, str] = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "vision": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
"""The lists of architectures in transformers/models/auto/modeling_auto.py."""


_UNFIT = frozenset((
    "AXK1ForCausalLM", "AXK2ForCausalLM", "BailingHybridForCausalLM", "BambaForCausalLM", "BeamForCausalLM",
    "CodeGenForCausalLM", "CohereCompassForCausalLM", "ConvNextForImageClassification",
    "ConvNextV2ForImageClassification", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM",
    "DeiTForImageClassificationWithTeacher", "DinatForImageClassification", "DonutSwinForImageClassification",
    "Dots1ForCausalLM", "Dots3NoteForCausalLM", "EfficientNetForImageClassification", "EsmcForMaskedLM",
    "FNetForMaskedLM", "FalconMambaForCausalLM", "FlaubertWithLMHeadModel", "GPTJForCausalLM", "GPTNeoForCausalLM",
    "Gemma3nForCausalLM", "GlmMoeDsaForCausalLM", "GraniteMoeHybridForCausalLM", "IBertForMaskedLM",
    "ImageGPTForImageClassification", "JambaForCausalLM", "JetMoeForCausalLM", "KimiLinearForCausalLM",
    "LevitForImageClassificationWithTeacher", "Lfm2MoeForCausalLM", "Lfm3ForCausalLM", "LongcatFlashForCausalLM",
    "Mamba2ForCausalLM", "MambaForCausalLM", "MiMoV2FlashForCausalLM", "MobileBertForMaskedLM",
    "MobileViTV2ForImageClassification", "MusicgenForCausalLM", "MusicgenMelodyForCausalLM",
    "NllbMoeForConditionalGeneration", "PPLCNetForImageClassification",
    "PerceiverForImageClassificationConvProcessing", "PerceiverForImageClassificationFourier",
    "PerceiverForImageClassificationLearned", "PerceiverForMaskedLM", "PhimoeForCausalLM",
    "ProphetNetForConditionalGeneration", "Qwen4ExpForCausalLM", "ReformerForMaskedLM", "ReformerModelWithLMHead",
    "RwkvForCausalLM", "SwitchTransformersForConditionalGeneration", "TextNetForImageClassification",
    "TimmWrapperForImageClassification", "XLMWithLMHeadModel", "XmodForCausalLM", "XmodForMaskedLM",
    "YoutuForCausalLM", "Zamba2ForCausalLM", "ZambaForCausalLM", "ZayaForCausalLM", "xLSTMForCausalLM",
))  # fmt: skip
"""Classes that no drawn sizes fit, that read numbers from data, or that loop over the positions of a sequence."""


@cache
def names_of(library: str) -> tuple[str, ...]:
    """Return the architectures of a library, or of a list of transformers: those without networks inside."""
    check_choice("names", library, ("timm", *_GROUPS))
    if library == "timm":
        return tuple(sorted(import_library("timm").list_models()))
    import_library("transformers")
    listed: Any = import_library("transformers.models.auto.modeling_auto")
    configurations: Any = import_library("transformers.models.auto.configuration_auto")
    classes = {
        name
        for kind, names in getattr(listed, _GROUPS[library]).items()
        if kind in configurations.CONFIG_MAPPING and not configurations.CONFIG_MAPPING[kind].sub_configs
        for name in ((names,) if isinstance(names, str) else names)
    }
    return tuple(sorted(classes - _UNFIT))


def image_shape(name: str, size: int) -> list[int]:
    """Return the input of a network of timm: images of about a size, or of its own where it takes no other."""
    config = import_library("timm").get_pretrained_cfg(name)
    own = tuple(config.input_size) if config else (3, 224, 224)
    if config is None or config.fixed_input_size or any(part in name for part in _WINDOWED):
        return list(own)
    return [own[0], size, size]


_WINDOWED = ("swin", "maxvit", "maxxvit", "coatnet", "vit", "mixer", "mlp", "levit", "beit", "cait", "deit", "eva",
             "hiera", "nest", "tnt", "twins", "volo", "xcit", "pvt", "pit", "gc", "focal", "davit", "coat", "convit",
             "crossvit", "visformer", "halo", "bot", "lambda", "eca_", "sehalo", "samvit", "flexivit", "edgenext",
             "mobilevit", "sequencer", "nextvit", "swiftformer", "mvit", "caformer", "naflex")  # fmt: skip
"""Parts of names of networks whose layers are made for one size of images."""


def drawn_config(architecture: str, *named: Any) -> dict[str, Any]:
    """Return settings of a configuration of transformers, as far as the architecture has them.

    `named` are names of sizes, each followed by its value, because expressions have no keywords.
    """
    sizes: dict[str, int] = dict(zip(named[::2], named[1::2], strict=True))
    transformers = import_library("transformers")
    cls = getattr(transformers, architecture, None)
    if cls is None:
        raise UserError(
            f"expected a class of transformers {transformers.__version__}, found {architecture!r}: check the name"
        )
    default = cls.config_class()
    settings = default.to_dict()
    renamed: Mapping[str, str] = cls.config_class.attribute_map
    if "kv_lora_rank" in settings:  # its keys have no heads of their own
        sizes = {name: value for name, value in sizes.items() if name not in ("groups", "head")}
    config: dict[str, Any] = {}
    for size, value in sizes.items():
        names = {renamed.get(name, name) for name in _KEYS[size]}
        config |= {name: value for name in sorted(names) if isinstance(settings.get(name, ""), int | None)}
    config |= {name: 0.0 for name in _RANDOM_DEPTHS if settings.get(name)}
    if "vocabulary" in sizes:
        config |= {name: token for name, token in _TOKENS.items() if name in settings or name == _START}
    return config


def denoiser_config(
    architecture: str, side: int, heads: int, head: int, layers: int, width: int, text: int
) -> dict[str, Any]:
    """Return settings of a denoising network of diffusers with these sizes."""
    check_choice("architecture", architecture, ("UNet2DConditionModel", *_DENOISING_TRANSFORMERS))
    if architecture == "UNet2DConditionModel":
        levels = min(1 + layers // 3, 4)
        down = ["CrossAttnDownBlock2D"] * (levels - 1) + ["DownBlock2D"]
        up = ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * (levels - 1)
        widths = [width * min(2**level, 4) for level in range(levels)]
        return {"sample_size": side, "block_out_channels": widths, "down_block_types": down, "up_block_types": up,
                "cross_attention_dim": text, "layers_per_block": 1 + layers % 2}  # fmt: skip
    common = {"num_attention_heads": heads, "attention_head_dim": head, "num_layers": layers, "sample_size": side}
    if architecture == "DiTTransformer2DModel":
        return {**common, "in_channels": 4, "out_channels": 8, "patch_size": 2, "norm_elementwise_affine": False}
    if architecture == "SD3Transformer2DModel":
        return {**common, "in_channels": 4, "joint_attention_dim": text, "caption_projection_dim": heads * head,
                "pooled_projection_dim": 512, "pos_embed_max_size": 96}  # fmt: skip
    axes = [head // 4, 3 * head // 8, 3 * head // 8]
    return {"num_attention_heads": heads, "attention_head_dim": head, "num_layers": layers, "in_channels": 16,
            "num_single_layers": layers, "joint_attention_dim": text, "pooled_projection_dim": 512,
            "axes_dims_rope": axes}  # fmt: skip


_DENOISING_TRANSFORMERS = ("DiTTransformer2DModel", "SD3Transformer2DModel", "FluxTransformer2DModel")
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "image_shape": image_shape,
    "drawn_config": drawn_config,
    "denoiser_config": denoiser_config,
}
"""What the expressions of a space may call."""
