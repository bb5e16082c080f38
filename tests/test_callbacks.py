"""Callbacks of trainers compare a real run with its forecast: torch.cuda is a stub here, the libraries are real."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch

import vramcast
from vramcast.collocation.callbacks.run_observer import RunObserver
from vramcast.collocation.client import ServiceAwayError
from vramcast.errors import UserError

MIB = 2**20
FORECAST = {
    "allocated_mib": 900.0, "reserved_mib": 1000.0, "safe_mib": 1600.0, "device": "rtx_4090",
    "breakdown_mib": {"context": 500.0},
}  # fmt: skip
JOB = {"target": "timm:resnet18", "batch_size": 8}


class Service:
    def __init__(self, error=None):
        self.observed, self.error = [], error

    def observe(self, job, peak_mib, device):
        self.observed.append((job, peak_mib, device))
        if self.error:
            raise self.error


def own(caplog):
    return [record for record in caplog.records if record.name == "vramcast"]


@pytest.fixture(scope="module")
def trainer_callbacks():
    """The library, imported while torch has no stub."""
    return pytest.importorskip("transformers.trainer_callback")


@pytest.fixture
def gpu(monkeypatch):
    """The peaks that torch.cuda reports, in MiB."""
    peaks = SimpleNamespace(allocated=909, reserved=1020)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peaks.allocated * MIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: peaks.reserved * MIB)
    return peaks


def test_the_trainer_compares_and_reports_once(trainer_callbacks, gpu, caplog):
    service = Service()
    callback = vramcast.TrainerCallback(FORECAST, job=JOB, service=service)
    assert isinstance(callback, trainer_callbacks.TrainerCallback)
    with caplog.at_level(logging.INFO, "vramcast"):
        for step in range(1, 6):
            callback.on_step_end(None, SimpleNamespace(global_step=step, is_world_process_zero=True), None)
        assert len(own(caplog)) == 1 and own(caplog)[0].levelno == logging.INFO
        text = own(caplog)[0].getMessage()
        assert "after 3 steps torch reserves 1,020 MiB, forecast 1,000 (+2.0%)" in text and "1,600 MiB covers" in text
        assert service.observed == [(JOB, 1520.0, "rtx_4090")], "with the context as it was forecast"
        callback.on_train_end(None, SimpleNamespace(global_step=5, is_world_process_zero=True), None)
        assert len(service.observed) == 1, "nothing has grown"
        gpu.reserved = 1200
        callback.on_train_end(None, SimpleNamespace(global_step=5, is_world_process_zero=True), None)
    assert service.observed[1][1] == 1700.0 and own(caplog)[-1].levelno == logging.WARNING
    assert "does NOT cover" in own(caplog)[-1].getMessage()


def test_other_processes_compare_nothing(trainer_callbacks, gpu):
    callback = vramcast.TrainerCallback(FORECAST)
    callback.on_step_end(None, SimpleNamespace(global_step=9, is_world_process_zero=False), None)
    assert callback.observer.comparison is None


def test_lightning_counts_optimizer_steps(gpu):
    callback = vramcast.LightningCallback(FORECAST, steps=2)
    for batch, steps in enumerate((0, 1, 1, 2)):  # two batches a step
        callback.on_train_batch_end(SimpleNamespace(global_step=steps, is_global_zero=True), None, None, None, batch)
        assert (callback.observer.comparison is None) == (steps < 2)
    callback.on_train_end(SimpleNamespace(global_step=2, is_global_zero=True), None)
    assert callback.observer.comparison.error == pytest.approx(0.02)


def test_a_service_that_is_away_ends_no_training(gpu, caplog):
    observer = RunObserver(FORECAST, job=JOB, service=Service(ServiceAwayError("no answer")))
    observer.note_step(3)
    assert "the service did not take the observation: no answer" in caplog.text


def test_a_run_without_a_gpu_is_not_compared(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    observer = RunObserver(FORECAST)
    observer.note_step(3)
    observer.note_end(3)
    assert observer.comparison is None


def test_a_forecast_is_an_answer_its_json_or_a_file(tmp_path):
    file = tmp_path / "forecast.json"
    file.write_text(json.dumps({"job": "train.py", "passed": True, "answer": FORECAST}))
    assert RunObserver(str(file)).forecast == RunObserver(FORECAST).forecast
    answer = vramcast.classify(torch.nn.Linear(64, 64), torch.ones(8, 64), device="rtx_4090")
    assert RunObserver(answer).forecast.safe_mib == pytest.approx(answer.safe_mib, abs=0.05)
    for wrong in ({}, {**FORECAST, "safe_mib": None}, {**FORECAST, "reserved_mib": 0}, tmp_path / "none"):
        with pytest.raises(UserError, match="--json"):
            RunObserver(wrong)
    with pytest.raises(UserError, match="give both"):
        RunObserver(FORECAST, job=JOB)
