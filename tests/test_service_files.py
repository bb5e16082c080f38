"""The service answers for the content of files without code, and refuses those that would have to be built."""

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from network_files import SIDE, config_value, graph_json, keras_value, onnx_file, safetensors_file
from served import MLP, Service, serving

from vramcast.device.profiles import load_profile
from vramcast.jobs.network_files.reading import read_network_bytes
from vramcast.models.predictor import Predictor, Question, table_training

TRAINING = {"batch_size": 8}


def run(scenario: Callable[[Service], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with serving() as service:
            await scenario(service)

    asyncio.run(whole())


def encoded(content: bytes, **more: Any) -> dict[str, Any]:
    return {"file": base64.b64encode(content).decode(), "encoding": "base64", "training": TRAINING, **more}


def test_every_form_of_a_file_is_answered() -> None:
    async def scenario(service: Service) -> None:
        jobs = [
            {"file": graph_json().decode(), "training": TRAINING},
            {"file": json.dumps(keras_value()), "training": {**TRAINING, "optimizer": "SGD"}},
            encoded(safetensors_file(), input=[f"3,{SIDE},{SIDE}"]),
        ]
        reply = await service.post("/v1/classify", {"jobs": jobs})
        assert [answer["status"] for answer in reply.json["answers"]] == ["ok"] * 3
        assert {answer["target"] for answer in reply.json["answers"]} == {"file"}

    run(scenario)


def test_an_onnx_file_is_answered() -> None:
    pytest.importorskip("onnx")

    async def scenario(service: Service) -> None:
        reply = await service.post("/v1/classify", encoded(onnx_file()))
        assert (reply.status, reply.json["batch_size"]) == (200, 8)

    run(scenario)


def test_a_bad_file_is_a_sentence_and_the_service_still_answers() -> None:
    deep = '{"class_name":' * 5000
    archive = "expected the JSON inside of an archive, found the archive"

    async def scenario(service: Service) -> None:
        for body, words in (
            ({"file": deep, "training": TRAINING}, "expected JSON in the file"),
            (encoded(b"PK\x03\x04" + bytes(30)), archive),
            (encoded(b"\x80\x04\x95"), "a pickle, which is never opened"),
            (encoded(b"\xff" * 30), "found bytes of something else"),
            ({"file": "!", "encoding": "base64", "training": TRAINING}, "expected a file in base64"),
            ({"file": json.dumps(config_value()), "training": TRAINING}, "found a configuration: name the network"),
            (
                {"file": json.dumps({**config_value(), "auto_map": {}}), "training": TRAINING},
                "which names code of its own",
            ),
            (encoded(safetensors_file()), "expected the shape of one input"),
            (
                {"file": graph_json().decode(), "training": {**TRAINING, "optimizer": "Nothing"}},
                "expected an optimizer",
            ),
        ):
            reply = await service.post("/v1/classify", body)
            assert reply.status == 422
            assert words in reply.json["error"]
        assert (await service.post("/v1/classify", {"spec": MLP})).status == 200

    run(scenario)


def test_files_beyond_the_limit_of_layers_are_refused() -> None:
    layers = [{"class_name": "Dense", "config": {"units": 2}}] * 3500
    network = {"class_name": "Sequential", "config": {"layers": layers, "build_input_shape": [None, 2]}}

    async def scenario(service: Service) -> None:
        reply = await service.post("/v1/classify", {"file": json.dumps(network), "training": TRAINING})
        assert "expected at most 3000 layers, found 3500" in reply.json["error"]

    run(scenario)


def test_a_job_in_a_file_is_observed_and_recognised() -> None:
    async def scenario(service: Service) -> None:
        job = {"file": graph_json().decode(), "training": TRAINING}
        assert (await service.post("/v1/observations", {"job": job, "peak_mib": 2000})).status == 200
        spelled = {**job, "file": json.dumps(json.loads(job["file"]), indent=1)}
        assert (await service.post("/v1/classify", spelled)).json["basis"] == "observed"
        other = {**job, "training": {"batch_size": 9}}
        assert (await service.post("/v1/classify", other)).json["basis"] == "forecast"

    run(scenario)


def test_activations_that_are_inferred_widen_the_safe_figure() -> None:
    network = read_network_bytes(safetensors_file(), ((3, 256, 256),))
    training = table_training({"batch_size": 256})
    questions = Question.of_description("x", network, training, [load_profile("a100_40gb")])
    expected, narrow = Predictor.load("universal_layers").answers(
        [questions[0], Question(**{**vars(questions[0]), "wider": None})]
    )
    assert expected.estimate_mib == pytest.approx(narrow.estimate_mib)
    assert expected.safe_mib > 1.2 * narrow.safe_mib
    assert expected.out_of_distribution
