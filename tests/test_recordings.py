"""Memory snapshots: reading them safely, their start state, and their replay through the simulated allocator."""

import json
import lzma
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded_allocators import RecordedAllocator, random_history

from benchmarks.snapshots.__main__ import main, replay_all
from vramcast.errors import UserError
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.recordings.agreement import agreement
from vramcast.virtual_gpu.recordings.files import read_recording, read_values
from vramcast.virtual_gpu.recordings.pickles import PickleError, load_containers
from vramcast.virtual_gpu.recordings.recording import Action, recording_of
from vramcast.virtual_gpu.recordings.rewinding import start_state

FIXTURES = Path(__file__).parent / "fixtures" / "recordings"
SPLIT_LIMIT = AllocatorOptions(max_split_size_bytes=20 * MIB)
EXPANDABLE = AllocatorOptions(expandable_segments=True)


def _replayed(recorded: RecordedAllocator, last: int | None = None) -> Any:
    recording = recording_of(recorded.snapshot(last), "a test")
    return agreement(recording.devices[0], recorded.options, "a test")


def test_the_public_recordings_replay_to_every_address_segment_and_block(public_table: Callable[[str], Path]) -> None:
    # The largest of each person; all 42: python -m benchmarks.snapshots
    folder = public_table("snapshots")
    largest: dict[str, Path] = {}
    for path in sorted(folder.glob("*.json.xz"), key=lambda path: path.stat().st_size):
        largest[path.name.split("_")[0]] = path
    replayed = replay_all(list(largest.values()))
    assert len(replayed) >= 6
    for item in replayed:
        assert item.agreement.agrees, (item.file, item.agreement)
    assert sum(item.agreement.addresses.recorded for item in replayed) > 20_000


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("last", [None, 300, 57])
@pytest.mark.parametrize(
    ("options", "capacity"),
    [(AllocatorOptions(), None), (AllocatorOptions(), 600 * MIB), (EXPANDABLE, None), (SPLIT_LIMIT, 600 * MIB)],
    ids=["default", "full device", "expandable", "split limit"],
)
def test_a_history_of_any_length_replays_equally(
    options: AllocatorOptions, capacity: int | None, last: int | None, seed: int
) -> None:
    recorded = RecordedAllocator(options, capacity)
    random_history(recorded, seed, 400)
    result = _replayed(recorded, last)
    assert result.agrees, result
    assert result.addresses.recorded > 5


def test_the_start_state_is_the_state_at_that_event() -> None:
    recorded = RecordedAllocator()
    random_history(recorded, 5, 300)
    expected, count = recorded.allocator.segments(), len(recorded.events)
    random_history(recorded, 6, 300)
    recording = recording_of(recorded.snapshot(len(recorded.events) - count), "a test")
    assert start_state(recording.devices[0], recorded.options, "a test") == expected


def test_another_allocator_is_found_out() -> None:
    recorded = RecordedAllocator(SPLIT_LIMIT)
    random_history(recorded, 1, 400)
    recording = recording_of(recorded.snapshot(), "a test")
    assert agreement(recording.devices[0], SPLIT_LIMIT, "a test").agrees
    result = agreement(recording.devices[0], AllocatorOptions(), "a test")
    assert not result.agrees
    assert result.addresses.equal < result.addresses.recorded
    assert result.first_difference


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.iterdir()))
def test_the_small_recordings_replay_equally(name: str) -> None:
    recording = read_recording(FIXTURES / name)
    assert all(agreement(device, recording.options, name).agrees for device in recording.devices)


def test_a_failed_allocation_tells_the_free_memory_of_the_device() -> None:
    (device,) = read_recording(FIXTURES / "out_of_memory.pickle").devices
    failure = device.events[-1]
    assert failure.action is Action.OOM
    assert failure.size_bytes == 70 * MIB
    assert 0 <= failure.address < 70 * MIB


class _Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("/tmp/vramcast-was-here",)


def test_code_in_a_pickle_is_refused_and_never_run(tmp_path: Path) -> None:
    path = tmp_path / "harmful.pickle"
    for protocol in (2, 4, 5):
        path.write_bytes(pickle.dumps({"segments": [_Harmful()]}, protocol))
        with pytest.raises(PickleError, match="names code, which is never run"):
            read_recording(path)
    assert not Path("/tmp/vramcast-was-here").exists()


@pytest.mark.parametrize("protocol", range(2, 6))
def test_containers_and_scalars_are_read_as_pickle_reads_them(protocol: int) -> None:
    shared = [{"name": "f", "line": 7}]
    values = {
        "a": [1, -1, 2**40, -(2**40), 255, 256, 2**63, True, False, None, 1.5, "ü" * 300],
        "b": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], {}],
        "c": [shared, shared],
        7: "seven",
    }
    assert load_containers(pickle.dumps(values, protocol), "it") == values


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04",
        b"\x80\x04}",
        b"\x80\x04X\xff\xff\xff\xff.",
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x02]r\xff\xff\xff\xff.",
        b"\x80\x02h\x01.",
        b"\x80\x04" + b"(" * 5000 + b".",
        b"\x80\x04}(" + b")\x85" * 3 + b"K\x01u.",
        b"\x80\x04\x8a\xff" + b"\x01" * 255 + b".",
        b"\x80\x04cos\nsystem\n.",
    ],
)
def test_a_damaged_pickle_is_one_sentence(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "damaged.pickle"
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"^expected .* in damaged.pickle, found .*: "):
        read_values(path)


def test_each_cut_of_a_pickle_is_refused(tmp_path: Path) -> None:
    whole = (FIXTURES / "ring_cut.pickle").read_bytes()
    for length in range(2, len(whole) - 1, 97):
        with pytest.raises(PickleError):
            load_containers(whole[:length], "it")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "a memory snapshot with 'segments'"),
        ({"segments": [{}]}, "a segment with 'blocks'"),
        ({"segments": [{"address": -1, "total_size": 1, "blocks": []}]}, "an address as a whole number"),
        ({"segments": [{"address": 0, "total_size": 512, "blocks": []}]}, "blocks that fill their segment"),
        ({"segments": [], "device_traces": [[{"action": "explode"}]]}, "an action out of"),
        ({"segments": [], "device_traces": [[{"action": "alloc", "addr": "x"}]]}, "an address as a whole number"),
        ({"segments": [], "device_traces": [[{"action": "alloc", "addr": 1, "stack": 3}]]}, "a stack out of 0"),
        ({"segments": [], "device_traces": {}, "allocator_settings": ["x"]}, "'allocator_settings'"),
    ],
)
def test_a_snapshot_with_wrong_values_is_one_sentence(values: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match=words):
        read_recording(path)


def test_events_that_do_not_lead_to_the_final_state_are_refused() -> None:
    values = {"segments": [], "device_traces": [[{"action": "alloc", "addr": 512, "size": 512, "stream": 0}]]}
    recording = recording_of(values, "a test")
    with pytest.raises(UserError, match="events that lead to the final state"):
        start_state(recording.devices[0], recording.options, "a test")


def test_a_compressed_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramcast.virtual_gpu.recordings.files.MOST_BYTES", 1000)
    path = tmp_path / "bomb.json.xz"
    path.write_bytes(lzma.compress(b" " * 10**6))
    with pytest.raises(UserError, match="expected at most 0 MiB"):
        read_values(path)


def test_the_benchmark_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(FIXTURES)]) == 0
    assert "| recordings | 5 of 5 |" in capsys.readouterr().out
