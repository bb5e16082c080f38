"""Answers: what load().classify() says of modules, specs and tables, and that it is what the estimator says."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from synthetic_examples import mlp_examples, mlp_spec
from torch import nn

from vramcast import models
from vramcast.commands.classify.page import Page, render_page
from vramcast.dataset_builder.backends.virtual import VirtualBackend
from vramcast.device.profiles import DEFAULT_DEVICE, load_device, load_profile
from vramcast.errors import UserError
from vramcast.jobs.job import table_of
from vramcast.jobs.layer_tables import read_table
from vramcast.models.answer import FITS, TIGHT, TOO_LARGE, Answer, Bucket
from vramcast.models.baselines.virtual import Virtual
from vramcast.models.baselines.weights import Weights
from vramcast.models.estimators.classifiers import NetworkSettings
from vramcast.models.estimators.ensemble import Ensemble
from vramcast.models.estimators.fitting import PlainFitter
from vramcast.models.example import UNBOUNDED_BYTES
from vramcast.models.examples import example_of_table
from vramcast.models.predictor import Predictor, Question, _finite
from vramcast.models.timeline import check_picture, draw_timeline, timeline_table
from vramcast.models.value_search import largest_batch
from vramcast.simulation.result import Curve
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.training.setup import TrainingSetup

A100 = load_profile(DEFAULT_DEVICE)


@pytest.fixture(scope="module")
def predictor():
    return models.load("universal")


def network():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def test_a_module_is_answered_for_with_all_that_the_service_promises(predictor):
    answer = predictor.classify(network(), torch.empty(2, 64), batch_size=32, optimizer="adam")
    assert answer.fits
    assert answer.verdict == FITS
    assert 400 < answer.estimate_mib <= answer.safe_mib < answer.capacity_mib == 40410
    assert answer.bucket.lower_mib <= answer.estimate_mib < answer.bucket.upper_mib
    assert sum(answer.breakdown_mib.values()) == pytest.approx(answer.reserved_mib + answer.breakdown_mib["context"])
    values = json.loads(json.dumps(answer.to_dict(), allow_nan=False))
    assert values.keys() >= {
        "target", "batch_size", "device", "status", "bucket", "estimate_mib", "safe_mib", "allocated_mib",
        "reserved_mib", "fits", "oom_probability", "out_of_distribution", "max_batch_size", "breakdown_mib",
        "checkpoint", "profile", "seconds",
    }  # fmt: skip
    assert values["bucket"].keys() == {"index", "lower_mib", "upper_mib", "probability"}
    assert (values["target"], values["batch_size"], values["checkpoint"]) == ("Sequential", 32, "universal")


def test_inputs_are_a_batch_a_mapping_or_a_function(predictor):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, *, x):
            return self.net(x)

    plain = predictor.classify(network(), torch.empty(16, 64))
    made = predictor.classify(network(), lambda size: torch.empty(size, 64), batch_size=16)
    named = predictor.classify(Named(), {"x": torch.empty(16, 64)})
    assert plain.batch_size == made.batch_size == named.batch_size == 16
    assert plain.estimate_mib == made.estimate_mib == pytest.approx(named.estimate_mib, rel=0.01)
    with pytest.raises(UserError, match="give batch_size=N"):
        predictor.classify(network(), lambda size: torch.empty(size, 64))


def test_what_does_not_fit_is_told_what_it_would_need(predictor):
    answer = predictor.classify(nn.Linear(4096, 4096), torch.empty(2**20, 4096, device="meta"), device="rtx_4060")
    assert not answer.fits
    assert answer.verdict == TOO_LARGE
    assert answer.bucket.upper_mib is None
    assert answer.oom_probability > 0.9
    assert answer.estimate_mib > 2 * 2**20 * 4096 * 4 / MIB
    assert answer.safe_mib >= answer.estimate_mib


def test_a_spec_is_answered_for_as_the_estimator_says(predictor):
    """The path of a user's question is that of the rows which the estimator was judged on."""
    spec = mlp_spec(width=700, batch=64, last_batch_size=3)
    answer = predictor.classify_spec(spec)
    measured = VirtualBackend(A100).measure(spec).measurement
    example = example_of_table(table_of(spec), spec.training, A100, measured, spec.family)
    assert answer.estimate_mib * MIB == pytest.approx(predictor.estimator.predict_bytes([example])[0])
    assert answer.safe_mib * MIB == pytest.approx(predictor.estimator.safe_bytes([example], 0.01)[0])
    assert answer.reserved_mib * MIB == measured.reserved_bytes


@pytest.fixture(scope="module")
def for_tables(tmp_path_factory):
    directory = tmp_path_factory.mktemp("estimators") / "tables"
    settings = NetworkSettings(bucket_mib=50, width=16, blocks=1, features="gpumemnet")
    fitted = Ensemble.of(settings, 4, PlainFitter(epochs=3, batch_size=32, learning_rate=5e-3))
    fitted.fit(mlp_examples(300), mlp_examples(40, seed=1)).save(directory)
    return directory


def test_a_table_alone_is_answered_for_by_an_estimator_that_needs_no_simulation(for_tables):
    spec = mlp_spec(width=300)
    answer = Predictor.load("universal", tables=str(for_tables)).classify_table(table_of(spec), spec.training)
    assert (answer.allocated_mib, answer.reserved_mib, answer.breakdown_mib) == (None, None, {})
    assert answer.checkpoint == "tables"
    assert any("layer table alone" in note for note in answer.notes)


def test_many_questions_are_answered_in_their_order(predictor, for_tables):
    mixed = Predictor.load("universal", tables=str(for_tables))
    specs = [mlp_spec(width=width) for width in (100, 900)]
    tables = [Question.of_table(str(index), table_of(spec), spec.training, A100) for index, spec in enumerate(specs)]
    found = mixed.answers([*tables[:1], *tables[1:]])
    assert [item.target for item in found] == ["0", "1"]
    assert found[0].estimate_mib == pytest.approx(mixed.answers(tables[:1])[0].estimate_mib)
    with pytest.raises(UserError, match="risk"):
        mixed.answers(tables, risk=2)


TORCHSUMMARY = """
----------------------------------------------------------------
        Layer (type)               Output Shape         Param #
================================================================
            Conv2d-1            [-1, 8, 30, 30]             224
              ReLU-2            [-1, 8, 30, 30]               0
            Linear-3                   [-1, 10]          72,010
        Sequential-4                   [-1, 10]               0
================================================================
Total params: 72,234
Trainable params: 72,234
Non-trainable params: 0
----------------------------------------------------------------
Input size (MB): 0.01
"""
TORCHINFO = """
==========================================================================================
Layer (type:depth-idx)                   Output Shape              Param #
==========================================================================================
Net                                      [4, 10]                   --
├─Sequential: 1-1                        [4, 8, 30, 30]            --
│    └─Conv2d: 2-1                       [4, 8, 30, 30]            224
│    └─ReLU: 2-2                         [4, 8, 30, 30]            --
├─Linear: 1-2                            [4, 10]                   (72,010)
==========================================================================================
Total params: 72,234
Trainable params: 224
Non-trainable params: 72,010
==========================================================================================
Input size (MB): 0.05
Forward/backward pass size (MB): 0.23
"""
COLUMNS = """
Layer (type (var_name):depth-idx)      Input Shape           Output Shape          Param #      Kernel Shape
Net (Net)                              [4, 3, 32, 32]        [4, 10]               --           --
├─Conv2d (conv): 1-1                   [4, 3, 32, 32]        [4, 8, 30, 30]        224          [3, 3]
├─Linear (head): 1-2                   [4, 7200]             [4, 10]               72,010       --
├─Linear (head): 1-3                   [4, 10]               [4, 10]               (recursive)  --
Forward/backward pass size (MB): 0.23
"""


def test_printed_tables_are_read():
    summary = read_table(TORCHSUMMARY)
    assert [(layer.kind, layer.activations, layer.parameters) for layer in summary.layers] == [
        ("Conv2d", 7200, 224), ("ReLU", 7200, 0), ("Linear", 10, 72010),
    ]  # fmt: skip
    info = read_table(TORCHINFO)
    assert [(layer.kind, layer.activations) for layer in info.layers] == [
        ("Conv2d", 7200),
        ("ReLU", 7200),
        ("Linear", 10),
    ]
    assert info.trainable_shapes == ((224,),)
    assert info.input_elements == pytest.approx(3 * 32 * 32, rel=0.05)
    assert info.parameters == 72234


def test_the_columns_of_torchinfo_are_found_by_their_names():
    found = read_table(COLUMNS)
    assert [(layer.kind, layer.output_shape, layer.parameters) for layer in found.layers] == [
        ("Conv2d", (8, 30, 30), 224), ("Linear", (10,), 72010), ("Linear", (10,), 0),
    ]  # fmt: skip
    with pytest.raises(UserError, match="expected the columns"):
        read_table(COLUMNS.replace("Output Shape", "Weight Shape"))
    with pytest.raises(UserError, match="expected 4 figures to a layer"):
        read_table(COLUMNS.replace("(recursive)  --", "(recursive)"))


def test_layers_below_the_depth_that_torchinfo_printed_are_counted_or_missed():
    hidden = read_table(COLUMNS.replace("0.23", "0.25")).layers[-1]
    assert hidden.activations == pytest.approx(0.245e6 / 4 / 2 / 4 - 7220, abs=1)
    with pytest.raises(UserError, match="print the summary with depth=100"):
        read_table(COLUMNS.replace("0.23", "0.46"))


def test_tables_in_json_are_read_and_refused():
    table = table_of(mlp_spec())
    assert read_table(json.loads(json.dumps(table.to_json()))) == table
    short = read_table({"layers": [{"kind": "Linear", "output_shape": [10], "parameters": 50}], "input_elements": 4})
    assert (short.layers[0].activations, short.trainable_shapes) == (10, ((50,),))
    odd = {"layers": [{"kind": "Linear"}], "input_elements": 4, "trainable_shapes": [[1.5]]}
    for value in ({}, {"layers": [{}], "input_elements": 1}, {"layers": [{"kind": "Linear"}]}, "no table", [], odd):
        with pytest.raises(UserError, match="expected"):
            read_table(value)


def answer_of(batch, need, capacity=1000.0, safe=1.1, **more):
    bucket = Bucket(index=0, lower_mib=0, upper_mib=None, probability=1)
    return Answer(
        target="made", batch_size=batch, device="a100_40gb", bucket=bucket, estimate_mib=need, safe_mib=safe * need,
        allocated_mib=1, reserved_mib=2, capacity_mib=capacity, oom_probability=0, risk=0.01, out_of_distribution=False,
        checkpoint="made", profile="made", seconds=1, **more,
    )  # fmt: skip


@pytest.mark.parametrize("start", [1, 7, 64, 500])
@pytest.mark.parametrize(("fixed", "each"), [(100, 9.0), (0, 3.7), (890, 1.0), (2, 0.1)])
def test_the_largest_batch_is_found_in_few_traces(fixed, each, start):
    asked = []

    def ask(batch):
        asked.append(batch)
        return answer_of(batch, fixed + each * batch + 3 * (batch // 16))

    truth = max((n for n in range(1, 20_000) if ask(n).verdict == FITS), default=0)
    first = ask(start)
    asked.clear()
    found, answer = largest_batch(ask, first)
    assert found <= truth
    assert truth == 19_999 or found >= 0.99 * truth - 1
    assert len(asked) <= 10
    assert answer is not None
    assert answer.batch_size == found


@pytest.mark.parametrize("start", [1, 4, 250])
def test_the_largest_batch_is_found_where_a_few_samples_take_nothing(start):
    """Memory in whole steps of 20 MiB, as torch reserves it: 3000 samples to a step."""
    found, _ = largest_batch(lambda batch: answer_of(batch, 100 + 20 * (batch // 3000)), answer_of(start, 100))
    truth = 3000 * 41 - 1  # 100 + 20 * 40 is the last that fits with its margin
    assert 0.95 * truth < found <= truth


def test_no_batch_fits_where_the_weights_do_not():
    assert largest_batch(lambda size: answer_of(size, 2000 + size), answer_of(64, 2064)) == (0, None)


def test_verdicts():
    assert [answer_of(1, need).verdict for need in (500, 950, 1200)] == [FITS, TIGHT, TOO_LARGE]


def test_the_screen_is_narrow_enough_and_has_colours_only_where_they_are_wanted():
    answer = answer_of(
        8, 5000, breakdown_mib={"activations": 300.0, "context": 100.0}, max_batch_size=0, notes=("a note",)
    )
    page = Page(answer, "A GPU", TrainingSetup(batch_size=8), devices=[answer])
    text = render_page(page, 80)
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert "DOES NOT FIT" in text
    assert text.count("=") >= 50  # three quarters of the bar
    assert "note: a note" in text
    assert "\x1b[1;31mDOES NOT FIT\x1b[0m" in render_page(page, 80, colours=True)


def test_the_timeline_is_a_table_and_a_picture(tmp_path):
    curve = Curve({"parameters": [5, 5], "activations": [0, 7], "inputs": [0, 0]}, [6, 14], 2, 100)
    table = timeline_table(curve)
    assert list(table.layers) == ["context", "parameters", "activations"]
    assert np.array_equal(table.reserved * 2**30, [8, 16])
    for name in ("a.png", "a.svg"):
        draw_timeline(table, "a network", tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    with pytest.raises(UserError, match="ends in one of"):
        check_picture(tmp_path / "a.gif")


def test_devices_are_read_without_hydra():
    assert load_device("a100_40gb")["total_mib"] == 40960
    with pytest.raises(UserError, match="expected device to be one of"):
        load_device("abacus")


def test_a_checkpoint_that_is_not_there_is_told_with_those_that_are():
    with pytest.raises(UserError, match="universal"):
        models.load("nothing")


def test_an_answer_is_changed_by_its_risk(predictor):
    spec = mlp_spec(width=800)
    careful, bold = (predictor.classify_spec(spec, risk=risk) for risk in (0.01, 0.5))
    assert careful.safe_mib > bold.safe_mib
    assert replace(careful, safe_mib=0, risk=0, seconds=0) == replace(bold, safe_mib=0, risk=0, seconds=0)


def test_a_bound_beyond_all_cards_is_still_a_number():
    example = replace(mlp_examples(1)[0], capacity_bytes=8 * MIB)
    found = _finite(np.array([np.inf, np.inf, 5.0]), np.array([np.inf, 7.0, np.inf]), [example] * 3)
    assert found.tolist() == [UNBOUNDED_BYTES, 9 * MIB, 5.0]


def test_any_estimator_can_answer(predictor):
    spec = mlp_spec(width=700)
    plain = Predictor(Virtual()).classify_spec(spec)
    measured = VirtualBackend(A100).measure(spec).measurement
    assert plain.estimate_mib * MIB == measured.device_used_bytes
    assert plain.safe_mib == plain.bucket.upper_mib  # the quantile of a single bucket is its upper edge
    assert plain.checkpoint == "virtual"
    assert "virtual has no calibrated bound: the safe figure is its own quantile" in plain.notes
    assert not any("quantile" in note for note in predictor.classify_spec(spec).notes)
    table = Predictor(Weights()).classify_table(table_of(spec), spec.training)
    assert table.checkpoint == "weights"
