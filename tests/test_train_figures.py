"""Pictures of a run: their tables, and their drawing."""

import numpy as np
import pytest

from vramcast.models.buckets import Buckets
from vramcast.train.figures import (
    confusion_table,
    curves_table,
    draw_confusion,
    draw_curves,
    draw_projections,
    draw_reliability,
    projections_table,
    reliability_table,
)
from vramcast.train.figures.drawing import bucket_names
from vramcast.train.figures.reliability import calibration_error
from vramcast.virtual_gpu.allocator.sizes import MIB

GIB_BUCKETS = Buckets(1024 * MIB, 40_410 * MIB)
WIDE = Buckets(8000 * MIB, 40_410 * MIB)
PNG = b"\x89PNG"


def test_buckets_are_named_in_whole_numbers():
    assert bucket_names(WIDE)[0] == "0-8000"
    assert bucket_names(WIDE)[-2:] == ["32000-40000", "does not fit"]
    assert bucket_names(GIB_BUCKETS)[:2] == ["0-1", "1-2"]
    assert bucket_names(GIB_BUCKETS)[-2] == "39-39.46"
    assert len(bucket_names(GIB_BUCKETS)) == GIB_BUCKETS.classes


def test_a_confusion_table_counts_pairs_from_the_lowest_bucket_to_the_highest():
    truth, predicted = np.array([2, 2, 4, WIDE.fitting]), np.array([2, 3, 4, WIDE.fitting])
    table = confusion_table(truth, predicted, WIDE)
    assert list(table.index) == ["16000-24000", "24000-32000", "32000-40000", "does not fit"]
    assert table.loc["16000-24000", "24000-32000"] == 1
    assert int(np.trace(table.to_numpy())) == 3
    assert int(table.to_numpy().sum()) == 4


def test_a_confusion_table_has_one_cell_when_no_job_fits():
    oom = np.full(3, WIDE.fitting)
    assert confusion_table(oom, oom, WIDE).to_numpy().tolist() == [[3]]


def test_reliability_is_the_accuracy_in_each_bin():
    probabilities = np.array([[0.95, 0.05], [0.97, 0.03], [0.45, 0.55], [0.4, 0.6]])
    table = reliability_table(probabilities, np.array([0, 1, 1, 1]))
    assert table["rows"].to_dict() == {5: 1, 6: 1, 9: 2}
    assert table["accuracy"].to_dict() == {5: 1.0, 6: 1.0, 9: 0.5}
    assert calibration_error(table) == pytest.approx((0.45 + 0.4 + 2 * 0.46) / 4)


def test_a_probability_of_one_is_in_the_last_bin():
    assert list(reliability_table(np.array([[1.0, 0.0]]), np.array([0])).index) == [9]


def test_curves_have_one_line_per_member_and_epoch():
    epochs = [{"epoch": e, "train_loss": 2.0 - e, "validation_loss": 3.0 - e} for e in range(2)]
    table = curves_table({"member0": epochs, "member1": epochs[:1]})
    assert table["member"].tolist() == ["member0", "member0", "member1"]
    assert table["validation_loss"].tolist() == [3.0, 2.0, 3.0]


def test_projections_drop_constant_columns_and_repeat_with_a_seed():
    features = np.random.RandomState(0).randn(40, 5)
    features[:, 0] *= 10
    features[:, 4] = 0.1 + 1e-17 * np.arange(40)  # constant up to rounding
    classes = np.arange(40) % 3
    table, again = (projections_table(features, classes, seed=1) for _ in range(2))
    assert table.equals(again)
    assert table["bucket"].tolist() == classes.tolist()
    assert 0 < sum(table.attrs["explained"]) <= 1
    assert np.corrcoef(table["pca_x"], table["pca_y"])[0, 1] == pytest.approx(0, abs=1e-6)


def test_features_that_vary_in_one_direction_can_be_projected():
    table = projections_table(np.arange(12.0)[:, None] * np.ones((1, 2)), np.zeros(12, dtype=np.int64), seed=0)
    assert table["pca_y"].abs().max() == pytest.approx(0, abs=1e-9)


def test_too_few_points_are_refused():
    with pytest.raises(ValueError, match="expected at least 4 points to project, found 2"):
        projections_table(np.zeros((2, 2)), np.zeros(2, dtype=np.int64), seed=0)


@pytest.mark.parametrize(("buckets", "occurring"), [(WIDE, 1), (GIB_BUCKETS, GIB_BUCKETS.classes)])
def test_pictures_are_reproducible(tmp_path, buckets, occurring):
    truth = np.arange(60) % occurring
    probabilities = np.eye(buckets.classes)[truth]
    projections = projections_table(np.random.RandomState(0).randn(60, 4), truth, 0)
    curve = [{"epoch": e, "train_loss": 1.0, "validation_loss": 1.0} for e in range(3)]
    for attempt in ("first", "second"):
        out = tmp_path / attempt
        out.mkdir()
        draw_confusion(confusion_table(truth, truth, buckets), buckets, "a title", out / "confusion.png")
        draw_reliability(reliability_table(probabilities, truth), "a title", out / "reliability.png")
        draw_curves(curves_table({"member0": curve}), "a title", out / "curves.png")
        draw_projections(projections, buckets, "a title", out / "projections.png")
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes().startswith(PNG)
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes()
