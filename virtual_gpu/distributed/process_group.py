"""A fake process group: collectives return at once and move no data (torch.testing._internal.distributed.fake_pg).

Checked with torch 2.13.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

BACKEND = "cpu:fake,meta:fake"


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Initialise the default process group of one rank."""
    dist.init_process_group(BACKEND, rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
