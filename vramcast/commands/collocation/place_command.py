"""`vramcast place`: chooses a GPU for a job, for schedulers that are a script.

Prints the id of the chosen GPU and nothing else; reasons go to stderr. Exits with 1 if the job fits on no GPU.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vramcast.collocation.adapters.carma import GPUMEMNET_LINE, write_rad, write_yaml
from vramcast.collocation.adapters.gpu_text import parse_gpu, parse_gpus
from vramcast.collocation.placement import POLICIES, GpuState, Need, rank, refusals
from vramcast.commands.collocation.job_argument import FORMS, read_job
from vramcast.commands.collocation.service_token import TOKEN, read_token
from vramcast.commands.exit_codes import exit_code
from vramcast.defaults import CHECKPOINT, RISK
from vramcast.device.profiles import DEFAULT_DEVICE
from vramcast.errors import UserError, check_amount
from vramcast.models.json_figures import rounded

_NONE = 1


def main(argv: Sequence[str]) -> int:
    """Run the command, and return the exit code."""
    arguments = make_parser().parse_args(argv)
    return exit_code("vramcast place", lambda: _place(arguments))


def _place(arguments: argparse.Namespace) -> int:
    for name in ("need_mib", "margin_mib", "fallback_mib"):
        if getattr(arguments, name) is not None:
            check_amount(f"--{name.replace('_', '-')}", getattr(arguments, name))
    gpus = _gpus(arguments)
    if not gpus and not (arguments.rad or arguments.yaml):
        raise UserError("expected GPUs to choose from, found none: give --gpu ID=FREE_MIB or --gpus FILE")
    need, answers = _need(arguments, gpus)
    if arguments.rad:
        write_rad(arguments.rad, _fitting(need, answers, arguments), arguments.line)
    if arguments.yaml:
        write_yaml(arguments.yaml, _fitting(need, answers, arguments), arguments.key)
    if not gpus:
        print(f"{_on_default(need, arguments):.0f}")
        return 0
    return _print(arguments, need, gpus, answers)


def _print(arguments: argparse.Namespace, need: Need, gpus: Sequence[GpuState], answers: Mapping[str, Any]) -> int:
    ranked, refused = rank(need, gpus, arguments.policy), refusals(need, gpus, arguments.policy)
    if arguments.json:
        placed = {
            "placements": [
                {"gpu": item.gpu.id, "need_mib": item.need_mib, "left_mib": item.left_mib} for item in ranked
            ],
            "refused": [{"gpu": item.gpu.id, "reason": item.reason, "for_good": item.for_good} for item in refused],
            "answers": answers,
        }
        print(json.dumps(placed, allow_nan=False))
    elif ranked:
        print(ranked[0].gpu.id)
    for item in ranked[:1]:
        print(f"needs {item.need_mib:.0f} MiB on GPU {item.gpu.id}; {item.left_mib:.0f} stay free", file=sys.stderr)
    if not ranked:
        for refusal in refused:
            print(f"GPU {refusal.gpu.id}: {refusal.reason}", file=sys.stderr)
    return 0 if ranked else _NONE


def _need(arguments: argparse.Namespace, gpus: Sequence[GpuState]) -> tuple[Need, dict[str, Any]]:
    """Return the need with its margin by device profile, and the answers behind it."""
    if (arguments.job is None) == (arguments.need_mib is None):
        raise UserError("expected a job or --need-mib, found both or neither: give one of them")
    if arguments.need_mib is not None:
        return arguments.need_mib + arguments.margin_mib, {}
    job = read_job(arguments.job)
    devices = {gpu.device for gpu in gpus} | {None}
    answers = _from_service(arguments, job, devices) if arguments.service else _here(arguments, job, devices)
    need = {device: answer["need_mib"] + arguments.margin_mib for device, answer in answers.items()}
    return need, {answer.get("device", "fallback"): answer for answer in answers.values()}


def _here(
    arguments: argparse.Namespace, job: Mapping[str, Any], devices: set[str | None]
) -> dict[str | None, dict[str, Any]]:
    """Return answers of this process. It runs no code of a user: `vramcast classify` does that."""
    from vramcast.collocation.local_answers import answers_on  # noqa: PLC0415 - torch

    by_device = answers_on(
        job, {device or arguments.device for device in devices}, arguments.checkpoint, arguments.risk
    )
    answers = {device: by_device[device or arguments.device] for device in devices}
    return {
        device: {**answer.to_dict(), "need_mib": rounded(answer.safe_mib, "need_mib")}
        for device, answer in answers.items()
    }


def _from_service(
    arguments: argparse.Namespace, job: Mapping[str, Any], devices: set[str | None]
) -> dict[str | None, dict[str, Any]]:
    from vramcast.collocation.client import Client, ServiceError  # noqa: PLC0415

    token = read_token(arguments.token_file)
    try:
        client = Client(arguments.service, token=token, fallback_mib=arguments.fallback_mib)
        estimates = {
            device: client.classify({**job, "device": device or arguments.device, "risk": arguments.risk})
            for device in devices
        }
    except (ServiceError, ValueError) as error:
        raise UserError(str(error)) from error
    return {device: {**item.answer, "need_mib": item.need_mib} for device, item in estimates.items()}


def _fitting(need: Need, answers: Mapping[str, Any], arguments: argparse.Namespace) -> float | None:
    """Return the need for a job file; None if the job does not fit on its device, so that it runs alone."""
    answer = answers.get(arguments.device, {})
    fits = answer.get("fits", True) or answer.get("basis") == "observed"
    return _on_default(need, arguments) if fits else None


def _on_default(need: Need, arguments: argparse.Namespace) -> float:
    return need[None] if isinstance(need, Mapping) else need


def _gpus(arguments: argparse.Namespace) -> list[GpuState]:
    gpus = [parse_gpu(text) for text in arguments.gpu]
    if arguments.gpus:
        try:
            text = sys.stdin.read() if arguments.gpus == "-" else Path(arguments.gpus).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"expected GPUs in {arguments.gpus}, found: {error}; check --gpus") from error
        gpus += parse_gpus(text)
    return gpus


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="vramcast place", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", nargs="?", help=FORMS)
    parser.add_argument("--need-mib", type=float, help="the need, instead of a job")
    parser.add_argument(
        "--gpu", action="append", default=[], metavar="ID=FREE[/TOTAL][@DEVICE]", help="in MiB; repeatable"
    )
    parser.add_argument(
        "--gpus",
        metavar="FILE",
        help="JSON, or the CSV of nvidia-smi --query-gpu=index,memory.free,memory.total,name, without header and units",
    )
    parser.add_argument("--policy", default="best-fit", choices=POLICIES)
    parser.add_argument("--margin-mib", type=float, default=0.0, help="memory that must stay free beside the job")
    parser.add_argument("--device", default=DEFAULT_DEVICE, help="for GPUs without a device; default: %(default)s")
    parser.add_argument("--risk", type=float, default=RISK, help="the share of jobs that may need more")
    parser.add_argument("--checkpoint", default=CHECKPOINT, metavar="NAME")
    parser.add_argument("--service", metavar="URL", help="ask a running service instead of this process")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help=f"with the token of the service; default: ${TOKEN}"
    )
    parser.add_argument("--fallback-mib", type=float, help="the need if the service does not answer")
    parser.add_argument("--rad", type=Path, metavar="FILE", help="write the need into a job file of CARMA")
    parser.add_argument("--line", type=int, default=GPUMEMNET_LINE, help="of that file; default: %(default)s")
    parser.add_argument("--yaml", type=Path, metavar="FILE", help="write the need into a YAML job file")
    parser.add_argument("--key", default="estimated_memory_mib", help="of that file; default: %(default)s")
    parser.add_argument("--json", action="store_true")
    return parser
