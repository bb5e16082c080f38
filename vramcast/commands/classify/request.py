"""A job of `vramcast classify`: it may name a training configuration, and a file with the lengths of samples."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vramcast.commands.classify.lengths import batch_lengths, read_lengths
from vramcast.commands.classify.training_configs import read_training_config
from vramcast.errors import UserError
from vramcast.jobs import job_request
from vramcast.jobs.job_request import JobRequest, check_text
from vramcast.jobs.targets import parse_shape

KEYS = (*job_request.KEYS, "config", "lengths")


@dataclass(frozen=True, kw_only=True)
class ClassifyRequest(JobRequest):
    """One job to be classified."""

    lengths: tuple[int, ...] = ()
    """The length of each batch in ascending order, if those of the samples were given; `input` is the longest."""

    @classmethod
    def of(cls, values: Mapping[str, Any], **more: Any) -> "ClassifyRequest":
        """Check the values of a jobs file or of the command line, where None stands for no value."""
        chosen = {name: value for name, value in values.items() if value is not None}
        for name in (*job_request.TEXTS, "config", "lengths"):
            if name in chosen:
                check_text(name, chosen[name])
        notes: list[str] = []
        if "config" in chosen:
            configured = read_training_config(chosen.pop("config"), chosen.get("parallel") is not None)
            notes = configured.notes
            if "adapter" in chosen:
                configured.values.pop("lora", None)
            chosen = {**{name: value for name, value in configured.values.items() if value is not None}, **chosen}
        path = chosen.pop("lengths", None)
        request = super().of(chosen, notes=tuple(notes), **more)
        if path is None:
            return request
        lengths = _batch_lengths(path, request)
        padded = {name: value for name, value in chosen.items() if name != "length"}
        return super().of({**padded, "input": str(lengths[-1])}, notes=request.notes, lengths=lengths)


def _batch_lengths(path: str, request: JobRequest) -> tuple[int, ...]:
    batch_size = request.options["batch_size"]
    if not request.target.startswith("hf:") or request.packed or batch_size is None:
        raise UserError(
            "expected lengths beside an hf: target with a batch size and without packed, found others: packed "
            "sequences have one length, which --input gives"
        )
    longest = next(iter(parse_shape(request.input[0])[0]), None) if request.input else None
    return batch_lengths(read_lengths(path), batch_size, longest)
