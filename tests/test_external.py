"""Networks of other libraries."""

import subprocess
import sys
import textwrap
from importlib.util import find_spec

import pytest
import torch

from vramcast.dataset_builder.backends.virtual import trace_spec
from vramcast.errors import UserError
from vramcast.jobs.families import external, libraries
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.tracing.trace import Use
from vramcast.virtual_gpu.training.setup import TrainingSetup

RESNET = {"name": "resnet18", "input_shape": [3, 224, 224], "num_classes": 1000}


def needs(library):
    if find_spec(library) is None:  # importing it here would fail on a broken torchvision
        pytest.skip(f"needs {library}: pip install 'vramcast[timm,hf]'")


def _bytes_of(trace, use):
    return sum(size for block, size in trace.events if size > 0 and trace.uses[block] == use)


def test_a_timm_network_is_built_without_memory_and_traced():
    needs("timm")
    subject, inputs = external.build_external("timm", RESNET)
    assert sum(item.numel() for item in subject.parameters()) == 11_689_512
    assert all(item.is_meta for item in subject.parameters())
    assert inputs[0].shape == (3, 224, 224)
    trace = trace_spec(Spec("timm", RESNET, TrainingSetup(batch_size=4, optimizer="SGD(momentum=0.9)")))
    assert _bytes_of(trace, Use.PARAMETERS) > 4 * 11_689_512  # and the running statistics


def test_windows_makes_hiera_attend_over_one_window_as_older_timm_does():
    needs("timm")
    network = {"name": "hiera_tiny_224", "input_shape": [3, 224, 224], "num_classes": 10}
    now, _ = external.build_external("timm", network, "cpu")
    then, _ = external.build_external("timm", {**network, "windows": True}, "cpu")
    then.load_state_dict(now.state_dict())
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.allclose(now.eval()(x), then.eval()(x), atol=1e-5)
    setup = TrainingSetup(batch_size=2)
    bytes_now, bytes_then = (
        _bytes_of(trace_spec(Spec("timm", {**network, **more}, setup)), Use.ACTIVATIONS)
        for more in ({}, {"windows": True})
    )
    assert bytes_then > bytes_now  # attention matrices, which a fused kernel does not store


def test_the_error_for_a_missing_library_names_the_extra(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(libraries, "import_module", missing)
    with pytest.raises(UserError, match=r"pip install 'vramcast\[timm\]'"):
        external.build_external("timm", RESNET)


def test_an_unknown_family_is_rejected():
    with pytest.raises(UserError, match=r"expected a family of .*, found 'keras'"):
        external.build_external("keras", {})


def test_prefetched_batches_stay_allocated():
    from vramcast.jobs.families import make_spec

    network = {"arch": "uniform", "input_features": 1000, "output_features": 3, "depth": 1}
    plain, ahead = (
        trace_spec(make_spec("mlp", network, TrainingSetup(batch_size=8, prefetched_batches=count))) for count in (0, 2)
    )
    held = [_bytes_of(trace, Use.INPUTS) for trace in (plain, ahead)]
    assert held[1] - held[0] == 2 * 8 * 1000 * 4


def _hugging_face():
    network = {
        "architecture": "BertForMaskedLM",
        "config": {
            "vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 128,
        },
        "sequence": 16,
    }  # fmt: skip
    return Spec("hf", network, TrainingSetup(batch_size=4, optimizer="AdamW", loss="own"))


def test_a_network_of_transformers_uses_its_own_loss_and_records_assumptions():
    needs("transformers")
    trace = trace_spec(_hugging_face())
    assert _bytes_of(trace, Use.OPTIMIZER_STATE) > 2 * _bytes_of(trace, Use.PARAMETERS) * 0.9  # AdamW's two
    assert "a truth value was read from a tensor and taken as False" in trace.approximations


BROKEN_TORCHVISION = {
    "__init__.py": "from torchvision import _meta_registrations, ops",
    "_meta_registrations.py": """
        import torch

        @torch.library.register_fake("torchvision::nms")
        def nms(boxes, scores, iou_threshold):
            return boxes

        @torch.library.register_fake("torchvision::qnms")
        def qnms(boxes, scores, iou_threshold):
            return boxes
    """,
    "ops.py": """
        def nms(boxes, scores, iou_threshold):
            raise RuntimeError("Couldn't load custom C++ ops.")
    """,
}
USERS_NETWORK = """
    from torch import nn

    def make():
        import needs_torchvision  # as timm, transformers and torchmetrics do

        return nn.Linear(4, 2)

    def make_detector():
        from torchvision.ops import nms

        return nms(None, None, 0.5)
"""
BUILD = """
    import sys
    from pathlib import Path

    from vramcast.jobs.building import build_job
    from vramcast.jobs.targets import BuildRequest, parse_target

    sys.path.insert(0, str(Path.cwd()))
    print(build_job(BuildRequest(target=parse_target(sys.argv[1]), inputs=("4",))).module)
"""


def _build_with_broken_torchvision(directory, target):
    (directory / "torchvision").mkdir()
    for name, text in BROKEN_TORCHVISION.items():
        (directory / "torchvision" / name).write_text(textwrap.dedent(text))
    (directory / "needs_torchvision.py").write_text("import torchvision")
    (directory / "net.py").write_text(textwrap.dedent(USERS_NETWORK))
    command = [sys.executable, "-c", textwrap.dedent(BUILD), target]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def test_a_factory_may_import_a_library_that_imports_a_broken_torchvision(tmp_path):
    result = _build_with_broken_torchvision(tmp_path, "net.py:make")
    assert "Linear(in_features=4, out_features=2" in result.stdout, result.stderr


def test_code_that_needs_an_operator_of_a_broken_torchvision_gets_its_error(tmp_path):
    result = _build_with_broken_torchvision(tmp_path, "net.py:make_detector")
    assert result.stderr.strip().endswith("RuntimeError: Couldn't load custom C++ ops.")


def test_networks_of_torchvision_can_be_built():
    needs("timm")
    network = {"name": "mobilenet_v2", "input_shape": [3, 64, 64], "num_classes": 10}
    subject, inputs = external.build_external("torchvision", network)
    assert sum(item.numel() for item in subject.parameters()) == 2_236_682
    assert inputs[0].shape == (3, 64, 64)


def test_any_other_error_in_torchvision_is_an_import_error():
    def execute(module):
        raise RuntimeError("no such symbol")

    with pytest.raises(ImportError, match="no such symbol"):
        libraries._execute(execute, None)
