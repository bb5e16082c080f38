"""The networks that predict: plain modules from encoded examples to the parameters of a density."""

from vramcast.models.networks.mlp import MlpNetwork, ResidualMlp
from vramcast.models.networks.transformer import TransformerNetwork

__all__ = ["MlpNetwork", "ResidualMlp", "TransformerNetwork"]
