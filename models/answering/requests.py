"""What a person or a line of a jobs file asks for, checked. Nothing heavy is imported: a child is to start first."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vramcast.dataset_builder.defaults import RISK
from vramcast.dataset_builder.devices import DEFAULT_DEVICE
from vramcast.dataset_builder.jobs.targets import Wanted, parse_target
from vramcast.errors import UserError, check_count
from vramcast.virtual_gpu.training_setup import DTYPE_BYTES

_WISHES = ("batch_size", "optimizer", "dtype", "autocast", "checkpointing", "accumulate")
_FLAGS = ("checkpointing", "max_batch")
_TEXTS = ("target", "optimizer", "dtype", "autocast", "device", "inputs", "step")
_COUNTS = ("batch_size", "accumulate", "bucket_mib")
_LARGEST = 2**31
"""Of a count: tensors of more elements than torch can count are nobody's."""
KEYS = (*_WISHES, "target", "device", "risk", "bucket_mib", "max_batch", "input", "inputs", "step", "args")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One job to be classified."""

    target: str
    wishes: Mapping[str, Any]
    """Of the training; what is None is left to the network."""
    device: str = DEFAULT_DEVICE
    risk: float = RISK
    bucket_mib: int | None = None
    max_batch: bool = False
    input: tuple[str, ...] = ()
    inputs: str | None = None
    step: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Request":
        """From the names of the command line, which are those of a jobs file; None stands for what nobody said."""
        given = {name: value for name, value in values.items() if value is not None}
        unknown = sorted(given.keys() - set(KEYS))
        if unknown:
            raise UserError(f"expected a job with some of {sorted(KEYS)}, found {unknown}: remove or rename them")
        if "target" not in given:
            raise UserError(f"expected a job with a target, found {sorted(given)}: add it")
        _check(given)
        wishes = {name: given.pop(name, None) for name in _WISHES}
        inputs = given.pop("input", ())
        return cls(wishes=wishes, input=(inputs,) if isinstance(inputs, str) else tuple(inputs), **given)

    def check_batch(self) -> None:
        """Refuse what has no batch size: a spec alone brings its own along."""
        if self.wishes["batch_size"] is None:
            raise UserError("expected the batch size that the network is trained with, found none: give --batch-size N")

    def wanted(self) -> Wanted:
        """What a child is to build."""
        self.check_batch()
        return Wanted(
            target=parse_target(self.target),
            arguments=dict(self.args),
            inputs=self.input,
            inputs_factory=self.inputs,
            step_factory=self.step,
            directory=os.getcwd(),  # noqa: PTH109 - as the user knows it, links and all
        )


def _check(given: Mapping[str, Any]) -> None:
    for name in _TEXTS:
        if name in given and not isinstance(given[name], str):
            raise UserError(f"expected {name} to be a text, found {given[name]!r}: change it")
    for name in _COUNTS:
        if name in given:
            check_count(name, given[name])
            if given[name] > _LARGEST:
                raise UserError(f"expected {name} to be at most {_LARGEST}, found {given[name]}: change it")
    for name in _FLAGS:
        if not isinstance(given.get(name, False), bool):
            raise UserError(f"expected {name} to be true or false, found {given[name]!r}: change it")
    risk = given.get("risk", RISK)
    if not isinstance(risk, int | float) or not 0 < risk < 1:
        raise UserError(f"expected risk to be a number between 0 and 1, found {risk!r}: change it")
    for name, choices in (("dtype", list(DTYPE_BYTES)), ("autocast", ["bf16", "fp16"])):
        if name in given and given[name] not in choices:
            raise UserError(f"expected {name} to be one of {choices}, found {given[name]!r}: change it")
    if not isinstance(given.get("args", {}), Mapping):
        raise UserError(f"expected args to be a mapping, found {given['args']!r}: change it")
    texts = given.get("input", [])
    if not isinstance(texts, str) and not (isinstance(texts, list) and all(isinstance(item, str) for item in texts)):
        raise UserError(f"expected input to be texts such as '3,224,224', found {texts!r}: change it")
