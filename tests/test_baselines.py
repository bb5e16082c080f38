"""The baselines: the contract that all of them keep, and the figures of each by hand."""

from math import inf

import numpy as np
import pytest
from estimator_contract import EstimatorContract
from made_examples import CARD_BYTES, MIB, OVERHEAD_BYTES, example_of, measured_mlps, mlp_table, simulated

from vramcast.errors import UserError
from vramcast.jobs.families import make_spec
from vramcast.jobs.families.template import TEMPLATES
from vramcast.jobs.filters import check
from vramcast.jobs.spec import LayerRecord, LayerTable
from vramcast.models.baselines.catalogue import BASELINES, fit_baselines
from vramcast.models.baselines.extra_trees import ExtraTrees, _matrix
from vramcast.models.baselines.fake_tensor import FakeTensor, read_published
from vramcast.models.baselines.gap import HYPERPARAMETERS, DirectPolynomial, Gap, hyperparameters
from vramcast.models.baselines.horus import Horus, horus_bytes, parsed_activations
from vramcast.models.baselines.majority import Majority
from vramcast.models.baselines.shape_inference import ShapeInference
from vramcast.models.baselines.virtual import Virtual
from vramcast.models.baselines.weights import Weights
from vramcast.models.buckets import Buckets
from vramcast.virtual_gpu.training.setup import TrainingSetup

BUCKETS = Buckets(1000 * MIB, CARD_BYTES)
TRAIN, VALIDATION, TEST = measured_mlps(120), measured_mlps(40, 120), measured_mlps(30, 160)


@pytest.fixture(scope="module")
def fitted():
    return fit_baselines(TRAIN, VALIDATION)


for _kind in BASELINES.values():
    globals()[f"Test{_kind.__name__}"] = type(
        f"Test{_kind.__name__}", (EstimatorContract,), {"make": staticmethod(_kind), "__module__": __name__}
    )


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_no_examples_no_answers(name, fitted):
    assert fitted[name].predict_bytes([]).shape == (0,)
    assert fitted[name].predict_proba([], BUCKETS).shape == (0, BUCKETS.classes)


@pytest.mark.parametrize("kind", [Majority, Gap, DirectPolynomial, ExtraTrees])
def test_there_is_nothing_to_learn_from_nothing(kind):
    with pytest.raises(UserError, match="expected measured examples that fit to learn from, found none"):
        kind().fit([], VALIDATION)
    with pytest.raises(UserError, match="without a measurement"):
        kind().fit([example_of(mlp_table(2, 2))], VALIDATION)


# The formulas, by hand. An MLP 100 -> 50 -> 10: 5050 + 510 parameters; outputs of a sample 50 + 50 (ReLU) + 10.
SMALL = mlp_table(100, 50, 10)


def test_horus_by_hand():
    expected = 4 * (110 * 8 + 5560 + 8 * 5560) + 800 * MIB
    assert Horus().predict_bytes([example_of(SMALL)]).tolist() == [expected]


def test_horus_as_published(public_rows):
    """What two batch sizes of a published network say of its activations gives the third, with the constant."""
    lines = [line for line in public_rows("realworld/unseen_models_a100.csv") if line["params"]]
    for network in {line["model"] for line in lines}:
        mib = {int(line["batch_size"]): float(line["horus_mib"]) for line in lines if line["model"] == network}
        parameters = next(int(float(line["params"])) for line in lines if line["model"] == network)
        activations = round((mib[128] - mib[32]) / 96 * MIB / 4) - parameters
        assert horus_bytes(activations, parameters, 64) / MIB == pytest.approx(mib[64], rel=1e-5)


def test_horus_of_vgg16_as_published(public_rows):
    """From the layers alone; the published parser leaves out a few vectors, a quarter of a thousandth."""
    network = {"template": "vgg", "stages": TEMPLATES["vgg"], "input_size": 224, "num_classes": 1000, "dropout": 0.5}
    for line in public_rows("realworld/unseen_models_a100.csv"):
        if line["model"] == "vgg16":
            table = check(make_spec("template", network, TrainingSetup(batch_size=1)))
            example = example_of(table, batch_size=int(line["batch_size"]))
            assert Horus().used_bytes(example) / MIB == pytest.approx(float(line["horus_mib"]), rel=5e-4)


def test_horus_counts_what_a_summary_shows():
    layers = (
        LayerRecord("0", "Conv2d", (8, 4, 4), 128, 80),
        LayerRecord("1", "ReLU", (8, 4, 4), 0, 0),  # in place: no new storage, but a line of the summary
        LayerRecord("2", "MaxPool2d", (8, 2, 2), 32, 0),
        LayerRecord("", "add", (8, 2, 2), 32, 0, functional=True),
        LayerRecord("3", "AdaptiveAvgPool2d", (8, 1, 1), 8, 0),
        LayerRecord("4", "Flatten", (8,), 0, 0),
        LayerRecord("token", "Positions", (), 0, 5),
    )
    assert parsed_activations(layers) == 128 + 128 + 8


def test_horus_beyond_the_card_does_not_fit():
    wide = example_of(mlp_table(4000, 4000, 10), batch_size=1000)
    assert Horus().predict_bytes([wide]).tolist() == [inf]
    assert Horus().predict([wide], BUCKETS).tolist() == [BUCKETS.fitting]


def test_weights_by_hand():
    assert Weights().predict_bytes([example_of(SMALL, optimizer="SGD")]).tolist() == [4 * 4 * 5560]
    assert Weights().predict_bytes([example_of(SMALL, dtype="bf16")]).tolist() == [4 * 2 * 5560]


def test_shape_inference_by_hand():
    assert ShapeInference().predict_bytes([example_of(SMALL)]).tolist() == [2 * 4 * (5560 + 8 * (100 + 110))]


def test_shape_inference_of_the_slides_network():
    """8.48 MiB and 0.229 MiB a sample for the network of the slides, whose 29,978 outputs include the image."""
    records = [
        LayerRecord("conv1", "Conv2d", (32, 24, 24), 18432, 832),
        LayerRecord("pool1", "MaxPool2d", (32, 12, 12), 4608, 0),
        LayerRecord("conv2", "Conv2d", (64, 8, 8), 4096, 51264),
        LayerRecord("pool2", "MaxPool2d", (64, 4, 4), 1024, 0),
        LayerRecord("dense", "Linear", (1024,), 1024, 1_049_600),
        LayerRecord("out", "Linear", (10,), 10, 10_250),
    ]
    table = LayerTable(tuple(records), ((1_111_946,),), 28 * 28)
    found = ShapeInference().predict_bytes([example_of(table, batch_size=size) for size in (1, 101)]) / MIB
    assert found[0] - (found[1] - found[0]) / 100 == pytest.approx(8.48, abs=0.005)
    assert (found[1] - found[0]) / 100 == pytest.approx(0.229, abs=0.0005)


def test_the_virtual_gpu_by_itself():
    fits, does_not = (example_of(SMALL, simulated=simulated(700 * MIB, fits)) for fits in (True, False))
    assert Virtual().predict_bytes([fits, does_not]).tolist() == [OVERHEAD_BYTES + 700 * MIB, inf]
    assert Virtual().predict([fits, does_not], BUCKETS).tolist() == [1, BUCKETS.fitting]
    with pytest.raises(UserError, match="expected a simulated estimate of made"):
        Virtual().predict_bytes([example_of(SMALL)])


def test_fake_tensor_sees_neither_weights_nor_optimizer():
    seen = simulated(reserved_bytes=9 * MIB, requested_bytes=5 * MIB, workspace_bytes=MIB)
    example = example_of(SMALL, simulated=seen)
    expected = 5 * MIB - 4 * 5560 - 2 * 4 * 5560  # Adam keeps two states
    assert FakeTensor().predict_bytes([example]).tolist() == [expected]
    died = example_of(SMALL, simulated=simulated(5 * MIB, fits=False))
    assert FakeTensor().predict_bytes([died]).tolist() == [5 * MIB - 4 * 5560]  # no state yet
    tiny = example_of(SMALL, simulated=simulated(4 * 5560, fits=False))
    assert FakeTensor().predict_bytes([tiny]).tolist() == [4 * 5560]  # all gradients
    assert FakeTensor({"made": 7 * MIB}).predict_bytes([example]).tolist() == [7 * MIB]


def test_fake_tensor_figures_of_a_table(tmp_path):
    table = tmp_path / "timm.csv"
    head = "model,batch_size,max_gpu_mem_mib,faketensor_peak_mib,num_classes,timm_default_input,row_class\n"
    lines = 'resnet18,8,2300,512.5,1000,"[3, 224, 224]",usable\nresnet18,16,2600,,1000,"[3, 224, 224]",usable\n'
    table.write_text(head + lines)
    assert list(read_published(table).values()) == [int(512.5 * MIB)]
    table.write_text(head + lines.replace("512.5", "much"))
    with pytest.raises(UserError, match="expected figures in the column faketensor_peak_mib"):
        read_published(table)
    table.write_text("Filename,Max GPU Memory (MiB)\n")
    assert read_published(table) == {}


def test_the_majority_by_hand():
    used = [1, 1, 2, 5]
    train = [example_of(SMALL, used_bytes=mib * 1000 * MIB + MIB) for mib in used]
    train.append(example_of(SMALL, used_bytes=39_000 * MIB, fits=False))
    found = Majority().fit(train, [])
    probabilities = found.predict_proba([example_of(SMALL)], BUCKETS)[0]
    assert {index: share for index, share in enumerate(probabilities) if share} == {1: 0.4, 2: 0.2, 5: 0.2, 40: 0.2}
    assert found.predict_bytes([example_of(SMALL)]).tolist() == [2001 * MIB]


def test_the_majority_may_not_fit():
    train = [example_of(SMALL, used_bytes=CARD_BYTES, fits=False), example_of(SMALL, used_bytes=MIB)]
    assert Majority().fit(train, []).predict_bytes([example_of(SMALL)]).tolist() == [inf]


# What learns.


def test_hyperparameters_by_hand():
    layers = (
        LayerRecord("0", "Conv2d", (8, 4, 4), 128, 80),
        LayerRecord("1", "BatchNorm2d", (8, 4, 4), 128, 16),
        LayerRecord("2", "ReLU", (8, 4, 4), 0, 0),
        LayerRecord("3", "Flatten", (128,), 0, 0),
        LayerRecord("4", "Linear", (20,), 20, 2580),
    )
    found = hyperparameters([example_of(LayerTable(layers, (), 48), batch_size=6)])
    assert dict(zip(HYPERPARAMETERS, found[0], strict=True)) == {
        "batch_size": 6,
        "depth": 3,
        "convolutions": 1,
        "norms": 1,
        "widest": 20,
        "mean_width": 12,
        "input_elements": 48,
        "outputs": 20,
    }


@pytest.mark.parametrize(("kind", "least_degree"), [(Gap, 1), (DirectPolynomial, 2)])
def test_a_polynomial_need_is_found(kind, least_degree, fitted):
    """The need is of second degree (width squared, width x batch), and a constant beyond the static estimate."""
    found, fits = fitted[kind.name], [example for example in TEST if example.label.fits]
    actual = np.array([example.label.used_bytes for example in fits])
    assert found.polynomial_.degree >= least_degree
    assert np.abs(found.predict_bytes(fits) - actual).max() / actual.max() < 1e-3
    shares = found.predict_proba(fits, BUCKETS)[np.arange(len(fits)), BUCKETS.of(actual)]
    assert np.median(shares) > 0.85  # one in ten of the validation examples did not fit


def test_a_constant_gap_is_found_far_outside_of_what_was_fitted(fitted):
    far = example_of(mlp_table(9000, 9000, 9000, 10), batch_size=2)
    assert fitted["gap"].polynomial_.degree == 1
    assert fitted["gap"].predict_bytes([far]) == pytest.approx([far.static.total_bytes + 900 * MIB])


def test_a_polynomial_does_not_fall_below_what_was_ever_measured(fitted):
    tiny = example_of(mlp_table(1, 1), batch_size=1)
    least = min(example.label.used_bytes for example in TRAIN if example.label.fits)
    assert fitted["gv"].predict_bytes([tiny])[0] >= least


def test_trees_as_arrays_are_those_of_scikit_learn(fitted):
    from sklearn.ensemble import ExtraTreesRegressor

    found = fitted["extra_trees"]
    used = [float(item.label.used_bytes if item.label.fits else CARD_BYTES) for item in TRAIN]
    forest = ExtraTreesRegressor(found.trees, max_leaf_nodes=found.leaves, random_state=found.seed)
    forest.fit(_matrix(TRAIN).astype(np.float32), used)
    expected = forest.predict(_matrix(TEST).astype(np.float32))
    assert found.trees_.predict(_matrix(TEST)).astype(float).mean(axis=1) == pytest.approx(expected, rel=1e-6)
    share = found.predict_proba(TEST, BUCKETS)[0] * found.trees
    assert share == pytest.approx(np.round(share))  # votes
