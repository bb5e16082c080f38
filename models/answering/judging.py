"""From a request to an answer: the same for one job on a screen and for many in a file."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vramcast.dataset_builder.devices import gpu_profiles, load_profile
from vramcast.dataset_builder.jobs.optimizers import DEFAULT, optimizer_named
from vramcast.dataset_builder.schema import LayerTable
from vramcast.dataset_builder.simulation.inspector import Inspection
from vramcast.models.answer import FITS, Answer
from vramcast.models.answering.advice import advice
from vramcast.models.answering.conversation import Conversation
from vramcast.models.answering.requests import Request
from vramcast.models.answering.screen import Page
from vramcast.models.classify import Classifier
from vramcast.models.questions import question_of_table
from vramcast.virtual_gpu.training_setup import TrainingSetup


def answered(request: Request, subject: LayerTable | Inspection, classifier: Classifier, start: float) -> Answer:
    """One answer, and the largest batch where somebody asks for it."""
    if isinstance(subject, LayerTable):
        return _of_table(request, subject, classifier, start)
    talk = _talk(request, subject, classifier)
    found = talk.answer(request.device)
    if request.max_batch:
        found = replace(found, max_batch_size=talk.largest(found)[0])
    return replace(found, seconds=time.perf_counter() - start)


def looked_at(request: Request, subject: LayerTable | Inspection, classifier: Classifier, start: float) -> Page:
    """A page with all cards, the largest batch, and what would help where the job does not fit safely."""
    title = load_profile(request.device).title
    if isinstance(subject, LayerTable):
        answer = _of_table(request, subject, classifier, start)
        cards = [_of_table(replace(request, device=card.name), subject, classifier, start) for card in gpu_profiles()]
        return Page(answer, title, table_training(request.wishes), cards=cards)
    talk = _talk(request, subject, classifier)
    names = [card.name for card in gpu_profiles()]
    devices = list(dict.fromkeys([request.device, *names]))
    findings = talk.examine(devices)
    by_device = dict(zip(devices, talk.answers(findings, devices), strict=True))
    answer, cards = by_device[request.device], [by_device[name] for name in names]
    batch, largest = talk.largest(answer)
    helpful = [] if answer.verdict == FITS else advice(talk, answer, findings.training, largest, cards)
    answer = replace(answer, max_batch_size=batch, seconds=time.perf_counter() - start)
    return Page(answer, title, findings.training, findings.costs, cards, helpful)


def _talk(request: Request, subject: Inspection, classifier: Classifier) -> Conversation:
    return Conversation(request.target, subject, classifier, request.wishes, request.risk, request.bucket_mib)


def _of_table(request: Request, table: LayerTable, classifier: Classifier, start: float) -> Answer:
    question = question_of_table(request.target, table, table_training(request.wishes), load_profile(request.device))
    found = classifier.answers([question], request.risk, request.bucket_mib)[0]
    return replace(found, seconds=time.perf_counter() - start)


def table_training(wishes: Mapping[str, Any]) -> TrainingSetup:
    """The training of a network without code, as it is wished for."""
    given = {name: value for name, value in wishes.items() if value is not None}
    return TrainingSetup(**{**given, "optimizer": optimizer_named(given.get("optimizer", DEFAULT))})
