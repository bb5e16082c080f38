"""Networks of other libraries."""

import pytest

from dataset_builder.errors import UserError
from dataset_builder.families import external
from dataset_builder.measure.virtual.backend import trace_spec
from dataset_builder.measure.virtual.trace import Use
from dataset_builder.schema import Spec, TrainingSetup

RESNET = {"name": "resnet18", "input_shape": [3, 224, 224], "num_classes": 1000}


def _bytes_of(trace, use):
    return sum(size for block, size in trace.events if size > 0 and trace.uses[block] == use)


def test_a_timm_network_is_built_without_memory_and_traced():
    pytest.importorskip("timm", reason="needs the extra timm: pip install 'vramcast[timm]'")
    subject, inputs = external.build_external("timm", RESNET)
    assert sum(item.numel() for item in subject.parameters()) == 11_689_512
    assert all(item.is_meta for item in subject.parameters())
    assert inputs[0].shape == (3, 224, 224)
    trace = trace_spec(Spec("timm", RESNET, TrainingSetup(batch_size=4, optimizer="SGD(momentum=0.9)")))
    assert _bytes_of(trace, Use.PARAMETERS) > 4 * 11_689_512  # and the running statistics


def test_a_library_that_is_missing_is_named(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(external, "import_module", missing)
    with pytest.raises(UserError, match=r"pip install 'vramcast\[timm\]'"):
        external.build_external("timm", RESNET)


def test_a_family_that_cannot_be_built_is_refused():
    with pytest.raises(UserError, match="expected the family timm, found 'keras'"):
        external.build_external("keras", {})


def test_a_batch_loaded_ahead_takes_its_room_for_good():
    from dataset_builder.families import make_spec

    network = {"arch": "uniform", "input_features": 1000, "output_features": 3, "depth": 1}
    plain, ahead = (
        trace_spec(make_spec("mlp", network, TrainingSetup(batch_size=8, prefetched_batches=count))) for count in (0, 2)
    )
    held = [_bytes_of(trace, Use.INPUTS) for trace in (plain, ahead)]
    assert held[1] - held[0] == 2 * 8 * 1000 * 4
