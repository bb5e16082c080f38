"""Simulated neighbours of measured rows: other optimizers, the same networks and groups."""

from synthetic_examples import PROFILE, mlp_spec

from dataset_builder.schema import Spec, TrainingSetup
from models.simulation import SimulationCache
from train.retraining import retrained, simulated


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


def test_their_target_is_the_simulation(tmp_path, monkeypatch):
    monkeypatch.setattr("models.simulation.LocalExecutor.run", lambda _self, backend, specs: (
        (spec, backend.measure(spec)) for spec in specs
    ))  # fmt: skip
    monkeypatch.setattr("models.tables.TableCache._make", _in_this_process)
    adam, sgd = simulated(retrained(MEASURED[:1], ["Adam", "SGD"]), PROFILE, SimulationCache(tmp_path, workers=1))
    for example in (adam, sgd):
        assert example.measured.used_bytes == example.simulation.reserved_bytes + example.overhead_bytes
        assert example.group == MEASURED[0].group
    states = adam.static.optimizer_bytes
    assert adam.simulation.allocated_bytes - sgd.simulation.allocated_bytes >= 0.9 * states > 0


def _in_this_process(self, missing):
    from models.tables import _table_text

    self.directory.mkdir()
    for path, spec in missing.items():
        path.write_text(_table_text(spec))
