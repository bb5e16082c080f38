"""A pipeline of two stages under torchrun; the second is larger."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("nccl")
rank, device = dist.get_rank(), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
with torch.device(device):
    module = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(1 + 3 * rank)))
    example = torch.empty(4, 1024, requires_grad=True)
stage = PipelineStage(module, rank, dist.get_world_size(), device, input_args=(example,), output_args=(example,))
schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.Adam(module.parameters())
for _ in range(4):
    optimizer.zero_grad()
    x = torch.randn(8, 1024, device=device)
    schedule.step(*((x,) if rank == 0 else ()), **({"target": x} if rank else {}))
    optimizer.step()
dist.destroy_process_group()
