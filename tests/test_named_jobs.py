"""Networks of libraries by their name, asked of the service with the options of `vramcast classify`."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from served import Service, serving

from vramcast.collocation.adapters.job_text import job_of_text
from vramcast.collocation.local_answers import answers_on
from vramcast.collocation.named_job import NamedJob
from vramcast.collocation.service.loaded_checkpoint import Checkpoint
from vramcast.collocation.service.settings import Settings
from vramcast.commands.classify.job_answers import JobAnswers
from vramcast.commands.classify.request import ClassifyRequest
from vramcast.commands.classify.simulators import Simulators
from vramcast.errors import UserError
from vramcast.jobs.job_request import NAMED_KEYS
from vramcast.models.predictor import Predictor

RESNET = {"target": "timm:resnet18", "batch_size": 4, "input": "3,64,64"}


def run(
    scenario: Callable[[Service], Coroutine[Any, Any, None]], settings: Settings | None = None, load: Any = None
) -> None:
    async def all_of_it() -> None:
        async with serving(settings, load) as service:
            await scenario(service)

    asyncio.run(all_of_it())


def test_the_answer_is_that_of_classify() -> None:
    job = {**RESNET, "optimizer": "sgd(momentum=0.9)", "autocast": "bf16", "device": "t4"}
    with Simulators(100, 4096) as simulators:
        request = ClassifyRequest.of(job)
        expected = JobAnswers(request, simulators.start(request), Predictor.load("universal")).answer("t4")

    async def scenario(service: Service) -> None:
        answer = (await service.post("/v1/classify", job)).json
        for name in ("estimate_mib", "safe_mib", "reserved_mib", "breakdown_mib", "target", "verdict"):
            assert answer[name] == expected.to_dict()[name]
        quick = (await service.post("/v1/classify", {**job, "fast": True})).json
        assert (quick["checkpoint"], quick["reserved_mib"]) == ("universal_layers", None)
        assert quick["estimate_mib"] == pytest.approx(expected.estimate_mib, rel=0.5)

    run(scenario, load=Checkpoint)


def test_a_network_is_built_once_for_all_its_trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    from vramcast.collocation.service import tracing

    built: list[str] = []
    build = tracing.build_job
    monkeypatch.setattr(tracing, "build_job", lambda request: built.append(request.target.text) or build(request))
    tracing._BUILT.clear()

    async def scenario(service: Service) -> None:
        for more in ({}, {"batch_size": 8}, {"dtype": "bf16"}, {"fast": True}):
            assert (await service.post("/v1/classify", {**RESNET, **more})).status == 200
        answer = (await service.post("/v1/classify", {**RESNET, "max_batch": True})).json
        assert answer["max_batch_size"] > 8

    run(scenario)
    assert built == ["timm:resnet18"]


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"target": "net.py:make"}, "a network of a library"),
        ({"target": "os:system"}, "a network of a library"),
        ({"target": f"hf:{Path(__file__).parent}"}, "expected one of"),
        ({"target": "diffusers:/etc/config.json"}, "expected one of"),
        ({"target": "timm:resnet5"}, "did you mean resnet50"),
        ({"target": "timm:hf-hub:timm/resnet50"}, "expected a network of timm"),
        ({"target": "hf:gpt2", "config": "/etc/passwd"}, "Extra inputs"),
        ({"target": "timm:resnet18", "args": {"pretrained": True}}, "Extra inputs"),
        ({"target": "timm:resnet18", "python": "/bin/sh"}, "Extra inputs"),
        ({"target": "hf:gpt2", "step": "f"}, "Extra inputs"),
        ({"target": "timm:resnet18", "length": 8}, "beside an hf: target"),
        ({"target": "hf:gpt2", "parallel": "fsdp2"}, "world_size"),
        ({"target": "hf:gpt2", "parallel": "ddp", "world_size": 2, "fast": True}, "one GPU beside fast"),
        ({"target": "hf:gpt2", "quantize": "nf4"}, "expected an adapter"),
        ({"target": "hf:gpt2", "batch_size": 0}, "greater than or equal to 1"),
    ],
)
def test_neither_files_nor_code_of_a_client_are_used(job: dict[str, Any], words: str) -> None:
    async def scenario(service: Service) -> None:
        response = await service.post("/v1/classify", {"batch_size": 2, **job})
        assert response.status == 422
        assert words in response.json["error"]
        assert response.json["error"].startswith("expected ")

    run(scenario)


def test_an_observation_needs_a_known_name_and_replaces_the_forecast() -> None:
    async def scenario(service: Service) -> None:
        wrong = {"job": {**RESNET, "target": "timm:resnet5"}, "peak_mib": 900}
        assert "did you mean" in (await service.post("/v1/observations", wrong)).json["error"]
        other_rate = {**RESNET, "optimizer": "AdamW(lr=0.5)"}
        assert (await service.post("/v1/observations", {"job": other_rate, "peak_mib": 900})).json["runs"] == 1
        answer = (await service.post("/v1/classify", RESNET)).json
        assert (answer["basis"], answer["observed"]) == ("observed", {"runs": 1, "peak_mib": 900.0})

    run(scenario)


def test_the_names_are_listed() -> None:
    async def scenario(service: Service) -> None:
        listed = (await service.get("/v1/networks")).json
        assert {"resnet50", "vit_base_patch16_224"} <= set(listed["targets"]["timm"])
        assert {"gpt2", "llama-3-8b"} <= set(listed["targets"]["hf"])

    run(scenario)


def test_a_job_is_a_name_with_options_in_text() -> None:
    text = "hf:llama-3-8b batch_size=4 --length=2048 lora='r=16,targets=q_proj,v_proj' checkpointing memory_budget=0.5"
    assert job_of_text(text) == {
        "target": "hf:llama-3-8b", "batch_size": 4, "length": 2048, "lora": "r=16,targets=q_proj,v_proj",
        "checkpointing": True, "memory_budget": 0.5,
    }  # fmt: skip
    assert job_of_text("resnet50@32") == {"name": "resnet50@32"}
    for wrong in ("timm:resnet50 'open", "timm:resnet50 batch_size=1 batch_size=2", "timm:resnet50 =3"):
        with pytest.raises(UserError, match="expected options"):
            job_of_text(wrong)

    async def scenario(service: Service) -> None:
        reply = await service.post("/v1/slurm", b"timm:resnet18 batch_size=4 input=3,64,64")
        assert b"shards=" in reply.body, reply.body

    run(scenario)


def test_one_network_has_one_id() -> None:
    first = NamedJob.of({"target": "timm:resnet18", "batch_size": 4, "optimizer": "adamw"})
    assert first.id == NamedJob.of({"target": "timm:resnet18", "batch_size": 4}).id
    assert first.id != first.with_options(batch_size=5).id
    assert first.without_rate.id == first.with_options(optimizer="AdamW(lr=1.0)").without_rate.id
    assert set(first.options) < set(NAMED_KEYS)


def test_a_command_answers_names_too() -> None:
    answers = answers_on(RESNET, ["t4"], "universal", 0.01)
    assert answers["t4"].target == "timm:resnet18"
