"""Builds from end to end: complete, resumed, extended, interrupted and killed."""

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from vramcast.commands.build.build_command import main
from vramcast.dataset_builder.backends.static import StaticBackend
from vramcast.dataset_builder.executors import SerialExecutor
from vramcast.dataset_builder.pipeline import COVERAGE_NAME, Build, find_assignments, run
from vramcast.dataset_builder.samplers import make_sampler
from vramcast.dataset_builder.space import parse_space
from vramcast.dataset_builder.store import read_journal
from vramcast.dataset_builder.store.summary import Summary, kind_of, summarise
from vramcast.virtual_gpu.measurement import Status

WORDS = ["space=gpumemnet_mlp_step2", "backend=static", "executor=serial", "seed=4"]
SPACE = {
    "name": "tiny",
    "family": "mlp",
    "factors": {"width": {"int": [4, 8]}, "batch": {"choice": [1, 2]}},
    "network": {"arch": "uniform", "input_features": "=width", "output_features": 2, "depth": 1, "norm": "batch"},
    "training": {"batch_size": "=batch"},
}


def ids(directory: Path) -> set[str]:
    return {row.spec.id for row in read_journal(directory).rows}


def make(out: Path, n: int, sampler: str = "uniform", **changed) -> Build:
    settings = {"space": {**SPACE, **changed}, "sampler": {"name": sampler}, "n": n}
    return Build(parse_space(settings["space"]), make_sampler(sampler), StaticBackend(), n, 0, out, settings)


def run_serially(build: Build):
    return run(build, SerialExecutor(), lambda row: None, lambda done: None)


def test_a_build_writes_rows_with_provenance_rejections_and_coverage(tmp_path, capsys):
    assert main([*WORDS, "n=60", f"out={tmp_path}"]) == 0
    journal = read_journal(tmp_path)
    assert len(journal.rows) == 60
    for row in journal.rows:
        assert row.measurement.status is Status.OK
        assert row.measurement.allocated_bytes == row.static.total_bytes
        assert row.measurement.device_used_bytes is None
        assert (row.provenance.origin, row.provenance.backend, row.provenance.seed) == ("static", "static", 4)
        assert set(row.provenance.versions) == {"python", "torch", "vramcast"}
        assert row.provenance.time.startswith("20")
    assert all("expected" in item.reason for item in journal.rejections)
    assert journal.header.build["space"]["name"] == "gpumemnet_mlp_step2"
    assert "# Coverage of 60 configurations" in (tmp_path / COVERAGE_NAME).read_text()
    output = capsys.readouterr()
    assert output.err.startswith("gpumemnet_mlp_step2: 60 configurations from an orthogonal array of ")
    assert re.match(
        r"60 rows \(0 resumed, \d+ configurations rejected\) in .*; they cover .*% of all pairs", output.out
    )


def test_the_same_command_adds_nothing_and_a_larger_n_extends(tmp_path, capsys):
    assert main([*WORDS, "n=40", f"out={tmp_path}"]) == 0
    before = (tmp_path / "journal.jsonl").read_bytes()
    assert main([*WORDS, "n=40", f"out={tmp_path}"]) == 0
    assert (tmp_path / "journal.jsonl").read_bytes() == before
    assert main([*WORDS, "n=55", f"out={tmp_path}"]) == 0
    assert (tmp_path / "journal.jsonl").read_bytes().startswith(before)
    assert len(ids(tmp_path)) == 55
    assert "55 rows (40 resumed" in capsys.readouterr().out


def test_all_executors_give_the_same_rows(tmp_path):
    for name in ("serial", "local"):
        assert main(["family=mlp", "backend=static", f"executor={name}", "n=50", f"out={tmp_path / name}"]) == 0
    rows = [
        {row.spec.id: row.measurement for row in read_journal(tmp_path / name).rows} for name in ("serial", "local")
    ]
    assert rows[0] == rows[1]


def test_an_exhausted_space_ends_with_a_note(tmp_path):
    result = run_serially(make(tmp_path, 100))
    assert result.rows == 4  # four widths with batch size 2: batch norm rejects a batch of 1
    assert result.rejected == 4
    assert "found 4 configurations that can run, fewer than n=100" in result.notes[0]


def test_a_space_in_which_nothing_can_run_is_rejected(tmp_path, capsys):
    words = [*WORDS, "n=5", f"out={tmp_path}", "+space.training.optimizer=LBFGS"]
    assert main(words) == 2
    assert "found none among" in capsys.readouterr().err


def test_coverage_can_be_computed_again_from_the_journal(tmp_path, capsys):
    assert main([*WORDS, "n=30", f"out={tmp_path}"]) == 0
    capsys.readouterr()
    assert main(["coverage", str(tmp_path), "--pairs", "0"]) == 0
    whole = capsys.readouterr().out
    assert whole == (tmp_path / COVERAGE_NAME).read_text()
    assert main(["coverage", str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(whole.splitlines()) - 36 + 10  # pairs of nine factors
    build = make(tmp_path / "tiny", 3)
    run_serially(build)
    assert len(find_assignments(build, ids(tmp_path / "tiny"))) == 3


def test_a_summary_counts_and_groups(tmp_path):
    run_serially(make(tmp_path, 100))
    journal = read_journal(tmp_path)
    summary = summarise([*journal.rows, *journal.rejections], bucket_mib=1).to_json()
    assert summary["rows"] == 4
    assert summary["statuses"] == {"ok": 4}
    assert summary["buckets"] == {"0": 4}
    assert summary["rejections"] == {"BatchNorm1d: expected N * prod(L) > 1": 4}
    assert kind_of("Conv2d at '0.1': expected H2 >= 1, found H2=0") == "Conv2d: expected H2 >= 1"


def test_a_long_tail_of_buckets_is_summarised_in_one_line():
    summary = Summary(bucket_mib=8, buckets=Counter(dict.fromkeys(range(50), 2)), families=Counter(mlp=100))
    bars = [line.split("#")[0].split() for line in summary.to_text().splitlines() if "#" in line]
    assert bars[:2] == [["0-8", "2"], ["8-16", "2"]]
    assert len(bars) == 20
    assert bars[-1] == ["152", "and", "more", "62"]
    assert len(summary.to_json()["buckets"]) == 50


def start(out: Path, *words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "vramcast", "build", "family=mlp", "backend=static", "n=400", f"out={out}", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_rows(process: subprocess.Popen, out: Path, count: int) -> None:
    journal = out / "journal.jsonl"
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if journal.exists() and journal.read_bytes().count(b'"type":"row"') >= count:
            return
        time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["serial", "local"])
def test_a_build_killed_at_random_points_ends_with_the_same_rows(tmp_path, executor):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    words = (f"executor={executor}",)
    assert start(whole, *words).wait() == 0
    rng = random.Random(5)
    kills, safe = 0, set()
    for target in sorted(rng.sample(range(1, 390), 3)):
        process = start(killed, *words)
        wait_for_rows(process, killed, target)
        time.sleep(rng.random() * 0.02)
        process.kill()
        kills += process.wait() == -signal.SIGKILL
        rows = ids(killed)
        assert safe <= rows
        safe = rows
    assert kills >= 2
    final = start(killed, *words)
    assert final.wait() == 0, final.stderr.read()
    assert ids(killed) == ids(whole)
    lines = (killed / "journal.jsonl").read_text().splitlines()
    keys = [record["id"] for record in map(json.loads, lines) if record["type"] != "header"]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_says_so_and_leaves_a_valid_journal(tmp_path, number):
    process = start(tmp_path)
    wait_for_rows(process, tmp_path, 20)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "the same command resumes the build" in errors
    assert "Traceback" not in errors
    assert 20 <= len(ids(tmp_path)) < 400


def test_a_directory_that_another_build_uses_is_rejected(tmp_path):
    first = start(tmp_path, "n=100000", "executor=serial")
    wait_for_rows(first, tmp_path, 1)
    try:
        second = start(tmp_path, "n=100000", "executor=serial")
        _, errors = second.communicate(timeout=60)
        assert second.returncode == 2
        assert errors.strip().splitlines()[-1].startswith("vramcast build: expected")
    finally:
        first.kill()
        first.communicate()
