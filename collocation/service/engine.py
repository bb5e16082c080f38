"""From the job of a request to its answer: simulated in a worker, and estimated in a batch with others."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from vramcast.collocation.named_job import NamedJob
from vramcast.collocation.prices import read_prices
from vramcast.collocation.service import parsing
from vramcast.collocation.service.approvals import Approvals
from vramcast.collocation.service.batcher import Batcher
from vramcast.collocation.service.byte_cache import ByteCache, content_key
from vramcast.collocation.service.history import History, NotStoredError
from vramcast.collocation.service.loaded_checkpoint import (
    Checkpoint,
    CheckpointProtocol,
    EstimatedJob,
    JobQuestion,
    ObservedJob,
    observed_json,
)
from vramcast.collocation.service.logs import event, failure
from vramcast.collocation.service.metrics import ServiceMetrics
from vramcast.collocation.service.named_specs import read_named_specs, spec_of_name
from vramcast.collocation.service.old_history import import_history
from vramcast.collocation.service.operations import JobForecast, OperationsLog
from vramcast.collocation.service.requests import (
    AnyJobBody,
    ExportJobBody,
    FeaturesJobBody,
    FileJobBody,
    ForgetBody,
    NamedJobBody,
    ObservationBody,
    SpecJobBody,
    TableJobBody,
    TargetJobBody,
)
from vramcast.collocation.service.searches import JobVariants, Searches
from vramcast.collocation.service.settings import Limits, Settings
from vramcast.collocation.service.storage_access import StorageAccess
from vramcast.collocation.service.tables import (
    check_fast,
    id_of_file,
    id_of_table,
    question_of_export,
    question_of_features,
    question_of_file,
    question_of_network,
    question_of_table_body,
    training_of,
)
from vramcast.collocation.service.traces import Traces
from vramcast.collocation.service.tracing import TracedJob
from vramcast.collocation.service.worker_pool import (
    OverloadedError,
    PoolError,
    PoolLimits,
    WorkerPool,
)
from vramcast.device.profiles import load_profile
from vramcast.errors import UserError, suggestion
from vramcast.jobs.families import FAMILIES, make_spec
from vramcast.jobs.network_files.description import NetworkDescription
from vramcast.models.answer import Answer
from vramcast.models.predictor import Question
from vramcast.models.value_search import largest_batch
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.profile import DeviceProfile

TracedBody = SpecJobBody | TargetJobBody | NamedJobBody
"""Jobs that are simulated here."""
P = ParamSpec("P")
R = TypeVar("R")

POLICY = "best-fit"
"""The choice among nodes and their GPUs for Kubernetes."""


class JobFailedError(UserError):
    """An unexpected error of one job. It never fails the other jobs of a request."""


def _guarded(method: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Turn any unexpected error of a job into a problem of that job."""

    @wraps(method)
    async def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await method(*args, **kwargs)
        except (UserError, OverloadedError, PoolError, NotStoredError):
            raise
        except Exception as error:
            failure("job failed", error)
            raise JobFailedError(
                f"expected a job that can be estimated, found one that fails with {type(error).__name__}: "
                "check its figures, and the service's log"
            ) from error

    return guarded


class Engine:
    """The state that all requests share."""

    def __init__(
        self, settings: Settings, metrics: ServiceMetrics, load: Callable[[str], CheckpointProtocol] = Checkpoint
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        limits = settings.limits
        self._load = load
        self.named_specs = read_named_specs(settings.named_specs)
        self.prices = read_prices(settings.prices)
        load_profile(settings.device)  # an unknown device fails immediately
        self.checkpoint = load(settings.checkpoint)
        self.reload_note: str | None = None
        self.ready = False
        self.responses = ByteCache(limits.response_cache_bytes)
        self.traces = Traces(settings.workers, limits, metrics)
        self.parsers = WorkerPool(1, _parse_limits(limits), parsing.__name__)
        self.batcher: Batcher[JobQuestion, EstimatedJob] = Batcher(
            self._answers, limits.largest_batch, _layers_of, limits.batch_layers
        )
        self.history = History(settings.history, limits, settings.history_queue)
        if settings.import_history:
            import_history(settings.import_history, self.history.storage)
        self.approvals = Approvals(StorageAccess(self.history.storage), POLICY)
        self.operations = OperationsLog()
        self._hit, self._miss = (metrics.cached.labels("responses", outcome) for outcome in ("hit", "miss"))
        self.searches = Searches(2 * limits.trace_seconds)
        self._reloading = asyncio.Lock()
        metrics.watch("vramcast_response_cache_bytes", "Size of cached responses", lambda: self.responses.size_bytes)
        metrics.watch("vramcast_trace_cache_bytes", "Size of cached traces", lambda: self.traces.cache.size_bytes)
        metrics.watch("vramcast_traces_waiting", "Networks that wait for a worker", lambda: self.traces.pool.waiting)
        metrics.watch("vramcast_bodies_waiting", "Bodies that wait to be parsed", lambda: self.parsers.waiting)
        metrics.watch("vramcast_remembered_jobs", "Jobs with observations", lambda: len(self.history))
        metrics.watch("vramcast_observations_waiting", "Observations that wait", lambda: self.history.waiting)
        metrics.watch("vramcast_forward_batches", "Forward passes so far", lambda: self.batcher.batches)
        metrics.watch("vramcast_forward_jobs", "Jobs in them", lambda: self.batcher.answered)

    def count_response(self, hit: bool) -> None:
        """Count a lookup in the response cache."""
        (self._hit if hit else self._miss).inc()

    def _answers(self, questions: Sequence[JobQuestion]) -> list[EstimatedJob]:
        return self.checkpoint.answers(questions)  # the current one, which may have been reloaded

    async def start(self) -> None:
        """Start the workers, and trace the named specs."""
        await asyncio.gather(self.parsers.start(), self.traces.pool.start(), self.history.start())
        for name, spec in self.named_specs.items():
            try:
                await self.traces.simulation(spec, (self.settings.device,))
            except UserError as error:
                event("named spec refused", logging.WARNING, name=name, reason=str(error))
        self.ready = True

    async def close(self) -> None:
        """End everything that was started."""
        self.ready = False
        await asyncio.gather(self.parsers.close(), self.traces.pool.close())
        self.batcher.close()
        self.searches.close()
        await self.history.close()

    async def reload(self) -> dict[str, Any]:
        """Read the checkpoint again. Batches under way end with the old one; a bad checkpoint changes nothing."""
        async with self._reloading:
            try:
                fresh = await asyncio.to_thread(self._load, self.settings.checkpoint)
            except Exception as error:
                # The reason goes to the log: clients must not see paths of this machine.
                self.reload_note = "the last reload failed, and the loaded checkpoint still answers; see the log"
                self.metrics.reloads.labels("failed").inc()
                event("reload failed", logging.ERROR, reason=str(error) or type(error).__name__)
                raise UserError(
                    "expected a sound checkpoint, found one that cannot be loaded: see the service's log"
                ) from error
            self.checkpoint, self.reload_note = fresh, None
            self.responses.clear()
            self.metrics.reloads.labels("done").inc()
            event("reloaded", content=fresh.status["content"])
            return fresh.status

    async def parse(self, path: str, body: bytes) -> Any:
        """Return the checked body of a request; a large one is parsed in a worker process."""
        if len(body) <= self.settings.limits.inline_body_bytes:
            return parsing.parse_body(path, body)
        return await self.parsers.run(partial(parsing.parse_body, path, body))

    @_guarded
    async def classify(self, job: AnyJobBody) -> dict[str, Any]:
        """Return the answer to a job as it is sent to the client."""
        return (await self.estimate(job)).to_json()

    async def estimate(self, job: AnyJobBody, device: str | None = None) -> EstimatedJob:
        """Return the answer to a job, on its own device or another."""
        start = time.perf_counter()
        device = self.device_of(job, device)
        estimated = await self._on(job, await self._job_id(job), device, (device,))
        if (isinstance(job, SpecJobBody) and job.max_batch_size) or (isinstance(job, TargetJobBody) and job.max_batch):
            most = await self._largest(job, device, estimated)
            estimated = replace(estimated, answer=replace(estimated.answer, max_batch_size=most))
        seconds = round(time.perf_counter() - start, 6)
        return replace(estimated, answer=replace(estimated.answer, seconds=seconds))

    @_guarded
    async def estimates(self, job: AnyJobBody, devices: Iterable[str | None]) -> dict[str | None, EstimatedJob]:
        """Return the answers to a job on several devices, for which it is traced once."""
        names = self._names(job, devices)
        if isinstance(job, TracedBody) and not is_fast(job):
            await self.traces.simulation(self.traced(job), tuple(sorted(set(names.values()))))
        job_id = await self._job_id(job)
        estimates = await asyncio.gather(*(self._on(job, job_id, name, names.values()) for name in names.values()))
        return dict(zip(names, estimates, strict=True))

    @_guarded
    async def seen(self, job: AnyJobBody, devices: Iterable[str | None]) -> dict[str | None, ObservedJob] | None:
        """Return the observations of a job on several devices, or None unless it ran on all. Nothing is traced."""
        job_id, seen = await self._job_id(job), {}
        for device, name in self._names(job, devices).items():
            observed, profile = await self.history.get(_key(job_id, name)), load_profile(name)
            if observed is None:
                return None
            seen[device] = ObservedJob(name, profile.available_bytes / MIB, observed)
        return seen

    async def reserve(
        self, job: AnyJobBody, devices: Collection[str | None]
    ) -> Mapping[str | None, ObservedJob] | Mapping[str | None, EstimatedJob]:
        """Return what a scheduler reserves for a job: from observations if there are any, else from the forecast."""
        return await self.seen(job, devices) or await self.estimates(job, devices)

    def _names(self, job: AnyJobBody, devices: Iterable[str | None]) -> dict[str | None, str]:
        return {device: self.device_of(job, device) for device in devices}

    def device_of(self, job: AnyJobBody, device: str | None = None) -> str:
        """Return the device that is named beside a job, its own, or the service's."""
        return device or job.device or self.settings.device

    async def _on(self, job: AnyJobBody, job_id: bytes, device: str, devices: Iterable[str]) -> EstimatedJob:
        estimated = await self._ask(await self._question(job, device, tuple(sorted(set(devices)))), job)
        key = _key(job_id, device)
        if not is_fast(job):  # nobody reserves by a fast answer
            answer = estimated.answer
            self.operations.forecast(key, JobForecast(self._title(job), answer.estimate_mib, answer.safe_mib))
        return replace(estimated, observed=await self.history.get(key))

    def _title(self, job: AnyJobBody) -> str:
        """Return the name of a job for operators."""
        return target_of(job, self.traced(job)) if isinstance(job, TracedBody) else title_of(job)

    async def observe(self, observation: ObservationBody | ForgetBody) -> dict[str, Any]:
        """Store or remove an observation, and return the history of its job as it is sent to the client."""
        return await self._store(observation, *await self._checked(observation))

    async def observe_all(
        self, observations: Sequence[ObservationBody | ForgetBody]
    ) -> list[dict[str, Any] | BaseException]:
        """Do the same for several, in order: a wrong peak may be removed before the right one is stored."""
        checked = await asyncio.gather(*(self._checked(item) for item in observations), return_exceptions=True)
        sound = [
            self._store(item, *outcome)
            for item, outcome in zip(observations, checked, strict=True)
            if not isinstance(outcome, BaseException)
        ]
        outcomes = iter(await asyncio.gather(*sound, return_exceptions=True))
        return [outcome if isinstance(outcome, BaseException) else next(outcomes) for outcome in checked]

    @_guarded
    async def _checked(self, observation: ObservationBody | ForgetBody) -> tuple[bytes, str]:
        """Return the key of a job and its device. Refuse an observation that cannot be true."""
        profile = load_profile(self.device_of(observation.job, observation.device))
        if isinstance(observation, ObservationBody):
            check_peak(observation.peak_mib, profile)
            await self._check(observation.job, profile.name)
        return _key(await self._job_id(observation.job), profile.name), profile.name

    @_guarded
    async def _store(self, observation: ObservationBody | ForgetBody, key: bytes, device: str) -> dict[str, Any]:
        observed = None
        try:
            if isinstance(observation, ObservationBody):
                observed = await self.history.observe(key, math.ceil(observation.peak_mib * MIB))
            else:
                await self.history.forget(key)
        except NotStoredError:
            self.metrics.observations.labels("not stored").inc()
            raise
        if isinstance(observation, ObservationBody) and observed:
            peak_bytes = math.ceil(observation.peak_mib * MIB)
            run = self.operations.observe(key, self._title(observation.job), device, peak_bytes, observation.user)
            self.metrics.compared(device, run.peak_mib, run.estimate_mib, run.safe_mib)
        self.metrics.observations.labels("remembered" if observed else "forgotten").inc()
        figures = observed_json(observed) if observed else {"runs": 0, "peak_mib": None}
        return {"status": "ok", "device": device, **figures}

    async def _check(self, job: AnyJobBody, device: str) -> None:
        """Refuse a job that `classify` would refuse. Nothing is traced."""
        if isinstance(job, FileJobBody | TableJobBody | FeaturesJobBody | ExportJobBody):
            await self._question(job, device, (device,))
            return
        spec, limits = self.traced(job), self.settings.limits
        if isinstance(spec, NamedJob):
            await self._check_name(spec)
        elif spec.family in FAMILIES and not self.traces.is_sound(spec, device):
            await self.parsers.run(partial(parsing.check_layers, spec, limits.layers, limits.layer_passes))

    async def _check_name(self, job: NamedJob) -> None:
        """Refuse a name that no library has; the name of timm's network may end in the tag of its weights."""
        library, name = job.build.target.kind, job.build.target.name
        names = (await self.traces.names())[library]
        if library != "hf" and name not in names and not (library == "timm" and name.partition(".")[0] in names):
            raise UserError(
                f"expected a network of {library}, found {name[:100]!r}: "
                + suggestion(name, names, f"choose one of its {len(names)}")
            )

    async def _job_id(self, job: AnyJobBody) -> bytes:
        """Return an id of a job's network and training, which does not depend on the spelling of the request."""
        if isinstance(job, TracedBody):
            traced = self.traced(job)
            if isinstance(traced, NamedJob):
                return traced.without_rate.id.encode()
            return replace(traced, training=traced.training.without_rate).id.encode()
        if isinstance(job, FileJobBody):
            return (await self.batcher.call(id_of_file, job, await self._network(job))).encode()
        return (await self.batcher.call(id_of_table, job)).encode()

    async def _network(self, job: FileJobBody) -> NetworkDescription:
        """Return the network in a file, which is read once for all questions about it, apart from this process."""
        if job.network is None:
            most = self.settings.limits.layers
            read = partial(parsing.read_file, job.file, job.encoding, tuple(job.input), most)
            job.network = await self.parsers.run(read)
        network: NetworkDescription = job.network
        return network

    async def _ask(self, question: Question, job: AnyJobBody) -> EstimatedJob:
        return await self.batcher.ask(
            JobQuestion(question, job.risk or self.settings.risk, job.bucket_mib, job.distribution)
        )

    async def _question(self, job: AnyJobBody, device: str, traced_on: tuple[str, ...]) -> Question:
        profile = load_profile(device)
        if isinstance(job, TableJobBody):
            return await self.batcher.call(question_of_table_body, job, profile)
        if isinstance(job, FeaturesJobBody):
            return await self.batcher.call(question_of_features, job, profile)
        if isinstance(job, FileJobBody):
            return await self.batcher.call(question_of_file, job, await self._network(job), profile)
        if isinstance(job, ExportJobBody):
            return await self.batcher.call(question_of_export, job, profile)
        traced = self.traced(job)
        if isinstance(traced, NamedJob) and is_fast(job):
            check_fast(traced.training)
            table = await self.traces.table(traced)
            return await self.batcher.call(question_of_network, traced, table, profile)
        simulation = await self.traces.simulation(traced, traced_on)
        return Question.of_simulation(target_of(job, traced), simulation, profile)

    def traced(self, job: TracedBody) -> TracedJob:
        """Return the spec or the named job of a request, which is made once for all questions about it."""
        return job.once(lambda: self._made(job))

    def _made(self, job: TracedBody) -> TracedJob:
        if isinstance(job, TargetJobBody):
            return NamedJob.of(job.values)
        if isinstance(job, NamedJobBody):
            return spec_of_name(job.name, self.named_specs)
        check_size(job.spec.network, self.settings.limits.layers)
        return make_spec(job.spec.family, job.spec.network, training_of(job.spec.training))

    async def _largest(self, job: TracedBody, device: str, estimated: EstimatedJob) -> int:
        def search(variants: JobVariants) -> int:
            most, _ = largest_batch(lambda size: variants.answer(device, batch_size=size), estimated.answer)
            return most

        return await self.search(search, job)

    async def search(self, search: Callable[[JobVariants], R], job: TracedBody) -> R:
        """Return the result of a search among variants of a job."""
        traced = self.traced(job)

        async def ask(variant: TracedJob, device: str) -> Answer:
            simulation = await self.traces.simulation(variant, (device,))
            question = Question.of_simulation(target_of(job, traced), simulation, load_profile(device))
            return (await self._ask(question, job)).answer

        return await self.searches.run(search, target_of(job, traced), traced, ask)


def _parse_limits(limits: Limits) -> PoolLimits:
    return PoolLimits(
        waiting=limits.waiting_bodies,
        seconds=limits.parse_seconds,
        abandoned_seconds=limits.abandoned_seconds,
        worker_bytes=limits.parser_bytes,
    )


def _layers_of(question: JobQuestion) -> int:
    return len(question.question.example.layers)


def _key(job_id: bytes, device: str) -> bytes:
    """Return the key of a job on a device in the history."""
    return content_key(job_id, device.encode())


def check_peak(peak_mib: float, profile: DeviceProfile) -> None:
    """Refuse a peak that no job can have on a device: of another unit, of another device, or of tensors alone."""
    if peak_mib > profile.total_mib:
        raise UserError(
            f"expected peak_mib of at most {profile.total_mib}, the memory of {profile.name}, found {peak_mib:g}: "
            "check the device"
        )
    if peak_mib <= profile.context_mib:
        raise UserError(
            f"expected peak_mib above {profile.context_mib}, which CUDA alone takes on {profile.name}, found "
            f"{peak_mib:g}: report the memory of the whole process as nvidia-smi shows it, in MiB"
        )


def is_fast(job: AnyJobBody) -> bool:
    """Return whether a job is answered from its layers alone."""
    return isinstance(job, TargetJobBody) and job.fast


def title_of(job: AnyJobBody) -> str:
    """Return the name of a job that is not simulated here."""
    if isinstance(job, ExportJobBody):
        return str(job.export.target)
    return "file" if isinstance(job, FileJobBody) else "layer table"


def target_of(job: TracedBody, traced: TracedJob) -> str:
    """Return the name of a job in its answer."""
    if isinstance(job, TargetJobBody):
        return str(job.target)
    return job.name if isinstance(job, NamedJobBody) else traced.id


def check_size(network: Mapping[str, Any], most_layers: int) -> None:
    """Refuse a network that is too deep before its layers are listed."""
    stages = network.get("stages")
    blocks = sum(stage[-1] for stage in stages if stage) if isinstance(stages, list) else 0
    for name, value in {"depth": network.get("depth"), "layers": network.get("layers"), "stages": blocks}.items():
        if isinstance(value, int) and value > most_layers:
            raise UserError(
                f"expected network.{name} of at most {most_layers}, found {value}: make the network smaller"
            )


def replies(outcomes: Sequence[dict[str, Any] | BaseException]) -> list[dict[str, Any]]:
    """Return answers and problems in order.

    An error of the whole service (overload, a full disk) is raised instead, unless some observation was stored.
    """
    stored = any(isinstance(item, dict) and "runs" in item for item in outcomes)
    replies_in_order = []
    for item in outcomes:
        if isinstance(item, dict):
            replies_in_order.append(item)
        elif isinstance(item, UserError) or (stored and isinstance(item, NotStoredError)):
            replies_in_order.append(_problem(str(item)))
        elif isinstance(item, Exception) and stored:
            replies_in_order.append(_problem("expected a service with room for this job, found none: send it again"))
        else:
            raise item
    return replies_in_order


def _problem(sentence: str) -> dict[str, Any]:
    return {"status": "error", "error": sentence, "where": None}
