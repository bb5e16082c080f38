"""The training loop of PEFT's method comparison (MetaMathQA) with batches of equal length.

Usage: python peft_comparison.py PARAMETERS, a JSON object.
"""

from contextlib import nullcontext

import torch
from common import parameters, untrained, write_figures
from peft import get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.optimizers import create_lorafa_optimizer

STEPS = 2
ALLOCATING = {"ADALORA", "ADAMSS"}


def main():
    """Train for some steps and write the peaks of the whole run."""
    job = parameters()
    network = untrained(job["network"], torch.bfloat16, "sdpa")
    if job["checkpointing"]:
        network.enable_input_require_grads()
        network.gradient_checkpointing_enable()
    if job["adapter"]:
        kind = PEFT_TYPE_TO_CONFIG_MAPPING[job["adapter"]["kind"]]
        config = kind(**job["adapter"]["config"], task_type="CAUSAL_LM")
        network = get_peft_model(network, config, autocast_adapter_dtype=job["adapter"]["autocast"])
    optimizer = _optimizer(network, job["optimizer"])
    network.eval()
    with network.disable_adapter() if job["evaluates_base"] else nullcontext():
        _evaluate(network, job)
    network.train()
    for step in range(1, STEPS + 1):
        torch.cuda.empty_cache()  # every tenth step: the longest batch is the first of the next twenty
        _train(network, optimizer, job)
        if job["adapter"] and job["adapter"]["kind"] in ALLOCATING:
            network.base_model.update_and_allocate(step)
    write_figures(job)


def _optimizer(network, job):
    if job["kind"] == "lora-fa":
        return create_lorafa_optimizer(network, **job["options"])
    return getattr(torch.optim, job["kind"])(network.parameters(), **job["options"])


def _batch(job):
    shape = (job["batch_size"], job["length"])
    batch = {"input_ids": torch.ones(shape, dtype=torch.long), "attention_mask": torch.ones(shape, dtype=torch.long)}
    return {name: value.to("cuda") for name, value in batch.items()}


@torch.inference_mode()
def _evaluate(network, job):
    """Compute the loss of one batch, token by token, before training."""
    batch = _batch(job)
    logits = network(**batch).logits
    for row, target in zip(logits, batch["input_ids"], strict=True):
        length = len(target)
        torch.nn.functional.cross_entropy(row[-length:][:-1], target[1:], reduction="none")


def _train(network, optimizer, job):
    batch = _batch(job)
    batch["labels"] = batch["input_ids"].clone()
    count = batch["attention_mask"].sum().item()
    optimizer.zero_grad()
    outputs = network(**batch, num_items_in_batch=count)
    outputs.loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    outputs.loss.item()


main()
