"""Pipeline parallelism: torch's schedules run one stage, which gets the shapes of its neighbours."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from vramcast.errors import UserError
from vramcast.virtual_gpu.distributed.parallelism import Parallelism
from vramcast.virtual_gpu.distributed.stages import Stage, first_tensor
from vramcast.virtual_gpu.training.step import loss_of

_SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Pipeline:
    """The stage of one rank with its schedule."""

    def __init__(self, stage: Stage, parallelism: Parallelism, loss: str, group: dist.ProcessGroup | None) -> None:
        self.stage = stage
        self.parallelism = parallelism
        self.loss = partial(_loss, "cross_entropy" if loss == "own" else loss)
        self.group = group
        self._schedules: dict[int, Any] = {}

    def prepare(self, make_batch: Callable[[int], Any], sizes: Sequence[int], dtype: torch.dtype | None) -> None:
        """Make a schedule for each batch size, before the stage is sharded.

        Args:
            make_batch: Returns a batch of a size.
            sizes: All batch sizes that will be run.
            dtype: The dtype of the tensors between stages, None for that of the network.
        """
        for size in dict.fromkeys(sizes):
            count = self.parallelism.microbatches or min(self.parallelism.pipeline, size)
            if size % count:
                raise UserError(
                    f"expected a batch that {count} microbatches divide, found {size}: "
                    "change the batch or the microbatches"
                )
            received, sent = self.stage.shapes(first_tensor(make_batch(size // count)))
            stage = PipelineStage(
                self.stage,
                self.stage.index,
                self.stage.count,
                torch.device("meta"),
                input_args=(_sent_as(received, dtype),),
                output_args=(_sent_as(sent, dtype),),
                group=self.group,
            )
            self._schedules[size] = _SCHEDULES[self.parallelism.schedule](
                stage, n_microbatches=count, loss_fn=self.loss
            )

    def steps(
        self,
        make_batch: Callable[[int], Any],
        optimizer: Any,
        sizes: Sequence[int],
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> Iterator[None]:
        """Run one step of the schedule for each batch size."""
        for size in sizes:
            schedule = self._schedules[size]
            optimizer.zero_grad()
            inputs = (first_tensor(make_batch(size)),) if self.stage.is_first else ()
            target = {"target": torch.zeros(size, dtype=torch.int64, device="meta")} if self.stage.is_last else {}
            with autocast():
                schedule.step(*inputs, **target)
            del target
            optimizer.step()
            del inputs
            yield


def _sent_as(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().to(dtype or tensor.dtype).requires_grad_()


def _loss(loss: str, output: Tensor, _: Tensor) -> Tensor:
    """Return the loss in fp32, with targets that are drawn for the output."""
    return loss_of(loss, output.float())
