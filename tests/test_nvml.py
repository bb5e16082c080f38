"""The gateway to NVML with the real bindings and a stub of the driver's library."""

import json
import os
import subprocess
import sys

import pytest
from nvml_stub import (
    DRIVER_NOT_LOADED,
    GIB,
    LOST,
    NO_PERMISSION,
    NOT_SUPPORTED,
    UNKNOWN,
    VERSION_MISMATCH,
    without_driver,
)

START = """
import json, sys
from dataclasses import asdict
from vramcast.errors import UserError
from vramcast.device.nvml import *
def show(value): print(json.dumps(value, default=asdict), flush=True)
try:
    with open_nvml() as nvml:
{body}
except NvmlError as error:
    show([type(error).__name__, str(error)])
"""
STATE = "gpu, = nvml.gpus(); show([nvml.memory(gpu), nvml.processes(gpu)])"


def program(body):
    return START.format(body="\n".join(f"        {line}" for line in body.splitlines()))


def results(driver, body):
    result = driver.run(program(body))
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_gpu_has_a_uuid_a_name_and_memory(driver):
    driver.stub.gpu(used=3 * GIB).write()
    gpus, versions, state = results(driver, f"show(nvml.gpus())\nshow(nvml.versions())\n{STATE}")
    assert gpus == [
        {"uuid": "GPU-a", "name": "NVIDIA A100-SXM4-40GB", "index": 0, "total_bytes": 40 * GIB, "board_uuid": "GPU-a"}
    ]
    assert versions == {"driver": "555.42.06", "driver_cuda": "12.5"}
    assert state == [{"total_bytes": 40 * GIB, "used_bytes": 3 * GIB, "reserved_bytes": GIB // 2}, []]


def test_an_old_driver_reports_used_and_reserved_as_one(driver):
    driver.stub.gpu(used=3 * GIB).add(f"memory_v2 {NOT_SUPPORTED}").write()
    ((memory, _),) = results(driver, STATE)
    assert memory == {"total_bytes": 40 * GIB, "used_bytes": 3 * GIB + GIB // 2, "reserved_bytes": None}


def test_processes_with_compute_and_graphics_are_listed_once(driver):
    stub = driver.stub.gpu(mig=-1).gpu(uuid="GPU-b")
    stub.process(7, GIB).process(7, GIB, kind="g").process(9, 5, kind="g").process(8, -1).process(1, 1, uuid="GPU-b")
    stub.write()
    (processes,) = results(driver, "show(nvml.processes(nvml.gpus()[0]))")
    assert processes == [{"pid": 7, "used_bytes": GIB}, {"pid": 8, "used_bytes": None}, {"pid": 9, "used_bytes": 5}]


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION])
def test_an_unsupported_process_list_is_none(driver, code):
    driver.stub.gpu().add(f"processes GPU-a {code}").write()
    ((memory, processes),) = results(driver, STATE)
    assert memory["used_bytes"] == 0
    assert processes is None


def test_memory_and_processes_are_current(driver):
    body = f"{STATE}\nfor line in sys.stdin:\n    show([nvml.memory(gpu).used_bytes, nvml.processes(gpu)])"
    driver.stub.gpu().write()
    with subprocess.Popen(
        [sys.executable, "-c", program(body)],
        env=driver.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:

        def query():
            child.stdin.write("?\n")
            child.stdin.flush()
            return json.loads(child.stdout.readline())

        child.stdout.readline()
        assert query() == [0, []]
        driver.stub.gpu(used=GIB).process(os.getpid(), GIB).write()
        assert query() == [GIB, [{"pid": os.getpid(), "used_bytes": GIB}]]
        driver.stub.gpu(used=5).write()
        assert query() == [5, []]
        driver.stub.gpu(code=LOST).write()
        kind, sentence = query()
        assert kind == "GpuLostError"
        assert "GPU-a" in sentence
        assert "nvidia-smi -r" in sentence


def test_a_lost_gpu_does_not_hide_the_others(driver):
    driver.stub.gpu(code=LOST).gpu(uuid="GPU-b").write()
    gpus, lost = results(driver, "show([gpu.uuid for gpu in nvml.gpus()])\nshow(nvml.lost)")
    assert gpus == ["GPU-b"]
    assert lost[0].startswith("GPU 0: expected GPU 0 to respond, found that it is lost")


def test_a_gpu_in_mig_mode_is_listed_as_its_instances(driver):
    stub = driver.stub.gpu().gpu(uuid="GPU-b", mig=1)
    stub.instance(1, "MIG-x", used=GIB).instance(1, "MIG-y").process(4, GIB, uuid="MIG-x").write()
    gpus, state = results(driver, "show(nvml.gpus())\nx = nvml.gpus()[1]; show([nvml.memory(x), nvml.processes(x)])")
    assert [(gpu["uuid"], gpu["index"], gpu["board_uuid"]) for gpu in gpus] == [
        ("GPU-a", 0, "GPU-a"),
        ("MIG-x", 1, "GPU-b"),
        ("MIG-y", 1, "GPU-b"),
    ]
    assert gpus[1]["total_bytes"] == 5 * GIB
    assert state[0]["used_bytes"] == GIB
    assert state[1] == [{"pid": 4, "used_bytes": GIB}]


def test_a_gpu_in_mig_mode_without_instances_is_not_listed(driver):
    driver.stub.gpu(mig=1).write()
    assert results(driver, "show(nvml.gpus())") == [[]]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (DRIVER_NOT_LOADED, "no running driver"),
        (VERSION_MISMATCH, "reboot"),
        (NO_PERMISSION, "/dev/nvidia*"),
    ],
)
def test_a_driver_that_does_not_run_is_explained(driver, code, words):
    driver.stub.add(f"init {code}").write()
    ((kind, sentence),) = results(driver, "show(nvml.gpus())")
    assert kind == "NoDriverError"
    assert words in sentence
    assert "backend=virtual" in sentence


def test_a_missing_driver_is_explained(driver):
    result = driver.run(program("show(nvml.gpus())"), LD_LIBRARY_PATH=str(without_driver(driver.folder)))
    kind, sentence = json.loads(result.stdout)
    assert kind == "NoDriverError"
    assert "no libnvidia-ml.so.1 on this machine" in sentence
    assert "backend=virtual" in sentence


def test_another_error_names_the_gpu(driver):
    driver.stub.gpu().add(f"processes GPU-a {UNKNOWN}").write()
    ((kind, sentence),) = results(driver, STATE)
    assert kind == "NvmlError"
    assert sentence.startswith("expected GPU-a to respond, found NVML's error")
