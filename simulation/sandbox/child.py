"""The child process that runs a user's code and answers requests on a file descriptor.

It imports only torch and the standard library, so that it runs in a user's own interpreter. A supervisor watches over
it, and the network is blocked before anything of the user's is imported (see `isolation`).
"""

import re
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vramcast.child.channel import Answer, Channel
from vramcast.child.messages import DONE
from vramcast.errors import UserError
from vramcast.quick_imports import quick_imports
from vramcast.simulation.sandbox.failures import failure_of
from vramcast.simulation.sandbox.file_protection.kernel import drop_capabilities
from vramcast.simulation.sandbox.file_protection.protection import FileProtection, Keep
from vramcast.simulation.sandbox.isolation import ALLOWED, block_network, supervise

PROTECTED, OPEN_FILES = "protected", "open"
OLDEST_TORCH = (2, 4)


def main(network: str, files: str, report_fd: int) -> int:
    """Answer requests until the parent closes the input.

    Args:
        network: 'allowed' or 'blocked'.
        files: 'protected' or 'open'.
        report_fd: The pipe to the parent.
    """
    channel = Channel(report_fd)
    try:
        protection = FileProtection(Keep(downloads=network == ALLOWED), wanted=files == PROTECTED)
        supervise(protection)
        protection.enter()
    except UserError as error:
        channel.report(**failure_of(error))
        return 0
    service = _Service(ALLOWED if network == ALLOWED else block_network())
    drop_capabilities()
    channel.serve(service.answer)
    return 0


class _Service:
    """The requests that the child answers; torch is imported with the first one."""

    def __init__(self, network: str) -> None:
        self.network = network

    def answer(self, request: Mapping[str, Any]) -> Answer:
        """Return the result of a request, or its failure: foreign code may raise anything."""
        try:
            return {"event": DONE, **getattr(self, request["do"])(request)}, None
        except (Exception, SystemExit) as error:
            return failure_of(error), None

    def build(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Build the job; report how the network is blocked."""
        _check_torch()
        with quick_imports():  # the parent imports torch meanwhile
            from vramcast.jobs.building import build_job  # noqa: PLC0415
            from vramcast.jobs.targets import LIBRARIES, BuildRequest  # noqa: PLC0415
            from vramcast.simulation.simulator import Simulator  # noqa: PLC0415

        build = BuildRequest.from_json(request["request"])
        if build.target.kind not in LIBRARIES:
            _put_user_first(build.directory, build.target.name if build.target.kind == "file" else None)
        self.simulator = Simulator(build_job(build))
        return {"network": self.network}

    def simulate(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Simulate the job on some devices."""
        from vramcast.virtual_gpu.profile import parse_profile  # noqa: PLC0415

        profiles = [parse_profile(item) for item in request["devices"]]
        return {"simulation": self.simulator.simulate(request["options"], profiles).to_json()}

    def describe(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the layers of the network."""
        return {"description": self.simulator.describe(request["options"]).to_json()}

    def curve(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the memory over time."""
        from vramcast.virtual_gpu.profile import parse_profile  # noqa: PLC0415

        return {"curve": vars(self.simulator.curve(request["options"], parse_profile(request["device"])))}

    def by_order(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the peaks of runs whose batches come in several orders."""
        from vramcast.virtual_gpu.profile import parse_profile  # noqa: PLC0415
        from vramcast.virtual_gpu.replay.length_orders import LengthOrders  # noqa: PLC0415

        orders = LengthOrders.from_json(request["orders"])
        return {"peaks": vars(self.simulator.by_order(request["options"], parse_profile(request["device"]), orders))}


def _check_torch() -> None:
    try:
        release = version("torch")
    except PackageNotFoundError:  # built from source and not installed
        import torch  # noqa: PLC0415

        release = torch.__version__
    if tuple(int(part) for part in re.findall(r"\d+", release)[:2]) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise UserError(f"expected torch {oldest} or newer in {sys.executable}, found {release}: update it")


def _put_user_first(directory: str, file: str | None) -> None:
    """Extend the path as `python file.py` does: the file's directory, then the working directory."""
    places = [Path(file).resolve().parent] if file else []
    sys.path[:0] = [str(item) for item in dict.fromkeys([*places, Path(directory).resolve()])]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
