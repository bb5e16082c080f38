"""Networks that were measured under one optimizer, simulated under others: simulation teaches what nobody measured."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from dataset_builder.families import FAMILIES
from dataset_builder.measure.virtual.profile import DeviceProfile
from dataset_builder.schema import Provenance, Row, Spec, TrainingSetup
from models.example import Example
from models.examples import examples_of_rows
from models.simulation import SimulationCache


def retrained(specs: Iterable[Spec], optimizers: Sequence[str]) -> list[Spec]:
    """Each library's network once under each of the optimizers, at one of its batch sizes after the other.

    Networks of our own families are left out: builds draw those under all optimizers.
    """
    batches: dict[str, set[int]] = defaultdict(set)
    networks: dict[str, Spec] = {}
    for spec in specs:
        if spec.family not in FAMILIES:
            networks[spec.group] = spec
            batches[spec.group].add(spec.training.batch_size)
    found = []
    for place, group in enumerate(sorted(networks)):
        sizes = sorted(batches[group])
        for offset, optimizer in enumerate(optimizers):
            training = TrainingSetup(batch_size=sizes[(place + offset) % len(sizes)], optimizer=optimizer)
            found.append(replace(networks[group], training=training))
    return found


def simulated(specs: Sequence[Spec], profile: DeviceProfile, cache: SimulationCache) -> list[Example]:
    """Examples whose target is the simulation."""
    measurements = cache.measure(specs, profile)
    provenance = Provenance(origin="simulated", backend="virtual", device=profile.name, versions={}, seed=None, time="")
    rows = [Row(spec, None, measurements[spec.id], provenance) for spec in specs if spec.id in measurements]
    return examples_of_rows(rows, {profile.name: profile}, cache)
