"""The jobs behind LINYUN's and Wedsonlin's recordings: `vramcast snapshot FILE --against -- python course_job.py ...`.

`--form step` trains with torch's AdamW and cross-entropy, `--form own` with an optimizer and a loss written out,
`--form forward` and `--form inference` run the network alone, with and without a graph.
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from course_network import SHAPES, LanguageNetwork
from torch import Tensor
from torch.nn import functional


class WrittenAdamW(torch.optim.Optimizer):
    """AdamW without torch's fused loops: states are made anew at each step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.95), "decay": 0.1})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate, (one, two), decay = group["lr"], group["betas"], group["decay"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient = self.state[parameter], parameter.grad.data
                count = state.get("count", 1)
                parameter.data -= rate * decay * parameter.data
                mean = state.get("mean", torch.zeros_like(parameter.data))
                square = state.get("square", torch.zeros_like(parameter.data))
                mean = one * mean + (1 - one) * gradient
                square = two * square + (1 - two) * torch.square(gradient)
                scaled = rate * (1 - two**count) ** 0.5 / (1 - one**count)
                parameter.data -= scaled * mean / (torch.sqrt(square) + 1e-8)
                state["count"], state["mean"], state["square"] = count + 1, mean, square


def log_softmax(x: Tensor) -> Tensor:
    largest = torch.max(x, -1, keepdim=True)[0]
    x = x - largest
    return x - torch.log(torch.sum(torch.exp(x), -1, keepdim=True))


def written_loss(logits: Tensor, targets: Tensor) -> Tensor:
    negative = -log_softmax(logits)
    return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))


def torch_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    """Run warm-up steps and the recorded ones."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SHAPES, default="medium")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--form", choices=("step", "own", "forward", "inference"), default="step")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--uncached", action="store_true", help="autocast keeps no copies of weights")
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()

    shape = SHAPES[arguments.size]
    network = LanguageNetwork(shape, arguments.context).to("cuda")
    trains = arguments.form in ("step", "own")
    optimizer: Any = None
    if trains:
        make = WrittenAdamW if arguments.form == "own" else torch.optim.AdamW
        optimizer = make(network.parameters())
    loss_of = written_loss if arguments.form == "own" else torch_loss
    tokens = torch.randint(0, shape.vocabulary, (arguments.batch, arguments.context), device="cuda")
    targets = torch.randint(0, shape.vocabulary, (arguments.batch, arguments.context), device="cuda")
    autocast = torch.autocast("cuda", torch.bfloat16, cache_enabled=not arguments.uncached)
    precision = autocast if arguments.bf16 else nullcontext()
    for _ in range(arguments.steps):
        if trains:
            optimizer.zero_grad()
        with precision, torch.no_grad() if arguments.form == "inference" else nullcontext():
            if trains:
                logits = network(tokens)
                loss = loss_of(logits, targets)
            else:
                network(tokens)
        if trains:
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
