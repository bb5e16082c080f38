"""Samplers: draw configurations from a space."""

from collections.abc import Callable, Mapping
from typing import Any

from vramcast.dataset_builder.samplers._base import Sampler
from vramcast.dataset_builder.samplers.combined import CombinedSampler
from vramcast.dataset_builder.samplers.orthogonal import OrthogonalSampler, TbemSampler
from vramcast.dataset_builder.samplers.uniform import UniformSampler
from vramcast.errors import UserError, check_choice

SAMPLERS: Mapping[str, Callable[..., Sampler]] = {
    "uniform": UniformSampler,
    "orthogonal": OrthogonalSampler,
    "tbem": TbemSampler,
    "combined": lambda **settings: CombinedSampler(OrthogonalSampler(**settings)),
}


def make_sampler(name: str, **settings: Any) -> Sampler:
    """Make the sampler of this name."""
    check_choice("sampler", name, SAMPLERS)
    try:
        return SAMPLERS[name](**settings)
    except TypeError as error:
        raise UserError(
            f"expected settings of the sampler {name}, found {sorted(settings)} ({error}): change them"
        ) from error


__all__ = ["Sampler", "SAMPLERS", "make_sampler"]
