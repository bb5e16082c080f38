"""The rows of the study: measured ones, and ones simulated by the virtual GPU."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from vramcast.dataset_builder.configuration import compose_build, make_build, settings_of
from vramcast.dataset_builder.pipeline import Build
from vramcast.dataset_builder.simulation_store import SimulationStore
from vramcast.dataset_builder.store.splits import make_folds
from vramcast.device.profiles import load_profile
from vramcast.jobs.filters import Rejected, check
from vramcast.jobs.job import table_of
from vramcast.jobs.spec import Spec
from vramcast.models.example import Example, Label
from vramcast.models.examples import example_of_table
from vramcast.train.configuration import configure
from vramcast.train.experiment import examples_for
from vramcast.virtual_gpu.measurement import Measurement, Status

PROFILE = "a100_40gb_gpumemnet_2024"
"""The stack that the public sets were measured on, also used for simulated rows."""
SIMULATIONS = Path("runs/study/simulations")
"""Each part of the study has its own directory below it, because only one process may write to one."""
WORKERS = 2
WIDTHS_MIB = {"mlp": 1000, "cnn": 8000, "transformer": 8000}
"""The bucket widths of GPUMemNet's published figures."""
FAMILIES = tuple(WIDTHS_MIB)


def measured_examples(data: str, family: str, most: int | None = None) -> list[Example]:
    """Return the measured rows of a family, or a fixed random sample of at most `most`."""
    examples = examples_for(configure(["data=gpumemnet", f"data.path={data}", f"family={family}"]))
    if most is None or len(examples) <= most:
        return examples
    return [examples[index] for index in np.sort(np.random.RandomState(0).permutation(len(examples))[:most])]


def _runnable(build: Build) -> Iterator[Spec]:
    """Yield the sampler's configurations that can run, each once, as a build would measure them."""
    seen: set[str] = set()
    for values in build.sampler.candidates(build.space, build.seed):
        spec = build.space.spec(values)
        if spec.id not in seen and not isinstance(check(spec), Rejected):
            yield spec
        seen.add(spec.id)


def drawn_specs(words: Sequence[str], count: int) -> list[Spec]:
    """Return the first configurations of the build that a command line describes."""
    words = [*words, f"n={count}"]
    return list(islice(_runnable(make_build(settings_of(compose_build(words), words), Path())), count))


def simulated_examples(specs: Iterable[Spec], part: str) -> dict[str, Example]:
    """Simulate specs and return examples by id, with the simulated peak as label. Pass many: workers start slowly."""
    by_id, profile = {spec.id: spec for spec in specs}, load_profile(PROFILE)
    simulations = SimulationStore(SIMULATIONS / part, WORKERS).measure(by_id.values(), profile)
    examples = {}
    for key, simulation in simulations.items():
        spec = by_id[key]
        example = example_of_table(table_of(spec), spec.training, profile, simulation, spec.family)
        examples[key] = replace(example, id=spec.id, group=spec.group, label=_label(simulation))
    return examples


def _label(simulation: Measurement) -> Label:
    if simulation.peak_bytes is None:
        raise TypeError(f"expected a simulation with a peak, found {simulation}")
    return Label(simulation.peak_bytes, fits=simulation.status is Status.OK)


def folds_of(examples: Sequence[Example], count: int) -> Iterator[tuple[list[Example], list[Example]]]:
    """Yield training and test rows of each fold, split by configuration."""
    split = make_folds([example.group for example in examples], count, seed=0)
    for name in split.parts:
        test = [example for example in examples if split.part_of(example.group) == name]
        yield [example for example in examples if split.part_of(example.group) != name], test
