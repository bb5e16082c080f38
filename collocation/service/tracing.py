"""What a worker process does with a spec: its layers within bounds, then the virtual GPU on each of the devices."""

import pickle
from dataclasses import dataclass

from vramcast.dataset_builder.devices import load_profile
from vramcast.dataset_builder.jobs.job import SpecJob, table_of
from vramcast.dataset_builder.schema import Spec
from vramcast.dataset_builder.simulation.inspector import Inspector
from vramcast.errors import UserError


@dataclass(frozen=True)
class TraceQuestion:
    """A network with its training, on some devices."""

    spec: Spec
    devices: tuple[str, ...]
    most_layers: int


def trace(question: TraceQuestion) -> bytes:
    """Pickled `Findings`, which the service keeps as they come."""
    check_layers(question.spec, question.most_layers)
    profiles = [load_profile(name) for name in question.devices]
    return pickle.dumps(Inspector(SpecJob(question.spec)).examine(question.spec.training, profiles))


def check_layers(spec: Spec, most: int) -> None:
    """Refuse a network that cannot be trained, or has too many layers."""
    layers = len(table_of(spec).layers)
    if layers > most:
        raise UserError(f"expected at most {most} layers, found {layers}: make the network smaller")
