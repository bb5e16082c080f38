"""The work of a trace process: check the layers of a spec, then simulate it on the requested devices."""

import pickle
from dataclasses import dataclass

from vramcast.dataset_builder.devices import load_profile
from vramcast.dataset_builder.jobs.job import SpecJob, table_of
from vramcast.dataset_builder.schema import LayerTable, Spec
from vramcast.dataset_builder.simulation.simulator import Simulator
from vramcast.errors import UserError


@dataclass(frozen=True)
class TraceQuestion:
    """A spec to be simulated on some devices."""

    spec: Spec
    devices: tuple[str, ...]
    most_layers: int


def trace(question: TraceQuestion) -> bytes:
    """Return the pickled `Simulation`, which the service caches as it is."""
    table = check_layers(question.spec, question.most_layers)
    profiles = [load_profile(name) for name in question.devices]
    return pickle.dumps(Simulator(SpecJob(question.spec, table)).simulate({}, profiles))


def check_layers(spec: Spec, most: int) -> LayerTable:
    """Return the layer table; raise if the network cannot be trained or has too many layers."""
    table = table_of(spec)
    if len(table.layers) > most:
        raise UserError(f"expected at most {most} layers, found {len(table.layers)}: make the network smaller")
    return table
