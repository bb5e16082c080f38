"""One job as people ask for it: on a command line, in a jobs file or in a request, checked by one parser.

Imports nothing heavy, so that a command's child process starts first.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from vramcast.defaults import RISK
from vramcast.device.profiles import DEFAULT_DEVICE, device_file
from vramcast.errors import UserError, check_choice, check_count, check_flag, check_fraction
from vramcast.jobs.architectures import find_architecture
from vramcast.jobs.diffusion_architectures import find_denoiser
from vramcast.jobs.targets import LIBRARIES, BuildRequest, Target, parse_shape, parse_target
from vramcast.virtual_gpu.distributed.parallelism import PARALLEL_OPTIONS
from vramcast.virtual_gpu.training.checkpointing_forms import canonical_checkpointing
from vramcast.virtual_gpu.training.loss_forms import canonical_kernels, canonical_loss_form
from vramcast.virtual_gpu.training.setup import OPTIONS, with_shorthands

TRAINING_OPTIONS = {name: option for name, option in OPTIONS.items() if not option.from_network}
_FORMS: Mapping[str, Callable[[Any], Any]] = {
    "checkpointing": canonical_checkpointing, "loss_form": canonical_loss_form, "liger": canonical_kernels
}  # fmt: skip
_TABLES: Mapping[str, Callable[[str], Any]] = {"hf": find_architecture, "diffusers": find_denoiser}
_LARGEST = 2**31
"""Of a count: torch cannot index larger tensors."""
TEXTS = ("target", "optimizer", "adapter", "quantize", "device", "inputs", "step", "python")
_LONGEST_TEXT = 4096
"""PATH_MAX of Linux; no name or form is longer."""
NAMED_KEYS = (
    *TRAINING_OPTIONS, *PARALLEL_OPTIONS, "lora", "strategies", "target", "device", "risk", "bucket_mib", "max_batch",
    "input", "length", "packed", "keep_output",
)  # fmt: skip
"""What is asked about a network with a known name: none of it names a file or runs code."""
KEYS = (*NAMED_KEYS, "fast", "inputs", "step", "args", "python")


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """One job, and what is asked about it."""

    target: str
    options: Mapping[str, Any]
    """Training options; None leaves an option to the network."""
    device: str = DEFAULT_DEVICE
    risk: float = RISK
    bucket_mib: int | None = None
    max_batch: bool = False
    fast: bool = False
    """Answer from the layers alone, without a simulation."""
    strategies: bool = False
    """Compare strategies for several GPUs."""
    input: tuple[str, ...] = ()
    inputs: str | None = None
    step: str | None = None
    packed: bool = False
    keep_output: bool = False
    args: Mapping[str, Any] = field(default_factory=dict)
    python: str | None = None
    """The interpreter that builds and traces the network."""
    notes: tuple[str, ...] = ()
    """Settings of a configuration file that are not simulated."""

    @classmethod
    def of(cls, values: Mapping[str, Any], **more: Any) -> Self:
        """Check values, where None stands for no value; `more` are other fields."""
        chosen = {name: value for name, value in values.items() if value is not None}
        for name in TEXTS:
            if name in chosen:
                check_text(name, chosen[name])
        unknown = sorted(chosen.keys() - set(KEYS))
        if unknown:
            raise UserError(f"expected a job with some of {sorted(KEYS)}, found {unknown}: remove or rename them")
        if "target" not in chosen:
            raise UserError(f"expected a job with a target, found {sorted(chosen)}: add it")
        chosen = with_shorthands(with_input(chosen))
        _check(chosen)
        options = {name: chosen.pop(name, None) for name in TRAINING_OPTIONS}
        inputs = chosen.pop("input", ())
        shapes = (inputs,) if isinstance(inputs, str) else tuple(inputs)
        return cls(options=options, input=shapes, **chosen, **more)

    @classmethod
    def of_known(cls, values: Mapping[str, Any]) -> Self:
        """Check the values of a job that must neither read a file nor run code: a network of a library by its name."""
        unknown = sorted(values.keys() - set(NAMED_KEYS))
        if unknown:
            raise UserError(f"expected a job with some of {sorted(NAMED_KEYS)}, found {unknown}: remove or rename them")
        request = cls.of(values)
        kind, colon, name = request.target.partition(":")
        if not colon or kind not in LIBRARIES:
            raise UserError(
                f"expected a network of a library, as in timm:resnet50 or hf:gpt2, found {request.target[:100]!r}: "
                "name one, or run vramcast classify where the code is"
            )
        if kind in _TABLES:
            _TABLES[kind](name)  # a path of a config.json is not in the table
        request.check_batch()
        return request

    def check_batch(self) -> None:
        """Raise if there is no batch size; only a spec has its own."""
        if self.options["batch_size"] is None:
            raise UserError("expected the batch size that the network is trained with, found none: give --batch-size N")

    def build_request(self, target: Target | None = None) -> BuildRequest:
        """Return the request for the child process that builds the network, by default the one that is named."""
        self.check_batch()
        return BuildRequest(
            target=target or parse_target(self.target),
            arguments=dict(self.args),
            inputs=self.input,
            inputs_factory=self.inputs,
            step_factory=self.step,
            packed=self.packed,
            keep_output=self.keep_output,
            directory=os.getcwd(),  # noqa: PTH109 - with symlinks unresolved, as the user sees it
            python=self.python,
        )


def with_input(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with `length`, the tokens of a sequence, as the shape of the input."""
    values = dict(chosen)
    length = values.pop("length", None)
    if length is None:
        return values
    _check_bounded("length", length)
    if "input" in values or not str(values["target"]).startswith("hf:"):
        raise UserError(
            f"expected length={length} beside an hf: target without input, found others: give the shape as input"
        )
    return {**values, "input": str(length)}


def _check_mode(chosen: Mapping[str, Any]) -> None:
    """Raise if an optimizer is named for a run without training: a setup has a default one in any case."""
    mode = chosen.get("mode", "training")
    if mode != "training" and "optimizer" in chosen:
        raise UserError(
            f"expected no optimizer beside mode={mode}, found {chosen['optimizer']}: nothing is trained; leave it out"
        )


def _check_training(chosen: Mapping[str, Any]) -> None:
    _check_mode(chosen)
    for name, option in TRAINING_OPTIONS.items():
        if name in chosen:
            if option.kind == "count":
                _check_bounded(name, chosen[name], option.least)
            elif option.kind == "flag":
                check_flag(name, chosen[name])
            elif option.kind == "fraction":
                check_fraction(name, chosen[name])
            elif name in _FORMS:
                _FORMS[name](chosen[name])  # a wrong form fails before the network is built
            elif option.kind == "choice":
                check_choice(name, chosen[name], option.accepted)


def _check(chosen: Mapping[str, Any]) -> None:
    _check_training(chosen)
    if "bucket_mib" in chosen:
        _check_bounded("bucket_mib", chosen["bucket_mib"])
    check_flag("max_batch", chosen.get("max_batch", False))
    check_flag("fast", chosen.get("fast", False))
    check_flag("strategies", chosen.get("strategies", False))
    check_flag("packed", chosen.get("packed", False))
    check_flag("keep_output", chosen.get("keep_output", False))
    device_file(chosen.get("device", DEFAULT_DEVICE))  # an unknown device fails before the network is built
    risk = chosen.get("risk", RISK)
    if isinstance(risk, bool) or not isinstance(risk, int | float) or not 0 < risk < 1:
        raise UserError(f"expected risk to be a number between 0 and 1, found {risk!r}: change it")
    if not isinstance(chosen.get("args", {}), Mapping):
        raise UserError(f"expected args to be a mapping, found {chosen['args']!r}: change it")
    texts = chosen.get("input", [])
    if not isinstance(texts, str) and not (isinstance(texts, list) and all(isinstance(item, str) for item in texts)):
        raise UserError(f"expected input to be texts such as '3,224,224', found {texts!r}: change it")
    for text in [texts] if isinstance(texts, str) else texts:
        parse_shape(text)  # a wrong shape fails before the network is built


def check_text(name: str, value: Any) -> None:
    """Raise unless a value is a text that can be a name, a path or a form."""
    if not isinstance(value, str):
        raise UserError(f"expected {name} to be a text, found {value!r}: change it")
    if len(value) > _LONGEST_TEXT:
        raise UserError(
            f"expected {name} to have at most {_LONGEST_TEXT} characters, found {len(value)}: write it shorter"
        )
    if "\0" in value:
        raise UserError(f"expected {name} to be a name, a path or a form, found a NUL character in it: leave it out")


def _check_bounded(name: str, value: Any, least: int = 1) -> None:
    check_count(name, value, least)
    if value > _LARGEST:
        raise UserError(f"expected {name} to be at most {_LARGEST}, found {value}: change it")
