"""Cold starts: what the commands that people wait for import, and torch without its compiler."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from vramcast.jobs.families.libraries import import_library
from vramcast.virtual_gpu.tracing.uncompiled import with_plain_step, without_compiler

NEEDLESS = ("vramcast.dataset_builder", "vramcast.train", "pandas", "sklearn", "lightning", "hydra")
"""Nothing of it is needed for an answer."""
SCRIPT = "import torch; torch.nn.Linear(8, 8).cuda()(torch.ones(2, 8, device='cuda')).sum().backward()"
NETWORK = "from torch import nn\ndef make(): return nn.Linear(8, 2)"
CHILD = """
from vramcast.device.profiles import load_profile
from vramcast.jobs.building import build_job
from vramcast.jobs.targets import BuildRequest, Target
from vramcast.simulation.simulator import Simulator
simulator = Simulator(build_job(BuildRequest(target=Target("timm:resnet10t", "timm", "resnet10t"), directory=".")))
print(simulator.simulate({"batch_size": 2, "optimizer": "AdamW"}, [load_profile("l4")]).peaks)
"""


def loaded(code, *names):
    """Return which modules a program has imported when it ends."""
    code += f"\nimport sys; print('\\nloaded', sorted({{*{names!r}}} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return result.stdout.splitlines()[-1]


def test_classify_imports_no_builder_and_no_compiler(tmp_path):
    (tmp_path / "net.py").write_text(NETWORK)
    words = ["classify", f"{tmp_path / 'net.py'}:make", "--input", "8", "--batch-size", "4", "--optimizer", "sgd(lr=1)"]
    code = f"from vramcast.cli import main; assert main({words!r}) == 0"
    assert loaded(code, *NEEDLESS, "sympy", "torch._dynamo") == "loaded []"


def test_the_process_that_builds_a_network_of_a_library_imports_as_little():
    pytest.importorskip("timm")
    assert loaded(CHILD, *NEEDLESS, "torch._dynamo", "huggingface_hub", "torchvision") == "loaded []"


def test_run_imports_no_builder_in_either_process(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(f"{SCRIPT}\nimport sys; print('script', sorted({{*{NEEDLESS!r}}} & sys.modules.keys()))")
    code = f"from vramcast.cli import main; assert main(['run', {str(path)!r}]) == 0"
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print('parent', sorted({{*{NEEDLESS!r}}} & sys.modules.keys()))"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    printed = (result.stdout + result.stderr).splitlines()
    assert "script []" in printed
    assert "parent []" in printed


def test_timm_extracts_features_with_what_is_left_of_torchvision():
    timm = import_library("timm")
    network = timm.create_model("resnet10t", features_only=True, feature_cls="fx")
    assert len(network(torch.zeros(1, 3, 64, 64))) == 5


STEP = """
import torch
from torch import nn
from vramcast.virtual_gpu.tracing.uncompiled import with_plain_step, without_compiler
weight = nn.Parameter(torch.ones(2))
with without_compiler():
    optimizer = with_plain_step(torch.optim.AdamW([weight], lr=0.5))
    optimizer.zero_grad(); (weight * weight).sum().backward(); optimizer.step()
assert torch.is_grad_enabled() and weight.tolist() != [1, 1]
"""


def test_an_optimizer_steps_without_the_compiler():
    assert loaded(STEP, "torch._dynamo") == "loaded []"


def test_a_compiler_that_is_there_stays_in_charge():
    import torch._dynamo

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    methods = dict(vars(torch.optim.Optimizer))
    with without_compiler():
        assert with_plain_step(optimizer) is optimizer
        assert "step" not in vars(optimizer)
        assert dict(vars(torch.optim.Optimizer)) == methods


def test_torch_is_as_it_was_after_a_trace():
    code = """
import torch
from vramcast.virtual_gpu.tracing.uncompiled import without_compiler
plain = torch.optim.Optimizer.zero_grad.__wrapped__
with without_compiler():
    assert getattr(plain, "__dynamo_disable") is plain
assert not hasattr(plain, "__dynamo_disable")
"""
    assert loaded(code, "torch._dynamo") == "loaded []"
