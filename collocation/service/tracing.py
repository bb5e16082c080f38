"""The work of a trace process: check the layers of a spec, then simulate it on the requested devices."""

import pickle
from dataclasses import dataclass

from vramcast.collocation.service.parsing import check_work
from vramcast.dataset_builder.devices import load_profile
from vramcast.dataset_builder.filters import check
from vramcast.dataset_builder.jobs.job import SpecJob, table_of
from vramcast.dataset_builder.schema import Spec
from vramcast.dataset_builder.simulation.simulator import Simulator


@dataclass(frozen=True)
class TraceQuestion:
    """A spec to be simulated on some devices."""

    spec: Spec
    devices: tuple[str, ...]
    most_layers: int
    most_layer_passes: int


def trace(question: TraceQuestion) -> bytes:
    """Return the pickled `Simulation`, which the service caches as it is."""
    try:
        table = table_of(question.spec)
        check_work(question.spec, len(table.layers), question.most_layers, question.most_layer_passes)
        profiles = [load_profile(name) for name in question.devices]
        return pickle.dumps(Simulator(SpecJob(question.spec, table)).simulate({}, profiles))
    finally:
        check.cache_clear()  # tables of thousands of layers take tens of MiB each
