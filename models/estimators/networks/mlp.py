"""A small residual MLP over the vector of features."""

from torch import Tensor, nn

from vramcast.models.estimators.batch import Inputs


class ResidualMlp(nn.Module):
    """A projection, residual blocks, and a linear layer."""

    def __init__(self, inputs: int, width: int, blocks: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(_block(width, dropout) for _ in range(blocks))
        self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, inputs] to [n, outputs]."""
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.last(x)
        return out

    def start_at(self, bias: Tensor) -> None:
        """Initialise the last layer so that outputs are near a bias for every input."""
        last = self.last[1]
        if isinstance(last, nn.Linear):
            nn.init.normal_(last.weight, std=0.01)
            last.bias.data.copy_(bias)


def _block(width: int, dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Dropout(dropout), nn.Linear(2 * width, width)
    )


class VectorNetwork(nn.Module):
    """A network that reads the vector only."""

    def __init__(self, inputs: int, width: int, blocks: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.body = ResidualMlp(inputs, width, blocks, outputs, dropout)

    def forward(self, inputs: Inputs) -> Tensor:
        """Return [n, outputs]."""
        out: Tensor = self.body(inputs.vector)
        return out
