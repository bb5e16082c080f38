"""`vramcast serve`: answers jobs over HTTP."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from vramcast.collocation.adapters.claims import GPU_CLASS
from vramcast.commands.collocation.service_token import TOKEN, read_token
from vramcast.commands.exit_codes import exit_code
from vramcast.defaults import CHECKPOINT, RISK
from vramcast.device.profiles import DEFAULT_DEVICE
from vramcast.errors import UserError, check_choice, check_count, check_probability

_LARGEST_PORT = 65_535
HISTORY = "VRAMCAST_HISTORY"
"""The variable with the URL of the history, which may hold a password."""


def main(argv: Sequence[str]) -> int:
    """Serve until a signal ends it, and return the exit code."""
    arguments = make_parser().parse_args(argv)
    return exit_code("vramcast serve", lambda: _serve(arguments))


def _serve(arguments: argparse.Namespace) -> None:
    if not 0 <= arguments.port <= _LARGEST_PORT:
        raise UserError(f"expected --port from 0 to {_LARGEST_PORT}, found {arguments.port}: choose another")
    check_count("--workers", arguments.workers)
    check_probability("--risk", arguments.risk)
    check_count("--max-body-kib", arguments.max_body_kib)
    if (arguments.tls_cert is None) != (arguments.tls_key is None):
        raise UserError("expected --tls-cert and --tls-key together, found one of them: add the other")
    for path in (arguments.tls_cert, arguments.tls_key):
        if path is not None and not path.is_file():
            raise UserError(f"expected a PEM file at {path}, found none: check the path")
    try:
        from vramcast.collocation.adapters.pod_resources import RESOURCES  # noqa: PLC0415
        from vramcast.collocation.service.database import is_url  # noqa: PLC0415
        from vramcast.collocation.service.server import serve  # noqa: PLC0415
        from vramcast.collocation.service.settings import Limits, Settings  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise UserError(
            f"expected the packages of the service, found no {error.name}: pip install 'vramcast[serve]'"
        ) from error
    check_choice("--resource", arguments.resource, sorted(RESOURCES))
    serve(
        Settings(
            checkpoint=arguments.checkpoint,
            device=arguments.device,
            risk=arguments.risk,
            host=arguments.host,
            port=arguments.port,
            workers=arguments.workers,
            token=read_token(arguments.token_file),
            named_specs=arguments.named_specs,
            prices=arguments.prices,
            history=Path(arguments.history)
            if arguments.history and not is_url(arguments.history)
            else arguments.history,
            history_queue=arguments.history_queue,
            import_history=arguments.import_history,
            tls_cert=arguments.tls_cert,
            tls_key=arguments.tls_key,
            kubernetes=not arguments.no_kubernetes,
            resource=arguments.resource,
            device_class=arguments.device_class,
            log_requests=not arguments.quiet,
            limits=Limits(body_bytes=arguments.max_body_kib * 1024),
        )
    )


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(prog="vramcast serve", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s, this machine alone")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--checkpoint", default=CHECKPOINT, metavar="NAME", help="an estimator's directory or name")
    parser.add_argument("--device", default=DEFAULT_DEVICE, help="for jobs that name none; default: %(default)s")
    parser.add_argument(
        "--risk", type=float, default=RISK, help="the share of jobs that may need more than the safe answer"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes that simulate networks")
    parser.add_argument("--named-specs", type=Path, metavar="FILE", help="JSON lines of specs with names")
    parser.add_argument("--prices", type=Path, metavar="FILE", help="YAML: the price of an hour of each device")
    parser.add_argument(
        "--history",
        default=os.environ.get(HISTORY),
        metavar="FILE|URL",
        help=f"the database of observations: a file, or postgresql://... for replicas; default: ${HISTORY}",
    )
    parser.add_argument(
        "--history-queue",
        type=Path,
        default=Path("vramcast-history.queue"),
        metavar="FILE",
        help="with a URL, the file of observations that wait while it does not answer; default: %(default)s",
    )
    parser.add_argument(
        "--import-history", type=Path, metavar="FILE", help="a history of an earlier version, added once"
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help=f"with the token that clients must send; default: ${TOKEN}"
    )
    parser.add_argument("--tls-cert", type=Path, metavar="FILE")
    parser.add_argument("--tls-key", type=Path, metavar="FILE")
    parser.add_argument(
        "--resource", default="hami", help="the resource that the admission webhook writes; default: %(default)s"
    )
    parser.add_argument(
        "--device-class",
        default=GPU_CLASS,
        metavar="NAME",
        help="with --resource dra, the DeviceClass whose claims get an amount; default: %(default)s",
    )
    parser.add_argument("--no-kubernetes", action="store_true", help="serve no paths of Kubernetes and Volcano")
    parser.add_argument("--max-body-kib", type=int, default=1024, help="larger requests are refused")
    parser.add_argument("--quiet", action="store_true", help="do not log single requests")
    return parser
