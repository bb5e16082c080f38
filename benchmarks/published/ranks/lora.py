"""LoRA as PEFT computes it."""

import torch
from torch import Tensor, nn


class Adapter(nn.Linear):
    """One of the two matrices of LoRA: an FSDP unit of its own under PEFT's wrapping policy."""


class LoraLinear(nn.Module):
    """A frozen layer with a LoRA adapter."""

    def __init__(self, base: nn.Linear, rank: int, dropout: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base
        self.lora_a = Adapter(base.in_features, rank, bias=False, dtype=dtype)
        self.lora_b = Adapter(rank, base.out_features, bias=False, dtype=dtype)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Add the product of the adapter."""
        result = self.base(x)
        cast = x.to(self.lora_a.weight.dtype)
        out: Tensor = (result + self.lora_b(self.lora_a(self.dropout(cast))) * 1.0).to(result.dtype)
        return out


def add_lora(network: nn.Module, names: tuple[str, ...], rank: int, dropout: float, dtype: torch.dtype) -> nn.Module:
    """Freeze a network and put adapters beside the layers of these names."""
    network.requires_grad_(False)
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(module, name, LoraLinear(child, rank, dropout, dtype))
    return network
