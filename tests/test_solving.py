"""A job is solved for the value that is left open."""

import asyncio
import json

import pytest
from served import serving

from vramcast.collocation.prices import read_prices
from vramcast.collocation.service.settings import Settings
from vramcast.commands.classify.solve_command import main
from vramcast.errors import UserError
from vramcast.jobs.architectures import positions_of
from vramcast.models.advice.solving import OpenJob, solve
from vramcast.models.answer import Answer, Bucket
from vramcast.virtual_gpu.training.setup import TrainingSetup, parse_call

CAPACITIES = {"t4": 15_000.0, "v100_16gb": 16_000.0, "a100_40gb": 40_000.0}


class Formula:
    """A job whose memory is a formula of its options."""

    target = "hf:made"

    def __init__(self) -> None:
        self.asked = 0

    def need(self, length=100, batch_size=1, adapter="lora(r=8)", parallel=None, **_):
        rank = parse_call(adapter)[1]["r"]
        ranks = parse_call(parallel)[1]["world_size"] if parallel else 1
        return 1000 + length * batch_size + 10 * rank + 60_000 / ranks * (parallel is not None)

    def answer(self, device, **changes):
        self.asked += 1
        need = self.need(**changes)
        return Answer(
            target=self.target, batch_size=1, device=device, estimate_mib=need, safe_mib=need, allocated_mib=1,
            reserved_mib=1, capacity_mib=CAPACITIES[device], oom_probability=0, risk=0.01, out_of_distribution=False,
            bucket=Bucket(index=0, lower_mib=0, upper_mib=None, probability=1), checkpoint="made", profile="made",
            seconds=0, parallel=changes.get("parallel"),
        )  # fmt: skip

    def with_length(self, device, length):
        return self.answer(device, length=length)


def open_job(find, **more):
    training = TrainingSetup(batch_size=1, **more.pop("training", {}))
    return OpenJob(find, "t4", training, **more)


@pytest.mark.parametrize(
    ("find", "training", "least", "most"),
    [
        ("batch_size", {}, 138, 139),
        ("length", {}, 13_780, 13_920),
        ("lora_rank", {"adapter": "lora(r=8)"}, 1375, 1390),
        ("world_size", {"parallel": "fsdp2(world_size=2)"}, 5, 5),
        ("world_size", {"parallel": "fsdp2(world_size=4, tensor=4)"}, 8, 8),
    ],
)
def test_the_value_fits_and_a_better_one_does_not(find, training, least, most):
    job = Formula()
    solution = solve(job, open_job(find, training=training))
    assert least <= solution.value <= most
    assert solution.answer.verdict == "fits"
    assert job.asked <= 12


def test_positions_bound_a_length():
    assert solve(Formula(), open_job("length", longest=1024)).value == 1024
    assert solve(Formula(), open_job("length", longest=1024)).notes == ()
    assert "not checked" in solve(Formula(), open_job("length")).notes[0]
    assert [positions_of(f"hf:{name}") for name in ("gpt2", "bert-base", "llama-3-8b", "t5-small")] == [
        1024, 512, 8192, None,
    ]  # fmt: skip
    assert positions_of("timm:resnet50") is None


def test_a_value_that_does_not_exist_is_none():
    job = Formula()
    job.need = lambda **_: 99_999
    for find, training in (("batch_size", {}), ("world_size", {"parallel": "ddp(world_size=2)"})):
        solution = solve(job, open_job(find, training=training))
        assert (solution.value, solution.answer, solution.price) == (None, None, None)
        assert solution.to_dict()["value"] is None


def test_the_cheapest_device_is_found_by_prices(tmp_path):
    job = Formula()
    answers = [job.answer(device) for device in CAPACITIES]
    found = solve(job, open_job("device", devices=answers, prices={"a100_40gb": 1.0, "t4": 2.0}))
    assert (found.value, found.price) == ("a100_40gb", 1.0)
    found = solve(job, open_job("device", devices=answers))
    assert (found.value, found.price) == ("t4", None)
    assert "no table of prices" in found.notes[0]
    gpus = solve(job, open_job("world_size", training={"parallel": "fsdp2(world_size=2)"}, prices={"t4": 0.5}))
    assert gpus.price == 2.5


@pytest.mark.parametrize(
    ("find", "words"), [("lora_rank", "an adapter"), ("world_size", "a strategy"), ("colour", "the value to find")]
)
def test_a_search_needs_what_it_varies(find, words):
    with pytest.raises(UserError, match=words):
        solve(Formula(), open_job(find))


@pytest.mark.parametrize("text", ["t5: 1", "t4: cheap", "t4: -1", "t4: .nan", "[1, 2]", "t4: true", "{"])
def test_wrong_prices_are_refused(tmp_path, text):
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match="expected"):
        read_prices(path)


def test_the_command_prints_the_value_and_ends_with_1_without_one(tmp_path, capsys):
    spec = {"family": "mlp", "network": {"arch": "pyramid", "input_features": 64, "output_features": 2, "depth": 2},
            "training": {"batch_size": 8}}  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(spec))
    words = [str(tmp_path / "job.json"), "--json", "--device", "t4"]
    assert main([*words, "--find", "batch-size"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["value"] == found["answer"]["batch_size"] > 1000
    (tmp_path / "prices.yaml").write_text("rtx_4090: 0.1\n")
    assert main([words[0], "--find", "device", "--prices", str(tmp_path / "prices.yaml")]) == 0
    text = capsys.readouterr().out
    assert "the cheapest device that fits safely is rtx_4090" in text
    assert "0.1 an hour" in text
    assert main([*words, "--find", "batch-size", "--dtype", "fp33"]) == 2
    assert main([*words, "--find", "size"]) == 2
    assert main(["--find", "device"]) == 2


def test_the_service_solves_and_advises(tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text("t4: 0.5\nrtx_4060: 0.25\n")
    mlp = {"family": "mlp", "network": {"arch": "pyramid", "input_features": 64, "output_features": 2, "depth": 2},
           "training": {"batch_size": 8}}  # fmt: skip

    async def scenario():
        async with serving(Settings(prices=path)) as service:
            job = {"spec": mlp, "device": "t4"}
            device = (await service.post("/v1/solve", {"job": job, "find": "device"})).json
            assert (device["value"], device["price_per_hour"]) == ("rtx_4060", 0.25)
            batch = (await service.post("/v1/solve", {"job": job, "find": "batch_size"})).json
            assert batch["value"] == batch["answer"]["batch_size"] > 8
            wrong = await service.post("/v1/solve", {"job": job, "find": "length"})
            assert (wrong.status, "by its name" in wrong.json["error"]) == (422, True)
            advice = (await service.post("/v1/advice", {"job": job})).json
            assert len(advice["devices"]) > 10
            assert advice["max_batch_size"] == batch["value"]
            line = (await service.post("/v1/timeline", {"job": job})).json
            points = {len(values) for values in line["uses"].values()}
            assert points == {len(line["reserved_bytes"])}
            assert next(iter(line["uses"])) == "parameters"
            table = {"layers": [], "trainable_shapes": [], "input_elements": 1}
            refused = await service.post("/v1/advice", {"job": {"table": table, "training": {"batch_size": 1}}})
            assert refused.status == 422

    asyncio.run(scenario())
