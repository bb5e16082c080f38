"""The networks of published ranks by name, each with the loss of its training loop."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from benchmarks.published.ranks.litgpt_network import ChunkedLoss, LitGPT
from benchmarks.published.ranks.losses import LanguageLoss
from benchmarks.published.ranks.titan_network import TitanLlama
from vramcast.jobs.families.libraries import import_library


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


NETWORKS: Mapping[str, Callable[..., nn.Module]] = {
    "titan": _titan,
    "litgpt": _litgpt,
}
