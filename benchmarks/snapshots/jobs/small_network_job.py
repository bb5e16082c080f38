"""The jobs behind NiuHuang's recordings: a small network of the course, in another version than `course_network`.

Norms divide by the root, rotary tables come from the host at each call, the mask is a product of the host that fills
scores in place, the exponentials of softmax are computed twice, and the loss of the last position uses a one-hot.
"""

import argparse
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from course_network import SHAPES, GatedLayer, Lookup, Product, Shape
from torch import Tensor, nn

DEVICE = "cuda"


class DividingNorm(nn.Module):
    """Divides by the root of the mean square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        x = x.to(torch.float32)
        root = torch.sqrt(torch.mean(x**2, -1, keepdim=True) + 1e-5)
        return (x / root * self.weight).to(kind)


class HostRotary:
    """Rotates pairs of features with tables that stay on the host."""

    def __init__(self, context: int, width: int) -> None:
        rates = 10_000.0 ** -(torch.arange(0, width, 2, device="cpu") / width)
        angles = torch.outer(torch.arange(context, device="cpu"), rates)
        self.cosine, self.sine = angles.cos(), angles.sin()

    def __call__(self, x: Tensor) -> Tensor:
        cosine = self.cosine[: x.shape[-2]].to(x.device)
        sine = self.sine[: x.shape[-2]].to(x.device)
        first = x[..., ::2] * cosine - x[..., 1::2] * sine
        second = x[..., ::2] * sine + x[..., 1::2] * cosine
        return torch.cat((first, second), -1)


class TwiceSoftmax(nn.Module):
    """A softmax that computes its exponentials twice."""

    def forward(self, x: Tensor) -> Tensor:
        largest = torch.max(x, -1, keepdim=True).values
        return torch.exp(x - largest) / torch.sum(torch.exp(x - largest), -1, keepdim=True)


class MaskedAttention(nn.Module):
    """Causal attention of several heads."""

    def __init__(self, shape: Shape, context: int) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query, self.key, self.value, self.out = (Product(shape.width, shape.width) for _ in range(4))
        self.rotary = HostRotary(context, shape.width // shape.heads)
        self.softmax = TwiceSoftmax()

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        query = query.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        query = self.rotary(query)
        key = key.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key = self.rotary(key)
        value = value.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        mixed = self.mix(query, key, value)
        mixed = mixed.transpose(1, 2).flatten(-2)
        return self.out(mixed)

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = torch.tril(torch.ones(query.shape[-2], query.shape[-2], device="cpu")).to(query.device)
        scores = torch.einsum("...qd,...kd->...qk", query, key)
        scaled = scores / torch.sqrt(torch.tensor(query.shape[-1], device="cpu").to(query.device))
        scaled.masked_fill_(~mask.to(torch.bool), -math.inf)
        return torch.einsum("...qk,...kd->...qd", self.softmax(scaled), value)


class Block(nn.Module):
    """Attention and a gated layer, each behind a norm and beside a residual."""

    def __init__(self, shape: Shape, context: int) -> None:
        super().__init__()
        self.first, self.second = DividingNorm(shape.width), DividingNorm(shape.width)
        self.attention = MaskedAttention(shape, context)
        self.layer = GatedLayer(shape)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(self.first(x))
        x = x + attended
        return x + self.layer(self.second(x))


class SmallNetwork(nn.Module):
    """The whole network: logits of all positions."""

    def __init__(self, shape: Shape, context: int) -> None:
        super().__init__()
        self.lookup = Lookup(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape, context) for _ in range(shape.layers))
        self.norm = DividingNorm(shape.width)
        self.head = Product(shape.width, shape.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.lookup(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class OneHotLoss(nn.Module):
    """Cross-entropy as the product of a one-hot with log-probabilities."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        largest = torch.max(logits, -1, keepdim=True).values
        logs = (logits - largest) - torch.log(torch.sum(torch.exp(logits - largest), -1, keepdim=True))
        chosen = torch.zeros_like(logs)
        chosen.scatter_(1, targets.unsqueeze(1), 1)
        return -torch.sum(chosen * logs) / targets.shape[0]


class ReplacingAdamW(torch.optim.Optimizer):
    """AdamW that replaces parameters and states by new tensors; its states exist from the start."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["mean"] = torch.zeros_like(parameter.data)
                state["square"] = torch.zeros_like(parameter.data)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate = group["lr"]
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad.data
                mean = state["mean"]
                state["mean"] = 0.9 * mean + 0.1 * gradient
                square = state["square"]
                state["square"] = 0.999 * square + 0.001 * gradient**2
                parameter.data = parameter.data - rate * (state["mean"] / (torch.sqrt(state["square"]) + 1e-8))
                parameter.data = parameter.data - rate * 0.01 * parameter.data


def last_position(logits: Tensor) -> Tensor:
    """Return logits[:, -1, :] as torch 2.6 takes it: full slices are views with a backward of their own."""
    view = torch.ops.aten.slice.Tensor
    return view(torch.ops.aten.select.int(view(logits, 0), 1, -1), 1)


def main() -> None:
    """Run three steps, or forward passes alone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--form", choices=("step", "forward"), default="step")
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args()

    shape = SHAPES["tiny"]
    with torch.device(DEVICE):
        network = SmallNetwork(shape, arguments.context)
    tokens = torch.randint(0, shape.vocabulary, (10, arguments.context))
    targets = torch.randint(0, shape.vocabulary, (10,))
    optimizer = ReplacingAdamW(network.parameters()) if arguments.form == "step" else None
    tokens = tokens.to(DEVICE)
    targets = targets.to(DEVICE)
    loss_of = OneHotLoss()
    precision = torch.autocast(DEVICE, torch.bfloat16) if arguments.bf16 else nullcontext()
    for _ in range(3):
        with precision:
            if optimizer is None:
                network(tokens)
            else:
                logits = network(tokens)
                logits = last_position(logits)
                loss = loss_of(logits, targets)
        if optimizer is not None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
