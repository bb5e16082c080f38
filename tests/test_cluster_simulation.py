"""Networks that users write: built without weights, fed what they take, and traced with a step of theirs or ours."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from vramcast.dataset_builder.backends.virtual import VirtualBackend
from vramcast.device.profiles import gpu_profiles, load_profile
from vramcast.errors import UserError
from vramcast.jobs.building import build_job
from vramcast.jobs.families import make_spec
from vramcast.jobs.families.libraries import tolerate_broken_torchvision
from vramcast.jobs.families.meta_device import build_on_meta, copy_to_meta
from vramcast.jobs.job import ModuleJob, SpecJob
from vramcast.jobs.optimizers import parse_optimizer
from vramcast.jobs.spec import Spec
from vramcast.jobs.targets import BuildRequest, parse_target
from vramcast.models.examples import example_of_simulation
from vramcast.models.uncertainty import unit_bytes
from vramcast.simulation.result import Simulation
from vramcast.simulation.simulator import Simulator
from vramcast.virtual_gpu.measurement import Status
from vramcast.virtual_gpu.training.setup import TrainingSetup

FILE = Path(__file__).parent / "support" / "written_networks.py"
A100 = load_profile("a100_40gb")


def request(factory, **more):
    return BuildRequest(target=parse_target(f"{FILE}:{factory}"), **more)


def job(factory, *inputs, **more):
    return build_job(request(factory, inputs=inputs, **more))


def simulated(job, **options):
    return Simulator(job).simulate({"batch_size": 4, **options}, [A100])


def held(simulation, use):
    return simulation.peaks["a100_40gb"].bounded.breakdown[use]


@pytest.mark.parametrize(
    ("factory", "inputs", "layer", "loss"),
    [
        ("UNet", ("3,32,32",), "up.0", "own"),
        ("Fpn", ("3,32,32",), "sides.2", "own"),
        ("Denoiser", ("3,16,16", "1"), "attention", "mse"),
        ("Tagger", ("9:100",), "lstm", "cross_entropy"),
        ("Tied", ("9:500",), "words", "cross_entropy"),
        ("Computing", ("9:500",), "head", "cross_entropy"),
        ("on_a_card", ("10",), "", "cross_entropy"),
    ],
)
def test_networks_are_traced_with_the_loss_that_their_output_suggests(factory, inputs, layer, loss):
    simulation = simulated(job(factory, *inputs))
    assert simulation.training.loss == loss
    assert layer in {record.name for record in simulation.table.layers}
    assert simulation.peaks["a100_40gb"].bounded.status is Status.OK
    assert held(simulation, "parameters") >= 4 * simulation.table.parameters


def test_a_graph_network_is_fed_by_a_function():
    simulation = simulated(job("GraphNet", inputs_factory="graph"))
    assert simulation.table.input_elements > 50 * 12
    assert [record.kind for record in simulation.table.layers if not record.functional] == ["Linear", "Linear"]


def test_a_step_of_the_users_own_takes_the_place_of_ours():
    simulation = simulated(job("blocks", inputs_factory="views", step_factory="contrast"), batch_size=4096)
    assert simulation.training.loss == "own"
    plain = simulated(job("blocks", "64"), batch_size=4096)
    assert held(simulation, "activations") > 1.5 * held(plain, "activations")  # two views


def test_what_is_frozen_has_neither_gradients_nor_state():
    simulation = simulated(job("lora", "256"), batch_size=64)
    assert simulation.table.parameters == 2 * (256 * 256 + 256 + 2 * 2 * 256)
    trainable = sum(torch.Size(shape).numel() for shape in simulation.table.trainable_shapes)
    assert trainable == 2 * 2 * 2 * 256
    owners = {cost.name: cost for cost in simulation.costs}
    assert set(owners["0.frozen"].held_bytes).isdisjoint({"gradients", "optimizer_state"})


def test_tied_weights_are_counted_once():
    made = job("Tied", "9:500")
    assert made.module.head.weight is made.module.words.weight
    assert simulated(made).table.parameters == 500 * 32
    untied = nn.Sequential(nn.Embedding(500, 32), nn.Linear(32, 500, bias=False))
    untied[1].weight = untied[0].weight
    copied = copy_to_meta(untied)
    assert copied[1].weight is copied[0].weight


def test_data_in_the_control_flow_is_assumed_and_noted_with_its_line():
    line = FILE.read_text().splitlines().index("        if y.sum().item() > 0:") + 1
    (note,) = simulated(job("Undecided", "10")).notes
    assert "taken as 1.0" in note and f"{FILE}:{line}" in note


def test_a_yes_or_no_that_is_read_from_a_tensor_is_told_with_its_line():
    line = FILE.read_text().splitlines().index("        if y.isnan().any():") + 1
    simulation = simulated(job("Checking", "10", arguments={"in_features": 10, "out_features": 2}))
    (note,) = [item for item in simulation.peaks["a100_40gb"].bounded.notes if "taken as False" in item]
    assert note.endswith(f"(at {FILE}:{line})")


def test_a_network_that_looks_like_lightnings_brings_step_and_optimizer():
    found = job("Lit", "10")
    simulation = simulated(found)
    assert simulation.training.optimizer == "SGD(momentum=0.9)"
    assert simulation.training.loss == "own"
    assert simulated(found, optimizer="adam").training.optimizer == "Adam"


def test_a_lightning_module_brings_step_optimizer_and_an_example_of_its_input():
    tolerate_broken_torchvision()  # Lightning imports it where it is installed, also where it does not load
    found = build_job(
        BuildRequest(target=parse_target(f"{FILE.parent / 'lit_network.py'}:Classifier"), arguments={"width": 64})
    )
    assert found.module.device.type == "meta"
    simulation = simulated(found)
    assert simulation.training.optimizer == "Adam(amsgrad=True)"
    assert simulation.table.parameters == 10 * 64 + 64 + 64 * 3 + 3


def test_inputs_that_nothing_tells_are_asked_for():
    with pytest.raises(UserError, match="expected the input shape of Linear"):
        job("on_a_card")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("resnet50", "name the network in one of these ways"),
        ("nowhere.py:make", "expected a Python file at nowhere.py"),
        ("timm:", "name the network in one of these ways"),
        ("a-b:make", "name the network in one of these ways"),
    ],
)
def test_targets_that_are_none_are_refused(text, why):
    with pytest.raises(UserError, match=why):
        parse_target(text)


def test_a_function_that_is_not_there_is_told_with_those_that_are():
    with pytest.raises(UserError, match=r"expected nothing_of in .*, found .*'UNet'"):
        job("nothing_of")


@pytest.mark.parametrize(
    ("target", "more", "why"),
    [
        (f"{FILE}:blocks", {"arguments": {"colour": 1}}, r"expected arguments of blocks\(depth=6, size=64\), found"),
        ("timm:resnet5", {}, "did you mean resnet50"),
        ("torchvision:zzzz", {}, "choose one of its"),
        ("timm:resnet18", {"step_factory": "step"}, "neither --inputs nor --step"),
        ("timm:resnet18", {"inputs": ("3,32,32", "5")}, "expected at most one --input"),
    ],
)
def test_words_that_a_network_has_no_use_for_are_refused(target, more, why):
    with pytest.raises(UserError, match=why):
        build_job(BuildRequest(target=parse_target(target), **more))


def test_what_a_library_says_to_a_spec_is_told_in_a_sentence():
    network = {"name": "resnet18", "input_shape": [3, 32, 32], "num_classes": 2, "arguments": {"colour": 1}}
    spec = Spec("timm", network, TrainingSetup(batch_size=2))
    with pytest.raises(UserError, match=r"expected a spec that timm can build and train, found TypeError: .*'colour'"):
        simulated(SpecJob(spec))


def test_weights_are_never_made():
    def make():
        assert torch.linspace(0, 1, 3)[-1].item() == 1.0  # meta has no numbers: the constructor starts again
        return nn.Sequential(*(nn.Linear(200_000, 200_000) for _ in range(3)))  # 160 GB each

    built = build_on_meta(make)
    assert all(item.is_meta for item in built.parameters())
    assert sum(item.numel() for item in built.parameters()) > 10**11


def test_a_module_in_memory_is_copied_without_its_numbers():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    made = ModuleJob(copy_to_meta(module), lambda size: torch.empty(size, 4))
    Simulator(made).simulate({"batch_size": 8}, [A100])
    assert not module.training
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(item.grad is None for item in module.parameters())


def test_what_a_loss_takes_is_no_blocks_own_under_checkpointing():
    """Recomputation leaves the forward of a block early, by an exception."""
    block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    network = nn.Sequential(nn.Embedding(50_000, 8), nn.Sequential(block, copy.deepcopy(block)), nn.Linear(8, 50_000))
    made = ModuleJob(copy_to_meta(network), lambda size: torch.zeros(size, 64, dtype=torch.long, device="meta"))
    costs = {item.name: item.total_bytes for item in simulated(made, checkpointing=True).costs}
    assert all(size < 2**20 for name, size in costs.items() if name.startswith("1.")), costs


def test_dtypes_accumulation_autocast_and_checkpointing_change_what_they_should():
    made = job("blocks", "64", arguments={"depth": 8, "size": 256})
    made.batch = ModuleJob(made.module, lambda size: torch.empty(size, 256)).batch
    plain = simulated(made, batch_size=512)
    assert held(simulated(made, batch_size=512, dtype="bf16"), "parameters") < 0.6 * held(plain, "parameters")
    assert held(simulated(made, batch_size=512, checkpointing=True), "activations") < 0.5 * held(plain, "activations")
    assert held(simulated(made, batch_size=512, autocast="bf16"), "activations") < held(plain, "activations")
    parts = simulated(made, batch_size=128, accumulate=4)
    assert parts.peaks["a100_40gb"].bounded.allocated_bytes < plain.peaks["a100_40gb"].bounded.allocated_bytes


def test_state_in_eight_bits_is_a_quarter():
    made = job("blocks", "64", arguments={"size": 256})
    made.batch = ModuleJob(made.module, lambda size: torch.empty(size, 256)).batch
    costs = {name: simulated(made, optimizer=name).costs for name in ("adamw", "adamw8bit")}
    state = {name: sum(item.held_bytes.get("optimizer_state", 0) for item in found) for name, found in costs.items()}
    assert 0.25 < state["adamw8bit"] / state["adamw"] < 0.28  # and a scale for each 256 elements


@pytest.mark.parametrize(("text", "name"), [("ADAMW", "AdamW"), ("sgd(momentum=0.9)", "SGD(momentum=0.9)")])
def test_optimizers_are_named_in_any_case(text, name):
    assert parse_optimizer(text) == name


@pytest.mark.parametrize("text", ["sophia", "lbfgs", "adam(momentum=1)"])
def test_optimizers_that_are_none_are_refused(text):
    with pytest.raises(UserError, match="expected"):
        parse_optimizer(text)


def test_cards_on_which_a_network_runs_alike_share_a_trace():
    made = ModuleJob(copy_to_meta(nn.Linear(8, 8)), lambda size: torch.empty(size, 8))
    simulator = Simulator(made)
    simulation = simulator.simulate({"batch_size": 2}, gpu_profiles())
    assert len(simulator._traces) == 1
    assert len(simulation.peaks) == len(gpu_profiles())


def test_a_card_that_is_too_small_is_told_what_would_be_needed():
    made = ModuleJob(copy_to_meta(nn.Linear(4096, 4096)), lambda size: torch.empty(size, 4096))
    simulation = Simulator(made).simulate({"batch_size": 2**20}, [load_profile("rtx_4060")])
    assert simulation.peaks["rtx_4060"].bounded.status is Status.OOM
    unbounded = simulation.peaks["rtx_4060"].unbounded
    assert unbounded.status is Status.OK
    assert unbounded.reserved_bytes > 2 * 2**20 * 4096 * 4
    assert Simulation.from_json(simulation.to_json()) == simulation


def test_a_spec_is_inspected_as_its_backend_measures_it():
    network = {"arch": "uniform", "input_features": 100, "output_features": 3, "depth": 2}
    spec = make_spec("mlp", network, TrainingSetup(batch_size=32, last_batch_size=5))
    found = SpecJob(spec)
    simulation = Simulator(found).simulate({}, [A100])
    measured = VirtualBackend(A100).measure(spec).measurement
    assert simulation.peaks["a100_40gb"].bounded.device_used_bytes == measured.device_used_bytes
    assert found.setup({"batch_size": 64}).last_batch_size is None


def test_facts_about_a_job_widen_no_bound_and_assumptions_do():
    assert not assumed(simulated(job("on_a_card", "10"), optimizer="adamw"))
    paged = simulated(job("on_a_card", "10"), optimizer=parse_optimizer("paged_adamw_32bit"))
    assert any("managed memory" in note for note in paged.notes)
    assert not assumed(paged)
    assert assumed(simulated(job("Tagger", "9:100")))  # the reserve of an LSTM is estimated


def test_a_rank_is_less_certain_by_the_memory_of_nccl_and_not_by_a_share_of_its_own():
    simulation = simulated(job("on_a_card", "10"), parallel="ddp(world_size=2)")
    assert any("NCCL" in note for note in simulation.peaks[A100.name].bounded.notes)
    rank = example_of_simulation(simulation, A100)
    assert not rank.assumed
    assert rank.unknown_nccl
    alone = replace(rank, unknown_nccl=False)
    assert unit_bytes(alone, "all", 0.0) < unit_bytes(rank, "all", 0.0)
    large = replace(rank, simulated=replace(rank.simulation, reserved_bytes=2**36), capacity_bytes=2**37)
    assert unit_bytes(large, "all", 0.0) < unit_bytes(replace(large, assumed=True), "all", 0.0) / 2


def assumed(simulation):
    return example_of_simulation(simulation, A100).assumed
