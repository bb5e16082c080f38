"""Inference alone: growing inputs in inference mode."""

import torch
from torch import nn

layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
network = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).cuda().eval()
with torch.inference_mode():
    for length in (64, 128, 512):
        network(torch.randn(8, length, 256, device="cuda"))
print("peak", torch.cuda.max_memory_allocated())
