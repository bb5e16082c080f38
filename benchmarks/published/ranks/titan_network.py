"""torchtitan's Llama, with the checkpointing and the norms of its runs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F  # noqa: N812 - the name that every PyTorch reader knows
from torch.utils.checkpoint import checkpoint

from vramcast.jobs.checkpointing import saving_products


class FloatRMSNorm(nn.Module):
    """RMSNorm in fp32, as torchtitan had it in March 2024."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Scale by the root mean square."""
        wide = x.float()
        return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class Attention(nn.Module):
    """Causal attention with rotary embeddings in complex numbers."""

    def __init__(self, width: int, heads: int, kv_heads: int, head: int, normed: bool) -> None:
        super().__init__()
        self.head = head
        self.q_norm, self.k_norm = (nn.RMSNorm(head, eps=1e-6) if normed else nn.Identity() for _ in range(2))
        self.wq = nn.Linear(width, heads * head, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.head, bias=False)
        self.wv = nn.Linear(width, kv_heads * self.head, bias=False)
        self.wo = nn.Linear(heads * head, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Attend and project."""
        batch, length, _ = x.shape
        q, k, v = (layer(x).view(batch, length, -1, self.head) for layer in (self.wq, self.wk, self.wv))
        q, k = _rotated(self.q_norm(q), angles), _rotated(self.k_norm(k), angles)
        repeats = q.shape[2] // k.shape[2]
        if repeats > 1:
            k, v = (_repeated(item, repeats) for item in (k, v))
        q, k, v = (item.transpose(1, 2) for item in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.wo(out.transpose(1, 2).contiguous().view(batch, length, -1))
        return projected


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles[: x.shape[1]].view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)


def _repeated(x: Tensor, repeats: int) -> Tensor:
    batch, length, heads, width = x.shape
    return x.unsqueeze(3).expand(batch, length, heads, repeats, width).reshape(batch, length, -1, width)


class TitanBlock(nn.Module):
    """A Transformer block of Llama, whose checkpointing is inside of what FSDP shards and torch.compile compiles.

    torchtitan applies checkpointing first, then torch.compile, then FSDP (parallelize_llama.py).
    """

    def __init__(
        self, attention: nn.Module, width: int, hidden: int, norm: Callable[[int], nn.Module], checkpointing: str
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.attention = attention
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)
        self.attention_norm, self.ffn_norm = norm(width), norm(width)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Apply attention and MLP, and recompute them as the checkpointing says."""
        if self.checkpointing == "none":
            return self._block(x, angles)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if self.checkpointing == "selective":
            options["context_fn"] = saving_products
        out: Tensor = checkpoint(self._block, x, angles, **options)
        return out

    def _block(self, x: Tensor, angles: Tensor) -> Tensor:
        """Apply attention and MLP, each beside a residual."""
        x = x + self.attention(self.attention_norm(x), angles)
        normed = self.ffn_norm(x)
        out: Tensor = x + self.w2(F.silu(self.w1(normed)) * self.w3(normed))
        return out


def _of_block(checkpointing: str, index: int) -> str:
    """Return the checkpointing of a block: 'alternate' recomputes every second one, counted from one."""
    if checkpointing == "alternate":
        return "full" if index % 2 else "none"
    return checkpointing


class TitanLlama(nn.Module):
    """torchtitan's Llama with full checkpointing, selective checkpointing per operator, or none.

    Under FSDP2, the last block stays whole between the passes (`keeps_last`), as in torchtitan's default. Qwen 3 has
    heads of a size of their own (`head`), whose queries and keys are `normed`.
    """

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        vocabulary: int,
        length: int,
        checkpointing: str,
        early: bool = False,
        keeps_last: bool = True,
        head: int | None = None,
        normed: bool = False,
    ) -> None:
        super().__init__()
        norm = FloatRMSNorm if early else (lambda size: nn.RMSNorm(size, eps=1e-5))
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        head = head or width // heads
        self.layers = nn.ModuleList(
            TitanBlock(
                Attention(width, heads, kv_heads, head, normed), width, hidden, norm, _of_block(checkpointing, i)
            )
            for i in range(layers)
        )
        self.norm = norm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("angles", torch.empty(length, head // 2, dtype=torch.complex64))
        self.early = early
        self.keeps_last = keeps_last

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        last: Any = self.layers[-1]
        if self.keeps_last and isinstance(last, FSDPModule):  # the backward pass would gather it first (apply_fsdp)
            last.set_reshard_after_forward(False, recurse=False)
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.angles)
        logits: Tensor = self.output(self.norm(x))
        return logits.float() if self.early else logits
