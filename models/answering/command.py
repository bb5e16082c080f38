"""`vramcast classify`: how much GPU memory a network's training takes, whether it fits, and what to do if not."""

import argparse
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vramcast.dataset_builder.defaults import BUCKET_MIB, CHECKPOINT, RISK
from vramcast.dataset_builder.devices import DEFAULT_DEVICE
from vramcast.dataset_builder.exit_codes import exit_code
from vramcast.dataset_builder.jobs.targets import FORMS, parse_argument
from vramcast.dataset_builder.schema import LayerTable
from vramcast.dataset_builder.simulation.client import MEMORY_MIB, TIMEOUT_SECONDS, TheirError
from vramcast.errors import UserError, check_count
from vramcast.models.answering.requests import Request
from vramcast.models.answering.sessions import Sessions

_THEIR_ERROR = 3
_JOB_WORDS = ("target", "batch_size", "optimizer", "dtype", "autocast", "checkpointing", "accumulate", "device", "risk",
              "bucket_mib", "max_batch", "input", "inputs", "step")  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Carry out the command; the return value is the exit code."""
    arguments = _parser().parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the estimator is small: threads would wait for each other
    return exit_code("vramcast classify", lambda: _classify(arguments))


def _classify(arguments: argparse.Namespace) -> int:
    check_count("--memory-limit-mib", arguments.memory_limit_mib)
    try:
        with Sessions(arguments.timeout, arguments.memory_limit_mib) as sessions:
            (_many if arguments.jobs else _one)(arguments, sessions)
    except TheirError as error:
        print(error.traceback, file=sys.stderr)
        print(f"vramcast classify: the network's own code failed: {error}", file=sys.stderr)
        return _THEIR_ERROR
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vramcast classify", description=__doc__, epilog=f"TARGET is {FORMS}.")
    parser.add_argument("target", nargs="?", metavar="TARGET", help="the network, see below")
    parser.add_argument("--batch-size", type=int, metavar="N", help="samples in a batch")
    parser.add_argument(
        "--input", action="append", metavar="SHAPE", help="of a sample: 3,224,224, or 512:30522 (tokens)"
    )
    parser.add_argument("--inputs", metavar="FUNCTION", help="of the target's file: from a batch size to a batch")
    parser.add_argument("--step", metavar="FUNCTION", help="of the target's file: from network and batch to the loss")
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help="of the target's function")
    parser.add_argument("--optimizer", metavar="NAME", help="of torch.optim, as in 'sgd(momentum=0.9)', or adamw8bit")
    parser.add_argument("--dtype", metavar="TYPE", help="of parameters and inputs: fp32, bf16 or fp16")
    parser.add_argument("--autocast", nargs="?", const="bf16", metavar="TYPE", help="mixed precision: bf16 or fp16")
    parser.add_argument(
        "--checkpointing", action="store_true", default=None, help="recompute blocks in the backward pass"
    )
    parser.add_argument("--accumulate", type=int, metavar="N", help="batches to one optimizer step")
    parser.add_argument("--device", metavar="NAME", help=f"a profile of conf/device; default {DEFAULT_DEVICE}")
    parser.add_argument("--risk", type=float, help=f"how often the safe figure may be too low; default {RISK}")
    parser.add_argument("--bucket-mib", type=int, metavar="N", help=f"the width of a bucket; default {BUCKET_MIB}")
    parser.add_argument("--checkpoint", default=CHECKPOINT, metavar="NAME", help="the estimator: a name or directory")
    parser.add_argument(
        "--max-batch", action="store_true", default=None, help="look for the largest batch with --json too"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--jobs", metavar="FILE", help="a JSON object a line for many jobs; with --json")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the memory over the steps (.png or .svg)")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_SECONDS, metavar="SECONDS", help="for the network's code"
    )
    parser.add_argument("--memory-limit-mib", type=int, default=MEMORY_MIB, metavar="N", help="for the network's code")
    return parser


def _named(arguments: argparse.Namespace) -> dict[str, Any]:
    """The job of the command line, by the names of a jobs file."""
    values = {name: getattr(arguments, name) for name in _JOB_WORDS}
    return {**values, "args": dict(map(parse_argument, arguments.arg)) or None}


def _one(arguments: argparse.Namespace, sessions: Sessions) -> None:
    start = time.perf_counter()
    if arguments.target is None:
        raise UserError(f"expected {FORMS}, found no target: name the network")
    request = Request.of(_named(arguments))
    if arguments.plot:
        _check_plot(arguments.plot)
    subject = sessions.start(request)
    # a child builds the network while torch is imported here
    from vramcast.models.answering.judging import answered, looked_at
    from vramcast.models.classify import Classifier

    classifier = Classifier(arguments.checkpoint)
    if arguments.json:
        answer = answered(request, subject, classifier, start)
        print(json.dumps(answer.to_json(), allow_nan=False))
    else:
        from vramcast.models.answering.screen import rendered

        page = looked_at(request, subject, classifier, start)
        print(rendered(page, shutil.get_terminal_size((100, 40)).columns, sys.stdout.isatty()), end="")
    if arguments.plot:
        _plot(arguments.plot, request, subject)


def _check_plot(path: Path) -> None:
    from vramcast.models.timeline import check_picture

    check_picture(path)


def _plot(path: Path, request: Request, subject: Any) -> None:
    from vramcast.dataset_builder.devices import load_profile
    from vramcast.models.timeline import draw_timeline, timeline_table

    if isinstance(subject, LayerTable):
        raise UserError(f"expected a network to draw {path} of, found a layer table: nothing of it is simulated")
    profile = load_profile(request.device)
    curve = subject.curve(request.wishes, profile)
    draw_timeline(timeline_table(curve), f"{request.target} on {profile.title}, simulated", path)
    print(f"{path} written", file=sys.stderr)


def _many(arguments: argparse.Namespace, sessions: Sessions) -> None:
    if not arguments.json or arguments.target is not None or arguments.plot:
        raise UserError("expected --jobs FILE with --json, and neither a target nor --plot, found others: change them")
    lines = list(_lines(arguments.jobs))
    from vramcast.models.answering.judging import answered
    from vramcast.models.classify import Classifier

    classifier, defaults = Classifier(arguments.checkpoint), _named(arguments)
    for line in lines:
        start = time.perf_counter()
        found: Mapping[str, Any]
        try:
            request = Request.of({**defaults, **_job(line)})
            found = answered(request, sessions.start(request), classifier, start).to_json()
        except (UserError, TheirError) as error:
            found = _failed(line, str(error))
        except Exception as error:  # a fault of vramcast's own, which must not stop the other lines either
            traceback.print_exc()
            found = _failed(line, f"{type(error).__name__}: {error}")
        print(json.dumps(found, allow_nan=False), flush=True)


def _failed(line: str, why: str) -> dict[str, Any]:
    return {"target": _target(line), "status": "error", "error": " ".join(why.split())}


def _lines(path: str) -> Iterator[str]:
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"expected a file of jobs at {path}, found: {error}; check the path") from error
    return (line for line in text.splitlines() if line.strip())


def _job(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise UserError(f"expected a JSON object in a line of the jobs file, found: {error}; mend it") from error
    if not isinstance(found, dict):
        raise UserError(f"expected a JSON object in a line of the jobs file, found {found!r}: mend it")
    return found


def _target(line: str) -> Any:
    try:
        return _job(line).get("target")
    except UserError:
        return None
