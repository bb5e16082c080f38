"""`vramcast observe`: reports the observed peak of a job to a service, which reserves it the next time."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from vramcast.collocation.client import Client, ServiceError
from vramcast.commands.collocation.job_argument import FORMS, read_job
from vramcast.commands.collocation.service_token import TOKEN, read_token
from vramcast.commands.exit_codes import exit_code
from vramcast.errors import UserError, check_amount


def main(argv: Sequence[str]) -> int:
    """Run the command, and return the exit code."""
    arguments = make_parser().parse_args(argv)
    return exit_code("vramcast observe", lambda: _observe(arguments))


def _observe(arguments: argparse.Namespace) -> None:
    if arguments.peak_mib is not None:
        check_amount("--peak-mib", arguments.peak_mib, zero=False)
    job = read_job(arguments.job)
    try:
        client = Client(arguments.service, token=read_token(arguments.token_file))
        if arguments.forget:
            observation = client.forget(job, arguments.device)
        else:
            observation = client.observe(job, arguments.peak_mib, arguments.device)
    except (ServiceError, ValueError) as error:
        raise UserError(str(error)) from error
    if observation.peak_mib is None:
        print(f"no observations on {observation.device}")
        return
    runs = f"{observation.runs} run{'s' if observation.runs > 1 else ''}"
    print(f"{runs} on {observation.device}, {observation.peak_mib:.0f} MiB at most")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(prog="vramcast observe", description=__doc__)
    parser.add_argument("job", help=FORMS)
    report = parser.add_mutually_exclusive_group(required=True)
    report.add_argument("--peak-mib", type=float, help="of the whole process on one GPU, as nvidia-smi shows it")
    report.add_argument("--forget", action="store_true", help="remove all observations of the job on that device")
    parser.add_argument("--device", help="the device that it ran on; default: the job's, or the service's")
    parser.add_argument("--service", default="http://127.0.0.1:8080", metavar="URL", help="default: %(default)s")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help=f"with the token of the service; default: ${TOKEN}"
    )
    return parser
