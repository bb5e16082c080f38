"""Answers for one job under varied training options: for a screen, for a line of JSON, and for the batch search."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vramcast.commands.classify.page import Page
from vramcast.device.profiles import gpu_profiles, load_profile
from vramcast.errors import UserError
from vramcast.jobs.job_request import JobRequest
from vramcast.jobs.network_files.description import NetworkDescription
from vramcast.jobs.optimizers import parse_optimizer
from vramcast.models.advice.strategies import strategy_answers
from vramcast.models.advice.suggestions import Suggestion, suggestions
from vramcast.models.answer import FITS, TOO_LARGE, Answer
from vramcast.models.predictor import Predictor, Question, table_training
from vramcast.models.value_search import largest_batch
from vramcast.simulation.result import OrderPeaks, Simulation, with_orders
from vramcast.simulation.simulator import JobSimulator
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.replay.length_orders import LengthOrders
from vramcast.virtual_gpu.training.setup import TrainingSetup


class JobAnswers:
    """Answers for the job of a request; training options can be changed from answer to answer."""

    def __init__(self, request: JobRequest, simulator: JobSimulator, predictor: Predictor) -> None:
        self.request = request
        self.simulator = simulator
        self.predictor = predictor

    @property
    def target(self) -> str:
        """The name of the network."""
        return self.request.target

    def simulate(self, devices: Sequence[str], **changes: Any) -> Simulation:
        """Simulate the job on some devices."""
        options = {**self.request.options, **changes}
        return self.simulator.simulate(options, [load_profile(name) for name in devices])

    def answers(self, simulation: Simulation, devices: Sequence[str]) -> list[Answer]:
        """Return the answers for some of the simulated devices."""
        questions = Question.of_devices(self.request.target, simulation, map(load_profile, devices))
        answers = self.predictor.answers(questions, self.request.risk, self.request.bucket_mib)
        return [replace(item, notes=(*self.request.notes, *item.notes)) for item in answers]

    def answer(self, device: str, **changes: Any) -> Answer:
        """Return the answer for one device, with some training options changed."""
        start = time.perf_counter()
        answer = self.answers(self.simulate([device], **changes), [device])[0]
        return replace(answer, seconds=time.perf_counter() - start)

    def over_orders(self, longest: Answer, lengths: Sequence[int]) -> Answer:
        """Return the answer for batches of varying lengths, from the answer for the longest one alone."""
        if longest.verdict == TOO_LARGE:
            return longest
        profile = load_profile(longest.device)
        simulation = self.simulate([longest.device])
        orders = LengthOrders.of_samples(lengths, 1, simulation.training.accumulate)
        peaks = self.simulator.by_order(self.request.options, profile, orders)
        if peaks.reason:
            return replace(
                longest, notes=(*longest.notes, f"the figures are those of the longest batch: {peaks.reason}")
            )
        varied = with_orders(simulation, profile.name, peaks)
        answer = self.answers(varied, [profile.name])[0]
        figures = _order_figures(varied.peaks[profile.name].orders or peaks)
        return replace(answer, lengths=figures, notes=tuple(dict.fromkeys((*answer.notes, *longest.notes))))

    def largest_batch(self, start: Answer) -> tuple[int, Answer | None]:
        """Return the largest batch whose safe figure fits the device of an answer, and the answer for it."""
        return largest_batch(lambda size: self.answer(start.device, batch_size=size, last_batch_size=None), start)


def _order_figures(peaks: OrderPeaks) -> dict[str, float]:
    """Return the memory that orders of batches reserve, in MiB, beside that of the longest batch alone."""
    reserved = [item / MIB for item in peaks.reserved_bytes if item is not None]
    count = len(peaks.reserved_bytes)
    figures: dict[str, float] = {"orders": count, "orders_out_of_memory": count - len(reserved)}
    figures["longest_reserved_mib"] = peaks.longest_bytes / MIB
    if reserved:
        figures |= {"least_reserved_mib": min(reserved), "most_reserved_mib": max(reserved)}
    if peaks.expandable_bytes is not None:
        figures["expandable_reserved_mib"] = peaks.expandable_bytes / MIB
    return figures


def answer_request(
    request: JobRequest, subject: NetworkDescription | JobSimulator, predictor: Predictor, start: float
) -> Answer:
    """Return the answer to a request, with the largest batch if it was requested."""
    if isinstance(subject, NetworkDescription):
        return _described(request, subject, predictor, [request.device], start)[0]
    job = JobAnswers(request, subject, predictor)
    simulation = job.simulate([request.device])
    answer = job.answers(simulation, [request.device])[0]
    if request.max_batch:
        answer = replace(answer, max_batch_size=job.largest_batch(answer)[0])
    if request.strategies and answer.parallel:
        compared = strategy_answers(job, answer, simulation.training)
        answer = replace(answer, strategies=tuple(item.to_dict() for item in compared))
    return replace(answer, seconds=time.perf_counter() - start)


def page_of_request(
    request: JobRequest, subject: NetworkDescription | JobSimulator, predictor: Predictor, start: float
) -> Page:
    """Return a page with all devices, the largest batch, and suggestions if the job does not fit safely."""
    title = load_profile(request.device).title
    names = [profile.name for profile in gpu_profiles()]
    if isinstance(subject, NetworkDescription):
        answer, *others = _described(request, subject, predictor, [request.device, *names], start)
        return Page(answer, title, subject.training or table_training(request.options), devices=others)
    job = JobAnswers(request, subject, predictor)
    devices = list(dict.fromkeys([request.device, *names]))
    simulation = job.simulate(devices)
    by_device = dict(zip(devices, job.answers(simulation, devices), strict=True))
    answer, others = by_device[request.device], [by_device[name] for name in names]
    shown = _named_training(request, simulation.training)
    if simulation.training.parallel:  # a trace of a rank takes seconds: no search for the batch
        compared = strategy_answers(job, answer, simulation.training)
        answer = replace(answer, seconds=time.perf_counter() - start)
        return Page(answer, title, shown, simulation.costs, others, strategies=compared)
    batch, largest = job.largest_batch(answer)
    helpful: list[Suggestion] = []
    notes: tuple[str, ...] = ()
    if answer.verdict != FITS:
        helpful, notes = suggestions(job, answer, shown, largest, others)
    seconds = time.perf_counter() - start
    answer = replace(answer, max_batch_size=batch, notes=(*answer.notes, *notes), seconds=seconds)
    return Page(answer, title, shown, simulation.costs, others, helpful)


def _named_training(request: JobRequest, training: TrainingSetup) -> TrainingSetup:
    """Return the training with the optimizer that the user named: estimators may know it under another name."""
    named = request.options.get("optimizer")
    return replace(training, optimizer=parse_optimizer(named)) if named else training


def _described(
    request: JobRequest, network: NetworkDescription, predictor: Predictor, devices: Sequence[str], start: float
) -> list[Answer]:
    """Return the answers for a network without code on some devices."""
    if request.strategies:
        raise UserError("expected no strategies beside layers alone, found them: name the network itself")
    training = network.training or table_training(request.options)

    def answers(setup: TrainingSetup, names: Sequence[str]) -> list[Answer]:
        questions = Question.of_description(request.target, network, setup, map(load_profile, names))
        return predictor.answers(questions, request.risk, request.bucket_mib)

    def with_batch(size: int) -> Answer:
        return answers(replace(training, batch_size=size, last_batch_size=None), devices[:1])[0]

    first, *others = answers(training, devices)
    if request.max_batch:
        first = replace(first, max_batch_size=largest_batch(with_batch, first)[0])
    seconds = time.perf_counter() - start
    return [replace(item, notes=(*request.notes, *item.notes), seconds=seconds) for item in (first, *others)]
