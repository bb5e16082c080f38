"""Mask R-CNN as torchvision's reference script trains it, and batches whose shapes vary as those of COCO.

The network is torchvision's own. What depends on values is replaced by counts (`_fix_counts`), since a virtual GPU has
shapes alone. The sizes of images and the numbers of instances are assumptions about COCO, stated below.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from vramcast.jobs.families.libraries import import_library

IMAGE_SIZES: Mapping[tuple[int, int], float] = {
    (640, 480): 0.28, (640, 427): 0.24, (480, 640): 0.12, (427, 640): 0.08, (500, 375): 0.06, (375, 500): 0.02,
    (640, 640): 0.03, (640, 360): 0.02, (500, 333): 0.02, (333, 500): 0.01,
}  # fmt: skip
"""Assumed shares of width and height; the rest has a long side of 640, and a short side from 320 to 640."""
LONG_SIDE, SHORTEST_SIDE, LANDSCAPE = 640, 320, 0.75
MEAN_INSTANCES, MOST_INSTANCES = 7.3, 93
"""Instances in an image, taken to be geometrically distributed."""
ASPECT_RATIOS = [2 ** (step / 3) for step in range(-3, 4)]
"""Bounds of the groups that the script draws batches from: `--aspect-ratio-group-factor 3`, its default."""


class MaskRcnn(nn.Module):
    """torchvision's maskrcnn_resnet50_fpn without weights, as `train.py` builds it by default: every layer trains."""

    def __init__(self, num_classes: int, seed: int = 0) -> None:
        super().__init__()
        make = import_library("torchvision").models.get_model
        self.network = make("maskrcnn_resnet50_fpn", weights=None, weights_backbone=None, num_classes=num_classes)
        _fix_counts(self.network, Random(seed))  # noqa: S311 - a sample, no secret

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> SimpleNamespace:
        """Return the losses and their sum."""
        losses = self.network(images, targets)
        return SimpleNamespace(loss=sum(losses.values()), losses=losses)


def _fix_counts(network: Any, random: Random) -> None:
    """Replace the parts of torchvision's network whose shapes depend on values.

    Of an image's proposals 2,000 are left, which is the most; 512 of them are sampled, and from as many as the image
    has instances to 128, which is the most, are positive. Which of them they are does not matter to memory.
    """
    rpn, heads = network.rpn, network.roi_heads
    rpn.filter_proposals = partial(_first_proposals, rpn.post_nms_top_n())
    rpn.proposal_matcher.set_low_quality_matches_ = _compare
    for part in (rpn, heads):
        part.fg_bg_sampler = partial(_sample, part.fg_bg_sampler)
    heads.select_training_samples = partial(_with_positives, heads.select_training_samples, random)


def _first_proposals(count: int, proposals: Tensor, objectness: Tensor, *_: Any) -> tuple[list[Tensor], list[Tensor]]:
    scores = objectness.detach().reshape(len(proposals), -1)
    return [item[:count].clone() for item in proposals], [item[:count].clone() for item in scores]


def _compare(matches: Tensor, all_matches: Tensor, quality: Tensor) -> None:
    """Compare each anchor with the best; the few that are equal take no memory to speak of."""
    best = quality.max(dim=1)[0]
    _ = quality == best[:, None]


def _sample(sampler: Any, labels: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return masks of the first places, as many as the sampler draws."""
    positive = int(sampler.batch_size_per_image * sampler.positive_fraction)
    masks = [[torch.zeros_like(item, dtype=torch.uint8) for item in labels] for _ in range(2)]
    for chosen, others in zip(*masks, strict=True):
        chosen[:positive] = 1
        others[positive : sampler.batch_size_per_image] = 1
    return masks[0], masks[1]


def _with_positives(select: Any, random: Random, proposals: Any, targets: Any) -> tuple[Any, Any, Any, Any]:
    """Select RoIs, and say how many of them are positive: the mask head takes these alone."""
    sampler = select.__self__.fg_bg_sampler.args[0]
    most = int(sampler.batch_size_per_image * sampler.positive_fraction)
    proposals, matched, labels, regression = select(proposals, targets)
    positives = [torch.zeros_like(item) for item in labels]
    for item, target in zip(positives, targets, strict=True):
        item[: random.randint(min(len(target["labels"]), most), most)] = 1
    return proposals, matched, positives, regression


def coco_batches(size: int, seed: int = 0) -> Iterator[tuple[list[Tensor], list[dict[str, Tensor]]]]:
    """Yield batches without data for ever, each of images from one group of aspect ratios, as the script does."""
    random = Random(seed)  # noqa: S311 - a sample, no secret
    groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
    while True:
        width, height = _image_size(random)
        group = groups[bisect_right(ASPECT_RATIOS, width / height)]
        group.append((height, width))
        if len(group) == size:
            sides = list(group)
            group.clear()
            images = [torch.empty(3, *side, device="meta") for side in sides]
            yield images, [_target(random, side) for side in sides]


def _image_size(random: Random) -> tuple[int, int]:
    """Draw width and height."""
    rest = random.random()
    for size, share in IMAGE_SIZES.items():
        rest -= share
        if rest < 0:
            return size
    short = random.randint(SHORTEST_SIDE, LONG_SIDE)
    return (LONG_SIDE, short) if random.random() < LANDSCAPE else (short, LONG_SIDE)


def _target(random: Random, side: tuple[int, int]) -> dict[str, Tensor]:
    count = min(1 + int(random.expovariate(1 / (MEAN_INSTANCES - 0.5))), MOST_INSTANCES)
    return {
        "boxes": torch.empty(count, 4, device="meta"),
        "labels": torch.empty(count, dtype=torch.int64, device="meta"),
        "masks": torch.empty(count, *side, dtype=torch.uint8, device="meta"),
        "image_id": torch.empty(1, dtype=torch.int64, device="meta"),
        "area": torch.empty(count, device="meta"),
        "iscrowd": torch.empty(count, dtype=torch.int64, device="meta"),
    }
