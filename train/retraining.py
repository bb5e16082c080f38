"""Simulated examples of networks with optimizers that no table measured."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from vramcast.dataset_builder.rows import Provenance, Row
from vramcast.dataset_builder.simulation_store import SimulationStore
from vramcast.jobs.families import FAMILIES
from vramcast.jobs.spec import Spec
from vramcast.models.example import Example
from vramcast.models.examples import examples_of_rows
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.training.setup import TrainingSetup


def retrained(specs: Iterable[Spec], optimizers: Sequence[str]) -> list[Spec]:
    """Return each library's network once for each optimizer, cycling through its batch sizes.

    Generated families are left out, because builds sample them with all optimizers.
    """
    batches: dict[str, set[int]] = defaultdict(set)
    networks: dict[str, Spec] = {}
    for spec in specs:
        if spec.family not in FAMILIES:
            networks[spec.group] = spec
            batches[spec.group].add(spec.training.batch_size)
    retrained_specs = []
    for index, group in enumerate(sorted(networks)):
        sizes = sorted(batches[group])
        for offset, optimizer in enumerate(optimizers):
            spec, batch_size = networks[group], sizes[(index + offset) % len(sizes)]
            training = TrainingSetup(batch_size=batch_size, optimizer=optimizer, loss=spec.training.loss)
            retrained_specs.append(replace(spec, training=training))
    return retrained_specs


def named_specs(networks: Iterable[str]) -> Iterator[Spec]:
    """Yield networks such as torchvision:vgg11 with their default settings, at a few batch sizes each."""
    for text in networks:
        family, _, name = text.partition(":")
        network_of, sizes, loss = _LIBRARIES[family]
        for batch_size in sizes:
            yield Spec(family, network_of(name), TrainingSetup(batch_size=batch_size, loss=loss))


def _classifier(name: str) -> dict[str, Any]:
    return {"name": name, "input_shape": [3, 224, 224], "num_classes": 1000}


def _language_model(name: str) -> dict[str, Any]:
    return {"architecture": name, "config": {}, "sequence": 512}


_LIBRARIES = {
    "torchvision": (_classifier, (8, 16, 32, 64, 128), "cross_entropy"),
    "hf": (_language_model, (2, 4, 8, 16, 32), "own"),
}
"""By `settings.LIBRARIES`: the network's settings, batch sizes, and the loss."""


def simulated(specs: Sequence[Spec], profile: DeviceProfile, store: SimulationStore) -> list[Example]:
    """Return examples whose label is the simulation."""
    measurements = store.measure(specs, profile)
    provenance = Provenance(origin="simulated", backend="virtual", device=profile.name, versions={}, seed=None, time="")
    rows = [Row(spec, None, measurements[spec.id], provenance) for spec in specs if spec.id in measurements]
    return examples_of_rows(rows, {profile.name: profile}, store)
