"""`vramcast classify` and the Python API for several GPUs: ranks, strategies and refusals."""

import json

import pytest
import torch
from rank_traces import mlp

from vramcast.commands.classify.classify_command import main
from vramcast.commands.classify.request import ClassifyRequest
from vramcast.errors import UserError
from vramcast.jobs.families import make_spec
from vramcast.jobs.job import SpecJob
from vramcast.models.predictor import Predictor
from vramcast.simulation.result import Simulation
from vramcast.simulation.simulator import Simulator
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.training.setup import TrainingSetup, with_shorthands

PLAIN = DeviceProfile(name="plain", title="Plain", total_mib=8192, compute_capability=8.0, context_mib=100)
NETWORK = {"arch": "uniform", "input_features": 1024, "output_features": 1000, "depth": 6}


def spec(**training):
    return make_spec("mlp", NETWORK, TrainingSetup(batch_size=32, **training))


def test_one_text_stands_for_equal_parallelism() -> None:
    setups = [
        TrainingSetup(batch_size=1, parallel=text)
        for text in ("fsdp2(world_size=8)", "fsdp2(nodes=1, world_size=8)", "fsdp2(offload=False, world_size=8)")
    ]
    assert len(set(setups)) == 1
    assert setups[0].parallel == "fsdp2(world_size=8)"
    assert setups[0].parallelism is not None
    assert TrainingSetup(batch_size=1, parallel="tp(world_size=2)").parallel == "tp(world_size=2)"


def test_parallelism_changes_the_id_of_a_spec_and_its_absence_does_not() -> None:
    plain, parallel = spec(), spec(parallel="ddp(world_size=2)")
    assert plain.id != parallel.id
    assert plain.group == parallel.group
    assert "parallel" not in json.dumps(plain.to_json())
    assert parallel.from_json(parallel.to_json()) == parallel


def test_options_of_the_command_line_become_one_text() -> None:
    values = {"parallel": "fsdp2", "world_size": 8, "offload": True, "batch_size": 4}
    assert with_shorthands(values) == {"parallel": "fsdp2(offload=True, world_size=8)", "batch_size": 4}
    with pytest.raises(UserError, match="expected parallel with world_size, found none"):
        ClassifyRequest.of({"target": "timm:resnet18", "batch_size": 4, "world_size": 8})


def test_the_answer_of_ddp_has_the_gradients_twice() -> None:
    one, two = (Simulator(SpecJob(spec(parallel=text))) for text in (None, "ddp(world_size=2)"))
    single, ranks = one.simulate({}, [PLAIN]), two.simulate({}, [PLAIN])
    assert single.ranks == ()
    assert [(item.rank, item.count) for item in ranks.ranks] == [(0, 2)]
    parameters = sum(torch.Size(shape).numel() for shape in single.table.trainable_shapes) * 4
    difference = ranks.peaks["plain"].bounded.requested_bytes - single.peaks["plain"].bounded.requested_bytes
    assert difference == pytest.approx(parameters, rel=0.02)  # the buckets
    assert any("NCCL" in note for note in ranks.peaks["plain"].bounded.notes)
    assert Simulation.from_json(json.loads(json.dumps(ranks.to_json()))) == ranks


def test_memory_of_nccl_is_part_of_the_overhead_where_it_is_known() -> None:
    profile = DeviceProfile(**{**vars(PLAIN), "nccl_mib": 700, "nccl_source": "a measurement"})
    simulation = Simulator(SpecJob(spec(parallel="fsdp2(world_size=2)"))).simulate({}, [profile])
    measurement = simulation.peaks["plain"].bounded
    assert measurement.breakdown["context"] == 800 * MIB
    assert not any("NCCL" in note for note in measurement.notes)


def test_the_largest_rank_comes_first() -> None:
    simulation = Simulator(SpecJob(spec(parallel="zero1(world_size=4)"))).simulate({}, [PLAIN])
    reserved = [item.reserved_bytes for item in simulation.ranks]
    assert len(reserved) == 2
    assert reserved == sorted(reserved, reverse=True)
    assert simulation.peaks["plain"].unbounded.reserved_bytes == reserved[0]


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor.load("universal")


def test_the_python_api_takes_a_strategy(predictor: Predictor) -> None:
    answer = predictor.classify(mlp(), torch.randn(8, 1024), parallel="fsdp2", world_size=4)
    assert answer.parallel == "fsdp2(world_size=4)"
    assert answer.ranks[0]["count"] == 4
    assert answer.out_of_distribution
    values = answer.to_dict()
    assert values["parallel"] == answer.parallel
    plain = predictor.classify(mlp(), torch.randn(8, 1024)).to_dict()
    assert "parallel" not in plain
    assert plain["allocated_mib"] > values["allocated_mib"]


def test_a_line_of_json_has_ranks_and_strategies(capsys, tmp_path) -> None:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec().to_json()))
    assert main([str(path), "--parallel", "fsdp2", "--world-size", "4", "--strategies", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ranks"][0]["rank"] == 0
    by_name = {item["strategy"]: item for item in answer["strategies"] if not item["smallest"]}
    assert by_name["DDP"]["estimate_mib"] > by_name["ZeRO-1"]["estimate_mib"] > by_name["FSDP2"]["estimate_mib"]
    assert answer["strategies"][-1]["smallest"]
    assert answer["strategies"][-1]["world_size"] == 1
    assert answer["strategies"][-1]["parallel"] is None


def test_the_page_names_the_least_number_of_gpus(capsys, tmp_path) -> None:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec().to_json()))
    assert main([str(path), "--parallel", "ddp", "--world-size", "2"]) == 0
    page = capsys.readouterr().out
    assert "rank 0 and 1 like it" in page
    assert "The least number of these GPUs that fits: 1, with no parallelism" in page


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--parallel", "fsdp9", "--world-size", "8"], "found 'fsdp9'"),
        (["--parallel", "fsdp2"], "expected a world_size with parallel"),
        (["--parallel", "fsdp2", "--world-size", "8", "--wrap", "Nothing"], "found Nothing: use one of"),
        (["--parallel", "fsdp2", "--world-size", "8", "--shard-after-forward", "maybe"], "found 'maybe'"),
        (["--parallel", "tp", "--world-size", "2"], "expected a network with a tensor-parallel plan"),
    ],
)
def test_bad_input_gets_one_sentence(words, sentence, capsys, tmp_path) -> None:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec().to_json()))
    assert main([str(path), *words, "--json"]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error
