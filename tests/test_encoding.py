"""Encoders and features: what is far off shows, what is unknown does no harm, and rows and modules are seen alike."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from synthetic_examples import PROFILE, cnn_spec, example_of, mlp_examples, mlp_spec

from vramcast.dataset_builder.backends.virtual import VirtualBackend
from vramcast.dataset_builder.rows import Provenance, Row
from vramcast.errors import UserError
from vramcast.jobs.families import make_spec, plan_of
from vramcast.jobs.job import ModuleJob, table_of
from vramcast.jobs.spec import Spec
from vramcast.jobs.subject import build_subject, make_inputs
from vramcast.models.estimators.encoding import ExampleEncoder, Scale
from vramcast.models.estimators.network_uncertainty import stratum
from vramcast.models.examples import example_of_row, example_of_simulation, example_of_table
from vramcast.models.features import FEATURE_SETS, TOKEN_NUMBERS, feature_set, tokens_of
from vramcast.models.features.layers import largest_convolution, main_activation
from vramcast.simulation.result import Peaks, Simulation
from vramcast.simulation.simulator import Simulator
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.training.setup import TrainingSetup

TRANSFORMER = make_spec(
    "transformer",
    {
        "kind": "encoder", "vocabulary": 900, "embedding_size": 32, "layers": 3, "heads": 4, "feed_forward_size": 70,
        "sequence_length": 12, "num_classes": 5, "dropout": 0.1,
    },
    TrainingSetup(batch_size=6, last_batch_size=2),
)  # fmt: skip


def measured(spec: Spec) -> Row:
    provenance = Provenance(origin="measured", backend="x", device="plain", versions={}, seed=None, time="2024")
    return Row(spec, None, Measurement(status=Status.OK, device_used_bytes=600 * 2**20), provenance)


@pytest.mark.parametrize("spec", [mlp_spec(), cnn_spec(depth=5), TRANSFORMER], ids=["mlp", "cnn", "transformer"])
@pytest.mark.parametrize("features", sorted(FEATURE_SETS))
def test_a_row_and_the_module_of_its_spec_have_the_same_features(spec, features):
    peaks = {PROFILE.name: Peaks(VirtualBackend(PROFILE).measure(spec).measurement)}
    simulation = Simulation(table_of(spec), spec.training, peaks, family=spec.family)
    row = example_of_row(measured(spec), PROFILE, simulation)
    plan = plan_of(spec)
    job = ModuleJob(build_subject(plan), lambda size: make_inputs(plan, size), family=spec.family)
    module = example_of_simulation(Simulator(job).simulate(vars(spec.training), [PROFILE]), PROFILE)
    chosen = feature_set(features)
    assert chosen.numbers(module) == chosen.numbers(row)
    assert chosen.reference_bytes(module) == chosen.reference_bytes(row)
    assert tokens_of(module) == tokens_of(row)
    assert (module.family, module.overhead_bytes, module.capacity_bytes) == (
        row.family, row.overhead_bytes, row.capacity_bytes,
    )  # fmt: skip
    encoder = ExampleEncoder.fit([row, *mlp_examples(5)], features)
    for ours, theirs in zip(
        vars(encoder.inputs([row], True)).values(), vars(encoder.inputs([module], True)).values(), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_a_layer_table_alone_gives_the_published_features_and_no_others():
    example = example_of_table(table_of(mlp_spec()), mlp_spec().training, PROFILE)
    assert feature_set("gpumemnet").numbers(example)["depth"] > 0
    with pytest.raises(UserError, match="expected a simulated estimate"):
        feature_set("full").numbers(example)


def test_the_published_features_by_hand():
    example = example_of(mlp_spec(width=64, depth=2, batch=32))
    found = feature_set("gpumemnet").numbers(example)
    parameters, activations = 2 * (64 * 64 + 64) + 64 * 10 + 10, 4 * 64 + 10
    amounts = {name: round(np.expm1(value)) for name, value in found.items()}
    assert amounts["depth"] == 5
    assert amounts["batch"] == 32
    assert amounts["parameters"] == parameters
    assert amounts["activations"] == activations
    assert amounts["activations_x_batch"] == 32 * activations
    assert amounts["count_Linear"] == 3
    assert found["act_sin"] == pytest.approx(np.sin(6 * np.pi / 11))  # ReLU is the seventh of eleven
    assert found["act_cos"] == pytest.approx(np.cos(6 * np.pi / 11))


def test_full_features_are_finite_numbers_with_the_same_names_for_all():
    examples = [example_of(mlp_spec()), example_of(cnn_spec()), example_of(TRANSFORMER)]
    found = [feature_set("full").numbers(example) for example in examples]
    assert {tuple(numbers) for numbers in found} == {tuple(found[0])}
    assert all(np.isfinite(list(numbers.values())).all() for numbers in found)


def test_the_largest_convolution_by_hand():
    example = example_of(cnn_spec(filters=8, depth=1, batch=4, size=16))
    found = example.columns.convolutions(example.input_elements)
    assert (found.weight.tolist(), found.channels.tolist(), found.size.tolist()) == ([3 * 8 * 9 + 8], [8], [16])
    assert found.totals(4).tolist() == [4 * (3 * 256 + 8 * 256) + 3 * 8 * 9 + 8] == [largest_convolution(example)]


def test_tokens_fold_what_has_no_parameters_and_count_what_repeats():
    tokens = tokens_of(example_of(mlp_spec(width=64, depth=5)))
    assert [token.kind for token in tokens] == ["Linear", "Linear"]  # five alike with their activations, and the head
    times = TOKEN_NUMBERS.index("times")
    assert [round(np.expm1(token.numbers[times])) for token in tokens] == [5, 1]
    followers = TOKEN_NUMBERS.index("follower_count")
    assert [round(np.expm1(token.numbers[followers])) for token in tokens] == [1, 0]


def test_a_network_that_nobody_named_counts_as_a_real_one():
    example = example_of_table(table_of(cnn_spec(depth=5)), cnn_spec().training, PROFILE)
    assert stratum(example) == "real with workspaces"
    assert main_activation(table_of(mlp_spec()).layers) == "ReLU"


def test_a_scale_is_that_of_the_training_set():
    columns = np.array([[1.0, 5.0], [3.0, 5.0]])
    scale = Scale.fit(columns)
    np.testing.assert_allclose(scale.apply(columns), [[-1, 0], [1, 0]])
    far = scale.apply(np.array([[101.0, 5.5]]))
    assert far[0, 0] == 99
    assert far[0, 1] == 100  # never seen


def test_inputs_of_networks_are_clipped_and_the_matrix_is_not():
    encoder = ExampleEncoder.fit(mlp_examples(30), "full")
    strange = [example_of(cnn_spec(batch=64, size=64, dtype="bf16"))]
    assert np.abs(encoder.matrix(strange)).max() >= 100
    vector = encoder.inputs(strange, with_tokens=False).vector
    assert float(vector.abs().max()) <= 5
    assert float(vector[0, encoder.names.index("element_bytes")]) == 0


def test_an_unknown_source_is_the_average_of_the_known_ones():
    examples = mlp_examples(20)
    mixed = [type(item)(**{**vars(item), "source": "ab"[index % 2]}) for index, item in enumerate(examples)]
    encoder = ExampleEncoder.fit(mixed, "full")
    other = type(examples[0])(**{**vars(examples[0]), "source": "c"})
    np.testing.assert_allclose(encoder.matrix([other])[0, -2:], 0, atol=1e-12)
    assert np.abs(encoder.matrix(mixed)[:, -2:]).min() > 0.5


def test_json_gives_an_encoder_back():
    encoder = ExampleEncoder.fit([*mlp_examples(12), example_of(cnn_spec())], "full")
    assert ExampleEncoder.from_json(json.loads(json.dumps(encoder.to_json()))) == encoder


def test_an_encoder_whose_scale_does_not_fit_is_refused():
    values = json.loads(json.dumps(ExampleEncoder.fit(mlp_examples(12), "full").to_json()))
    values["names"].pop()
    with pytest.raises(UserError, match="expected a scale for each feature"):
        ExampleEncoder.from_json(values)


def test_the_default_optimizer_is_nothing_new_to_who_has_seen_its_twin():
    """AdamW takes what Adam takes: measured sets have one of them."""
    spec = mlp_spec()
    setups = [replace(spec.training, optimizer=name) for name in ("Adam", "AdamW", "SGD")]
    adam, twin, other = (feature_set("full").numbers(example_of(replace(spec, training=item))) for item in setups)
    assert adam == twin != other
