"""The space of all networks: its draws, its parts without a filter, and rows of many batch sizes and devices."""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from vramcast.dataset_builder.backends.swept import SweptBackend, SweptSettings, TooSlow, time_limit
from vramcast.dataset_builder.executors import SerialExecutor
from vramcast.dataset_builder.pipeline import Build, run
from vramcast.dataset_builder.rows import Row
from vramcast.dataset_builder.samplers.mixed import MixedSampler
from vramcast.dataset_builder.samplers.uniform import UniformSampler
from vramcast.dataset_builder.space import parse_space
from vramcast.dataset_builder.store import JournalWriter, iter_records
from vramcast.dataset_builder.store.splits import make_wide_split
from vramcast.dataset_builder.store.tables import TABLES_NAME, read_tables, table_key
from vramcast.dataset_builder.store.views import to_frame
from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.jobs.families.external import build_external
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.measurement import Status
from vramcast.virtual_gpu.training.setup import TrainingSetup

PARTS = {
    "mlp": {
        "name": "mlp",
        "family": "mlp",
        "factors": [["depth", {"int": [1, 4]}], ["batch", {"choice": [16, 64]}]],
        "network": {"arch": "uniform", "input_features": 8, "output_features": 4, "depth": "=depth"},
        "training": {"batch_size": "=batch"},
    },
    "recurrent": {
        "name": "recurrent",
        "family": "recurrent",
        "factors": [["hidden", {"choice": [8, 16]}], ["batch", {"choice": [8, 32]}]],
        "network": {"cell": "GRU", "embedding": 8, "hidden": "=hidden", "layers": 1, "classes": 3, "vocabulary": 20,
                    "sequence": 5},
        "training": {"batch_size": "=batch"},
    },
}  # fmt: skip
MIXTURE: Mapping[str, Any] = {
    "name": "few", "parts": PARTS, "weights": {"mlp": 3, "recurrent": 1}, "drawn": ["recurrent"],
}  # fmt: skip


def build_of(out: Path, n: int = 4) -> Build:
    space = parse_space(MIXTURE)
    profiles = [load_profile(name) for name in ("a100_40gb", "rtx_4090", "t4")]
    backend = SweptBackend(profiles, SweptSettings(batches=4, others=1))
    return Build(space, MixedSampler(UniformSampler()), backend, n, 0, out, {"n": n})


def rows_of(out: Path) -> list[Row]:
    return [item for item in iter_records(out) if isinstance(item, Row)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rows")
    run(build_of(out), SerialExecutor(), lambda _: None, lambda _: None)
    return out


def test_the_parts_of_a_mixture_come_by_their_weights_and_in_random_order() -> None:
    space = parse_space(MIXTURE)
    drawn = [item["part"] for item in islice(MixedSampler(UniformSampler()).candidates(space, 0), 400)]
    assert 0.68 < drawn.count("mlp") / 400 < 0.82
    assert "recurrent" in drawn[:20]
    again = [item["part"] for item in islice(MixedSampler(UniformSampler()).candidates(space, 0), 400)]
    assert drawn == again


@pytest.mark.parametrize(
    "change", [{"weights": {"mlp": 1}}, {"weights": {"mlp": 0, "recurrent": 0}}, {"drawn": ["cnn"]}, {"parts": {}}]
)
def test_bad_mixtures_are_refused(change: Mapping[str, Any]) -> None:
    with pytest.raises(UserError, match="change the space"):
        parse_space({**MIXTURE, **change})


def test_a_network_has_rows_of_several_batch_sizes_and_devices(built: Path) -> None:
    rows, tables = rows_of(built), dict(read_tables(built))
    assert len({row.spec.id for row in rows}) == len(rows) > 8
    assert {row.measurement.status for row in rows} == {Status.OK}
    assert {row.provenance.device for row in rows} == {"a100_40gb"}
    assert {device for row in rows for device in row.needs} == {"rtx_4090", "t4"}
    for row in rows:
        table = tables[table_key(row.spec)]
        assert row.static is not None
        assert row.static.parameter_bytes == 4 * table.parameters
        assert all(layer.saved is not None for layer in table.layers)
        for need in row.needs.values():
            assert need.device_used_bytes == sum(need.breakdown.values())


def test_a_killed_build_loses_and_repeats_no_row(built: Path, tmp_path: Path) -> None:
    lines = (built / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "journal.jsonl").write_bytes(b"".join(lines[:4]) + lines[4][:50])  # in the midst of a network
    packed = (built / TABLES_NAME).read_bytes()
    (tmp_path / TABLES_NAME).write_bytes(packed[: len(packed) // 2])
    run(build_of(tmp_path), SerialExecutor(), lambda _: None, lambda _: None)
    again = {row.spec.id: row.measurement.reserved_bytes for row in rows_of(tmp_path)}
    assert again == {row.spec.id: row.measurement.reserved_bytes for row in rows_of(built)}
    assert len(rows_of(tmp_path)) == len(again)
    assert {table_key(row.spec) for row in rows_of(tmp_path)} <= dict(read_tables(tmp_path)).keys()


def test_rows_of_several_devices_pass_through_the_journal_and_the_view(built: Path, tmp_path: Path) -> None:
    row = next(row for row in rows_of(built) if "t4" in row.needs)
    with JournalWriter(tmp_path, {}) as journal:
        journal.append(row)
    assert rows_of(tmp_path) == [row]
    frame = to_frame([row])
    assert frame["needs.t4.device_used_bytes"][0] == row.needs["t4"].device_used_bytes
    assert frame["needs.t4.status"][0] == "ok"


def test_a_network_that_cannot_be_trained_is_an_outcome() -> None:
    spec = Spec(
        "recurrent", {**PARTS["recurrent"]["network"], "hidden": 8}, TrainingSetup(batch_size=4, checkpointing=True)
    )  # type: ignore[dict-item]
    result = build_of(Path()).backend.measure(spec)
    assert result.measurement.status is Status.CRASHED
    assert "leave out checkpointing" in str(result.measurement.evidence)


def test_a_network_that_takes_long_is_given_up() -> None:
    with pytest.raises(TooSlow, match=r"more than 0\.05 s of CPU time"), time_limit(0.05):
        while True:
            pass


FORMS = {
    "unet": {"width": 8, "levels": 3, "size": 32, "classes": 2},
    "random": {"kind": "image", "seed": 3, "nodes": 20, "width": 8, "size": 16, "classes": 5},
    "recurrent": {"cell": "LSTM", "embedding": 8, "hidden": 8, "layers": 2, "bidirectional": True, "every_word": True,
                  "classes": 7, "vocabulary": 20, "sequence": 6},
}  # fmt: skip


@pytest.mark.parametrize("family", FORMS)
def test_networks_of_our_own_forms_are_trained_and_equal_for_one_description(family: str) -> None:
    backend = SweptBackend([load_profile("a100_40gb")], SweptSettings(batches=2))
    loss = "bce_with_logits" if family == "unet" else "cross_entropy"
    result = backend.measure(Spec(family, FORMS[family], TrainingSetup(batch_size=4, loss=loss)))
    assert result.measurement.status is Status.OK
    assert result.table is not None
    shapes = [[item.shape for item in build_external(family, FORMS[family])[0].parameters()] for _ in range(2)]
    assert shapes[0] == shapes[1]


def test_random_networks_of_several_seeds_differ() -> None:
    made = [build_external("random", {**FORMS["random"], "kind": kind, "seed": seed})[0]
            for kind in ("image", "sequence") for seed in range(6)]  # fmt: skip
    assert len({str(item) for item in made}) == 12


def test_a_split_by_a_wider_unit_keeps_it_together() -> None:
    units = {f"group{index}": f"unit{index % 7}" for index in range(50)}
    split = make_wide_split(units, {"train": 0.6, "test": 0.4}, seed=1)
    parts = {name: {units[group] for group in groups} for name, groups in split.parts.items()}
    assert not parts["train"] & parts["test"]
    assert sum(map(len, split.parts.values())) == 50
