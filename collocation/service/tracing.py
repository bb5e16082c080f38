"""The work of a trace process: build the network of a job, check its size, and simulate it."""

from collections import OrderedDict
from dataclasses import dataclass

from vramcast.collocation.named_job import NamedJob
from vramcast.collocation.service.parsing import check_work
from vramcast.device.profiles import load_profile
from vramcast.jobs.building import build_job
from vramcast.jobs.filters import check
from vramcast.jobs.job import SpecJob, table_of
from vramcast.jobs.library_names import library_names
from vramcast.jobs.spec import LayerTable, Spec
from vramcast.simulation.result import Curve, Simulation
from vramcast.simulation.simulator import Simulator

TracedJob = Spec | NamedJob
"""A job that a worker can simulate."""
_MOST_BUILT = 4
"""Networks that a process keeps: people vary the training of one network, which is then not built again."""
_BUILT: OrderedDict[str, Simulator] = OrderedDict()


@dataclass(frozen=True)
class TraceQuestion:
    """A job to be simulated on some devices."""

    job: TracedJob
    devices: tuple[str, ...]
    most_layers: int
    most_layer_passes: int


def trace(question: TraceQuestion) -> Simulation:
    """Return the simulation of a question; the service caches it pickled, as it arrives."""
    try:
        profiles = [load_profile(name) for name in question.devices]
        return _simulator(question).simulate(_options(question.job), profiles)
    finally:
        check.cache_clear()  # tables of thousands of layers take tens of MiB each


def trace_curve(question: TraceQuestion) -> Curve:
    """Return the memory over the steps of a job on the first device of a question."""
    try:
        return _simulator(question).curve(_options(question.job), load_profile(question.devices[0]))
    finally:
        check.cache_clear()


def trace_table(question: TraceQuestion) -> LayerTable:
    """Return the layers of a named network after one forward pass; of its training, the adapter alone matters."""
    return _simulator(question).job.details(question.job.training)


def network_names() -> dict[str, list[str]]:
    """Return the names of networks by library, which takes as long as importing the libraries."""
    return library_names()


def _options(job: TracedJob) -> dict[str, object]:
    return dict(job.options) if isinstance(job, NamedJob) else {}


def _simulator(question: TraceQuestion) -> Simulator:
    """Return the simulator of a job whose size is within the limits."""
    job = question.job
    if isinstance(job, NamedJob):
        simulator = _built(job)
        layers, training = len(simulator.table().layers), job.training
    else:
        table = table_of(job)
        simulator, layers, training = Simulator(SpecJob(job, table)), len(table.layers), job.training
    check_work(training, layers, question.most_layers, question.most_layer_passes)
    return simulator


def _built(job: NamedJob) -> Simulator:
    """Return the simulator of a named network; the traces of the last training are all that it keeps."""
    simulator = _BUILT.pop(job.network, None) or Simulator(build_job(job.build))
    _BUILT[job.network] = simulator
    while len(_BUILT) > _MOST_BUILT:
        _BUILT.popitem(last=False)
    return simulator
