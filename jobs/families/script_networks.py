"""Networks defined in public training scripts, or in libraries that vramcast does not depend on."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that every PyTorch reader knows

from vramcast.errors import UserError, suggestion
from vramcast.jobs.families.libraries import import_library


class Mnist(nn.Module):
    """The network of PyTorch's MNIST example (pytorch/examples, mnist/main.py)."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return log-probabilities."""
        x = F.relu(self.conv2(F.relu(self.conv1(images))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


class UNet(nn.Module):
    """A U-Net over ResNet-34, as segmentation_models_pytorch builds `Unet("resnet34")`; returns its own loss."""

    _WIDTHS = (256, 128, 64, 32, 16)

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        timm = import_library("timm")
        self.encoder = timm.create_model("resnet34", pretrained=False, features_only=True)
        skips = (256, 128, 64, 64, 0)
        sizes = zip((512, *self._WIDTHS), skips, self._WIDTHS, strict=False)
        self.blocks = nn.ModuleList(_decoder_block(below + skip, width) for below, skip, width in sizes)
        self.head = nn.Conv2d(self._WIDTHS[-1], num_classes, 3, padding=1)

    def forward(self, images: Tensor) -> SimpleNamespace:
        """Return the logits and the loss over all pixels, with random classes as targets."""
        *skips, x = self.encoder(images)
        for block in self.blocks:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], dim=1) if skips else x)
        logits = self.head(x)
        targets = torch.randint(logits.shape[1], (len(logits), *logits.shape[2:]), device=logits.device)
        return SimpleNamespace(loss=F.cross_entropy(logits, targets), logits=logits)


def _decoder_block(channels: int, width: int) -> nn.Sequential:
    """Return two convolutions with norm and activation."""
    layers: list[nn.Module] = []
    for size in (channels, width):
        layers += [nn.Conv2d(size, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


NETWORKS: Mapping[str, Callable[[int], nn.Module]] = {"mnist": Mnist, "unet_resnet34": UNet}


def build_script_network(name: str, num_classes: int) -> nn.Module:
    """Build a network by its name."""
    if name not in NETWORKS:
        raise UserError(f"expected a network of {sorted(NETWORKS)}, found {name!r}: {suggestion(name, NETWORKS)}")
    return NETWORKS[name](num_classes)
