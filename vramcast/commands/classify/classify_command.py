"""`vramcast classify`: how much GPU memory a network's training takes, whether it fits, and what to do if not."""

import argparse
import json
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramcast.commands.classify.lengths import with_lengths
from vramcast.commands.classify.request import KEYS, ClassifyRequest
from vramcast.commands.classify.simulators import Simulators, Subject
from vramcast.commands.exit_codes import BAD_INPUT, FAILED, CommandParser, checked, exit_code
from vramcast.defaults import BUCKET_MIB, CHECKPOINT, RISK
from vramcast.device.profiles import DEFAULT_DEVICE
from vramcast.error_words import message_of, shortened
from vramcast.errors import UserError, check_count
from vramcast.files.json_lines import numbered_lines, parse_object
from vramcast.jobs.job_request import TRAINING_OPTIONS
from vramcast.jobs.network_files.description import NetworkDescription
from vramcast.jobs.targets import FORMS, is_document, parse_argument
from vramcast.models.answer import FITS, Answer
from vramcast.models.released import checkpoint_directory
from vramcast.quick_imports import quick_imports
from vramcast.simulation.sandbox.client import MEMORY_MIB, TIMEOUT_SECONDS
from vramcast.simulation.sandbox.failures import InternalError, NetworkError
from vramcast.virtual_gpu.distributed.parallelism import PARALLEL_OPTIONS

if TYPE_CHECKING:  # the child starts before this process imports torch
    from vramcast.models.predictor import Predictor

_NETWORK_FAILED = 3
_QUIET_SECONDS = 2.0
_REPORT = "this is an error of vramcast, not of the network: please report it with the traceback above"


def main(argv: Sequence[str]) -> int:
    """Run `vramcast classify` and return the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the estimator is small: threads would wait for each other
    return exit_code("vramcast classify", lambda: _classify(with_target(make_parser().parse_args(argv))))


def with_target(arguments: argparse.Namespace) -> argparse.Namespace:
    """Take the target from a bare `--checkpointing` or `--liger` before it, which argparse reads as their form."""
    for name, option in TRAINING_OPTIONS.items():
        value = getattr(arguments, name)
        if option.kind == "form" and isinstance(value, str) and arguments.target is None and _is_target(value):
            arguments.target = value
            setattr(arguments, name, True)
    return arguments


def _is_target(text: str) -> bool:
    return ":" in text or text.endswith(".py") or is_document(text)  # no form has a colon or a suffix


def _classify(arguments: argparse.Namespace) -> int:
    return with_simulators(
        "vramcast classify", arguments, lambda simulators: (_many if arguments.jobs else _one)(arguments, simulators)
    )


def with_simulators(prog: str, arguments: argparse.Namespace, work: Callable[[Simulators], int]) -> int:
    """Do the work of a command on networks of users; return the exit code, also for a network that failed."""
    check_count("--memory-limit-mib", arguments.memory_limit_mib)
    checkpoint_directory(arguments.checkpoint)  # an unknown one fails before the child starts
    try:
        limits = (arguments.timeout, arguments.memory_limit_mib)
        environment = dict(map(_variable, arguments.env))
        allowed = {"allow_network": arguments.allow_network, "unprotected": arguments.unprotected}
        with Simulators(*limits, **allowed, environment=environment) as simulators:
            return work(simulators)
    except InternalError as error:
        print(error.traceback, file=sys.stderr)
        print(f"{prog}: {error}: {_REPORT}", file=sys.stderr)
        return FAILED
    except NetworkError as error:
        print(error.traceback, file=sys.stderr)
        print(f"{prog}: the network's own code failed: {error}", file=sys.stderr)
        return _NETWORK_FAILED


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = CommandParser(prog="vramcast classify", description=__doc__, epilog=f"TARGET is {FORMS}.")
    add_job(parser)
    add = parser.add_argument
    add("--strategies", action="store_true", default=None, help="compare strategies with --json too")
    add("--max-batch", action="store_true", default=None, help="search the largest batch with --json too")
    add("--lengths", metavar="FILE", help="tokens of each sample, one a line or .npy: which batches fit (hf:)")
    add("--fast", action="store_true", default=None, help="answer from the layers alone after one forward pass")
    add("--check", action="store_true", help="exit with 1 if the job does not fit safely")
    add("--jobs", metavar="FILE", help="classify many jobs, one JSON object a line; with --json")
    add("--export", type=Path, metavar="FILE", help="write the job for schedulers that cannot run its code")
    add("--plot", type=Path, metavar="FILE", help="draw the memory over the steps (.png or .svg)")
    return parser


def add_job(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a job and how its network is built, which `vramcast solve` has too."""
    add = parser.add_argument
    add("target", nargs="?", metavar="TARGET", help="the network, see below")
    add("--input", action="append", metavar="SHAPE", help="of a sample: 3,224,224, or 512:30522 (tokens)")
    add("--length", type=int, metavar="N", help="tokens of a sequence: the same as --input N (hf:)")
    add("--inputs", metavar="FUNCTION", help="a function of the target's file that returns a batch for a batch size")
    add("--step", metavar="FUNCTION", help="a function of the target's file: (network, batch) to the loss")
    add("--packed", action="store_true", default=None, help="sequences of full length: no mask for padding (hf:)")
    add("--keep-output", action="store_true", default=None, help="a plain loop, which keeps the last logits (hf:)")
    add("--arg", action="append", default=[], metavar="NAME=VALUE", help="an argument of the target's function")
    for name, option in TRAINING_OPTIONS.items():
        flag = f"--{name.replace('_', '-')}"
        if option.kind == "flag":
            add(flag, action="store_true", default=None, help=option.help)
        elif option.kind == "count":
            add(flag, type=int, metavar="N", help=option.help)
        elif option.kind == "fraction":
            add(flag, type=float, metavar="F", help=option.help)
        elif option.kind == "form":
            add(flag, nargs="?", const=True, metavar="FORM", help=option.help)
        else:
            text = f"{option.help}: {', '.join(option.choices)}" if option.choices else option.help
            bare: dict[str, Any] = {"nargs": "?", "const": option.bare} if option.bare else {}
            add(flag, metavar="NAME", help=text, **bare)
    for name, text in PARALLEL_OPTIONS.items():
        flag = f"--{name.replace('_', '-')}"
        if name == "offload":
            add(flag, action="store_true", default=None, help=text)
        elif name in ("world_size", "nodes", "tensor", "pipeline", "microbatches"):
            add(flag, type=int, metavar="N", help=text)
        else:
            add(flag, metavar="NAME", type=_shard_after_forward if name == "shard_after_forward" else str, help=text)
    add("--config", metavar="FILE", help="a training configuration: TrainingArguments, LLaMA-Factory or axolotl")
    add("--lora", nargs="?", const=True, metavar="KEY=VALUE,...", help="train LoRA, as in r=16,targets=q_proj,v_proj")
    add("--device", metavar="NAME", help=f"a device profile, see vramcast device list; default {DEFAULT_DEVICE}")
    add("--risk", type=float, help=f"probability that the safe figure is too low; default {RISK}")
    add("--bucket-mib", type=int, metavar="N", help=f"the width of a bucket; default {BUCKET_MIB}")
    add("--checkpoint", default=CHECKPOINT, metavar="NAME", help="the estimator: a name or directory")
    add("--json", action="store_true", help="print one JSON object")
    add("--timeout", type=float, default=TIMEOUT_SECONDS, metavar="SECONDS", help="limit for the network's code")
    add("--memory-limit-mib", type=int, default=MEMORY_MIB, metavar="N", help="limit for the network's code")
    add("--python", metavar="PATH", help="build and trace the network with this interpreter; it needs torch alone")
    add("--env", action="append", default=[], metavar="NAME[=VALUE]", help="pass a variable to the network's code")
    add("--allow-network", action="store_true", help="let the network's code and its libraries reach the Internet")
    add("--unprotected", action="store_true", help="let the network's code change files")


def _shard_after_forward(text: str) -> bool | int:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected true, false or a number, found {text!r}") from None


def values_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the job of the command line by the keys of a jobs file."""
    values = {name: getattr(arguments, name, None) for name in KEYS if name != "args"}
    return {**values, "args": dict(map(parse_argument, arguments.arg)) or None}


def _variable(text: str) -> tuple[str, str]:
    """Parse NAME=VALUE, or NAME for a variable of this process."""
    name, equals, value = text.partition("=")
    if not name or (not equals and name not in os.environ):
        raise UserError(f"expected NAME=VALUE, or a variable that is set, found --env {text}: give it a value")
    return name, value if equals else os.environ[name]


def _one(arguments: argparse.Namespace, simulators: Simulators) -> int:
    """Classify one job; return the exit code."""
    start = time.perf_counter()
    if arguments.target is None and arguments.config is None:
        raise UserError(f"expected {FORMS}, found no target: name the network")
    request = ClassifyRequest.of(values_of(arguments))
    if arguments.plot:
        from vramcast.models.timeline import check_picture

        check_picture(arguments.plot)
    if arguments.export:
        from vramcast.simulation.exported_job import check_export_path

        check_export_path(arguments.export)
    with progress(request.target):
        subject = simulators.start(request)
        text, answer = _rendered(arguments, request, subject, simulators, start)
    print(text, end="")
    if arguments.plot:
        _plot(arguments.plot, request, simulators.start(request))
    if arguments.export:
        _export(arguments.export, request, simulators.start(request))
    return checked(arguments.check, answer.verdict == FITS)


def _rendered(
    arguments: argparse.Namespace,
    request: ClassifyRequest,
    subject: Subject,
    simulators: Simulators,
    start: float,
) -> tuple[str, Answer]:
    with quick_imports():  # here, because the child builds the network while this process imports torch
        from vramcast.commands.classify.job_answers import answer_request, page_of_request
        from vramcast.commands.classify.page import render_page

    predictor = _predictor(arguments.checkpoint)
    if arguments.json:
        answer = _lengths(request, answer_request(request, subject, predictor, start), simulators, predictor)
        return json.dumps(answer.to_dict(), allow_nan=False) + "\n", answer
    page = page_of_request(request, subject, predictor, start)
    answer = _lengths(request, page.answer, simulators, predictor)
    devices = [answer if item.device == answer.device and answer.lengths else item for item in page.devices]
    page = replace(page, answer=answer, devices=devices)
    return render_page(page, shutil.get_terminal_size((100, 40)).columns, sys.stdout.isatty()), page.answer


def _lengths(request: ClassifyRequest, answer: Answer, simulators: Simulators, predictor: "Predictor") -> Answer:
    """Add which batches fit, if the request has the lengths of samples."""
    if not request.lengths:
        return answer
    from vramcast.commands.classify.job_answers import JobAnswers, answer_request

    def answer_for(length: int) -> Answer:
        shorter = replace(request, input=(str(length),), max_batch=False, strategies=False)
        return answer_request(shorter, simulators.start(shorter), predictor, time.perf_counter())

    start = time.perf_counter()
    subject = simulators.start(request)
    if answer.parallel or isinstance(subject, NetworkDescription):
        varied = replace(answer, notes=(*answer.notes, "the figures are those of the longest batch on several GPUs"))
    else:
        varied = JobAnswers(request, subject, predictor).over_orders(answer, request.lengths)
    shares = with_lengths(answer, request.lengths, answer_for).lengths
    seconds = answer.seconds + time.perf_counter() - start
    return replace(varied, lengths={**shares, **varied.lengths}, max_batch_size=answer.max_batch_size, seconds=seconds)


def _predictor(checkpoint: str) -> "Predictor":
    from vramcast.models.predictor import Predictor

    return Predictor.load(checkpoint)


@contextmanager
def progress(target: str) -> Iterator[None]:
    """Print a line to stderr if the work takes longer than two seconds."""
    start = time.perf_counter()
    timer = threading.Timer(_QUIET_SECONDS, lambda: print(f"simulating {target} ...", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if time.perf_counter() - start > _QUIET_SECONDS and sys.stderr.isatty():
        print(f"simulated {target} in {time.perf_counter() - start:.1f} s", file=sys.stderr)


def _export(path: Path, request: ClassifyRequest, subject: Any) -> None:
    from vramcast.device.profiles import gpu_profiles, load_profile
    from vramcast.jobs.spec import LayerTable
    from vramcast.jobs.targets import parse_target
    from vramcast.simulation.exported_job import exported_job, write_export

    if isinstance(subject, LayerTable):
        raise UserError(f"expected a network to export to {path}, found a layer table: send the table itself")
    profiles = {item.name: item for item in (load_profile(request.device), *gpu_profiles())}
    simulation = subject.simulate(request.options, list(profiles.values()))
    target = None if is_document(request.target) else parse_target(request.target)
    code = Path(target.name) if target is not None and target.kind == "file" else None
    write_export(path, exported_job(request.target, simulation, code))
    print(f"{path} written", file=sys.stderr)


def _plot(path: Path, request: ClassifyRequest, subject: Any) -> None:
    from vramcast.device.profiles import load_profile
    from vramcast.models.timeline import draw_timeline, timeline_table

    if isinstance(subject, NetworkDescription):
        raise UserError(f"expected a network to draw {path} of, found its layers alone: name the network itself")
    profile = load_profile(request.device)
    curve = subject.curve(request.options, profile)
    draw_timeline(timeline_table(curve), f"{request.target} on {profile.title}, simulated", path)
    print(f"{path} written", file=sys.stderr)


def _many(arguments: argparse.Namespace, simulators: Simulators) -> int:
    """Classify the jobs of a file; return the exit code, which tells whether a line failed."""
    if not arguments.json:
        raise UserError("expected --json beside --jobs, found none: add it")
    if arguments.target is not None or arguments.plot or arguments.export:
        extra = arguments.target or ("--plot" if arguments.plot else "--export")
        raise UserError(f"expected neither a target nor --plot or --export beside --jobs, found {extra}: leave it out")
    lines = list(numbered_lines(_contents(arguments.jobs)))
    from vramcast.commands.classify.job_answers import answer_request

    predictor, defaults, verdicts = _predictor(arguments.checkpoint), values_of(arguments), list[str | None]()
    for number, line in lines:
        start = time.perf_counter()
        result: Mapping[str, Any]
        job: Mapping[str, Any] = {}
        try:
            job = parse_object(line, "in a line of the jobs file")
            request = ClassifyRequest.of({**defaults, **job})
            answer = answer_request(request, simulators.start(request), predictor, start)
            result = _lengths(request, answer, simulators, predictor).to_dict()
        except InternalError as error:
            print(error.traceback, file=sys.stderr)
            result = _failed(job, f"{message_of(error)}: {_REPORT}")
        except (UserError, NetworkError) as error:
            result = _failed(job, message_of(error))
        except Exception as error:  # an error of vramcast must not stop the other lines either
            traceback.print_exc()
            result = _failed(job, f"{type(error).__name__}: {message_of(error)}: {_REPORT}")
        verdicts.append(result.get("verdict"))
        print(json.dumps({"line": number, **result}, allow_nan=False), flush=True)
    if failed := verdicts.count(None):
        print(f"vramcast classify: {failed} of {len(lines)} jobs have no answer: see their errors", file=sys.stderr)
        return BAD_INPUT
    return checked(arguments.check, all(verdict == FITS for verdict in verdicts))


def _failed(job: Mapping[str, Any], why: str) -> dict[str, Any]:
    target = job.get("target")
    return {"target": shortened(target) if isinstance(target, str) else None, "status": "error", "error": why}


def _contents(path: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise UserError(f"expected a file of jobs at {path}, found: {error}; check the path") from error
