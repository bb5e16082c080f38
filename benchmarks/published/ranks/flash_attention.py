"""Networks of transformers with the attention of flash-attn, whose memory is that of torch's flash attention."""

import sys
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that every PyTorch reader knows


def use_flash_attention(network: nn.Module) -> None:
    """Let a network of transformers attend as with `flash_attention_2`, which is not installed."""
    modeling: Any = sys.modules[type(network).__module__]
    config: Any = network.config
    config._attn_implementation = "flash_attention_2"
    registered = getattr(modeling, "ALL_ATTENTION_FUNCTIONS", None)
    if registered is not None:  # from transformers 4.48 on
        registered["flash_attention_2"] = _by_heads
        return
    classes = [item for name, item in vars(modeling).items() if name.endswith("FlashAttention2")]
    module: Any
    for module in network.modules():
        if hasattr(module, "_attn_implementation"):
            module._attn_implementation = "flash_attention_2"
        if hasattr(module, "_use_flash_attention_2"):
            module._use_flash_attention_2 = True
        for kind in classes:
            if isinstance(module, kind.__bases__[0]):
                module.__class__ = kind
                module._flash_attn_uses_top_left_mask = False
                if hasattr(kind, "_flash_attention_forward"):  # a method until transformers 4.42
                    kind._flash_attention_forward = lambda _, *args, **__: _by_position(*args)
    modeling._flash_attention_forward = _by_position


def _by_position(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """Attend to tensors of batch, position, head and element."""
    return _by_heads(None, *(item.transpose(1, 2) for item in (query, key, value)))[0]


def _by_heads(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> tuple[Tensor, None]:
    """Attend to tensors of batch, head, position and element; positions come second in the result."""
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2), None
