"""Our own reservations for the jobs of a trace: networks are built, simulated and classified. Imports torch.

A job that a file without code defines is classified from its layers.
"""

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vramcast.collocation.cluster_simulation.workload import TraceJob
from vramcast.dataset_builder.simulation_store import SimulationStore
from vramcast.defaults import CHECKPOINT, RISK
from vramcast.device.profiles import load_profile
from vramcast.errors import UserError, check_count
from vramcast.files.yaml_text import parse_yaml
from vramcast.jobs.network_files.description import NetworkDescription
from vramcast.jobs.network_files.reading import read_network_file
from vramcast.jobs.recipes import spec_of_recipe
from vramcast.jobs.spec import Spec
from vramcast.jobs.targets import is_document
from vramcast.models import load
from vramcast.models.answer import Answer
from vramcast.models.predictor import Question, table_training
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.profile import DeviceProfile

DEFINITIONS = Path(__file__).with_name("definitions.yaml")


@dataclass(frozen=True)
class AnswerSettings:
    """The estimator of our answers, their risk, and how they are rounded."""

    checkpoint: str = CHECKPOINT
    risk: float = RISK
    bucket_mib: int = 1
    """Reservations are rounded up to a multiple of it."""

    def __post_init__(self) -> None:
        check_count("--bucket-mib", self.bucket_mib)


def specs_of(jobs: Iterable[TraceJob], definitions: Path = DEFINITIONS) -> dict[str, Spec]:
    """Return the specs of the jobs that a recipe defines, each with its own batch size."""
    recipe_of = _recipes(definitions)
    return {
        job.name: spec_of_recipe(recipe_of[job.name], job.batch_size)
        for job in jobs
        if job.name in recipe_of and not is_document(recipe_of[job.name])
    }


def _questions_of_files(jobs: Iterable[TraceJob], profile: DeviceProfile, definitions: Path) -> list[Question]:
    """Return the questions about jobs that a file without code defines: their layers are known, and no simulation."""
    recipe_of = _recipes(definitions)
    questions = []
    for job in jobs:
        if is_document(name := recipe_of.get(job.name, "")):
            network = read_network_file(definitions.parent / name)
            if not isinstance(network, NetworkDescription):
                raise UserError(f"expected the layers of a network, found {name}: name another file in {definitions}")
            training = table_training({"batch_size": job.batch_size})
            questions += Question.of_description(job.name, network, training, [profile])
    return questions


def bounds_bytes(
    jobs: Iterable[TraceJob],
    device: str,
    settings: AnswerSettings,
    store: SimulationStore,
    definitions: Path = DEFINITIONS,
) -> dict[str, int]:
    """Return the reservation of each job that can be built, on each of its GPUs."""
    return {
        answer.target: math.ceil(answer.safe_mib / settings.bucket_mib) * settings.bucket_mib * MIB
        for answer in answers(jobs, device, settings, store, definitions)
    }


def answers(
    jobs: Iterable[TraceJob],
    device: str,
    settings: AnswerSettings,
    store: SimulationStore,
    definitions: Path = DEFINITIONS,
) -> list[Answer]:
    """Return the answer for each job that can be built."""
    jobs, profile = list(jobs), load_profile(device)
    specs = specs_of(jobs, definitions)
    simulations = store.simulate(specs.values(), profile, unbounded=True)
    questions = [
        Question.of_simulation(name, simulations[spec.id], profile)
        for name, spec in specs.items()
        if spec.id in simulations
    ]
    questions += _questions_of_files({job.name: job for job in jobs}.values(), profile, definitions)
    absent = sorted({job.name for job in jobs} - {question.target for question in questions})
    if absent:
        print(f"note: no network is defined for {', '.join(absent)}: a whole device is reserved", file=sys.stderr)
    return load(settings.checkpoint).answers(questions, settings.risk) if questions else []


def _recipes(path: Path) -> dict[str, str]:
    """Return the recipe of each job."""
    try:
        recipes = parse_yaml(path.read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"expected definitions of jobs at {path}, found: {error}; name another file") from error
    if not isinstance(recipes, Mapping) or not all(isinstance(names, list) for names in recipes.values()):
        raise UserError(
            f"expected lists of jobs by recipe in {path}, found {type(recipes).__name__}: write it like that"
        )
    return {str(job): str(recipe) for recipe, jobs in recipes.items() for job in jobs}
