"""ResNet-50 in plain torch: a network as a user writes it, without a slow import of a library."""

from torch import nn

from vramcast.jobs.families.blocks import Residual


def _bottleneck(channels: int, width: int, stride: int) -> nn.Module:
    """Return a block of ResNet-50 (He et al. 2015)."""
    out = 4 * width
    layers: list[nn.Module] = []
    for size_in, size_out, kernel, step in ((channels, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1)):
        conv = nn.Conv2d(size_in, size_out, kernel, step, kernel // 2, bias=False)
        layers += [conv, nn.BatchNorm2d(size_out), nn.ReLU(inplace=True)]
    shortcut: nn.Module = nn.Identity()
    if stride != 1 or channels != out:
        shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
    return nn.Sequential(Residual(nn.Sequential(*layers[:-1]), shortcut), nn.ReLU(inplace=True))


def resnet50() -> nn.Module:
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    blocks, channels = [], 64
    for index, (width, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for i in range(count):
            blocks.append(_bottleneck(channels, width, 2 if index and not i else 1))
            channels = 4 * width
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))
