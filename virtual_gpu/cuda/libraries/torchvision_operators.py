"""torchvision: non-maximum suppression and RoI align as CUDA allocates them (checked on torchvision 0.28).

torchvision/csrc/ops/cuda/nms_kernel.cu and roi_align_kernel.cu. The compiled operators are not needed.
"""

import math
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vramcast.virtual_gpu.cuda.patches import Patches

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation

_BOXES_A_WORD = 64


class _RoIAlign(torch.autograd.Function):
    """Crops of a feature map; the gradient is as large as the map."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, count: int, size: tuple[int, int]) -> Tensor:
        ctx.shape, ctx.dtype = features.shape, features.dtype
        return torch.empty((count, features.shape[1], *size), dtype=features.dtype, device=features.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.zeros(ctx.shape, dtype=ctx.dtype, device=gradient.device), None, None


def _apply_nms(module: ModuleType, patches: Patches, gpu: "CudaEmulation") -> None:
    original: Any = module.nms

    def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
        if not boxes.is_cuda:
            result: Tensor = original(boxes, scores, iou_threshold)
            return result
        count = boxes.shape[0]
        order = scores.argsort(descending=True)
        sorted_boxes = boxes.index_select(0, order)
        words = -(-count // _BOXES_A_WORD)
        mask = torch.empty(count * words, dtype=torch.int64, device=boxes.device)
        survivors = math.ceil(gpu.nonzero_fraction * count)
        gpu.assumptions.note(f"non-maximum suppression keeps {gpu.nonzero_fraction:.0%} of the boxes")
        del sorted_boxes, mask
        return order[:survivors]

    for other in list(sys.modules.values()):  # those that imported the function before
        if getattr(other, "__dict__", {}).get("nms") is original:
            patches.set(other, "nms", nms)


def _apply_roi_align(module: ModuleType, patches: Patches, gpu: "CudaEmulation") -> None:
    original: Any = module.roi_align

    def roi_align(input: Tensor, boxes: Any, output_size: Any, *args: Any, **kwargs: Any) -> Any:
        if not input.is_cuda:
            return original(input, boxes, output_size, *args, **kwargs)
        count = boxes.shape[0] if isinstance(boxes, Tensor) else sum(item.shape[0] for item in boxes)
        height, width = (output_size, output_size) if isinstance(output_size, int) else output_size
        return _RoIAlign.apply(input, count, (height, width))  # type: ignore[no-untyped-call]

    for other in list(sys.modules.values()):
        if getattr(other, "__dict__", {}).get("roi_align") is original:
            patches.set(other, "roi_align", roi_align)


PATCHES = {"torchvision.ops.boxes": _apply_nms, "torchvision.ops.roi_align": _apply_roi_align}
