"""Denoising networks of diffusers, with the inputs of its pipelines: noisy latents, times, encoded texts."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that every PyTorch reader knows

from vramcast.errors import UserError
from vramcast.jobs.families.keyword_inputs import KeywordInputs
from vramcast.jobs.families.libraries import import_library
from vramcast.jobs.plan import InputTensor

Inputs = dict[str, InputTensor]
_TIMES = InputTensor((), 1000)


def denoising_step(network: Callable[..., Any], batch: Sequence[Tensor]) -> Tensor:
    """Return the squared error of the predicted noise, as the training scripts of diffusers do."""
    predicted = network(*batch).sample
    return F.mse_loss(predicted.float(), torch.randn_like(predicted).float())


def build_denoiser(network: Mapping[str, Any], build: Callable[[Callable[[], nn.Module]], nn.Module]) -> Any:
    """Build a class of diffusers from the settings of its configuration, and return it with its inputs."""
    name = network["architecture"]
    diffusers: Any = import_library("diffusers")
    diffusers.utils.logging.set_verbosity_error()  # it warns of each place that has a batch
    architecture = getattr(diffusers, name, None)
    if architecture is None or name not in _INPUTS:
        raise UserError(f"expected a denoising network of {sorted(_INPUTS)}, found {name!r}: name one of these")
    subject: Any = build(lambda: architecture.from_config(dict(network.get("config", {}))))
    inputs = _INPUTS[name](subject.config, tuple(network.get("latents") or ()))
    module = KeywordInputs(subject, list(inputs))
    return DenoisingLoss(module) if network.get("with_loss") else module, tuple(inputs.values())


class DenoisingLoss(nn.Module):
    """A denoising network that returns its own loss, as a spec's network does."""

    def __init__(self, subject: nn.Module) -> None:
        super().__init__()
        self.subject = subject

    def forward(self, *batch: Tensor) -> SimpleNamespace:
        """Return the loss of a batch."""
        return SimpleNamespace(loss=denoising_step(self.subject, batch))


def _square(config: Any, latents: tuple[int, ...]) -> InputTensor:
    return InputTensor(latents or (config.in_channels, config.sample_size, config.sample_size))


def _unet(config: Any, latents: tuple[int, ...]) -> Inputs:
    """Return the inputs of a UNet; that of SDXL also takes a pooled text and six sizes."""
    width = config.cross_attention_dim
    inputs = {
        "sample": _square(config, latents),
        "timestep": _TIMES,
        "encoder_hidden_states": InputTensor((77, width if isinstance(width, int) else width[0])),
    }
    if config.addition_embed_type == "text_time":
        text = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        inputs |= {"added_cond_kwargs.text_embeds": InputTensor((text,))}
        inputs |= {"added_cond_kwargs.time_ids": InputTensor((6,))}
    return inputs


def _sd3(config: Any, latents: tuple[int, ...]) -> Inputs:
    """Return the inputs of SD3: tokens of two CLIP encoders and of T5, one after the other."""
    return {
        "hidden_states": _square(config, latents),
        "encoder_hidden_states": InputTensor((77 + 256, config.joint_attention_dim)),
        "pooled_projections": InputTensor((config.pooled_projection_dim,)),
        "timestep": _TIMES,
    }


def _flux(config: Any, latents: tuple[int, ...]) -> Inputs:
    """Return the inputs of Flux: patches of 2 x 2 latents are packed into tokens, which have places."""
    channels, height, width = latents or (config.in_channels // 4, 128, 128)
    tokens, words = (height // 2) * (width // 2), 512
    inputs = {
        "hidden_states": InputTensor((tokens, 4 * channels)),
        "encoder_hidden_states": InputTensor((words, config.joint_attention_dim)),
        "pooled_projections": InputTensor((config.pooled_projection_dim,)),
        "timestep": InputTensor(()),
        "img_ids": InputTensor((tokens, 3)),
        "txt_ids": InputTensor((words, 3)),
    }
    return {**inputs, "guidance": InputTensor(())} if config.guidance_embeds else inputs


def _dit(config: Any, latents: tuple[int, ...]) -> Inputs:
    classes = InputTensor((), config.num_embeds_ada_norm)
    return {"hidden_states": _square(config, latents), "timestep": _TIMES, "class_labels": classes}


def _pixart(config: Any, latents: tuple[int, ...]) -> Inputs:
    """Return the inputs of PixArt; networks for large images also take their resolution."""
    large = config.sample_size == 128 if config.use_additional_conditions is None else config.use_additional_conditions
    if not large:
        raise UserError("expected a PixArt with sample_size 128, found a smaller one: name another network")
    return {
        "hidden_states": _square(config, latents),
        "encoder_hidden_states": InputTensor((120, config.caption_channels)),
        "timestep": _TIMES,
        "added_cond_kwargs.resolution": InputTensor((2,)),
        "added_cond_kwargs.aspect_ratio": InputTensor((1,)),
    }


_INPUTS: Mapping[str, Callable[[Any, tuple[int, ...]], Inputs]] = {
    "UNet2DConditionModel": _unet,
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
    "DiTTransformer2DModel": _dit,
    "PixArtTransformer2DModel": _pixart,
}
