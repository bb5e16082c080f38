"""A network under inspection and the classifier that judges it: questions about one job, varied."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vramcast.dataset_builder.defaults import RISK
from vramcast.dataset_builder.devices import load_profile
from vramcast.dataset_builder.simulation.findings import Findings
from vramcast.dataset_builder.simulation.inspector import Inspection
from vramcast.models.answer import Answer
from vramcast.models.batch_search import largest_batch
from vramcast.models.classify import Classifier
from vramcast.models.questions import question_of


class Conversation:
    """One job on one network; its wishes may be changed question by question."""

    def __init__(
        self,
        target: str,
        inspection: Inspection,
        classifier: Classifier,
        wishes: Mapping[str, Any],
        risk: float = RISK,
        bucket_mib: int | None = None,
    ) -> None:
        self.target = target
        self.inspection = inspection
        self.classifier = classifier
        self.wishes = dict(wishes)
        self.risk = risk
        self.bucket_mib = bucket_mib

    def examine(self, devices: Sequence[str]) -> Findings:
        """What the job takes on some devices."""
        return self.inspection.examine(self.wishes, [load_profile(name) for name in devices])

    def answers(self, findings: Findings, devices: Sequence[str]) -> list[Answer]:
        """Answers for some of the devices that were examined."""
        questions = [question_of(self.target, findings, load_profile(name)) for name in devices]
        return self.classifier.answers(questions, self.risk, self.bucket_mib)

    def answer(self, device: str, **changes: Any) -> Answer:
        """The answer for one device, with some wishes changed."""
        start = time.perf_counter()
        findings = self.inspection.examine({**self.wishes, **changes}, [load_profile(device)])
        found = self.answers(findings, [device])[0]
        return replace(found, seconds=time.perf_counter() - start)

    def largest(self, start: Answer) -> tuple[int, Answer | None]:
        """The largest batch whose safe answer fits the device of an answer, and the answer for it."""
        return largest_batch(lambda size: self.answer(start.device, batch_size=size, last_batch_size=None), start)
