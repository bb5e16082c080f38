"""The part of a network that one stage of a pipeline holds: a slice of a Sequential, or of a decoder's layers."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from vramcast.errors import UserError


class Stage(nn.Module):
    """One stage of a pipeline: the first takes the batch, the others what their predecessor sends."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        self.index = index
        self.count = count

    @property
    def is_first(self) -> bool:
        """Return True for the stage that takes the batch."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Return True for the stage that computes the loss."""
        return self.index == self.count - 1

    def received(self, batch: Tensor) -> Tensor:
        """Return a tensor like the one that this stage receives for a batch."""
        raise NotImplementedError

    def shapes(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return tensors like those that this stage receives and sends for a batch."""
        with torch.no_grad():
            received = self.received(batch)
            return received, self(received)


def stage_of(network: nn.Module, index: int, count: int) -> Stage:
    """Cut one stage out of a network; raise UserError if it has no layers that can be cut."""
    decoder = next((item for item in network.modules() if _is_decoder(item)), None)
    if decoder is not None:
        return DecoderStage(decoder, index, count)
    if isinstance(network, nn.Sequential):
        return SequentialStage(network, index, count)
    raise UserError(
        f"expected an nn.Sequential or a decoder of transformers for a pipeline, found {type(network).__name__}: "
        "use fsdp2"
    )


def share(total: int, index: int, count: int) -> tuple[int, int]:
    """Return the start and end of an even share of layers; the first stages take one more."""
    if total < count:
        raise UserError(f"expected a layer for each stage, found {total} layers for {count} stages: use fewer stages")
    size, longer = divmod(total, count)
    start = index * size + min(index, longer)
    return start, start + size + (index < longer)


class SequentialStage(Stage):
    """Some consecutive children of an nn.Sequential."""

    def __init__(self, network: nn.Sequential, index: int, count: int) -> None:
        super().__init__(index, count)
        start, end = share(len(network), index, count)
        before = network[:start]
        object.__setattr__(self, "_before", before)  # not a submodule: it belongs to other stages
        self.layers = network[start:end]

    def forward(self, x: Tensor) -> Any:
        """Run the layers of the stage."""
        return self.layers(x)

    def received(self, batch: Tensor) -> Tensor:
        """Run the stages before this one on meta."""
        out: Tensor = self._before(batch)  # type: ignore[operator]
        return out


class DecoderStage(Stage):
    """Some consecutive layers of a decoder of transformers: the first stage embeds, the last has norm and head."""

    def __init__(self, decoder: nn.Module, index: int, count: int) -> None:
        super().__init__(index, count)
        self.decoder = decoder
        base: Any = decoder.base_model
        start, end = share(len(base.layers), index, count)
        self.hidden_size = int(base.config.hidden_size)
        self.dtype = next(decoder.parameters()).dtype
        base.layers = base.layers[start:end]
        head = decoder.get_output_embeddings()  # type: ignore[operator]
        if not self.is_first:
            base.set_input_embeddings(nn.Identity())
        if not self.is_last:
            base.norm = nn.Identity()
            decoder.set_output_embeddings(nn.Identity())  # type: ignore[operator]
        self.head = head if self.is_last else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        """Return hidden states, or the logits of the last stage."""
        name = "input_ids" if self.is_first else "inputs_embeds"
        base: Any = self.decoder.base_model
        return self.head(base(**{name: x}, use_cache=False).last_hidden_state)

    def received(self, batch: Tensor) -> Tensor:
        """Return hidden states for a batch of tokens."""
        if self.is_first:
            return batch
        return torch.empty(*batch.shape, self.hidden_size, dtype=self.dtype, device="meta")


def _is_decoder(module: nn.Module) -> bool:
    base = getattr(module, "base_model", None)
    parts = ("layers", "norm", "config")
    has_head = callable(getattr(module, "get_output_embeddings", None)) and base is not module
    return has_head and base is not None and all(hasattr(base, part) for part in parts)


def first_tensor(batch: Any) -> Tensor:
    """Return the tensor of a batch that the first stage takes."""
    tensors = [item for item in tree_leaves(batch) if isinstance(item, Tensor)]
    if not tensors:
        raise UserError("expected a batch with a tensor for a pipeline, found none: use fsdp2")
    return tensors[0]
