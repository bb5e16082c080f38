"""Replay recorded memory snapshots through the simulated allocator: `python -m benchmarks.snapshots --data DIR`.

Prints, for each recording and in total, how many addresses, segments and final blocks the replay gives as recorded.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from vramcast.commands.exit_codes import CommandParser, exit_code
from vramcast.errors import UserError
from vramcast.virtual_gpu.recordings.agreement import ReplayAgreement, Tally, agreement
from vramcast.virtual_gpu.recordings.files import read_recording

_SUFFIXES = (".pickle", ".pkl", ".json", ".json.xz", ".json.gz")


@dataclass(frozen=True)
class Replayed:
    """A device of a recording, replayed."""

    file: str
    device: int
    events: int
    agreement: ReplayAgreement


def replay_all(files: Sequence[Path]) -> list[Replayed]:
    """Replay each device of each recording."""
    replayed = []
    for file in files:
        recording = read_recording(file)
        for device in recording.devices:
            result = agreement(device, recording.options, file.name)
            replayed.append(Replayed(file.name, device.device, len(device.events), result))
    return replayed


def table(replayed: Sequence[Replayed]) -> dict[str, Tally]:
    """Return the totals over all recordings."""
    results = [item.agreement for item in replayed]
    totals = {
        "address of every allocation": [item.addresses for item in results],
        "segments made, event and size": [item.segments_made for item in results],
        "segments freed": [item.segments_freed for item in results],
        "final blocks": [item.final_blocks for item in results],
    }
    rows = {name: Tally(sum(t.recorded for t in each), sum(t.equal for t in each)) for name, each in totals.items()}
    equal_peaks = sum(item.recorded_peak_bytes == item.peak_reserved_bytes for item in results)
    rows["peak reserved"] = Tally(len(results), equal_peaks)
    rows["recordings"] = Tally(len(results), sum(item.agrees for item in results))
    return rows


def text_of(replayed: Sequence[Replayed]) -> str:
    """Return the table as Markdown, with a line for each recording that differs."""
    lines = ["| of real GPUs' recordings | equal |", "| --- | --- |"]
    lines += [f"| {name} | {tally.equal:,} of {tally.recorded:,} |" for name, tally in table(replayed).items()]
    lines.append(f"\n{sum(item.events for item in replayed):,} events")
    lines += [
        f"{item.file}, device {item.device}: {item.agreement.first_difference}"
        for item in replayed
        if not item.agreement.agrees
    ]
    cut = sum(item.agreement.cut_allocations for item in replayed)
    if cut:
        lines.append(f"{cut} histories begin in the midst of an allocation, which is not compared")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Replay the recordings of a directory; return 1 if one differs."""
    return exit_code("benchmarks.snapshots", lambda: _run(argv))


def _run(argv: Sequence[str]) -> int:
    parser = CommandParser(prog="python -m benchmarks.snapshots", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="a directory of memory snapshots")
    parser.add_argument("--json", action="store_true")
    arguments: argparse.Namespace = parser.parse_args(argv)
    files = sorted(path for path in arguments.data.iterdir() if path.name.endswith(_SUFFIXES))
    if not files:
        raise UserError(
            f"expected memory snapshots ({', '.join(_SUFFIXES)}) in {arguments.data}, found none: name another"
        )
    replayed = replay_all(files)
    print(json.dumps([asdict(item) for item in replayed]) if arguments.json else text_of(replayed))
    return 0 if all(item.agreement.agrees for item in replayed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
