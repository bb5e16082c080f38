"""The process that runs a user's code: answers requests on a file descriptor.

Imports torch and the standard library alone, so that it runs in the interpreter of a user that has nothing else.
"""

import json
import os
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vramcast.dataset_builder.child_process import end_with_parent, write_line
from vramcast.errors import UserError
from vramcast.virtual_gpu.source_lines import is_users, place_of

DONE, REFUSED, THEIRS = "done", "refused", "theirs"


def main(report_fd: int) -> int:
    """Answer requests until the parent closes the input."""
    end_with_parent()
    os.set_inheritable(report_fd, False)  # a program that is started here must not hold it open
    requests = os.fdopen(os.dup(0), "rb")  # a user's code that reads its input finds none
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    service = _Service()
    for line in requests:
        write_line(report_fd, _answer(service, json.loads(line)))
    return 0


def _answer(service: "_Service", request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"event": DONE, **getattr(service, request["do"])(request)}
    except UserError as error:
        return {"event": REFUSED, "reason": _with_place(error)}
    except (Exception, SystemExit) as error:  # whatever foreign code raises
        return {"event": THEIRS, **_theirs(error)}


class _Service:
    """What can be asked of the child; torch is imported with the first request."""

    def build(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Build the network, once."""
        from vramcast.dataset_builder.jobs.building import build_job  # noqa: PLC0415 - the parent imports torch meanwhile
        from vramcast.dataset_builder.jobs.targets import LIBRARIES, Wanted  # noqa: PLC0415
        from vramcast.dataset_builder.simulation.inspector import Inspector  # noqa: PLC0415

        wanted = Wanted.from_json(request["wanted"])
        if wanted.target.kind not in LIBRARIES:
            _put_user_first(wanted.directory, wanted.target.name if wanted.target.kind == "file" else None)
        self.inspector = Inspector(build_job(wanted))
        return {}

    def examine(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What the network takes under a setup, on some devices."""
        from vramcast.virtual_gpu.profile import parse_profile  # noqa: PLC0415

        profiles = [parse_profile(item) for item in request["devices"]]
        training = self.inspector.job.setup(request["wishes"])
        return {"findings": self.inspector.examine(training, profiles).to_json()}

    def curve(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The memory over time."""
        from vramcast.virtual_gpu.profile import parse_profile  # noqa: PLC0415

        training = self.inspector.job.setup(request["wishes"])
        return {"curve": vars(self.inspector.curve(training, parse_profile(request["device"])))}


def _put_user_first(directory: str, file: str | None) -> None:
    """As `python file.py` would: the file's directory, then where the user is."""
    places = [Path(file).resolve().parent] if file else []
    sys.path[:0] = [str(item) for item in dict.fromkeys([*places, Path(directory).resolve()])]


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Where an exception comes from: the lines of the user's own, and the last one."""
    frames = list(traceback.extract_tb(error.__traceback__))
    return [frame for frame in frames[:-1] if is_users(frame.filename)] + frames[-1:]


def _with_place(error: UserError) -> str:
    place = place_of(error)
    return f"{error} (at {place})" if place else str(error)


def _theirs(error: BaseException) -> dict[str, Any]:
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(_frames(error))]
    ending = "".join(traceback.format_exception_only(error)).strip()
    summary = f"{type(error).__name__}: {' '.join(str(error).split())}"
    summary += "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    return {"traceback": _plain("".join(lines) + ending), "summary": _plain(summary), "place": place_of(error)}


def _plain(text: str) -> str:
    """Layers by their names in the user's network, without our wrappers."""
    return re.sub(r"'(?:subject\.)+", "'", text)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
