"""Networks as users write them: `written_networks.py:NAME` is a target of the tests."""

import torch
from torch import nn
from torch.nn import functional as F

print("a module that talks while it is imported")


def _double(channels, out):
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, padding=1), nn.ReLU(), nn.Conv2d(out, out, 3, padding=1), nn.ReLU()
    )


class UNet(nn.Module):
    """A U-Net: a map of classes, with skip connections (Ronneberger et al. 2015)."""

    def __init__(self, channels=3, classes=5, width=8):
        super().__init__()
        self.down = nn.ModuleList([_double(channels, width), _double(width, 2 * width), _double(2 * width, 4 * width)])
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)]
        )
        self.join = nn.ModuleList([_double(4 * width, 2 * width), _double(2 * width, width)])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2) if block is not self.down[-1] else x
        for up, join, skip in zip(self.up, self.join, reversed(skips[:-1]), strict=True):
            x = join(torch.cat([up(x), skip], dim=1))
        return self.head(x)


class Fpn(nn.Module):
    """A detector's backbone with a feature pyramid: several maps as output (Lin et al. 2016)."""

    def __init__(self, width=8):
        super().__init__()
        self.stages = nn.ModuleList([nn.Conv2d(3 if i == 0 else width, width, 3, 2, 1) for i in range(3)])
        self.sides = nn.ModuleList([nn.Conv2d(width, width, 1) for _ in range(3)])

    def forward(self, x):
        maps = []
        for stage in self.stages:
            x = F.relu(stage(x))
            maps.append(x)
        top = None
        found = {}
        for index in (2, 1, 0):
            side = self.sides[index](maps[index])
            top = side if top is None else side + F.interpolate(top, scale_factor=2.0, mode="nearest")
            found[f"p{index}"] = top
        return found


class Denoiser(nn.Module):
    """A small diffusion U-Net: takes an image and a time, returns noise of the image's shape."""

    def __init__(self, width=16):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.into, self.norm, self.out = (
            nn.Conv2d(3, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.Conv2d(width, 3, 1),
        )
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x, t):
        h = F.silu(self.norm(self.into(x))) + self.time(t)[:, :, None, None]
        flat = h.flatten(2).transpose(1, 2)
        h = h + self.attention(flat, flat, flat, need_weights=False)[0].transpose(1, 2).unflatten(2, h.shape[2:])
        return self.out(h)


class Tagger(nn.Module):
    """An LSTM over tokens."""

    def __init__(self):
        super().__init__()
        self.words, self.lstm, self.head = nn.Embedding(100, 16), nn.LSTM(16, 32, 2, batch_first=True), nn.Linear(32, 7)

    def forward(self, tokens):
        return self.head(self.lstm(self.words(tokens))[0])


class GraphNet(nn.Module):
    """A graph network: two rounds of messages along edges, by index_add."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 32), nn.Linear(32, 4)

    def forward(self, nodes, edges):
        for layer in (self.first, self.second):
            sent = layer(nodes)
            nodes = torch.zeros_like(sent).index_add(0, edges[1], sent[edges[0]])
        return nodes


def graph(size):
    return {"nodes": torch.randn(50 * size, 12), "edges": torch.randint(0, 50 * size, (2, 300 * size))}


class LoraLinear(nn.Module):
    def __init__(self, size, rank):
        super().__init__()
        self.frozen = nn.Linear(size, size)
        self.frozen.requires_grad_(False)
        self.down, self.up = nn.Linear(size, rank, bias=False), nn.Linear(rank, size, bias=False)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


def lora(size=256, rank=2):
    return nn.Sequential(LoraLinear(size, rank), nn.ReLU(), LoraLinear(size, rank))


class Tied(nn.Module):
    """A language network whose output layer is its embedding."""

    def __init__(self, words=500, size=32):
        super().__init__()
        self.words, self.head = nn.Embedding(words, size), nn.Linear(size, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        return self.head(self.words(tokens))


class Computing(Tied):
    """A network whose constructor reads values, which meta tensors do not have."""

    def __init__(self):
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.drop = nn.Dropout(rates[-1])


class Undecided(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(10, 10)

    def forward(self, x):
        y = self.layer(x)
        if y.sum().item() > 0:
            return y
        return -y


class Checking(nn.Linear):
    """A network that checks for non-finite values."""

    def forward(self, x):
        y = super().forward(x)
        if y.isnan().any():
            raise ValueError("bad numbers")
        return y


def broken():
    raise ValueError("a fault of the user's own")


def mismatched():
    return nn.Sequential(nn.Linear(10, 5), nn.Linear(4, 3))


def on_a_card():
    return nn.Linear(10, 3).cuda().to("cuda:0")


def large(gigabytes):
    kept = torch.ones(gigabytes * 2**28)
    module = nn.Linear(10, 3)
    module.kept = kept + 1
    return module


def endless():
    while True:
        pass


def blocks(depth=6, size=64):
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size)) for _ in range(depth))
    )


def contrast(network, batch):
    """A training step with its own loss over two views."""
    first, second = network(batch["a"]), network(batch["b"])
    return F.cross_entropy(first @ second.T, torch.arange(first.shape[0], device=first.device))


def views(size):
    return {"a": torch.randn(size, 64), "b": torch.randn(size, 64)}


class Lit(nn.Module):
    """An object with the methods of a LightningModule."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(10, 3)

    def training_step(self, batch, index):
        x, y = batch
        return {"loss": F.cross_entropy(self.net(x), y)}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
