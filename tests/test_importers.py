"""Importing public measurements as rows, with statuses by rules."""

import csv
from collections import Counter

import pytest

from vramcast.dataset_builder.store import read_journal
from vramcast.dataset_builder.store.importers import import_file, read_rows
from vramcast.errors import UserError
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.measurement import VARYING, Status

MLP = "input:20_output:4_depth:2_arch:uniform_batch:8.out"
NORM = "input:20_output:{o}_depth:2_arch:uniform_batch:{b}_act:relu_dropout:0.2_dropout:True_batchnorm:True.out"
CNN = (
    "input_channels:3_num_classes:5_depth:28_arch:dense_base_filters:9_batch:4_input_size:{s}"
    "_act:relu_dropout:0.2_dropout:False_batchnorm:False.out"
)
PEAK = "Max GPU Memory (MiB)"


def table(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def line(name, peak=1500, layers="[('linear', 4, 5)]", **more):
    return {"Filename": name, "Activations-Params": layers, PEAK: peak, **more}


def test_a_measured_row_keeps_its_value_and_its_source(tmp_path):
    (row,) = read_rows(table(tmp_path / "set.csv", [line(MLP, 1479)]))
    assert row.measurement.status is Status.OK
    assert row.measurement.device_used_bytes == 1479 * MIB
    assert row.provenance.origin == "measured"
    assert row.provenance.device == "a100_40gb_gpumemnet_2024"
    assert "set.csv" in row.provenance.source
    assert "CC BY 4.0" in row.provenance.source
    assert row.static.parameter_bytes == 4 * (2 * (20 * 20 + 20) + 20 * 4 + 4)
    assert row.spec.training.dry_run_batch_size == 2


@pytest.mark.parametrize(
    ("record", "status", "evidence"),
    [
        (line(MLP, Status="OOM_CRASH"), Status.OOM, "out of memory"),
        (line(MLP.replace("output:4", "output:1")), Status.CRASHED, "do not match"),
        (line(NORM.format(o=1, b=8), layers="[('Sigmoid', 1, 0)]"), Status.OK, None),
        (line(NORM.format(o=4, b=9)), Status.CRASHED, "BatchNorm1d at '0.1'"),  # 4096 = 455 x 9 + 1
        (line(CNN.format(s=6), 0, "[]", **{"Conv2d Count": 0}), Status.CRASHED, "before CUDA starts"),
    ],
)
def test_failed_runs_are_found_by_rule(tmp_path, record, status, evidence):
    (row,) = read_rows(table(tmp_path / "set.csv", [record]))
    assert row.measurement.status is status
    assert evidence is None or evidence in row.measurement.evidence


def test_settings_missing_from_the_file_name_are_recovered(tmp_path):
    counts = {}
    for count in range(20, 40):
        (row,) = read_rows(table(tmp_path / "set.csv", [line(CNN.format(s=64), **{"Conv2d Count": count})]))
        counts[count] = row.spec.network.get("transition_every")
    assert 5 in counts.values()
    assert None in counts.values()
    (row,) = read_rows(table(tmp_path / "set.csv", [line(NORM.format(o=1, b=8), layers="[('Identity', 1, 0)]")]))
    assert row.spec.network["head"] == "identity"


def test_the_timm_table_keeps_its_classes_apart(tmp_path):
    known = {"model": "resnet18", "max_gpu_mem_mib": 3000, "num_classes": 1000, "timm_default_input": "[3, 224, 224]"}
    classes = ["usable", "near_capacity", "probable_OOM_or_crash", "crash_label_mismatch(num_classes<1000)"]
    records = [{**known, "batch_size": 8 + i, "row_class": name} for i, name in enumerate(classes)]
    rows = list(read_rows(table(tmp_path / "timm.csv", records)))
    assert [row.measurement.status.value for row in rows] == ["ok", "censored", "crashed", "crashed"]
    assert {row.spec.group for row in rows} == {rows[0].spec.group}
    assert rows[0].spec.training.optimizer == "SGD(momentum=0.9, nesterov=True, weight_decay=2e-05)"


def test_importing_twice_adds_nothing(tmp_path):
    path = table(tmp_path / "set.csv", [line(MLP), line(NORM.format(o=4, b=8))])
    assert "2 rows added" in import_file(path, tmp_path / "rows")
    assert "0 rows added" in import_file(path, tmp_path / "rows")
    assert len(read_journal(tmp_path / "rows").rows) == 2


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a,b\n1,2\n", "expected the columns of a public table"),
        (f'Filename,Activations-Params,{PEAK}\nnonsense.out,"[]",5\n', r"set.csv:2, found: expected a file name"),
        (f'Filename,Activations-Params,{PEAK}\n{MLP},"[]",lots\n', "set.csv:2"),
        (f'Filename,Activations-Params,{PEAK}\n{MLP.replace("output:4", "output:1")},"[]",5\n', "set.csv:2"),
        ("", "expected the columns"),
    ],
)
def test_a_file_that_is_no_table_is_one_error(tmp_path, text, sentence):
    path = tmp_path / "set.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=sentence):
        list(read_rows(path))


def test_a_missing_table_is_one_error(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        list(read_rows(tmp_path / "none.csv"))


@pytest.mark.parametrize(
    ("file", "unknown"),
    [
        ("gpumemnet/mlp_data_step1.csv", 0),
        ("gpumemnet/mlp_data_step2.csv", 0),
        ("gpumemnet/cnn_data_step1.csv", 0),
        ("gpumemnet/transformer_data_sample.csv", 0),
        ("realworld/timm_sgd_a100.csv", None),
    ],
)
def test_every_public_row_is_read(public_table, public_rows, file, unknown):
    records = public_rows(file)
    rows = list(read_rows(public_table(file)))
    assert len(rows) == len(records)
    counts = Counter(row.measurement.status for row in rows)
    assert counts[Status.OK] > 0.75 * len(rows)
    assert counts[Status.OOM] == sum(record.get("Status", "").startswith("OOM") for record in records)
    if unknown is not None:
        assert sum(row.static is None for row in rows) == unknown
    assert len({row.spec.id for row in rows}) == len(rows)


def _real(name, **more):
    cells = {"model": name, "batch_size": 32, "input": "3x224x224", "classes": "1000.0", "actual_mib_2024": 5262}
    return {**cells, "carma2025_mib": "3934.0", "aegis2026_mib": "", "rtx2080ti_mib": "3560.0", **more}


def test_a_job_measured_on_several_stacks_has_a_row_for_each(tmp_path):
    rows = list(read_rows(table(tmp_path / "real.csv", [_real("resnet50")])))
    columns = [(row.provenance.device, row.provenance.time, row.measurement.device_used_bytes // MIB) for row in rows]
    assert columns == [
        ("a100_40gb_gpumemnet_2024", "2024", 5262),
        ("a100_40gb", "2025", 3934),
        ("rtx_2080ti", "2026", 3560),
    ]
    assert {row.spec.id for row in rows} == {rows[0].spec.id}
    assert rows[0].spec.family == "torchvision"


def test_jobs_on_two_gpus_are_left_out(tmp_path):
    language = {"input": "seq512", "classes": ""}
    lines = [_real("gpt2_large", **language), _real("BERT_base", **language)]
    rows = list(read_rows(table(tmp_path / "real.csv", lines)))
    assert {row.spec.network["architecture"] for row in rows} == {"BertForMaskedLM"}
    assert rows[0].spec.training.loss == "own"
    assert rows[0].spec.network["sequence"] == 512


def test_networks_whose_batches_are_padded_to_their_longest_line_are_marked(tmp_path):
    language = {"input": "seq512", "classes": ""}
    path = table(tmp_path / "real.csv", [_real("xlnet_base", **language), _real("BERT_base", **language)])
    marked = {row.spec.network["architecture"]: row.measurement.notes for row in read_rows(path)}
    assert [VARYING in notes for notes in marked.values()] == [True, False]


def test_a_journal_takes_the_rows_of_one_stack(tmp_path):
    path = table(tmp_path / "real.csv", [_real("resnet50"), _real("vgg16")])
    assert "2 rows added" in import_file(path, tmp_path / "first")
    assert read_journal(tmp_path / "first").rows[0].provenance.device == "a100_40gb_gpumemnet_2024"
    import_file(path, tmp_path / "clean", "a100_40gb")
    assert read_journal(tmp_path / "clean").rows[0].measurement.device_used_bytes == 3934 * MIB
    with pytest.raises(UserError, match=r"expected --device to be one of .*'rtx_2080ti'.*, found 't4'"):
        import_file(path, tmp_path / "none", "t4")
