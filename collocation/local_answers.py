"""Answers of an estimator in this process, for commands that run once."""

from collections.abc import Collection, Mapping
from typing import Any

from vramcast.collocation.named_job import NamedJob
from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.jobs.building import build_job
from vramcast.jobs.families import make_spec
from vramcast.jobs.families.gpumemnet import spec_of_filename
from vramcast.jobs.job import SpecJob
from vramcast.jobs.layer_tables import read_table
from vramcast.jobs.network_files.description import NetworkDescription
from vramcast.jobs.spec import Spec
from vramcast.jobs.targets import GPUMEMNET
from vramcast.models import load
from vramcast.models.answer import Answer
from vramcast.models.predictor import Question, table_training
from vramcast.simulation.exported_job import read_export, simulated_on
from vramcast.simulation.simulator import Simulator
from vramcast.virtual_gpu.training.setup import OPTIONS, TrainingSetup


def answers_on(job: Mapping[str, Any], devices: Collection[str], checkpoint: str, risk: float) -> dict[str, Answer]:
    """Return the answers for a job on each device: a spec or a name is simulated once, a layer table is not."""
    profiles = [load_profile(name) for name in sorted(devices)]
    if "table" in job:
        network = NetworkDescription(read_table(job["table"]))
        questions = Question.of_description("layer table", network, _table_training(job.get("training")), profiles)
        return {answer.device: answer for answer in load(checkpoint).answers(questions, risk)}
    if "target" in job:
        named = NamedJob.of(job)
        target, simulation = named.target, Simulator(build_job(named.build)).simulate(named.options, profiles)
    elif "export" in job:
        target, simulation = read_export(job["export"])
        simulated_on(simulation, set(devices))
    else:
        target, spec = _spec(job)
        simulation = Simulator(SpecJob(spec)).simulate({}, profiles)
    questions = Question.of_devices(target, simulation, profiles)
    return {answer.device: answer for answer in load(checkpoint).answers(questions, risk)}


def _table_training(values: Any) -> TrainingSetup:
    if not isinstance(values, Mapping) or "batch_size" not in values:
        raise UserError("expected 'training' with a batch_size beside a layer table, found none: add it")
    unknown = sorted(values.keys() - OPTIONS.keys(), key=str)
    if unknown:
        raise UserError(f"expected training options among {sorted(OPTIONS)}, found {unknown}: remove or rename them")
    return table_training(values)


def _spec(job: Mapping[str, Any]) -> tuple[str, Spec]:
    if "name" in job:
        return str(job["name"]), spec_of_filename(str(job["name"]).removeprefix(GPUMEMNET))
    if "spec" not in job:
        raise UserError(
            f"expected a spec, a name or a table, found {sorted(job)}: ask a running service with --service for others"
        )
    parsed = Spec.from_json(job["spec"])
    spec = make_spec(parsed.family, parsed.network, parsed.training)
    return spec.id, spec
