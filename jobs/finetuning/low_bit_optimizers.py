"""Optimizers of bitsandbytes and torchao. They reproduce the memory of the state; they do not train.

Their kernels update in place, block by block, so that a step has no temporaries.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_SMALLEST = 4096
"""Smaller tensors are not quantised: bitsandbytes/optim/optimizer.py (min_8bit_size), torchao/optim/adam.py."""
_SMALLEST_PAGED = 100_000
"""Smaller tensors are not paged: bitsandbytes/optim/optimizer.py, get_state_buffer."""


@dataclass(frozen=True)
class StateForm:
    """How an optimizer keeps its state."""

    moments: int
    bits: int = 8
    block: int = 256
    """Elements that share an fp32 scale."""
    paged: bool = False
    """Large states are in managed memory, which the driver pages in: they are not in the device's memory."""
    torchao: bool = False

    def tensors(self, parameter: Tensor, whole: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield the state of a parameter, or of its local shard; `whole` keeps it in 32 bits."""
        local = getattr(parameter, "to_local", None)  # of a DTensor, whose module is slow to import
        parameter = local() if local is not None else parameter
        count = parameter.numel()
        for index in range(1, self.moments + 1):
            if self.paged and count >= _SMALLEST_PAGED:
                if self.bits == 8 and not whole:
                    yield f"absmax{index}", torch.zeros(-(-count // self.block), device=parameter.device)
            elif self.bits == 32 or whole or count < _SMALLEST or (self.torchao and count % self.block):
                dtype = parameter.dtype if self.torchao else torch.float32
                yield f"state{index}", torch.zeros_like(parameter, dtype=dtype)
            else:
                codes = torch.zeros(count * self.bits // 8, dtype=torch.uint8, device=parameter.device)
                yield f"state{index}", codes
                yield f"absmax{index}", torch.zeros(-(-count // self.block), device=parameter.device)
                if self.torchao:  # a table for each tensor; bitsandbytes shares two
                    yield f"qmap{index}", torch.zeros(2**self.bits, device=parameter.device)


FORMS: Mapping[str, StateForm] = {
    "Adam8bit": StateForm(2),
    "AdamW8bit": StateForm(2),
    "Lion8bit": StateForm(1),
    "SGD8bit": StateForm(1),
    "RMSprop8bit": StateForm(1),
    "Lion": StateForm(1, bits=32),
    "PagedAdam": StateForm(2, bits=32, paged=True),
    "PagedAdamW": StateForm(2, bits=32, paged=True),
    "PagedLion": StateForm(1, bits=32, paged=True),
    "PagedAdam8bit": StateForm(2, paged=True),
    "PagedAdamW8bit": StateForm(2, paged=True),
    "PagedLion8bit": StateForm(1, paged=True),
    "TorchaoAdamW8bit": StateForm(2, torchao=True),
    "TorchaoAdamW4bit": StateForm(2, bits=4, block=128, torchao=True),
}
"""The forms by name; those without 'Torchao' are of bitsandbytes."""
SYNONYMS: Mapping[str, str] = {
    "adamw_torch": "AdamW",
    "adamw_hf": "AdamW",
    "adamw_torch_fused": "AdamW(fused=True)",
    "adamw_8bit": "AdamW8bit",
    "adamw_bnb_8bit": "AdamW8bit",
    "lion_8bit": "Lion8bit",
    "lion_32bit": "Lion",
    "rmsprop_bnb_8bit": "RMSprop8bit",
    "paged_adamw_32bit": "PagedAdamW",
    "paged_adamw": "PagedAdamW",
    "paged_adamw_8bit": "PagedAdamW8bit",
    "paged_lion_32bit": "PagedLion",
    "paged_lion_8bit": "PagedLion8bit",
    "adamw_torch_8bit": "TorchaoAdamW8bit",
    "adamw_torch_4bit": "TorchaoAdamW4bit",
    "ao_adamw_8bit": "TorchaoAdamW8bit",
    "ao_adamw_4bit": "TorchaoAdamW4bit",
    "adamw4bit": "TorchaoAdamW4bit",
}
"""The names of the Trainer of transformers (`OptimizerNames`) and of axolotl."""


class LowBitOptimizer(torch.optim.Optimizer):
    """An optimizer whose state has one of the `FORMS`."""

    def __init__(
        self, params: Iterable[nn.Parameter], form: StateForm, whole: Collection[int] = (), **arguments: Any
    ) -> None:
        super().__init__(params, {"lr": arguments.get("lr", 1e-3)})
        self.form = form
        self.whole = whole

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Create the state at the first step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter] = dict(self.form.tensors(parameter, id(parameter) in self.whole))


def low_bit_factory(
    name: str, arguments: Mapping[str, Any], module: nn.Module | None
) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """Return what makes an optimizer of these forms.

    The Trainer keeps the states of embeddings in 32 bits (transformers/trainer.py, create_optimizer). It does so for
    the parameters of `module`.
    """
    form = FORMS[name]
    parts = [] if module is None or form.torchao or form.bits != 8 else module.modules()
    whole = {id(part.weight) for part in parts if isinstance(part, nn.Embedding)}
    return lambda parameters: LowBitOptimizer(parameters, form, whole, **arguments)
