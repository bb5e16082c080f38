"""`vramcast simulate`: its files, output and chart."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from clusters import GB, job, trace, truth
from network_files import exported_program, written

from benchmarks.collocation.jobs import lines
from benchmarks.performance.simulator_scale import generated_trace
from vramcast.collocation.cluster_simulation.cluster import simulate
from vramcast.collocation.cluster_simulation.cluster_metrics import cluster_metrics
from vramcast.collocation.cluster_simulation.comparison import compare, jittered
from vramcast.collocation.cluster_simulation.gantt_table import gantt_table
from vramcast.collocation.cluster_simulation.needs import ESTIMATORS, NeedRules
from vramcast.collocation.cluster_simulation.ours import DEFINITIONS, AnswerSettings, answers, bounds_bytes, specs_of
from vramcast.collocation.cluster_simulation.rules import ClusterRules
from vramcast.collocation.cluster_simulation.workload import TraceJob, read_jobs, read_trace
from vramcast.commands.collocation.simulate_command import main
from vramcast.dataset_builder.simulation_store import SimulationStore
from vramcast.errors import UserError
from vramcast.virtual_gpu.allocator.sizes import MIB

JOBS = """job,num_gpus,batch_size,actual_peak_mib,horus_mib,faketensor_mib,gpumemnet_mib,solo_seconds
mnist_train,1,32,1500,1000,50,8000,100
pair,2,8,20000,,40000,16000,600
other,1,8,30000,5000,40000,16000,600
"""
TRACE = "arrival_s,job\n20,pair\n0,mnist_train\n30,other\n40.5,mnist_train\n"
RULES = ClusterRules(gpus=2, capacity_bytes=40 * GB)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "jobs.csv").write_text(JOBS)
    (tmp_path / "trace.csv").write_text(TRACE)
    return ["--jobs", str(tmp_path / "jobs.csv"), "--trace", str(tmp_path / "trace.csv"), "--gpus", "2"]


def test_jobs_and_traces_are_read(files: list[str]) -> None:
    jobs = read_jobs(Path(files[1]))
    assert jobs["pair"] == TraceJob(
        "pair", 2, 8, 20_000 * MIB, 600, {"faketensor": 40_000 * MIB, "gpumemnet": 16_000 * MIB}
    )
    result = read_trace(Path(files[3]), jobs)
    assert [(item.arrival_s, item.job.name) for item in result] == [
        (0, "mnist_train"), (20, "pair"), (30, "other"), (40.5, "mnist_train")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("jobs", "arrivals", "message"),
    [
        (JOBS.replace(",100\n", ",soon\n"), TRACE, "expected solo_seconds to be a number"),
        (JOBS.replace("pair,2", "pair,0"), TRACE, "expected num_gpus to be a number from 1"),
        (JOBS.replace("1500", "nan"), TRACE, "expected actual_peak_mib"),
        (JOBS + "pair,1,1,1,,,,1\n", TRACE, "found 'pair' again at line 5"),
        (JOBS.replace("job,", "name,"), TRACE, r"add \['job'\]"),
        (JOBS, "arrival_s,job\n", "expected arrivals"),
        (JOBS, "arrival_s,job\n-1,pair\n", "expected arrival_s to be a number from 0"),
        (JOBS, "arrival_s,job\n1,missing\n", "found 'missing'"),
        (JOBS, "arrival_s,job\n1\n", "found ''"),
    ],
)
def test_bad_files_are_refused_in_a_sentence(tmp_path: Path, jobs: str, arrivals: str, message: str) -> None:
    (tmp_path / "jobs.csv").write_text(jobs)
    (tmp_path / "trace.csv").write_text(arrivals)
    with pytest.raises(UserError, match=message):
        read_trace(tmp_path / "trace.csv", read_jobs(tmp_path / "jobs.csv"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--estimator", "magic"], "expected --estimator among"),
        (["--estimator", "oracle", "--device", "none"], "expected device to be one of"),
        (["--estimator", "oracle", "--gpus", "1"], "raise --gpus"),
        (["--estimator", "oracle", "--device", "t4"], "name a larger --device"),
        (["--estimator", "oracle", "--gantt", "chart.txt"], "expected a picture's name that ends in"),
        (["--estimator", "oracle", "--gantt", "nowhere/chart.png"], "expected a directory for the picture"),
        (["--estimator", "oracle", "--repeats", "0"], "expected --repeats"),
        (["--estimator", "oracle", "--trace", "absent.csv"], "expected a CSV table at absent.csv"),
    ],
)
def test_bad_arguments_end_with_a_sentence(
    files: list[str], capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main([*files, *words]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_one_estimator_prints_its_metrics(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*files, "--estimator", "oracle", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    wanted = {"makespan_s", "mean_jct_s", "p95_jct_s", "mean_wait_s", "ooms", "wasted_gpu_s", "memory_utilisation"}
    assert wanted | {"gpu_utilisation", "estimator", "policy", "queue", "ledger"} <= result.keys()
    jobs = read_jobs(Path(files[1]))
    rules = ClusterRules(gpus=2)
    runs = simulate(read_trace(Path(files[3]), jobs), {item.name: item.peak_bytes for item in jobs.values()}, rules)
    assert result["makespan_s"] == cluster_metrics(runs, rules).makespan_s
    assert (result["jobs"], result["ooms"]) == (4, 0)


def test_several_estimators_make_a_table_and_a_chart(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = "oracle,gpumemnet,horus,faketensor,none"
    for chart in ("chart.png", "chart.svg"):
        assert main([*files, "--estimator", names, "--repeats", "3", "--gantt", str(tmp_path / chart)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[2:7]] == names.split(",")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    picture = (tmp_path / "chart.svg").read_text()
    assert "<svg" in picture
    assert main([*files, "--estimator", names, "--json", "--repeats", "3"]) == 0
    result = json.loads(capsys.readouterr().out)["estimators"]
    assert list(result) == names.split(",")
    assert result["none"]["sd"]["makespan_s"] > 0


def test_each_estimator_has_its_own_needs() -> None:
    known = TraceJob("a", 1, 1, 10 * MIB, 1, {"horus": 5 * MIB})
    need_rules = NeedRules(capacity_bytes=100 * MIB, margin_mib=2, floor_mib=50)
    asked = {name: need_rules.needs_bytes(name, [known], {"a": 12 * MIB})["a"] // MIB for name in ESTIMATORS}
    # a bound has its margin in it, the floor is none, and who says nothing gets a card
    assert asked == {"oracle": 12, "ours": 12, "gpumemnet": 102, "horus": 7, "faketensor": 102, "none": 50}
    assert need_rules.needs_bytes("ours", [known])["a"] == 100 * MIB


def test_without_an_estimator_the_floor_applies_to_observed_memory() -> None:
    submissions = trace((0, job("a", 19, 100)), (0, job("b", 19, 100)), (50, job("c", 1, 100)))
    needs = dict.fromkeys(truth(submissions), 5 * GB)
    rules = ClusterRules(gpus=1, capacity_bytes=40 * GB, ledger="reserved", slowdown=0, peak_after_s=10)
    starts = {
        name: {run.submission.job.name: run.start_s for run in outcome.runs}
        for name, outcome in compare(submissions, {"none": needs, "horus": needs}, rules).items()
    }
    assert starts["horus"] == {"a": 0, "b": 0, "c": 50}
    assert starts["none"] == {"a": 0, "b": 10, "c": 100}  # 2 GB are free until the first is done


def test_shifted_traces_are_the_same_for_all_and_repeat_themselves() -> None:
    submissions = trace(*((10 * number, job(f"j{number}", 1, 5)) for number in range(20)))
    moved = jittered(submissions, 60, seed=1)
    assert moved == jittered(submissions, 60, seed=1) != jittered(submissions, 60, seed=2)
    before = {item.job.name: item.arrival_s for item in submissions}
    assert all(0 <= item.arrival_s - before[item.job.name] <= 60 for item in moved)
    assert [item.number for item in moved] == list(range(20))
    assert [item.arrival_s for item in moved] == sorted(item.arrival_s for item in moved)


def test_overlapping_bars_of_a_gpu_are_in_different_lanes() -> None:
    submissions = trace((0, job("a", 10, 100)), (0, job("b", 10, 50)), (70, job("c", 10, 10)), (0, job("p", 1, 9, 2)))
    rules = ClusterRules(gpus=2, capacity_bytes=30 * GB, slowdown=0, ledger="reserved", policy="first-fit")
    bars = gantt_table(simulate(submissions, truth(submissions), rules))
    assert [(bar.gpu, bar.job, bar.lane, bar.start_s, bar.end_s) for bar in bars] == [
        (0, "a", 0, 0, 100), (0, "b", 1, 0, 50), (0, "p", 2, 0, 9), (0, "c", 1, 70, 80), (1, "p", 0, 0, 9)
    ]  # fmt: skip


def test_all_jobs_of_the_public_table_are_defined(public_table: Callable[[str], Path]) -> None:
    jobs = read_jobs(public_table("collocation/jobs.csv"))
    specs = specs_of(jobs.values())
    assert set(jobs) == set(specs)
    other = {name for name, spec in specs.items() if spec.training.batch_size != jobs[name].batch_size}
    assert other == {"UNet", "maskrcnn"}  # their scripts have their own batch sizes


def test_our_bounds_leave_out_jobs_without_a_definition(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [TraceJob("mnist_train", 1, 32, 1500 * MIB, 100), TraceJob("undefined", 1, 32, 1500 * MIB, 100)]
    result = bounds_bytes(jobs, "a100_40gb", AnswerSettings(bucket_mib=1024), SimulationStore(tmp_path, 1))
    assert list(result) == ["mnist_train"]
    assert result["mnist_train"] % (1024 * MIB) == 0
    assert 600 * MIB < result["mnist_train"] <= 42_000 * MIB
    assert "no network is defined for undefined" in capsys.readouterr().err
    given = answers(jobs[:1], "a100_40gb", AnswerSettings(), SimulationStore(tmp_path, 1))
    *_, line = lines({"mnist_train": jobs[0]}, given)
    name, batch, measured, _, error, bound, ratio = (cell.strip() for cell in line.strip("|").split("|"))
    assert (name, batch, measured) == ("mnist_train", "32", "1,500")
    assert -0.5 < float(error.rstrip("%")) / 100 < 0
    assert float(ratio) == pytest.approx(float(bound.replace(",", "")) / 1500, abs=0.01)


def test_a_job_that_a_file_defines_is_answered_from_its_layers(tmp_path: Path) -> None:
    written(tmp_path, "small.pt2", exported_program())
    definitions = tmp_path / "definitions.yaml"
    definitions.write_text("small.pt2: [pair]\n")
    submitted = TraceJob("pair", gpus=1, batch_size=64, peak_bytes=1, solo_s=1.0)
    store = SimulationStore(tmp_path / "cache", 1)
    (answer,) = answers([submitted, submitted], "a100_40gb", AnswerSettings(), store, definitions)
    assert (answer.target, answer.batch_size, answer.checkpoint) == ("pair", 64, "universal_layers")


def test_bad_definitions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("vgg16: vgg\n")
    with pytest.raises(UserError, match="expected lists of jobs by recipe"):
        specs_of([], tmp_path / "wrong.yaml")
    with pytest.raises(UserError, match="expected definitions of jobs"):
        specs_of([], tmp_path / "absent.yaml")
    assert DEFINITIONS.exists()


def test_ten_thousand_jobs_on_a_thousand_gpus_take_seconds() -> None:
    submissions = generated_trace(10_000, 1_000)
    rules = ClusterRules(gpus=1_000)
    runs = simulate(submissions, truth(submissions), rules)
    result = cluster_metrics(runs, rules)
    assert (result.jobs, result.ooms) == (10_000, 0)


def test_the_command_starts_without_torch() -> None:
    """Only our own estimator builds networks."""
    code = (
        "import sys, vramcast.commands.collocation.simulate_command;"
        "print([name for name in ('torch', 'matplotlib', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
