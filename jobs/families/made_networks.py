"""Networks of usual forms that no library here has: recurrent ones, U-Nets of convolutions, detectors on a backbone."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the usual name

from vramcast.jobs.families.libraries import import_library
from vramcast.jobs.plan import InputTensor

Made = tuple[nn.Module, tuple[InputTensor, ...]]
_CELLS: Mapping[str, type[nn.LSTM] | type[nn.GRU] | type[nn.RNN]] = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


class RecurrentNetwork(nn.Module):
    """Words, recurrent layers, and scores: for each word, or for the last one."""

    def __init__(self, network: Mapping[str, Any]) -> None:
        super().__init__()
        width, hidden = int(network["embedding"]), int(network["hidden"])
        both = bool(network.get("bidirectional"))
        self.words = nn.Embedding(int(network["vocabulary"]), width)
        self.layers = _CELLS[network["cell"]](
            width, hidden, int(network["layers"]), dropout=float(network.get("dropout", 0.0)), bidirectional=both,
            batch_first=True,
        )  # fmt: skip
        self.score = nn.Linear(hidden * (1 + both), int(network["classes"]))
        self.every_word = bool(network.get("every_word"))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores."""
        outputs, _ = self.layers(self.words(tokens))
        return self.score(outputs if self.every_word else outputs[:, -1])  # type: ignore[no-any-return]


class ConvolutionalUNet(nn.Module):
    """An encoder and a decoder of convolutions with skip connections; it scores each pixel."""

    def __init__(self, network: Mapping[str, Any]) -> None:
        super().__init__()
        widths = [int(network["width"]) * 2**level for level in range(int(network["levels"]))]
        norm = nn.BatchNorm2d if network.get("norm", "batch") == "batch" else nn.InstanceNorm2d
        sizes = zip([int(network.get("channels", 3)), *widths], widths, strict=False)
        self.down = nn.ModuleList(_double(before, after, norm) for before, after in sizes)
        pairs = list(zip(widths[::-1], widths[-2::-1], strict=False))
        self.widen = nn.ModuleList(nn.ConvTranspose2d(deep, wide, 2, stride=2) for deep, wide in pairs)
        self.up = nn.ModuleList(_double(2 * wide, wide, norm) for _, wide in pairs)
        self.score = nn.Conv2d(widths[0], int(network["classes"]), 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a score for each pixel and class."""
        skipped = []
        for index, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if index else x)
            skipped.append(x)
        skipped.pop()
        for widen, block in zip(self.widen, self.up, strict=True):
            x = block(torch.cat([skipped.pop(), widen(x)], 1))
        return self.score(x)  # type: ignore[no-any-return]


def _double(before: int, after: int, norm: Any) -> nn.Module:
    parts = [part for width in (before, after)
             for part in (nn.Conv2d(width, after, 3, padding=1), norm(after), nn.ReLU(inplace=True))]  # fmt: skip
    return nn.Sequential(*parts)


class PyramidDetector(nn.Module):
    """A backbone of timm, a feature pyramid, and heads over all its levels that score boxes, as in RetinaNet."""

    def __init__(self, network: Mapping[str, Any]) -> None:
        super().__init__()
        timm = import_library("timm")
        self.backbone = timm.create_model(network["name"], pretrained=False, features_only=True)
        channels = self.backbone.feature_info.channels()[-int(network.get("levels", 3)) :]
        width, anchors = int(network["width"]), 9
        self.classes, self.levels = int(network["classes"]), len(channels)
        self.lateral = nn.ModuleList(nn.Conv2d(size, width, 1) for size in channels)
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in channels)
        tower = [part for _ in range(4) for part in (nn.Conv2d(width, width, 3, padding=1), nn.ReLU())]
        self.score = nn.Sequential(*tower, nn.Conv2d(width, anchors * self.classes, 3, padding=1))

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of all boxes."""
        features = self.backbone(images)[-self.levels :]
        merged = [lateral(item) for lateral, item in zip(self.lateral, features, strict=True)]
        for index in range(self.levels - 2, -1, -1):
            merged[index] = merged[index] + F.interpolate(merged[index + 1], size=merged[index].shape[-2:])
        scores = [self.score(smooth(item)) for smooth, item in zip(self.smooth, merged, strict=True)]
        flat = [item.permute(0, 2, 3, 1).reshape(len(item), -1, self.classes) for item in scores]
        return torch.cat(flat, 1)


def recurrent(network: Mapping[str, Any]) -> Made:
    """Build a recurrent network and its input."""
    tokens = InputTensor((int(network["sequence"]),), int(network["vocabulary"]))
    return RecurrentNetwork(network), (tokens,)


def unet(network: Mapping[str, Any]) -> Made:
    """Build a U-Net and its input, a square whose side its levels can halve."""
    side = int(network["size"])
    return ConvolutionalUNet(network), (InputTensor((int(network.get("channels", 3)), side, side)),)


def detector(network: Mapping[str, Any]) -> Made:
    """Build a detector and its input."""
    side = int(network["size"])
    return PyramidDetector(network), (InputTensor((3, side, side)),)
