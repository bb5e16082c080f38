"""Settings of well-known denoising networks of diffusers, from their published config.json where they are not defaults.

`tests/test_diffusion.py` compares the numbers of parameters with the published ones.
"""

from collections.abc import Mapping
from typing import Any

from vramcast.errors import UserError, suggestion

Settings = Mapping[str, Any]
_UNET, _SD3 = "UNet2DConditionModel", "SD3Transformer2DModel"
_SDXL: Settings = {
    "sample_size": 128, "block_out_channels": [320, 640, 1280], "cross_attention_dim": 2048,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "transformer_layers_per_block": [1, 2, 10], "attention_head_dim": [5, 10, 20], "use_linear_projection": True,
    "addition_embed_type": "text_time", "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip
_SD3_MEDIUM: Settings = {
    "sample_size": 128, "in_channels": 16, "out_channels": 16, "num_layers": 24, "attention_head_dim": 64,
    "num_attention_heads": 24, "joint_attention_dim": 4096, "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048, "pos_embed_max_size": 192,
}  # fmt: skip
_DIT: Settings = {
    "num_attention_heads": 16, "attention_head_dim": 72, "in_channels": 4, "out_channels": 8, "num_layers": 28,
    "sample_size": 32, "patch_size": 2, "num_embeds_ada_norm": 1000, "norm_elementwise_affine": False,
}  # fmt: skip

DENOISERS: Mapping[str, tuple[str, Settings]] = {
    "sd15-unet": (_UNET, {"sample_size": 64, "cross_attention_dim": 768}),
    "sd21-unet": (
        _UNET,
        {"sample_size": 96, "cross_attention_dim": 1024, "attention_head_dim": [5, 10, 20, 20],
         "use_linear_projection": True},
    ),
    "sdxl-unet": (_UNET, _SDXL),
    "sd3": (_SD3, _SD3_MEDIUM),
    "sd3.5-large": (
        _SD3, {**_SD3_MEDIUM, "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432,
               "qk_norm": "rms_norm"},
    ),
    "flux-dit": ("FluxTransformer2DModel", {"guidance_embeds": True}),
    "flux-schnell-dit": ("FluxTransformer2DModel", {}),
    "dit-xl-2": ("DiTTransformer2DModel", _DIT),
    "pixart": ("PixArtTransformer2DModel", {"sample_size": 128, "caption_channels": 4096}),
}  # fmt: skip


def denoiser_names() -> list[str]:
    """Return the names."""
    return sorted(DENOISERS)


def find_denoiser(name: str) -> tuple[str, Settings]:
    """Return the class and the settings of a named network."""
    if name not in DENOISERS:
        fix = suggestion(name, DENOISERS, "name diffusers:FOLDER, a folder with the config.json of that network")
        raise UserError(f"expected one of {sorted(DENOISERS)} or the path of a config.json, found {name!r}: {fix}")
    return DENOISERS[name]
