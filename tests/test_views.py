import json

import pandas as pd
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from vramcast.dataset_builder.rows import Provenance, Row
from vramcast.dataset_builder.store.views import to_frame, write_view
from vramcast.errors import UserError
from vramcast.jobs.spec import Spec, StaticEstimate
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.training.setup import TrainingSetup


def make_row(i: int, network: dict | None = None, evidence: str | None = None, seed: int | None = 1) -> Row:
    bare = i % 2 == 0  # every second row has nothing that may be absent
    return Row(
        Spec("mlp", {"width": i} if network is None else network, TrainingSetup(batch_size=i + 1)),
        None if bare else StaticEstimate(i, i, 2 * i, 3 * i),
        Measurement(status=Status.OOM, evidence=evidence)
        if bare
        else Measurement(
            status=Status.OK,
            requested_bytes=2**53 + i,
            allocated_bytes=i,
            reserved_bytes=2**60 + i,
            breakdown={"parameters": i},
            evidence=evidence,
            seconds=0.1 * i,
        ),
        Provenance(
            origin="simulated",
            backend="virtual",
            device=None if bare else "a100-40gb",
            versions={"torch": "2.13", "a": "b"},
            seed=seed,
            time="2026-01-01T00:00:00Z",
        ),
    )


def read(path, like: pd.DataFrame) -> pd.DataFrame:
    if path.suffix == ".parquet":
        return pd.read_parquet(path)
    return pd.read_csv(path, dtype=like.dtypes.to_dict(), keep_default_na=False, na_values=[""])


def test_a_row_is_flattened():
    row = make_row(3, {"layers": [3, 4], "norm": None, "extra": {"b": 1, "a": 2}, "act": "ReLU"})
    line = to_frame([row]).iloc[0]
    assert (line["id"], line["group"], line["family"]) == (row.spec.id, row.spec.group, "mlp")
    assert (line["network.layers"], line["network.extra"]) == ("[3,4]", '{"a":2,"b":1}')
    assert line["network.act"] == "ReLU"
    assert line["network.norm"] is pd.NA
    assert (line["training.batch_size"], line["training.optimizer"]) == (4, "Adam")
    assert not line["training.checkpointing"]
    assert (line["static.parameter_bytes"], line["static.total_bytes"]) == (3, 21)
    assert (line["status"], line["requested_bytes"], line["breakdown.parameters"]) == ("ok", 2**53 + 3, 3)
    assert (line["peak_bytes"], line["device_used_bytes"]) == (2**60 + 3, pd.NA)
    assert (line["provenance.origin"], line["provenance.seed"]) == ("simulated", 1)
    assert json.loads(line["provenance.versions"]) == {"torch": "2.13", "a": "b"}
    assert "breakdown" not in line.index


def test_columns_and_types_do_not_depend_on_the_rows():
    empty, bare, full = to_frame([]), to_frame([make_row(0)]), to_frame([make_row(1)])
    assert (len(empty), len(bare), len(full)) == (0, 1, 1)
    for frame in (bare, full):
        fixed = [name for name in frame if not name.startswith(("network.", "breakdown."))]
        assert fixed == list(empty)
        assert frame.dtypes[fixed].equals(empty.dtypes)
    sizes = [name for name in full if name.endswith("_bytes") or name.startswith("breakdown.")]
    assert len(sizes) > 8
    assert {str(full.dtypes[name]) for name in sizes} == {"Int64"}


def test_families_may_use_one_name_for_values_of_different_types():
    values = [3, [3, 4], "same", None, True, 2.5]
    frame = to_frame([make_row(i, {"kernel": value}) for i, value in enumerate(values)])
    assert frame["network.kernel"].tolist() == ["3", "[3,4]", "same", pd.NA, "true", "2.5"]
    numbers = to_frame([make_row(0, {"rate": 1}), make_row(1, {"rate": 0.5}), make_row(2, {})])
    assert numbers["network.rate"].tolist() == [1.0, 0.5, pd.NA]


def test_numbers_beyond_64_bits_become_text():
    frame = to_frame([make_row(0, seed=2**64 - 1), make_row(1, seed=None)])
    assert frame["provenance.seed"].tolist() == [str(2**64 - 1), pd.NA]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_round_trip(tmp_path, suffix):
    rows = [
        make_row(i, {"layers": [i] * i, "drop": 0.1 * i or None, "bias": bool(i % 2)}, evidence)
        for i, evidence in enumerate([None, "a,b", 'say "no"', "two\nlines", "50%\r100%", "NA", "naïve ☃", "None"])
    ]
    frame = to_frame(rows)
    path = tmp_path / f"view{suffix}"
    write_view(frame, path)
    pd.testing.assert_frame_equal(read(path, frame), frame)
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_categories=(), exclude_characters="\0")), min_size=1, max_size=4))
@example(["half a pair: \ud800", "\r", ""])
def test_odd_text_round_trip(tmp_path, suffix, texts):
    frame = to_frame([make_row(i, {"odd": text}, text) for i, text in enumerate(texts)])
    path = tmp_path / f"view{suffix}"
    write_view(frame, path)
    wanted = frame if suffix == ".parquet" else frame.replace({"": pd.NA})  # CSV has no empty text
    pd.testing.assert_frame_equal(read(path, frame), wanted)


def test_an_empty_view_is_written(tmp_path):
    for name in ("view.csv", "view.parquet"):
        write_view(to_frame([]), tmp_path / name)
        assert list(read(tmp_path / name, to_frame([]))) == list(to_frame([]))


def test_other_suffixes_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"\*.csv or \*.parquet, found 'view.xlsx'"):
        write_view(to_frame([]), tmp_path / "view.xlsx")


def test_a_failed_view_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "view.csv"
    write_view(to_frame([make_row(1)]), path)
    before = path.read_bytes()

    def fail(frame, target, **_):
        target.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_csv", fail)
    with pytest.raises(UserError, match="No space left"):
        write_view(to_frame([make_row(2)]), path)
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["view.csv"]


def test_a_missing_directory_is_one_error(tmp_path):
    for name in ("view.csv", "view.parquet"):
        with pytest.raises(UserError, match="choose another path"):
            write_view(to_frame([make_row(1)]), tmp_path / "absent" / name)
