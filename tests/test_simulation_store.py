"""Simulations are computed once, stored by what decides them, and become examples with the labels of rows."""

import io
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from synthetic_examples import PROFILE, cnn_spec, mlp_spec
from torch import nn

from vramcast.dataset_builder import simulation_store
from vramcast.dataset_builder.backends.virtual import VirtualBackend
from vramcast.dataset_builder.executors import LocalExecutor
from vramcast.dataset_builder.rows import Provenance, Row
from vramcast.dataset_builder.simulation_store import SimulationStore
from vramcast.dataset_builder.store import read_journal
from vramcast.dataset_builder.store.lines import HEADER, encode_line
from vramcast.errors import UserError
from vramcast.jobs.job import table_of
from vramcast.jobs.plan import InputTensor
from vramcast.jobs.spec import Spec
from vramcast.models.examples import example_of_row, examples_of_rows
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.training.setup import TrainingSetup

MIB = 2**20
SPECS = [mlp_spec(width=64), mlp_spec(width=80), cnn_spec()]


def row(spec, used_mib=500, status=Status.OK, device="plain"):
    provenance = Provenance(origin="measured", backend="x", device=device, versions={}, seed=None, time="2024")
    return Row(spec, None, Measurement(status=status, device_used_bytes=used_mib * MIB), provenance)


@pytest.fixture
def computed(monkeypatch):
    """The ids of specs that were simulated, in this process."""
    seen = []

    def run(self, backend, specs):
        for spec in specs:
            seen.append(spec.id)
            yield spec, backend.measure(spec)

    monkeypatch.setattr(LocalExecutor, "run", run)
    return seen


def test_nothing_is_computed_twice(computed, tmp_path):
    first = SimulationStore(tmp_path, workers=1).measure(SPECS[:2], PROFILE)
    assert len(computed) == 2
    second = SimulationStore(tmp_path, workers=1).measure(SPECS, PROFILE)
    assert computed == [spec.id for spec in SPECS]
    assert {key: second[key] for key in first} == first
    assert second[SPECS[0].id].reserved_bytes == VirtualBackend(PROFILE).measure(SPECS[0]).measurement.reserved_bytes


def test_another_profile_or_another_virtual_gpu_is_computed_anew(computed, tmp_path, monkeypatch):
    cache = SimulationStore(tmp_path, workers=1)
    cache.measure(SPECS[:1], PROFILE)
    cache.measure(SPECS[:1], replace(PROFILE, context_mib=201))
    assert len(computed) == 2
    monkeypatch.setattr(simulation_store, "simulation_versions", lambda family: {"virtual_gpu": 0})
    cache.measure(SPECS[:1], PROFILE)
    assert len(computed) == 3


def test_a_release_of_a_library_invalidates_its_own_networks_alone(monkeypatch):
    def versions_of(family, release):
        simulation_store.simulation_versions.cache_clear()
        monkeypatch.setattr(simulation_store, "_installed", lambda name: release if name == "transformers" else "1")
        return simulation_store.simulation_versions(family)

    try:
        for family, changes in (("mlp", False), ("timm", False), ("hf", True), ("script", True)):
            assert (versions_of(family, "4") != versions_of(family, "5")) == changes, family
    finally:
        simulation_store.simulation_versions.cache_clear()


def test_the_cache_of_the_user_is_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("VRAMCAST_CACHE", raising=False)
    assert SimulationStore().directory == tmp_path / "vramcast" / "simulations"
    monkeypatch.setenv("VRAMCAST_CACHE", str(tmp_path / "own"))
    assert SimulationStore().directory == tmp_path / "own" / "simulations"


def test_an_interrupted_computation_keeps_what_it_had(computed, tmp_path, monkeypatch):
    def run(self, backend, specs):
        yield specs[0], backend.measure(specs[0])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(LocalExecutor, "run", run)
        with pytest.raises(KeyboardInterrupt):
            SimulationStore(tmp_path, workers=1).measure(SPECS, PROFILE)
    SimulationStore(tmp_path, workers=1).measure(SPECS, PROFILE)
    assert computed == [spec.id for spec in SPECS[1:]]


def test_what_cannot_be_simulated_is_told_and_left_out(tmp_path, monkeypatch, capsys):
    def run(self, backend, specs):
        for spec in specs:
            yield spec, replace(backend.measure(spec), measurement=Measurement(status=Status.CRASHED, evidence="odd"))

    monkeypatch.setattr(LocalExecutor, "run", run)
    assert SimulationStore(tmp_path, workers=1).measure(SPECS[:1], PROFILE) == {}
    assert "was not simulated: odd" in capsys.readouterr().err


def test_rows_become_examples(computed, tmp_path):
    rows = [row(SPECS[0]), row(SPECS[1], 900, Status.OOM), row(SPECS[2], status=Status.CRASHED)]
    first, second = examples_of_rows(rows, {"plain": PROFILE}, SimulationStore(tmp_path, workers=1))
    assert (first.id, first.group, first.family) == (SPECS[0].id, SPECS[0].group, "mlp")
    assert (first.label.used_bytes, first.label.fits) == (500 * MIB, True)
    assert not second.label.fits
    assert first.overhead_bytes == 200 * MIB
    assert first.capacity_bytes == 1000 * MIB
    measured = VirtualBackend(PROFILE).measure(SPECS[0]).measurement
    assert replace(first.simulated, seconds=None) == replace(measured, seconds=None)


def test_convolutions_bring_their_library(computed, tmp_path):
    found = examples_of_rows([row(SPECS[2])], {"plain": PROFILE}, SimulationStore(tmp_path, workers=1))
    assert found[0].overhead_bytes == 250 * MIB
    assert example_of_row(row(SPECS[2]), PROFILE, None).overhead_bytes == 250 * MIB


def test_without_a_cache_nothing_is_simulated():
    assert examples_of_rows([row(SPECS[0])], {"plain": PROFILE}, None)[0].simulated is None


def test_a_device_without_a_profile_gets_a_sentence():
    with pytest.raises(UserError, match="expected a device profile for 'abacus'"):
        examples_of_rows([row(SPECS[0], device="abacus")], {"plain": PROFILE}, None)


def test_networks_of_other_libraries_are_looked_at(monkeypatch):
    def build(family, network):
        with torch.device("meta"):
            return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten()), (InputTensor((3, 6, 6)),)

    monkeypatch.setattr("vramcast.jobs.job.build_external", build)
    example = example_of_row(row(Spec("timm", {"name": "any"}, TrainingSetup(batch_size=4))), PROFILE, None)
    assert example.family == "timm"
    assert [layer.kind for layer in example.layers] == ["Conv2d", "ReLU", "Flatten"]
    assert example.overhead_bytes == 250 * MIB


RESNET = Spec("timm", {"name": "resnet10t", "input_shape": [3, 32, 32], "num_classes": 10}, TrainingSetup(batch_size=4))


def test_tables_of_libraries_are_stored_and_those_of_generated_networks_are_not(computed, tmp_path, monkeypatch):
    pytest.importorskip("timm")
    larger = replace(RESNET, training=TrainingSetup(batch_size=8))
    found = SimulationStore(tmp_path).simulate([RESNET, larger, SPECS[0]], PROFILE)
    assert {key: item.table for key, item in found.items()} == {
        spec.id: table_of(spec) for spec in (RESNET, larger, SPECS[0])
    }
    assert len(list((tmp_path / "tables").iterdir())) == 1
    monkeypatch.setattr("vramcast.dataset_builder.simulation_store.table_of", None)
    assert SimulationStore(tmp_path).simulate([larger], PROFILE)[larger.id].table == found[larger.id].table
    assert len(computed) == 3


def test_a_lost_table_is_made_again(computed, tmp_path):
    pytest.importorskip("timm")
    SimulationStore(tmp_path).simulate([RESNET], PROFILE)
    (path,) = (tmp_path / "tables").iterdir()
    path.unlink()
    assert SimulationStore(tmp_path).simulate([RESNET], PROFILE)[RESNET.id].table == table_of(RESNET)
    assert len(computed) == 2


def damaged(path, old, new):
    """Change a file so that it stays JSON, as a fault of the disk might."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize("content", ["", "{", '{"layers": []}\n', "[1]", "[" * 10**5, "x" * 9, None])
def test_a_damaged_table_is_made_again(content, computed, tmp_path, capsys):
    pytest.importorskip("timm")
    SimulationStore(tmp_path).simulate([RESNET], PROFILE)
    (path,) = (tmp_path / "tables").iterdir()
    if content is None:
        damaged(path, '"parameters":', '"parameters":1')
    else:
        path.write_text(content)
    assert SimulationStore(tmp_path).simulate([RESNET], PROFILE)[RESNET.id].table == table_of(RESNET)
    assert len(computed) == 2
    assert capsys.readouterr().err.count("is damaged: it is made again") == 1
    SimulationStore(tmp_path).simulate([RESNET], PROFILE)
    assert len(computed) == 2


def test_a_table_of_an_earlier_release_is_read(computed, tmp_path):
    pytest.importorskip("timm")
    SimulationStore(tmp_path).simulate([RESNET], PROFILE)
    (path,) = (tmp_path / "tables").iterdir()
    path.write_text(json.dumps(table_of(RESNET).to_json()))
    assert SimulationStore(tmp_path).simulate([RESNET], PROFILE)[RESNET.id].table == table_of(RESNET)
    assert len(computed) == 1


def spoil_header(lines):
    return [b"{}\n", *lines[1:]]


def spoil_row(lines):
    return [lines[0], lines[1].replace(b'"reserved_bytes":', b'"reserved_bytes":9'), *lines[2:]]


def cut_last(lines):
    return [*lines[:-1], lines[-1][:-9]]


def other_schema(lines):
    return [encode_line(HEADER, {"schema": 99, "build": {}}), *lines[1:]]


@pytest.mark.parametrize(
    ("spoil", "lost", "again"),
    [(spoil_header, 1, 0), (spoil_row, 1, 1), (cut_last, 1, 1), (other_schema, 3, 2), (lambda _: [b"\n"], 1, 2)],
)
def test_a_damaged_journal_loses_its_damaged_lines_alone(spoil, lost, again, computed, tmp_path, capsys):
    first = SimulationStore(tmp_path, workers=1).measure(SPECS[:2], PROFILE)
    (journal,) = tmp_path.glob("*/journal.jsonl")
    journal.write_bytes(b"".join(spoil(journal.read_bytes().splitlines(keepends=True))))
    del computed[:]
    more = [*SPECS[:2], mlp_spec(width=96)]
    second = SimulationStore(tmp_path, workers=1).measure(more, PROFILE)
    assert len(computed) == again + 1
    assert {key: replace(second[key], seconds=None) for key in first} == {
        key: replace(item, seconds=None) for key, item in first.items()
    }
    assert f"note: {lost} lines of {journal} are damaged: their simulations are made again" in capsys.readouterr().err
    assert SimulationStore(tmp_path, workers=1).measure(more, PROFILE) == second
    assert len(computed) == again + 1
    assert len(read_journal(journal).rows) == 3


def test_a_second_process_waits_and_shares(computed, tmp_path, monkeypatch):
    # Not capsys: its readouterr drops what another thread writes between its read and its truncation.
    monkeypatch.setattr(sys, "stderr", notes := io.StringIO())
    begun, go_on = threading.Event(), threading.Event()
    run = LocalExecutor.run

    def slow(self, backend, specs):
        begun.set()
        assert go_on.wait(20)
        yield from run(self, backend, specs)

    monkeypatch.setattr(LocalExecutor, "run", slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(SimulationStore(tmp_path, workers=1).measure, SPECS[:1], PROFILE)
        assert begun.wait(20)
        second = pool.submit(SimulationStore(tmp_path, workers=1).measure, SPECS[:1], PROFILE)
        while "waiting until it ends" not in notes.getvalue():
            assert not second.done()
            time.sleep(0.01)
        go_on.set()
        assert first.result() == second.result()
    assert len(computed) == 1
    assert f"note: another vramcast (process {os.getpid()} on " in notes.getvalue()
    assert "out=" not in notes.getvalue()


def test_a_cache_that_cannot_be_written_is_named_without_an_option(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"expected to write at .*; choose another directory for the cache"):
        SimulationStore(tmp_path / "file", workers=1).measure(SPECS[:1], PROFILE)


def test_a_job_that_does_not_fit_is_also_simulated_without_a_limit(computed, tmp_path):
    least_mib = PROFILE.driver_mib + PROFILE.overhead_bytes(convolutions=False) // MIB
    store, small = SimulationStore(tmp_path), replace(PROFILE, total_mib=least_mib + 1)
    (bounded,) = store.simulate(SPECS[:1], small).values()
    assert bounded.peaks[small.name].bounded.status is Status.OOM
    assert bounded.peaks[small.name].unbounded is None
    (simulation,) = store.simulate(SPECS[:1], small, unbounded=True).values()
    need = simulation.peaks[small.name].unbounded
    assert need is not None
    assert need.status is Status.OK
    assert MIB < need.reserved_bytes < 2**40
    (fitting,) = store.simulate(SPECS[:1], PROFILE, unbounded=True).values()
    assert fitting.peaks[PROFILE.name].unbounded == fitting.peaks[PROFILE.name].bounded
