"""Our own answer for the jobs of a trace: their networks are built, simulated and classified here. Imports torch."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from collocation.simulator.workload import Job
from dataset_builder.configuration import load_device
from dataset_builder.errors import UserError, check_count
from dataset_builder.measure.virtual.profile import parse_profile
from dataset_builder.recipes import spec_of_recipe
from dataset_builder.schema import MIB, Spec
from models.checkpoint import load_checkpoint
from models.evaluation import Bounded, checkpoint_directory
from models.examples import example_of_table, table_of
from models.simulation import SimulationCache

DEFINITIONS = Path(__file__).with_name("definitions.yaml")


@dataclass(frozen=True)
class Question:
    """What is asked of which estimator."""

    checkpoint: str = "universal"
    risk: float = 0.01
    bucket_mib: int = 1024
    """Answers are rounded up to the edge of such a bucket; 1 leaves them as they are."""

    def __post_init__(self) -> None:
        check_count("--bucket-mib", self.bucket_mib)


def specs_of(jobs: Iterable[Job], definitions: Path = DEFINITIONS) -> dict[str, Spec]:
    """The jobs that are defined, each with its own batch size."""
    recipe_of = _recipes(definitions)
    return {job.name: spec_of_recipe(recipe_of[job.name], job.batch_size) for job in jobs if job.name in recipe_of}


def bounds_bytes(
    jobs: Iterable[Job], card: str, question: Question, cache: SimulationCache, definitions: Path = DEFINITIONS
) -> dict[str, int]:
    """What to set aside for each job that can be built, on each of its GPUs; without those that do not fit safely."""
    jobs, profile = list(jobs), parse_profile(load_device(card))
    specs = specs_of(jobs, definitions)
    found = cache.measure(specs.values(), profile)
    built = {name: spec for name, spec in specs.items() if spec.id in found}
    absent = sorted(job.name for job in jobs if job.name not in built)
    if absent:
        print(f"note: no network could be built for {', '.join(absent)}: they ask for a whole card", file=sys.stderr)
    if not built:
        return {}
    estimator = load_checkpoint(checkpoint_directory(question.checkpoint))
    if not isinstance(estimator, Bounded):
        raise UserError(f"expected a checkpoint with safe answers, found {question.checkpoint!r}: name another")
    examples = [
        example_of_table(table_of(spec), spec.training, profile, found[spec.id], spec.family) for spec in built.values()
    ]
    safe = estimator.safe_bytes(examples, max(question.risk, estimator.least_risk))
    width_bytes = question.bucket_mib * MIB
    rounded = {name: np.ceil(value / width_bytes) * width_bytes for name, value in zip(built, safe, strict=True)}
    return {name: int(value) for name, value in rounded.items() if np.isfinite(value)}


def _recipes(path: Path) -> dict[str, str]:
    """The recipe of each job."""
    try:
        found: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"expected definitions of jobs at {path}, found: {error}; name another file") from error
    if not isinstance(found, Mapping) or not all(isinstance(names, list) for names in found.values()):
        raise UserError(f"expected lists of jobs by recipe in {path}, found {type(found).__name__}: write it like that")
    return {str(job): str(recipe) for recipe, jobs in found.items() for job in jobs}
