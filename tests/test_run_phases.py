"""The phases of a script: what follows training is reached, and what was not reached is named."""

import json
import sys
from types import SimpleNamespace

import pytest
from script_runs import MIB, SCRIPTS, interpreter_for, peaks, run
from warm_runs import HOST

from vramcast.virtual_gpu.cuda.iteration_counters import IterationCounter
from vramcast.virtual_gpu.cuda.libraries.transformers_training import PATCHES
from vramcast.virtual_gpu.cuda.patches import Patches
from vramcast.virtual_gpu.cuda.script_source import COUNT, LOOP, RAN, ScriptSource


def by_phase(report):
    return {item.phase: item for item in report.phases}


def test_a_larger_batch_of_a_late_validation_is_seen(tmp_path):
    report = run("validation_every.py", tmp_path=tmp_path)
    whole = run("validation_every.py", tmp_path=tmp_path, phases="all")
    quick = run("validation_every.py", tmp_path=tmp_path, phases="train")
    assert peaks(report) == peaks(whole) and len(whole.steps) == 400 and len(report.steps) < 30
    held = 2 * 1024 * 32 * 32 * 32 * 4  # of a layer, before and after ReLU
    assert by_phase(report)["evaluation"].allocated_bytes > held > 6 * by_phase(quick)["backward"].allocated_bytes
    assert not report.missing and report.ending == "the script ended"
    assert any("evaluation" in item and "validation_every.py" in item for item in quick.missing)


@pytest.mark.parametrize("flags", [(), ("--steps",)])
def test_logits_that_are_collected_are_extrapolated_to_the_whole_loader(tmp_path, flags):
    report = run("collected_logits.py", *flags, tmp_path=tmp_path)
    logits = 15000 * 4096 * 4
    assert by_phase(report)["evaluation"].allocated_bytes == pytest.approx(2 * logits, rel=0.1), "a list and its cat"
    assert any("an evaluation was ended after 60 of 150 batches" in item for item in report.assumptions)
    assert not report.missing and len(report.steps) < 40
    assert report.changes.written == (str(tmp_path / "final.pt"),), "the script came to its end"
    whole = run("collected_logits.py", *flags, tmp_path=tmp_path, phases="all")
    assert peaks(report)[0] == pytest.approx(peaks(whole)[0], rel=0.001)


def test_the_generator_steps_that_comes_every_fifth_iteration_is_seen(tmp_path):
    report = run("wgan.py", tmp_path=tmp_path)
    whole = run("wgan.py", tmp_path=tmp_path, phases="all")
    generator = 64 * 1024 + 1024 + 1024 * 3072 + 3072
    critic = 3072 * 512 + 512 + 513
    states = report.simulation.peaks["a100_40gb"].bounded.breakdown["optimizer_state"]
    assert states == pytest.approx(12 * generator + 4 * critic, rel=0.001), "with the denominators of Adam"
    assert peaks(report)[0] == pytest.approx(peaks(whole)[0], rel=0.001) and len(report.steps) < 20 < len(whole.steps)


def test_an_optimizer_that_has_not_stepped_is_missing(tmp_path):
    report = run("wgan.py", tmp_path=tmp_path, steps=3)
    assert any(item.startswith("steps of Adam (") and "wgan.py" in item for item in report.missing), report.missing


def test_inference_alone_has_a_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = HOST.run("--json", "--device", "rtx_4090", "--", sys.executable, str(SCRIPTS / "inference.py"))
    answer = json.loads(out)
    printed = int(err.split("peak ")[1].split()[0])
    assert code == 0 and answer["verdict"] == "fits" and "missing" not in answer
    assert answer["run"]["phases_mib"]["evaluation"] == {
        "allocated": pytest.approx(printed / MIB, abs=0.06), "reserved": answer["reserved_mib"], "count": 3,
    }  # fmt: skip
    assert any("no network was trained" in note for note in answer["notes"])


def test_a_loop_without_an_optimizer_has_steps_and_a_report_although_it_fails(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = HOST.run("--json", "--phases", "all", "--", sys.executable, str(SCRIPTS / "own_updates.py"))
    answer = json.loads(out)
    weights = 4 * (512 * 512 + 512 + 5130)
    assert code == 3 and "after the loop" in err
    assert len(answer["run"]["steps"]) == 199 and answer["allocated_mib"] > 2 * weights / MIB


def test_a_verdict_names_the_phase_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = str(SCRIPTS / "validation_every.py")
    code, page, _ = HOST.run("--phases", "train", "--device", "rtx_4090", "--", sys.executable, path)
    assert code == 0
    assert "INCOMPLETE" in page and "so that no risk is stated" in page and "out of memory  " not in page
    assert "not reached: evaluation" in page and "FITS" not in page and "enough in 99 %" not in page


def test_metrics_of_all_logits_of_the_trainer_are_seen_within_the_memory_of_the_host(tmp_path):
    needs = ("transformers", "accelerate")
    report = run("hf_metrics.py", "100", needs=needs, tmp_path=tmp_path, memory_mib=6144)
    logits = 100 * 256 * 50257 * 4
    assert by_phase(report)["evaluation"].allocated_bytes == pytest.approx(2 * logits, rel=0.05), (
        "joined batch by batch"
    )
    assert not report.missing and len(report.steps) < 60, "of three epochs with 50 steps"


@pytest.mark.parametrize("search", ["greedy", "sample", "static", "beam", "assisted"])
def test_a_generation_runs_to_its_greatest_length(tmp_path, search):
    report = run("generate_eos.py", search, needs=("transformers",), tmp_path=tmp_path, timeout_seconds=120)
    assert report.ending == "the script ended" and by_phase(report)["generation"].count >= 3
    assert any("runs to its greatest length" in item for item in report.assumptions)


def test_lightning_tests_its_best_checkpoint_in_inference_mode(tmp_path):
    report = run("lightning_best.py", needs=("lightning",), tmp_path=tmp_path)
    assert report.ending == "the script ended" and not report.missing
    weights, logits = 4 * (256 * 512 + 512 + 5130), 4 * 256 * (256 + 512 + 512 + 10)
    assert by_phase(report)["evaluation"].allocated_bytes > 2 * weights + logits, "Adam's states beside a large batch"
    assert any(path.endswith(".ckpt") for path in report.changes.written)


def test_lightning_validates_after_an_epoch_that_ended_early(tmp_path):
    report = run("lightning_fit.py", "bf16-mixed", needs=("lightning", "torchmetrics"), tmp_path=tmp_path)
    assert report.ending == "the script ended" and not report.missing


def test_parameters_that_are_made_on_meta_are_drawn_on_each_rank(tmp_path):
    command = [interpreter_for(), "-m", "torch.distributed.run", "--nproc_per_node", "4"]
    report = run("ranks_meta.py", command=command, tmp_path=tmp_path, rank=0)
    parameters = 4 * (2 * 512 * 2048 + 2048 + 3 * 512)
    assert by_phase(report)["loading"].allocated_bytes == pytest.approx(parameters * 4 / 4, rel=0.01)
    states = report.simulation.peaks["a100_40gb"].bounded.breakdown["optimizer_state"]
    assert states == pytest.approx(2 * parameters * 4 / 4, rel=0.01), "two averages of a quarter"


def test_a_counter_goes_on_to_the_values_that_conditions_ask_for():
    counter = IterationCounter()
    seen, value = [], 7
    while value is not None and value < 2000:
        counter.visit(value, (lambda: 500, lambda: 10), (lambda: 1200, lambda: undefined), last=1999)  # noqa: F821
        seen.append(value)
        value = counter.following
    assert seen == [7, 9, 10, 499, 500, 1199, 1200, 1201]


def test_probes_leave_a_program_as_it_is():
    text = '''\
"""Text."""
from __future__ import annotations
def ended(rows):
    """Doc."""
    total = 0
    for index, row in enumerate(rows):
        total += 1
        if total % 3 == 0:
            save_checkpoint(row)
    else:
        total += index
    return total
def save_checkpoint(row): kept.append(row)
kept = []
for letter in "abc":
    kept.append(letter.upper())
out = ended("abcdef")
'''
    source, ran = ScriptSource(), []
    space = {LOOP: lambda rows, *_: rows, COUNT: lambda *_: 1, RAN: ran.append}
    exec(source.compiled(text, "program.py", is_main=True), space)
    assert space["out"] == 11 and space["kept"] == ["A", "B", "C", "c", "f"]
    assert space["ended"].__doc__ == "Doc." and [mark.place for mark in source.marks] == ["program.py:9"]
    assert ran == [0, 0] and source.marks[0].is_counted and dict(source.reachable_marks()) == {0: source.marks[0]}


@pytest.mark.parametrize("option", ["eval_strategy", "evaluation_strategy"])
def test_a_trainer_of_any_release_waits_for_the_evaluation_of_its_arguments(option):
    trainer = type("Trainer", (), {"train": lambda self: None, "evaluate": lambda self: {}})
    gpu = SimpleNamespace(coverage=SimpleNamespace(expected=[]))
    PATCHES["transformers.trainer"](SimpleNamespace(Trainer=trainer), Patches(), gpu)
    running = trainer()
    running.args = SimpleNamespace(**{option: "steps"})
    running.train()
    (expected,) = gpu.coverage.expected
    assert "eval_strategy=steps" in expected()
    running.evaluate()
    assert expected() is None


def test_graphs_in_an_object_vary_by_what_they_allocate(tmp_path):
    report = run("graphs.py", "60", tmp_path=tmp_path)
    whole = run("graphs.py", "60", tmp_path=tmp_path, phases="all")
    assert len({step.shapes for step in report.steps}) == 1, "the network's argument is no tensor"
    assert len(report.steps) > 25 and len(whole.steps) == 60
    assert 0.7 * peaks(whole)[0] < peaks(report)[0] <= peaks(whole)[0]
