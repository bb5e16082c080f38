"""Networks of public training scripts, by name (`recipes.yaml`)."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from vramcast.errors import UserError
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.canonical import from_mapping
from vramcast.virtual_gpu.training.setup import TrainingSetup

_FILE = Path(__file__).with_name("recipes.yaml")
_WHOLE_BATCH = "batch"


@cache
def recipes() -> Mapping[str, Mapping[str, Any]]:
    """Return all recipes: family, network, and training without the batch size."""
    entries: Mapping[str, Mapping[str, Any]] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return entries


def spec_of_recipe(name: str, batch_size: int, network: Mapping[str, Any] | None = None) -> Spec:
    """Return the spec of a script with a batch size, unless the recipe has one; `network` overrides its factors."""
    if name not in recipes():
        raise UserError(f"expected a recipe of {sorted(recipes())}, found {name!r}: choose one")
    recipe = recipes()[name]
    training = {"batch_size": batch_size, **recipe["training"]}
    if training.get("dry_run_batch_size") == _WHOLE_BATCH:
        training["dry_run_batch_size"] = batch_size
    setup = from_mapping(TrainingSetup, training, f"the training of the recipe {name}")
    return Spec(recipe["family"], {**recipe["network"], **(network or {})}, setup)
