"""The work of a trace process: check the layers of a spec, then simulate it on the requested devices."""

from dataclasses import dataclass

from vramcast.collocation.service.parsing import check_work
from vramcast.device.profiles import load_profile
from vramcast.jobs.filters import check
from vramcast.jobs.job import SpecJob, table_of
from vramcast.jobs.spec import Spec
from vramcast.simulation.result import Simulation
from vramcast.simulation.simulator import Simulator


@dataclass(frozen=True)
class TraceQuestion:
    """A spec to be simulated on some devices."""

    spec: Spec
    devices: tuple[str, ...]
    most_layers: int
    most_layer_passes: int


def trace(question: TraceQuestion) -> Simulation:
    """Return the simulation of a question; the service caches it pickled, as it arrives."""
    try:
        table = table_of(question.spec)
        check_work(question.spec, len(table.layers), question.most_layers, question.most_layer_passes)
        profiles = [load_profile(name) for name in question.devices]
        return Simulator(SpecJob(question.spec, table)).simulate({}, profiles)
    finally:
        check.cache_clear()  # tables of thousands of layers take tens of MiB each
