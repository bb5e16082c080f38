"""Rows of the timm table that include a trial of cudnn.benchmark are marked, by a rule without estimates."""

from pathlib import Path

import pytest

from vramcast.dataset_builder.store.importers import read_rows
from vramcast.jobs.families.external import build_external
from vramcast.virtual_gpu.measurement import TRIAL, Status

HEAD = "model,batch_size,max_gpu_mem_mib,num_classes,timm_default_input,row_class"


def table(path: Path, *lines: tuple[str, int, int, str]) -> Path:
    rows = (f'{name},{batch},{peak},1000,"[3, 224, 224]",{kind}' for name, batch, peak, kind in lines)
    path.write_text("\n".join([HEAD, *rows]) + "\n")
    return path


def test_a_row_above_a_larger_batch_is_marked(tmp_path: Path) -> None:
    path = table(
        tmp_path / "timm.csv",
        ("resnet18", 8, 7000, "usable"),
        ("resnet18", 16, 2400, "usable"),
        ("resnet18", 32, 3000, "usable"),
        ("resnet34", 8, 3020, "usable"),  # within what two runs differ by
        ("resnet34", 16, 3000, "usable"),
        ("resnet50", 8, 5000, "usable"),
        ("resnet50", 16, 1900, "probable_OOM_or_crash"),  # says nothing of the smaller batch
    )
    rows = list(read_rows(path))
    assert [TRIAL in row.measurement.notes for row in rows] == [True, *[False] * 6]
    assert rows[0].measurement.status is Status.OK


def test_a_row_that_grows_faster_than_its_batch_is_marked(tmp_path: Path) -> None:
    path = table(
        tmp_path / "timm.csv",
        ("resnet18", 8, 2700, "usable"),
        ("resnet18", 16, 9000, "usable"),
        ("resnet18", 32, 9500, "usable"),
        ("resnet34", 8, 2700, "usable"),
        ("resnet34", 16, 3600, "usable"),
    )
    assert [TRIAL in row.measurement.notes for row in read_rows(path)] == [False, True, True, False, False]


def test_a_row_above_its_share_of_a_larger_batch_is_marked_if_the_parameters_are_known(
    tmp_path: Path,
) -> None:
    lines = [(8, 11_800), (64, 25_900)]
    rows = (f'mobilevitv2_200,{batch},{peak},1000,"[3, 256, 256]",usable,18000000' for batch, peak in lines)
    path = tmp_path / "timm.csv"
    path.write_text("\n".join([f"{HEAD},params_timm_1_0_30", *rows]) + "\n")
    assert [TRIAL in row.measurement.notes for row in read_rows(path)] == [True, False]
    unknown = table(tmp_path / "other.csv", *(("mobilevitv2_200", *line, "usable") for line in lines))
    assert not any(row.measurement.notes for row in read_rows(unknown))


def test_an_input_that_a_later_timm_changed_is_corrected(tmp_path: Path) -> None:
    rows = (f'{name},8,3000,1000,"[3, 256, 256]",usable' for name in ("ese_vovnet57b", "darknet53"))
    path = tmp_path / "timm.csv"
    path.write_text("\n".join([HEAD, *rows]) + "\n")
    assert [row.spec.network["input_shape"][-1] for row in read_rows(path)] == [224, 256]


def test_a_network_that_a_later_timm_builds_otherwise_is_built_as_it_was(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    path = table(tmp_path / "timm.csv", ("ecaresnext50t_32x4d", 8, 2783, "usable"), ("darknet53", 8, 3000, "usable"))
    then, now = read_rows(path)
    subject, _ = build_external("timm", then.spec.network)
    assert sum(item.numel() for item in subject.parameters()) == 15_406_220  # the table's column
    assert "arguments" not in now.spec.network
