"""Pipeline schedules first exchange shapes between stages, which needs data: here each stage gets its shapes.

Patches _PipelineSchedule._warmup_p2p, which exists from torch 2.12 on; checked with torch 2.13.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.pipelining import schedules

from vramcast.errors import UserError
from vramcast.virtual_gpu.operators.autocast import replaced

_NAME = "_warmup_p2p"


@contextmanager
def static_pipeline() -> Iterator[None]:
    """Let all stages of a pipeline use the shapes that they were given."""
    schedule = schedules._PipelineSchedule
    if not hasattr(schedule, _NAME):
        yield
        return

    def use_given_shapes(_: Any, stages: list[Any], *__: Any, **___: Any) -> None:
        from torch.distributed.pipelining._utils import InferenceMode  # noqa: PLC0415 - absent before the patch's time

        for stage in stages:
            examples = getattr(stage, "_user_meta", None)
            if examples is not None and (examples.inputs is None or examples.outputs is None):
                raise UserError(
                    "expected a PipelineStage with input_args and output_args, found one without: pass example "
                    "tensors, since a simulated stage cannot ask its neighbours for shapes"
                )
            stage._inference_mode = InferenceMode.STATIC

    with replaced(schedule, _NAME, use_given_shapes):
        yield
