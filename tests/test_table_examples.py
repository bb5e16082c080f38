"""Examples with layer tables alone: of measured rows, of builds with tables, and with the parts of simulated peaks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from synthetic_examples import mlp_examples, mlp_spec

from vramcast.dataset_builder.rows import Provenance, Row
from vramcast.dataset_builder.store.journal import JournalWriter
from vramcast.dataset_builder.store.tables import TableWriter
from vramcast.dataset_builder.table_store import TableStore
from vramcast.errors import UserError
from vramcast.jobs.job import detailed_table_of
from vramcast.models.buckets import Buckets
from vramcast.models.estimators.classifiers import NetworkClassifier, NetworkSettings
from vramcast.models.estimators.fitting import PlainFitter
from vramcast.models.estimators.labels import PARTS, part_gaps
from vramcast.models.examples import without_details
from vramcast.models.features import feature_set
from vramcast.train.table_examples import built_with_tables, measured_with_tables
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.measurement import Measurement, Status

PARTS_BYTES = {name: index * MIB for index, name in enumerate(PARTS)}


def row_of(spec, backend="virtual", origin="simulated", **more):
    measurement = Measurement(
        status=Status.OK, reserved_bytes=80 * MIB, device_used_bytes=500 * MIB, breakdown=PARTS_BYTES
    )
    provenance = Provenance(origin=origin, backend=backend, device="a100_40gb", versions={}, seed=None, time="")
    return Row(spec, None, measurement, provenance, **more)


@pytest.fixture
def build(tmp_path, no_sync):
    specs = [mlp_spec(width=256, batch=32), mlp_spec(width=256, batch=64)]
    need = Measurement(status=Status.OK, reserved_bytes=80 * MIB, device_used_bytes=700 * MIB)
    with TableWriter(tmp_path) as tables, JournalWriter(tmp_path, {}) as journal:
        tables.append(specs[0], detailed_table_of(specs[0]))
        journal.append(row_of(specs[0], needs={"t4": need}))
        journal.append(row_of(specs[1]))
    return tmp_path


def test_rows_of_a_build_are_examples_on_each_device(build):
    examples = list(built_with_tables(str(build)))
    assert [example.source for example in examples] == ["a100_40gb", "t4", "a100_40gb"]
    assert [example.measured.used_bytes // MIB for example in examples] == [500, 700, 500]
    assert len({example.group for example in examples}) == 1  # one network, so one architecture
    assert examples[0].measured.parts == PARTS_BYTES
    assert examples[0].schedule.table is examples[2].schedule.table
    assert all(layer.saved is not None for layer in examples[0].layers)


def test_a_build_without_rows_is_an_error(tmp_path):
    with JournalWriter(tmp_path, {}):
        pass
    (tmp_path / "tables.jsonl").touch()
    with pytest.raises(UserError, match="expected rows with layer tables in"):
        list(built_with_tables(str(tmp_path)))


def test_tables_of_measured_rows_are_made_once(tmp_path, monkeypatch):
    rows = [row_of(mlp_spec(width=128, batch=batch), "nvidia-smi", "measured") for batch in (8, 16)]
    first = measured_with_tables(rows, str(tmp_path))
    monkeypatch.setattr("vramcast.dataset_builder.table_store.detailed_table_of", lambda spec: 1 / 0)
    second = measured_with_tables(rows, str(tmp_path))
    assert [example.layers for example in first] == [example.layers for example in second]
    assert first[0].measured.parts is None


def test_a_network_that_cannot_be_built_is_left_out(tmp_path, capsys):
    spec = replace(mlp_spec(), family="timm", network={"name": "no_such_network", "input_shape": [3, 8, 8]})
    assert TableStore(tmp_path).tables([spec]) == {}
    assert "has no layer table" in capsys.readouterr().err


def test_an_example_without_details_has_the_same_layers(build):
    detailed = next(built_with_tables(str(build)))
    plain = without_details(detailed)
    assert [layer.basis for layer in plain.layers] == [layer.basis for layer in detailed.layers]
    assert {layer.saved for layer in plain.layers} == {None}
    assert plain.label == detailed.label
    numbers = feature_set("schedule").numbers
    assert (numbers(detailed)["tells_saved"], numbers(plain)["tells_saved"]) == (1.0, 0.0)


def test_parts_are_learned_where_labels_tell_them():
    examples = mlp_examples(40)
    with_parts = [
        replace(example, label=replace(example.measured, parts=PARTS_BYTES)) if index % 2 else example
        for index, example in enumerate(examples)
    ]
    gaps = part_gaps(with_parts, feature_set("layers"))
    told = np.isfinite(gaps).all(axis=1)
    assert told.tolist() == [bool(index % 2) and item.measured.fits for index, item in enumerate(with_parts)]
    settings = NetworkSettings(features="layers", width=8, blocks=1, parts_weight=0.5)
    classifier = NetworkClassifier(settings, PlainFitter(epochs=2)).fit(with_parts[:30], with_parts[30:])
    restored = NetworkClassifier.from_state(classifier.state())
    buckets = Buckets(250 * MIB, 1000 * MIB)
    np.testing.assert_array_equal(
        restored.predict_proba(examples, buckets), classifier.predict_proba(examples, buckets)
    )
    last = classifier.network_.body.last[1]
    assert last.bias.shape == (3 * settings.components + 1 + len(PARTS),)
    assert torch.isfinite(last.bias).all()
