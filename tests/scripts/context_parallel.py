"""Context parallelism: each rank has a part of every sequence."""

import os

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("cp",))
m = torch.nn.Linear(256, 768).cuda().bfloat16()
o = torch.optim.AdamW(m.parameters())
for _ in range(3):
    o.zero_grad()
    x = torch.randn(2, 1024, 256, device="cuda", dtype=torch.bfloat16)
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], no_restore_buffers={x}):
        q, k, v = m(x).view(2, -1, 3, 4, 64).permute(2, 0, 3, 1, 4)
        assert q.shape[2] == 1024 // mesh.size()
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    o.step()
