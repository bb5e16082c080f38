"""lit-gpt's GPT with LoRA on queries and values, under FSDP1 with checkpointed blocks (finetune/lora.py)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that every PyTorch reader knows
from torch.utils.checkpoint import checkpoint

from benchmarks.published.ranks.losses import Output

_CHUNK = 128


class QueryKeyValue(nn.Module):
    """The joint projection to queries, keys and values with a LoRA adapter on queries and values."""

    def __init__(self, width: int, rank: int, dropout: float) -> None:
        super().__init__()
        self.width = width
        self.linear = nn.Linear(width, 3 * width)
        self.lora_A = nn.Parameter(torch.empty(2 * rank, width))
        self.lora_B = nn.Parameter(torch.empty(2 * width, rank))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return queries, keys and values."""
        result = self.linear(x)
        low = F.linear(self.dropout(x), self.lora_A).transpose(-2, -1)
        update = F.conv1d(low, self.lora_B.unsqueeze(-1), groups=2).transpose(-2, -1)
        out: Tensor = result + self._padded(update) * 2.0
        return out

    def _padded(self, update: Tensor) -> Tensor:
        """Put zeros where keys have no update."""
        update = update.transpose(0, 1)
        zeros = update.new_zeros((*update.shape[:-1], 3 * self.width)).view(-1, 3 * self.width)
        index = torch.empty(2 * self.width, dtype=torch.int64, device=update.device)
        padded = zeros.index_copy(1, index, update.reshape(-1, 2 * self.width))
        return padded.view(*update.shape[:-1], 3 * self.width).transpose(0, 1)


class LitBlock(nn.Module):
    """A block of GPT-NeoX: attention and MLP in parallel."""

    def __init__(self, width: int, heads: int, rotated: int, shared_norm: bool, approximate: str) -> None:
        super().__init__()
        self.head, self.heads, self.rotated, self.approximate = width // heads, heads, rotated, approximate
        self.norm_1 = nn.LayerNorm(width)
        self.norm_2 = None if shared_norm else nn.LayerNorm(width)
        self.qkv = QueryKeyValue(width, 8, 0.05)
        self.proj = nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Checkpoint the block."""
        out: Tensor = checkpoint(self._block, x, cos, sin, use_reentrant=False)
        return out

    def _block(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norm_1(x)
        attended = self._attention(normed, cos, sin)
        second = normed if self.norm_2 is None else self.norm_2(x)
        out: Tensor = x + attended + self.out(F.gelu(self.fc(second), approximate=self.approximate))
        return out

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        joint = self.qkv(x).view(batch, length, self.heads, 3, self.head).permute(0, 2, 3, 1, 4)
        q, k, v = (item.reshape(batch, -1, length, self.head) for item in joint.split((1, 1, 1), dim=2))
        q, k = (
            torch.cat((_rotated(item[..., : self.rotated], cos, sin), item[..., self.rotated :]), dim=-1)
            for item in (q, k)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        projected: Tensor = self.proj(out.reshape(batch, length, width))
        return projected


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (turned * sin)).type_as(x)


class LitGPT(nn.Module):
    """lit-gpt's network with the head in chunks of 128 positions, whose logits Lightning Fabric casts to fp32."""

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        vocabulary: int,
        rotary: float,
        length: int,
        shared_norm: bool = False,
        head_bias: bool = False,
        approximate: str = "none",
    ) -> None:
        super().__init__()
        rotated = int(rotary * width // heads)
        self.lm_head = nn.Linear(width, vocabulary, bias=head_bias)
        self.wte = nn.Embedding(vocabulary, width)
        self.h = nn.ModuleList(LitBlock(width, heads, rotated, shared_norm, approximate) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(length, rotated))
        for name, parameter in self.named_parameters():
            parameter.requires_grad = "lora_" in name

    def forward(self, tokens: Tensor) -> list[Tensor]:
        """Return the logits of each chunk of positions."""
        x = self.wte(tokens)
        cos, sin = (self.get_buffer(name)[: tokens.shape[1]] for name in ("cos", "sin"))
        for block in self.h:
            x = block(x, cos, sin)
        return [self.lm_head(part).float() for part in self.ln_f(x).split(_CHUNK, dim=1)]


class ChunkedLoss(nn.Module):
    """The mean cross entropy over chunks of logits, which live until the next step as a local variable does."""

    def __init__(self, subject: nn.Module) -> None:
        super().__init__()
        self.subject = subject

    def forward(self, tokens: Tensor, labels: Tensor) -> Output:
        """Return the mean loss and the logits that live on."""
        logits = self.subject(tokens)
        logits[-1] = logits[-1][..., :-1, :]
        targets = torch.split(labels[..., 1:], _CHUNK, dim=1)
        losses = [
            F.cross_entropy(part.reshape(-1, part.shape[-1]), target.reshape(-1), ignore_index=-1, reduction="none")
            for part, target in zip(logits, targets, strict=True)
        ]
        return Output(torch.cat(losses).mean(), logits)
