"""torchao's benchmark of optimizers (`benchmarks/benchmark_low_bit_adam.py`): a network of timm on images.

Usage: python low_bit_adam.py PARAMETERS, a JSON object. torch.compile is left out: the network runs as eager code.
"""

from contextlib import nullcontext

import bitsandbytes
import timm
import torch
from common import parameters, write_figures
from torch.nn import functional as F  # noqa: N812 - the usual name
from torchao.prototype import low_bit_optim

STEPS, CLASSES = 3, 45
OPTIMIZERS = {
    "AdamW": lambda items: torch.optim.AdamW(items, lr=1e-4, fused=True),
    "bnb AdamW8bit": lambda items: bitsandbytes.optim.AdamW8bit(items, lr=1e-4),
    "ao AdamW8bit": lambda items: low_bit_optim.AdamW8bit(items, lr=1e-4),
    "ao AdamWFp8": lambda items: low_bit_optim.AdamWFp8(items, lr=1e-4),
    "ao AdamW4bit": lambda items: low_bit_optim.AdamW4bit(items, lr=1e-4),
    "ao CPUOffloadOptimizer": lambda items: low_bit_optim.CPUOffloadOptimizer(items, torch.optim.AdamW, lr=1e-4),
}


def main():
    """Train for some steps and write the figures that the script would print."""
    job = parameters()
    network = timm.create_model(job["network"], num_classes=CLASSES, img_size=job["image_size"])
    if job["checkpointing"]:
        network.set_grad_checkpointing()
    if job["full_bf16"]:
        network.bfloat16()
    network.cuda().train()
    optimizer = OPTIMIZERS[job["optimizer"]](network.parameters())
    shape = (job["batch_size"], 3, job["image_size"], job["image_size"])
    for _ in range(STEPS):
        images, labels = torch.zeros(shape), torch.zeros(job["batch_size"], dtype=torch.long)
        if job["full_bf16"]:
            images = images.bfloat16()
        with nullcontext() if job["full_bf16"] else torch.amp.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(network(images.cuda()), labels.cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    write_figures(job)


main()
