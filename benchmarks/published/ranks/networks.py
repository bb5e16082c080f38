"""The networks of published ranks by name, each with the loss of its training loop."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from benchmarks.published.ranks.flash_attention import use_flash_attention
from benchmarks.published.ranks.litgpt_network import ChunkedLoss, LitGPT
from benchmarks.published.ranks.lora import add_lora
from benchmarks.published.ranks.losses import LanguageLoss
from benchmarks.published.ranks.titan_network import TitanLlama
from vramcast.jobs.families.libraries import import_library
from vramcast.virtual_gpu.training.step import DTYPES


def _titan(early: bool, float8: str | None = None, **sizes: Any) -> nn.Module:
    network = TitanLlama(**sizes, early=early)
    if float8:
        library = import_library("torchao.float8")
        config = library.Float8LinearConfig.from_recipe_name(float8)
        for block in network.layers:  # torchtitan leaves the output out
            library.convert_to_float8_training(block, config=config)
    return LanguageLoss(network, keeps=early)


def _litgpt(**sizes: Any) -> nn.Module:
    return ChunkedLoss(LitGPT(**sizes).bfloat16())


def _transformers(network: Mapping[str, Any], dtype: str, lora: Mapping[str, Any] | None) -> nn.Module:
    """Return a checkpointed network as `sft_trainer` has it, with flash attention and the loss of transformers 4."""
    transformers = import_library("transformers")
    values = {**network, "use_cache": False}
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    subject: nn.Module = transformers.AutoModelForCausalLM.from_config(config).to(DTYPES[dtype])
    use_flash_attention(subject)
    enabled: Any = subject
    enabled.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    enabled.enable_input_require_grads()
    if lora:
        add_lora(subject, tuple(lora["targets"]), lora["rank"], lora["dropout"], DTYPES[lora["dtype"]])
    return LanguageLoss(subject, own=True)


NETWORKS: Mapping[str, Callable[..., nn.Module]] = {
    "titan": _titan,
    "litgpt": _litgpt,
    "transformers": _transformers,
}
