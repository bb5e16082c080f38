"""Jobs without a network: layer tables, and features that were computed elsewhere."""

from dataclasses import replace

from vramcast.collocation.named_job import NamedJob
from vramcast.collocation.service.requests import (
    ExportJobBody,
    FeaturesJobBody,
    FileJobBody,
    TableBody,
    TableJobBody,
    TrainingBody,
)
from vramcast.errors import UserError
from vramcast.jobs.analysis.optimizers import OPTIMIZERS
from vramcast.jobs.network_files.description import NetworkDescription
from vramcast.jobs.spec import LayerRecord, LayerTable
from vramcast.models.predictor import Question
from vramcast.simulation.exported_job import read_export, simulated_on
from vramcast.virtual_gpu.canonical import content_hash, without_defaults
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.training.setup import TrainingSetup, check_trained_whole, parse_call


def training_of(body: TrainingBody) -> TrainingSetup:
    """Return the training of a request, with defaults for what it leaves out."""
    return TrainingSetup(**body.model_dump(exclude_unset=True))


def id_of_table(job: TableJobBody | FeaturesJobBody | ExportJobBody) -> str:
    """Return a hash over everything that decides the memory, like the id of a spec; names of layers do not."""
    if isinstance(job, ExportJobBody):
        export = job.export
        table = export.table.model_dump(exclude={"layers": {"__all__": {"name"}}}, exclude_none=True)
        training = TrainingSetup(**export.training.model_dump(exclude_unset=True)).without_rate
        return content_hash({"table": table, "training": without_defaults(training), "exported": True})
    body = job if isinstance(job, TableJobBody) else job.features
    table = body.table.model_dump(exclude={"layers": {"__all__": {"name"}}}, exclude_none=True)
    simulated = None if isinstance(job, TableJobBody) else job.features.simulated.model_dump()
    return content_hash(
        {"table": table, "training": without_defaults(training_of(body.training).without_rate), "simulated": simulated}
    )


def question_of_table_body(job: TableJobBody, profile: DeviceProfile) -> Question:
    """Return the question for a layer table."""
    training = checked_training(job.training)
    check_trained_whole(training)
    return Question.of_table("layer table", _table(job.table), training, profile)


def question_of_network(job: NamedJob, table: LayerTable, profile: DeviceProfile) -> Question:
    """Return the question for the layers of a named network, of which nothing was simulated."""
    description = NetworkDescription(table, family=job.build.target.kind)
    return Question.of_description(job.target, description, job.training, [profile])[0]


def check_fast(training: TrainingSetup) -> None:
    """Raise if layers alone cannot answer a training, before the network is built."""
    if training.parallel:
        raise UserError(
            f"expected one GPU beside fast, found parallel={training.parallel}: a rank must be simulated; leave fast "
            "out"
        )
    _check_known(training)
    check_trained_whole(replace(training, adapter=None, quantize=None))


def question_of_file(job: FileJobBody, network: NetworkDescription, profile: DeviceProfile) -> Question:
    """Return the question for the network in a file."""
    return Question.of_description("file", network, checked_training(job.training), [profile])[0]


def id_of_file(job: FileJobBody, network: NetworkDescription) -> str:
    """Return a hash over everything that decides the memory; names of layers do not."""
    layers = [replace(layer, name="").to_json() for layer in network.table.layers]
    training = without_defaults(training_of(job.training).without_rate)
    return content_hash({"layers": layers, "input": network.table.input_elements, "training": training})


def question_of_export(job: ExportJobBody, profile: DeviceProfile) -> Question:
    """Return the question for a job that was simulated where its code is."""
    target, simulation = read_export(job.export.model_dump(exclude_unset=True))
    _check_known(simulation.training)
    simulated_on(simulation, {profile.name})
    return Question.of_simulation(target, simulation, profile)


def question_of_features(job: FeaturesJobBody, profile: DeviceProfile) -> Question:
    """Return the question for a layer table with its simulation on that device."""
    body = job.features
    peaks = body.simulated
    simulated = Measurement(
        status=Status.OK if peaks.fits else Status.OOM,
        requested_bytes=peaks.requested_bytes,
        allocated_bytes=peaks.allocated_bytes,
        reserved_bytes=peaks.reserved_bytes,
        breakdown={"workspace": peaks.workspace_bytes},
    )
    table, training = _table(body.table), checked_training(body.training)
    question = Question.of_table("features", table, training, profile, body.family, simulated)
    return replace(question, notes=("classified from features that were computed elsewhere", *profile.notes))


def checked_training(body: TrainingBody) -> TrainingSetup:
    """Return the training of a request whose layers alone are known."""
    training = training_of(body)
    _check_known(training)
    return training


def _check_known(training: TrainingSetup) -> None:
    name, _ = parse_call(training.optimizer)
    if name not in OPTIMIZERS:
        raise UserError(f"expected an optimizer of {sorted(OPTIMIZERS)}, found {name!r}: name one of them")


def _table(body: TableBody) -> LayerTable:
    layers = (LayerRecord.from_json(layer.model_dump()) for layer in body.layers)
    return LayerTable(tuple(layers), tuple(tuple(shape) for shape in body.trainable_shapes), body.input_elements)
