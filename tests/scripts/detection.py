"""A Faster R-CNN of torchvision on images of different sizes, without downloads."""

import torch
import torchvision
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.rpn import AnchorGenerator

backbone = torchvision.models.mobilenet_v2(weights=None).features
backbone.out_channels = 1280
anchors = AnchorGenerator(sizes=((32, 64, 128),), aspect_ratios=((0.5, 1.0, 2.0),))
pooler = torchvision.ops.MultiScaleRoIAlign(featmap_names=["0"], output_size=7, sampling_ratio=2)
model = FasterRCNN(
    backbone, num_classes=5, rpn_anchor_generator=anchors, box_roi_pool=pooler, min_size=256, max_size=320
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
for step in range(4):
    images = [torch.rand(3, 240 + 16 * i, 320).cuda() for i in range(4)]
    targets = [
        {
            "boxes": torch.tensor([[10.0, 10.0, 60.0, 80.0], [100.0, 50.0, 180.0, 150.0]]).cuda(),
            "labels": torch.tensor([1, 3]).cuda(),
        }
        for _ in images
    ]
    losses = model(images, targets)
    loss = sum(losses.values())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, {name: round(value.item(), 3) for name, value in losses.items()})
