"""Activation checkpointing for any network: by its own switch, else around its repeated blocks.

All forms run torch's own implementation: torch.utils.checkpoint, and torch.autograd.graph.save_on_cpu for offloading.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from vramcast.errors import UserError
from vramcast.virtual_gpu.tracing.owners import repeated_blocks
from vramcast.virtual_gpu.training.checkpointing_forms import CheckpointingForm

aten = torch.ops.aten
_DEFAULT = CheckpointingForm()
_SAVED = {
    aten.mm.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    aten.max.default,
}
"""Operators whose outputs the form 'ops' saves (torchtitan 0.1.0, models/llama3/infra/parallelize.py, _save_list)."""
_FUNCTION = "_gradient_checkpointing_func"
"""The attribute of networks of transformers and diffusers that holds the function by which they recompute."""


def enable_checkpointing(module: nn.Module, form: CheckpointingForm = _DEFAULT) -> None:
    """Make a network recompute its blocks in the backward pass."""
    if form == _DEFAULT and _switch_on(module):
        return
    blocks = list(repeated_blocks(module))
    if not blocks:
        raise UserError(
            f"expected repeated blocks in a ModuleList or Sequential of {type(module).__name__}, found none: "
            "leave out checkpointing, which has nothing to recompute"
        )
    chosen = form.chosen(blocks)
    if not chosen:
        raise UserError(
            f"expected at least {form.every} blocks beside checkpointing every={form.every}, found {len(blocks)}: "
            "lower it"
        )
    recompute = recomputation(form)
    for part in module.modules():
        if callable(getattr(part, "gradient_checkpointing_enable", None)):  # transformers
            if _recompute_by(part, form, recompute, blocks, chosen):
                return
            break
    for block in chosen:
        block.forward = partial(recompute, block.forward)


def _switch_on(module: nn.Module) -> bool:
    """Turn on a network's own checkpointing; return False if it has none."""
    for part in module.modules():
        switch: Any = getattr(part, "gradient_checkpointing_enable", None)  # transformers
        if callable(switch):
            switch(gradient_checkpointing_kwargs={"use_reentrant": False})
            return True
        switch = getattr(part, "enable_gradient_checkpointing", None)  # diffusers
        if callable(switch):
            switch()
            return True
        switch = getattr(part, "set_grad_checkpointing", None)  # timm
        if callable(switch):
            switch(True)
            return True
    return False


def _recompute_by(
    network: Any, form: CheckpointingForm, recompute: Any, blocks: list[nn.Module], chosen: list[nn.Module]
) -> bool:
    """Let a network of transformers recompute some of its blocks; return False if its blocks have no switch each."""
    network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": form.reentrant})
    parts = [part for part in network.modules() if hasattr(part, _FUNCTION)]
    some = len(chosen) < len(blocks)
    if some and not all(hasattr(block, _FUNCTION) for block in blocks):  # one switch for all, until 4.52
        network.gradient_checkpointing_disable()
        network.config.use_cache = False  # a recomputed block would write to the cache again
        return False
    for part in parts:
        setattr(part, _FUNCTION, recompute)
    for block in blocks:
        if some:
            block.gradient_checkpointing = any(block is item for item in chosen)  # type: ignore[assignment]
    return True


def recomputation(form: CheckpointingForm) -> Callable[..., Any]:
    """Return the function that runs another one on its arguments and recomputes it in the backward pass."""
    if form.reentrant:
        run: Callable[..., Any] = _reentrant
    elif form.ops:
        run = partial(checkpoint, use_reentrant=False, context_fn=saving_products)
    else:
        run = partial(checkpoint, use_reentrant=False)
    return partial(_inputs_on_host, run) if form.offload else run


def _reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Recompute by re-entering autograd, which takes no keyword arguments."""
    return checkpoint(partial(function, **kwargs), *args, use_reentrant=True)


def _inputs_on_host(run: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Hold what a checkpoint saves, its inputs, on the host, as `offload` of transformers 5 does."""
    with save_on_cpu():  # pinned memory of the host would take the same memory of the device
        return run(function, *args, **kwargs)


def saving_products() -> Any:
    """Save the outputs of attention and of every second product (torchtitan, _apply_ac_to_transformer_block)."""
    counts: dict[bool, int] = defaultdict(int)

    def policy(context: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if func is aten.mm.default:
            counts[context.is_recompute] += 1
        skipped = func is aten.mm.default and counts[context.is_recompute] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if func in _SAVED and not skipped else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
