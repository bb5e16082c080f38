"""From a job in a request to its answer: cached, traced in a worker, and asked of the checkpoint with others."""

import asyncio
import logging
import math
import pickle
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from vramcast.collocation.service.batcher import Batcher
from vramcast.collocation.service.byte_cache import ByteCache, content_key
from vramcast.collocation.service.estimating import Asked, Checkpoint, Estimated, Estimating, Seen, observed_json
from vramcast.collocation.service.history import History
from vramcast.collocation.service.history_file import NotStoredError
from vramcast.collocation.service.logs import event
from vramcast.collocation.service.metrics import ServiceMetrics
from vramcast.collocation.service.named_specs import read_named_specs, spec_of_name
from vramcast.collocation.service.requests import (
    AnyJobBody,
    FeaturesJobBody,
    ForgetBody,
    NamedJobBody,
    ObservationBody,
    SpecJobBody,
    TableJobBody,
)
from vramcast.collocation.service.settings import Settings
from vramcast.collocation.service.tables import id_of_table, question_of_features, question_of_table_body, training_of
from vramcast.collocation.service.trace_pool import LostError, OverloadedError, PoolError, TracePool
from vramcast.collocation.service.tracing import TraceQuestion, check_layers
from vramcast.dataset_builder.devices import load_profile
from vramcast.dataset_builder.families import FAMILIES, make_spec
from vramcast.dataset_builder.schema import Spec
from vramcast.errors import UserError
from vramcast.models.answer import Answer
from vramcast.models.batch_search import largest_batch
from vramcast.models.predictor import Question
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.sizes import MIB

_FOUND, _REFUSED = b"F", b"R"
"""How a trace ended: refusals are kept too, since the same network will be refused again."""


_OUTCOMES = {LostError: "lost", OverloadedError: "overloaded", PoolError: "failed"}
_SEARCHES = 4
"""For the largest batch, at once: each waits for traces, of which a few at a time are made in any case."""


class Engine:
    """All that requests share."""

    def __init__(
        self, settings: Settings, metrics: ServiceMetrics, load: Callable[[str], Estimating] = Checkpoint
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        self._load = load
        self.known = read_named_specs(settings.known)
        load_profile(settings.device)  # a device that there is not is told at once
        self.checkpoint = load(settings.checkpoint)
        self.reload_note: str | None = None
        self.ready = False
        self.responses = ByteCache(settings.limits.response_cache_bytes)
        self.traces = ByteCache(settings.limits.trace_cache_bytes)
        self.pool = TracePool(settings.workers, settings.limits)
        self.batcher: Batcher[Asked, Estimated] = Batcher(self._answers, settings.limits.largest_batch)
        self.history = History(settings.history, settings.limits)
        self._hit, self._miss = (metrics.cached.labels("responses", outcome) for outcome in ("hit", "miss"))
        self._searches = ThreadPoolExecutor(_SEARCHES, thread_name_prefix="largest-batch")
        self._under_way: dict[bytes, asyncio.Task[bytes]] = {}
        self._reloading = asyncio.Lock()
        metrics.watch("vramcast_response_cache_bytes", "Size of kept responses", lambda: self.responses.size_bytes)
        metrics.watch("vramcast_trace_cache_bytes", "Size of kept traces", lambda: self.traces.size_bytes)
        metrics.watch("vramcast_traces_waiting", "Networks that wait for a worker", lambda: self.pool.waiting)
        metrics.watch("vramcast_remembered_jobs", "Jobs that were observed", lambda: len(self.history))
        metrics.watch("vramcast_forward_batches", "Forward passes so far", lambda: self.batcher.batches)
        metrics.watch("vramcast_forward_jobs", "Jobs in them", lambda: self.batcher.answered)

    def count_response(self, hit: bool) -> None:
        """Count a lookup of a kept response."""
        (self._hit if hit else self._miss).inc()

    def _answers(self, asked: Sequence[Asked]) -> list[Estimated]:
        return self.checkpoint.answers(asked)  # of the moment: it may have been reloaded

    async def start(self) -> None:
        """Have workers ready, and the known networks traced."""
        await self.pool.start()
        for name, spec in self.known.items():
            try:
                await self._traced(spec, (self.settings.device,))
            except UserError as error:
                event("known network refused", logging.WARNING, name=name, reason=str(error))
        self.ready = True

    async def close(self) -> None:
        """End what was started."""
        self.ready = False
        await self.pool.close()
        self.batcher.close()
        self._searches.shutdown(wait=False, cancel_futures=True)
        await self.history.close()

    async def reload(self) -> dict[str, Any]:
        """Read the checkpoint again. Batches that are under way end with the old one; a bad one changes nothing."""
        async with self._reloading:
            try:
                fresh = await asyncio.to_thread(self._load, self.settings.checkpoint)
            except (UserError, OSError) as error:
                # whoever asks may know no path of this machine: the reason is for the log
                self.reload_note = "the last reload failed, and what was loaded goes on answering; the log says why"
                self.metrics.reloads.labels("failed").inc()
                event("reload failed", logging.ERROR, reason=str(error))
                raise
            self.checkpoint, self.reload_note = fresh, None
            self.responses.clear()
            self.metrics.reloads.labels("done").inc()
            event("reloaded", content=fresh.status["content"])
            return fresh.status

    async def classify(self, job: AnyJobBody) -> dict[str, Any]:
        """The answer to one job, as it goes over the wire."""
        return (await self.estimate(job)).to_json()

    async def estimate(self, job: AnyJobBody, device: str | None = None) -> Estimated:
        """The answer to one job, on its own device or another."""
        start = time.perf_counter()
        device = self._device(job, device)
        found = await self._on(job, await self._said(job), device, (device,))
        if isinstance(job, SpecJobBody) and job.max_batch_size:
            most = await self._largest(job, device, found)
            found = replace(found, answer=replace(found.answer, max_batch_size=most))
        seconds = round(time.perf_counter() - start, 6)
        return replace(found, answer=replace(found.answer, seconds=seconds))

    async def estimates(self, job: AnyJobBody, devices: Iterable[str | None]) -> dict[str | None, Estimated]:
        """One job on several devices, traced once for all of them."""
        names = self._names(job, devices)
        if isinstance(job, SpecJobBody | NamedJobBody):
            await self._traced(self._spec(job), tuple(sorted(set(names.values()))))
        said = await self._said(job)
        found = await asyncio.gather(*(self._on(job, said, name, names.values()) for name in names.values()))
        return dict(zip(names, found, strict=True))

    async def seen(self, job: AnyJobBody, devices: Iterable[str | None]) -> dict[str | None, Seen] | None:
        """What one job took on several devices, None unless it ran on all of them. Nothing is traced for that."""
        said, found = await self._said(job), {}
        for device, name in self._names(job, devices).items():
            observed, profile = self.history.get(_key(said, name)), load_profile(name)
            if observed is None:
                return None
            found[device] = Seen(name, profile.available_bytes / MIB, observed)
        return found

    async def set_aside(
        self, job: AnyJobBody, devices: Collection[str | None]
    ) -> Mapping[str | None, Seen] | Mapping[str | None, Estimated]:
        """For schedulers that want no more than a figure: what is known already, else what is forecast."""
        return await self.seen(job, devices) or await self.estimates(job, devices)

    def _names(self, job: AnyJobBody, devices: Iterable[str | None]) -> dict[str | None, str]:
        return {device: self._device(job, device) for device in devices}

    def _device(self, job: AnyJobBody, device: str | None) -> str:
        """The one that is named beside a job, its own, or the service's."""
        return device or job.device or self.settings.device

    async def _on(self, job: AnyJobBody, said: bytes, device: str, devices: Iterable[str]) -> Estimated:
        found = await self._ask(await self._question(job, device, tuple(sorted(set(devices)))), job)
        return replace(found, observed=self.history.get(_key(said, device)))

    async def observe(self, told: ObservationBody | ForgetBody) -> dict[str, Any]:
        """Remember what a job took, or forget it; what is now known of it, as it goes over the wire."""
        return await self._remember(told, *await self._understood(told))

    async def observe_all(self, told: Sequence[ObservationBody | ForgetBody]) -> list[dict[str, Any] | BaseException]:
        """The same for several, in their order: a wrong peak may be taken back before the right one is told."""
        understood = await asyncio.gather(*(self._understood(item) for item in told), return_exceptions=True)
        sound = [
            self._remember(item, *found)
            for item, found in zip(told, understood, strict=True)
            if not isinstance(found, BaseException)
        ]
        outcomes = iter(await asyncio.gather(*sound, return_exceptions=True))
        return [found if isinstance(found, BaseException) else next(outcomes) for found in understood]

    async def _understood(self, told: ObservationBody | ForgetBody) -> tuple[bytes, str]:
        """The key of a job, and the device that it ran on."""
        profile = load_profile(self._device(told.job, told.device))
        if isinstance(told, ObservationBody):
            check_peak(told.peak_mib, profile)
            await self._check(told.job, profile.name)
        return _key(await self._said(told.job), profile.name), profile.name

    async def _remember(self, told: ObservationBody | ForgetBody, key: bytes, device: str) -> dict[str, Any]:
        known = None
        try:
            if isinstance(told, ObservationBody):
                known = await self.history.observe(key, math.ceil(told.peak_mib * MIB))
            else:
                await self.history.forget(key)
        except NotStoredError:
            self.metrics.observations.labels("not stored").inc()
            raise
        self.metrics.observations.labels("remembered" if known else "forgotten").inc()
        figures = observed_json(known) if known else {"runs": 0, "peak_mib": None}
        return {"status": "ok", "device": device, **figures}

    async def _check(self, job: AnyJobBody, device: str) -> None:
        """Refuse, in the words of an answer, what can never be asked for; nothing is traced for that."""
        if isinstance(job, TableJobBody | FeaturesJobBody):
            await self._question(job, device, (device,))
        elif (spec := self._spec(job)).family in FAMILIES:
            await asyncio.to_thread(check_layers, spec, self.settings.limits.layers)

    async def _said(self, job: AnyJobBody) -> bytes:
        """What a job says of its network and its training, however the request spells them."""
        if isinstance(job, SpecJobBody | NamedJobBody):
            spec = self._spec(job)
            return replace(spec, training=spec.training.without_rate).id.encode()
        return (await asyncio.to_thread(id_of_table, job)).encode()

    async def _ask(self, question: Question, job: AnyJobBody) -> Estimated:
        return await self.batcher.ask(Asked(question, job.risk or self.settings.risk, job.bucket_mib, job.distribution))

    async def _question(self, job: AnyJobBody, device: str, traced_on: tuple[str, ...]) -> Question:
        profile = load_profile(device)
        if isinstance(job, TableJobBody):
            return await asyncio.to_thread(question_of_table_body, job, profile)
        if isinstance(job, FeaturesJobBody):
            return await asyncio.to_thread(question_of_features, job, profile)
        spec = self._spec(job)
        target = job.name if isinstance(job, NamedJobBody) else spec.id
        simulation = pickle.loads(await self._traced(spec, traced_on))  # noqa: S301 - from our own worker
        return Question.of_simulation(target, simulation, profile)

    def _spec(self, job: SpecJobBody | NamedJobBody) -> Spec:
        if isinstance(job, NamedJobBody):
            return spec_of_name(job.name, self.known)
        check_size(job.spec.network, self.settings.limits.layers)
        return make_spec(job.spec.family, job.spec.network, training_of(job.spec.training))

    async def _largest(self, job: SpecJobBody, device: str, found: Estimated) -> int:
        """The search is one for all of the project and waits for each answer; so it has a thread."""
        spec, loop = self._spec(job), asyncio.get_running_loop()

        def ask(size: int) -> Answer:
            training = replace(spec.training, batch_size=size, last_batch_size=None)
            asked = self._at(replace(spec, training=training), job, device)
            return asyncio.run_coroutine_threadsafe(asked, loop).result(2 * self.settings.limits.trace_seconds)

        return (await loop.run_in_executor(self._searches, largest_batch, ask, found.answer))[0]

    async def _at(self, spec: Spec, job: SpecJobBody, device: str) -> Answer:
        simulation = pickle.loads(await self._traced(spec, (device,)))  # noqa: S301 - from our own worker
        return (await self._ask(Question.of_simulation(spec.id, simulation, load_profile(device)), job)).answer

    async def _traced(self, spec: Spec, devices: tuple[str, ...]) -> bytes:
        """Pickled simulations: kept ones, those that another request waits for, or fresh ones."""
        key = content_key(spec.id.encode(), *(name.encode() for name in devices))
        kept = self.traces.get(key)
        self.metrics.cached.labels("traces", "miss" if kept is None else "hit").inc()
        if kept is None:
            if key not in self._under_way:
                task = self._under_way[key] = asyncio.create_task(self._trace(key, spec, devices))
                task.add_done_callback(lambda _: self._under_way.pop(key, None))
            kept = await asyncio.shield(self._under_way[key])  # the next who asks is to find it, whoever leaves
        if kept[:1] == _REFUSED:
            raise UserError(kept[1:].decode())
        return kept[1:]

    async def _trace(self, key: bytes, spec: Spec, devices: tuple[str, ...]) -> bytes:
        try:
            found = _FOUND + await self.pool.trace(TraceQuestion(spec, devices, self.settings.limits.layers))
        except (LostError, OverloadedError, PoolError) as error:  # another time it may go well
            self.metrics.traces.labels(_OUTCOMES[type(error)]).inc()
            raise
        except UserError as error:
            found = _REFUSED + str(error).encode()
        self.metrics.traces.labels("traced" if found[:1] == _FOUND else "refused").inc()
        self.traces.put(key, found)
        return found


def _key(said: bytes, device: str) -> bytes:
    """What a job is remembered by on a device."""
    return content_key(said, device.encode())


def check_peak(peak_mib: float, profile: DeviceProfile) -> None:
    """Refuse what no job can have taken on a card: other units, another card, or the tensors alone."""
    if peak_mib > profile.total_mib:
        raise UserError(
            f"expected peak_mib of at most {profile.total_mib}, which {profile.name} has, found {peak_mib:g}: "
            "check the device"
        )
    if peak_mib <= profile.context_mib:
        raise UserError(
            f"expected peak_mib above {profile.context_mib}, which CUDA alone takes on {profile.name}, found "
            f"{peak_mib:g}: tell of the whole process as nvidia-smi shows it, in MiB"
        )


def check_size(network: Mapping[str, Any], most_layers: int) -> None:
    """Refuse what is too deep before anybody lists its layers."""
    stages = network.get("stages")
    blocks = sum(stage[-1] for stage in stages if stage) if isinstance(stages, list) else 0
    for name, value in {"depth": network.get("depth"), "layers": network.get("layers"), "stages": blocks}.items():
        if isinstance(value, int) and value > most_layers:
            raise UserError(
                f"expected network.{name} of at most {most_layers}, found {value}: make the network smaller"
            )


def many(outcomes: Sequence[dict[str, Any] | BaseException]) -> list[dict[str, Any]]:
    """Answers and problems in order; overload concerns them all, and a disk that stored nothing."""
    found = []
    stored = any(isinstance(item, dict) for item in outcomes)
    for item in outcomes:
        if isinstance(item, UserError) or (stored and isinstance(item, NotStoredError)):
            found.append({"status": "error", "error": str(item), "where": None})
        elif isinstance(item, BaseException):
            raise item
        else:
            found.append(item)
    return found
