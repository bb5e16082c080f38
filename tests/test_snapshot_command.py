"""`vramcast snapshot`: contents of the peak, reasons of a failure, and settings that help."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vramcast.cli import main
from vramcast.virtual_gpu.allocator.sizes import MIB

FIXTURES = Path(__file__).parent / "fixtures" / "recordings"


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["snapshot", *words, "--json"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    return device


def test_a_failure_out_of_need_says_how_much_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    # Four weights of 12 MiB and three activations of 70 MiB are alive; the device has 300 MiB.
    device = _json(capsys, str(FIXTURES / "out_of_memory.pickle"), "--device", "rtx_4060")
    failure = device["failure"]
    assert failure["requested_bytes"] == 70 * MIB
    assert failure["capacity_bytes"] == 300 * MIB
    assert failure["lacks_bytes"] == (48 + 210 + 70 - 300) * MIB
    assert not failure["is_fragmentation"]
    assert failure["outside_bytes"] == (8188 - 300) * MIB
    assert failure["contents"]["by_kind"] == {"activations": 210 * MIB, "parameters": 48 * MIB}
    passing = {remedy["name"] for remedy in device["remedies"] if remedy["passes"]}
    assert passing == {"smaller batch"}


def test_a_failure_by_fragmentation_is_cured_by_expandable_segments(capsys: pytest.CaptureFixture[str]) -> None:
    device = _json(capsys, str(FIXTURES / "fragmented.pickle"))
    failure = device["failure"]
    assert failure["is_fragmentation"]
    assert failure["contents"]["split_bytes"] == 165 * MIB
    assert failure["contents"]["largest_free_bytes"] == 9 * MIB
    passing = {remedy["name"] for remedy in device["remedies"] if remedy["completes"]}
    assert "expandable segments" in passing
    assert "empty cache" not in passing


def test_the_page_says_why_and_what_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshot", str(FIXTURES / "fragmented.pickle")]) == 0
    page = capsys.readouterr().out
    assert "Out of memory at event 75: 120 MiB requested" in page
    assert "Fragmentation: all free memory together is 265 MiB" in page
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in page
    assert "train.py:21" in page
    assert page.count("split limit") == 1


def test_a_history_that_is_cut_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshot", str(FIXTURES / "ring_cut.pickle")]) == 0
    page = capsys.readouterr().out
    assert "the history before them is cut" in page
    assert "addresses, all segments and all last blocks are as recorded" in page


@pytest.mark.parametrize("name", ["torch_2_0.pickle", "expandable.json.xz"])
def test_snapshots_of_any_form_are_examined(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    device = _json(capsys, str(FIXTURES / name))
    assert device["failure"] is None
    assert device["replay"]["agrees"]
    assert device["peak_reserved_bytes"] >= device["peak_allocated_bytes"] > 0
    assert (
        sum(device["peak"]["by_kind"].values()) + device["peak"]["rounding_bytes"] == device["peak"]["allocated_bytes"]
    )


def test_kinds_follow_from_stacks_and_lifetimes(
    capsys: pytest.CaptureFixture[str], public_table: Callable[[str], Path]
) -> None:
    folder = public_table("snapshots")
    (path,) = folder.glob("niuhuangxiaozi_forward_and_backward_memory_snapshot_200_cee681*")
    kinds = _json(capsys, str(path))["peak"]["by_kind"]
    assert kinds["workspace"] == 2 * 8519680
    assert kinds["activations"] > 600 * MIB


def test_bad_files_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.pickle"
    bad.write_bytes(pickle.dumps([{"address": 0}]))
    for words in ([str(bad)], [str(tmp_path / "absent")], [str(tmp_path)], [str(bad), "--device", "nothing"]):
        assert main(["snapshot", *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith("vramcast snapshot: expected ")
        assert len(error.strip().splitlines()) == 1
