"""`vramcast observe`: tells a service what a job took, so that it sets that aside the next time."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from vramcast.collocation.client import Client, ServiceError
from vramcast.collocation.commands.job_argument import FORMS, read_job
from vramcast.collocation.commands.service_token import TOKEN, read_token
from vramcast.dataset_builder.exit_codes import exit_code
from vramcast.errors import UserError, check_amount


def main(argv: Sequence[str]) -> int:
    """Tell it; the return value is the exit code."""
    arguments = _parser().parse_args(argv)
    return exit_code("vramcast observe", lambda: _observe(arguments))


def _observe(arguments: argparse.Namespace) -> None:
    if arguments.peak_mib is not None:
        check_amount("--peak-mib", arguments.peak_mib, zero=False)
    job = read_job(arguments.job)
    try:
        client = Client(arguments.service, token=read_token(arguments.token_file))
        if arguments.forget:
            found = client.forget(job, arguments.device)
        else:
            found = client.observe(job, arguments.peak_mib, arguments.device)
    except (ServiceError, ValueError) as error:
        raise UserError(str(error)) from error
    if found.peak_mib is None:
        print(f"nothing is known of it on {found.device}")
        return
    print(f"{found.runs} run{'s' if found.runs > 1 else ''} on {found.device}, {found.peak_mib:.0f} MiB at most")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vramcast observe", description=__doc__)
    parser.add_argument("job", help=FORMS)
    told = parser.add_mutually_exclusive_group(required=True)
    told.add_argument("--peak-mib", type=float, help="of the whole process on one card, as nvidia-smi shows it")
    told.add_argument("--forget", action="store_true", help="take back what was told of the job on that card")
    parser.add_argument("--device", help="the card that it ran on; default: the job's, or the service's")
    parser.add_argument("--service", default="http://127.0.0.1:8080", metavar="URL", help="default: %(default)s")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help=f"of the service; else from ${TOKEN}")
    return parser
