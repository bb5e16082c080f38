"""Networks of the classifiers: modules from encoded examples to the parameters of a density."""

from vramcast.models.estimators.networks.mlp import ResidualMlp, VectorNetwork
from vramcast.models.estimators.networks.transformer import TokenNetwork

__all__ = ["VectorNetwork", "ResidualMlp", "TokenNetwork"]
