"""Everything that a recording says about one device: its peak, its contents, its failure, and other settings."""

from dataclasses import dataclass, replace

from vramcast.virtual_gpu.recordings.agreement import ReplayAgreement, agreement
from vramcast.virtual_gpu.recordings.contents import Contents, contents_at, lives, peak_event
from vramcast.virtual_gpu.recordings.failures import Failure, Remedy, failure_at, last_failure, remedies
from vramcast.virtual_gpu.recordings.recording import DeviceRecording, Recording
from vramcast.virtual_gpu.recordings.rewinding import start_state
from vramcast.virtual_gpu.recordings.settings import replay_under


@dataclass(frozen=True)
class Examination:
    """The findings about one device."""

    device: int
    events: int
    starts_empty: bool
    """The history goes back to the first allocation."""
    private_pools: bool
    """Segments belong to CUDA graphs or memory pools, which the replay does not know."""
    replay: ReplayAgreement
    peak: Contents
    """At the event with the most memory allocated."""
    failure: Failure | None
    remedies: tuple[Remedy, ...]
    """Tried where an allocation failed."""
    expandable_reserved_bytes: int | None
    """The reserved peak with expandable segments, None if they are on."""


def examine(recording: Recording, device: DeviceRecording, name: str) -> Examination:
    """Return the findings about a device of a recording."""
    start = start_state(device, recording.options, name)
    blocks = lives(device, start)
    peak = contents_at(recording, device, blocks, peak_event(recording, device, start), name)
    failed = last_failure(device)
    failure = None
    if failed is not None:
        contents = contents_at(recording, device, blocks, failed, name)
        failure = failure_at(failed, device.events[failed], contents, recording.options)
    expandable = None
    if not recording.options.expandable_segments:
        options = replace(recording.options, expandable_segments=True)
        expandable = replay_under(device, start, options).peak_reserved_bytes
    return Examination(
        device=device.device,
        events=len(device.events),
        starts_empty=not start,
        private_pools=any(segment.private for segment in device.segments),
        replay=agreement(device, recording.options, name),
        peak=peak,
        failure=failure,
        remedies=tuple(remedies(recording, device, start, blocks, failure)) if failure else (),
        expandable_reserved_bytes=expandable,
    )
