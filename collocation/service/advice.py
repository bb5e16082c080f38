"""Advice for people about one job: every device, the largest batch, changes that help, strategies, memory over time."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from vramcast.collocation.service.engine import Engine, TracedBody, target_of
from vramcast.collocation.service.requests import AnyJobBody, SolveBody
from vramcast.collocation.service.searches import JobVariants
from vramcast.device.profiles import gpu_profiles, load_profile
from vramcast.errors import UserError
from vramcast.jobs.architectures import positions_of
from vramcast.models.advice.solving import OpenJob, solve
from vramcast.models.advice.strategies import strategy_answers
from vramcast.models.advice.suggestions import suggestions
from vramcast.models.answer import FITS, Answer
from vramcast.models.timeline import CURVE_ORDER
from vramcast.models.value_search import largest_batch
from vramcast.virtual_gpu.training.setup import TrainingSetup


def check_traced(job: AnyJobBody) -> TracedBody:
    """Return a job that is simulated here. Raise for layer tables and features."""
    if not isinstance(job, TracedBody):
        raise UserError("expected a network by its name or its spec, found a layer table: nothing of it is simulated")
    return job


async def advice(engine: Engine, job: TracedBody) -> dict[str, Any]:
    """Return the answers on all devices; for one GPU the largest batch and changes, for several the strategies."""
    device = engine.device_of(job)
    names = list(dict.fromkeys([device, *(profile.name for profile in gpu_profiles())]))
    estimates = await engine.estimates(job, names)
    answers = [estimates[name].answer for name in names]
    answer, training = answers[0], engine.traced(job).training
    devices = sorted(answers, key=lambda item: (item.capacity_mib, item.device))

    def search(variants: JobVariants) -> dict[str, Any]:
        if training.parallel:
            compared = strategy_answers(variants, answer, training)
            return {"strategies": [item.to_dict() for item in compared], "max_batch_size": None, "changes": []}
        return {"strategies": [], **_changes(variants, answer, training, devices)}

    outcome = await engine.search(search, job)
    return {
        "status": "ok",
        "target": target_of(job, engine.traced(job)),
        "device": device,
        "devices": [_brief(estimates[item.device].to_json()) for item in devices],
        **outcome,
    }


def _changes(
    variants: JobVariants, answer: Answer, training: TrainingSetup, devices: Sequence[Answer]
) -> dict[str, Any]:
    def ask(size: int) -> Answer:
        return variants.answer(answer.device, batch_size=size)

    most, largest = largest_batch(ask, answer)
    changes, notes = ([], ()) if answer.verdict == FITS else suggestions(variants, answer, training, largest, devices)
    return {
        "max_batch_size": most,
        "changes": [{"change": item.change, **_brief(item.answer.to_dict())} for item in changes],
        "notes": list(notes),
    }


def _brief(answer: dict[str, Any]) -> dict[str, Any]:
    names = (
        "device", "profile", "batch_size", "estimate_mib", "safe_mib", "capacity_mib", "verdict", "need_mib", "basis",
    )  # fmt: skip
    return {name: answer[name] for name in names if name in answer}


async def solution(engine: Engine, body: SolveBody) -> dict[str, Any]:
    """Return the value that is left open in a job, and the answer for it."""
    job = check_traced(body.job)
    device, prices = engine.device_of(job), engine.prices
    on_devices: list[Answer] = []
    if body.find == "device":
        names = [profile.name for profile in gpu_profiles()]
        on_devices = [item.answer for item in (await engine.estimates(job, names)).values()]
    traced = engine.traced(job)
    problem = OpenJob(body.find, device, traced.training, on_devices, prices, positions_of(target_of(job, traced)))
    return (await engine.search(lambda variants: solve(variants, problem), job)).to_dict()


async def timeline(engine: Engine, job: TracedBody) -> dict[str, Any]:
    """Return the memory over the steps of a job: by use, stacked from the context up, and as torch reserves it."""
    profile = load_profile(engine.device_of(job))
    curve = asdict(await engine.traces.curve(engine.traced(job), profile.name))
    used = curve["requested_bytes"]
    return {
        "status": "ok",
        "device": profile.name,
        "title": profile.title,
        "uses": {name: used[name] for name in CURVE_ORDER if any(used.get(name, ()))},
        "reserved_bytes": curve["reserved_bytes"],
        "context_bytes": curve["context_bytes"],
        "capacity_bytes": curve["capacity_bytes"],
    }
