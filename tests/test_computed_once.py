"""A layer table, a static estimate, a training setup and a spec are computed once per request."""

import asyncio
import sys
from collections import Counter

import pytest
import torch
from served import MLP, serving
from synthetic_examples import mlp_examples
from torch import nn

import vramcast
from vramcast.collocation.service.loaded_checkpoint import Checkpoint
from vramcast.commands.classify.job_answers import JobAnswers
from vramcast.commands.classify.request import ClassifyRequest
from vramcast.device.profiles import gpu_profiles
from vramcast.jobs.analysis.layers import layer_table
from vramcast.jobs.analysis.static import static_estimate
from vramcast.jobs.families import make_spec
from vramcast.jobs.job import ModuleJob, SpecJob, table_of
from vramcast.models import load
from vramcast.models.estimators.encoding import ExampleEncoder
from vramcast.simulation.simulator import Simulator


@pytest.fixture
def counts(monkeypatch):
    """The calls of each function, under any name by which a module of vramcast knows it."""
    calls = Counter()

    def counted(function):
        def call(*arguments, **options):
            calls[function.__name__] += 1
            return function(*arguments, **options)

        return call

    modules = [module for name, module in sys.modules.items() if name.startswith("vramcast")]
    for function in (static_estimate, layer_table, table_of, make_spec):
        counting = counted(function)
        for module in modules:
            for name in [name for name, value in vars(module).items() if value is function]:
                monkeypatch.setattr(module, name, counting)
    for kind in (ModuleJob, SpecJob):
        monkeypatch.setattr(kind, "setup", counted(kind.setup))
    return calls


def network():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def test_a_module_is_described_once(counts):
    vramcast.classify(network(), torch.empty(32, 64))
    assert counts == {"setup": 1, "layer_table": 1, "static_estimate": 1}


def test_a_job_that_does_not_fit_is_described_once(counts):
    answer = vramcast.classify(nn.Linear(4096, 4096), torch.empty(2**20, 4096, device="meta"), device="rtx_4060")
    assert not answer.fits
    assert counts == {"setup": 1, "layer_table": 1, "static_estimate": 1}


def test_all_devices_of_a_page_share_one_description(counts):
    names = [profile.name for profile in gpu_profiles()]
    request = ClassifyRequest.of({"target": "net.py:make", "batch_size": 32})
    simulator = Simulator(ModuleJob(network().to("meta"), lambda size: torch.empty(size, 64, device="meta")))
    job = JobAnswers(request, simulator, load())
    answers = job.answers(job.simulate(names), names)
    assert len(answers) == len(names) > 10
    assert counts == {"setup": 1, "layer_table": 1, "static_estimate": 1}


def test_a_request_of_the_service_makes_its_spec_once(counts):
    async def scenario():
        async with serving(load=Checkpoint) as service:
            response = await service.post(
                "/v1/classify", {"spec": {**MLP, "training": {"batch_size": 17}}, "device": "t4"}
            )
            assert response.status == 200

    asyncio.run(scenario())
    assert counts == {"setup": 1, "make_spec": 1, "table_of": 1, "static_estimate": 1}


@pytest.mark.parametrize("checkpoint", ["universal", "universal_layers"])
def test_features_are_computed_once_for_a_distribution(checkpoint, monkeypatch):
    matrices = []
    compute = ExampleEncoder.matrix
    monkeypatch.setattr(ExampleEncoder, "matrix", lambda *given: matrices.append(given) or compute(*given))
    load(checkpoint).estimator.distribution(mlp_examples(3), 0.01)
    assert len(matrices) == 1
