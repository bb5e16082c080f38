"""Simulated neighbours of measured rows: other optimizers, the same networks and groups."""

import pytest
from synthetic_examples import PROFILE, mlp_spec

from vramcast.dataset_builder.simulation_store import SimulationStore
from vramcast.errors import UserError
from vramcast.jobs.spec import Spec
from vramcast.train.retraining import named_specs, retrained, simulated
from vramcast.train.settings import LIBRARIES, DataSettings
from vramcast.virtual_gpu.training.setup import TrainingSetup


def timm_spec(name, batch):
    network = {"name": name, "input_shape": [3, 32, 32], "num_classes": 10}
    return Spec("timm", network, TrainingSetup(batch_size=batch, optimizer="SGD(momentum=0.9)", cudnn_benchmark=True))


MEASURED = [timm_spec(name, batch) for name in ("resnet10t", "resnet14t") for batch in (4, 8, 16)]


def test_each_library_network_once_under_each_optimizer_and_none_of_ours():
    found = retrained([*MEASURED, mlp_spec()], ["Adam", "SGD"])
    assert {spec.group for spec in found} == {spec.group for spec in MEASURED}
    assert len(found) == len({(spec.group, spec.training.optimizer) for spec in found}) == 4
    assert {spec.training.batch_size for spec in found} == {4, 8, 16}
    assert not any(spec.training.cudnn_benchmark for spec in found)
    assert retrained(reversed([*MEASURED]), ["Adam", "SGD"]) == found


def test_their_label_is_the_simulation(tmp_path, monkeypatch):
    monkeypatch.setattr("vramcast.dataset_builder.simulation_store.LocalExecutor.run", lambda _self, backend, specs: (
        (spec, backend.measure(spec)) for spec in specs
    ))  # fmt: skip
    adam, sgd = simulated(retrained(MEASURED[:1], ["Adam", "SGD"]), PROFILE, SimulationStore(tmp_path, workers=1))
    for example in (adam, sgd):
        assert example.measured.used_bytes == example.simulation.reserved_bytes + example.overhead_bytes
        assert example.group == MEASURED[0].group
    states = adam.static.optimizer_bytes
    assert adam.simulation.allocated_bytes - sgd.simulation.allocated_bytes >= 0.9 * states > 0


def test_networks_that_no_table_has_go_by_their_names():
    specs = list(named_specs(["torchvision:vgg11", "hf:RobertaForMaskedLM"]))
    found = retrained(specs, ["Adam", "SGD"])
    assert len(found) == 4
    losses = {(spec.family, spec.training.loss) for spec in found}
    assert losses == {("torchvision", "cross_entropy"), ("hf", "own")}
    assert {spec.training.batch_size for spec in found} <= {spec.training.batch_size for spec in specs}


def test_every_library_of_the_settings_has_networks():
    found = named_specs([f"{library}:name" for library in LIBRARIES])
    assert {spec.family for spec in found} == set(LIBRARIES)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"networks": ["keras:VGG16"], "optimizers": ["Adam"]},
            r"library of 'keras:VGG16' in data\.networks to be",
        ),
        ({"networks": ["torchvision:vgg11"]}, r"expected data\.optimizers for data\.networks"),
        ({"networks": None}, r"data\.networks to be a list of texts"),
        ({"builds": "rows"}, r"data\.builds to be a list of texts"),
    ],
)
def test_networks_that_cannot_be_simulated_are_refused_before_anything_is(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        DataSettings(name="mixed", **settings)


@pytest.mark.parametrize(
    ("family", "network", "design"),
    [
        ("timm", {"name": "resnet50d"}, "timm/resnet"),
        ("timm", {"name": "swin_base_patch4_window12_384"}, "timm/swin"),
        ("hf", {"architecture": "BertForMaskedLM"}, "hf/BertForMaskedLM"),
    ],
)
def test_a_design_is_told_by_the_name(family, network, design):
    assert Spec(family, network, TrainingSetup(batch_size=4)).design == design


def test_a_network_without_a_name_is_its_own_design():
    assert mlp_spec().design == mlp_spec().group
    assert mlp_spec(width=64).design != mlp_spec(width=128).design
