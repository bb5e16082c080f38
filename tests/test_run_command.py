"""`vramcast run`: commands, endings, errors, the report as text and as JSON, and the context manager."""

import json
import math
import pickle
import random
import sys
from dataclasses import replace
from textwrap import dedent
from types import SimpleNamespace

import pytest
import torch
from script_runs import SCRIPTS
from warm_runs import HOST

import vramcast
from vramcast.cli import main
from vramcast.commands.run.long_runs import covers_long_run, growth_factor, is_ordered
from vramcast.errors import UserError
from vramcast.models.answer import Answer, Bucket
from vramcast.simulation.scripts import report_html
from vramcast.simulation.scripts.command_line import Program, parse_command
from vramcast.simulation.scripts.launchers import unwrapped
from vramcast.simulation.scripts.report import StepPeak
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.tracing.capability import RecordedCapability
from vramcast.virtual_gpu.tracing.source_lines import is_fault_of_virtual_gpu

TRAIN = """
import sys, torch
device = "cuda"
model = torch.nn.Linear(1024, 1024).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    loss = model(torch.randn({batch}, 1024, device=device)).pow(2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    {extra}
print("ended", sys.argv[1:])
"""


def script(tmp_path, steps=3, batch=64, extra="pass"):
    path = tmp_path / "train.py"
    path.write_text(dedent(TRAIN).format(steps=steps, batch=batch, extra=extra))
    return str(path)


def run_cold(capsys, *words):
    """Run a script as a user does: its child imports torch itself."""
    code = main(["run", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_commands_name_an_interpreter_and_a_program(tmp_path):
    path = script(tmp_path)
    assert parse_command([sys.executable, "-u", path, "--lr", "1"])[:3] == (
        sys.executable, ("-u",), Program("file", path, ("--lr", "1"))
    )  # fmt: skip
    assert parse_command([path])[2] == Program("file", path, ())
    assert parse_command([sys.executable, "-m", "my.package", "x"])[2] == Program("module", "my.package", ("x",))
    launched = parse_command([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "1", path])[2]
    assert launched == Program("torchrun", "torch.distributed.run", ("--nproc_per_node", "1", path))
    for words in (
        ["accelerate", "launch"],
        [sys.executable, "-m", "accelerate.commands.launch"],
        ["accelerate-launch"],
    ):
        program = parse_command([*words, "--num_processes", "2", path, "--lr", "1"])[2]
        assert program.kind == "accelerate" and program.arguments == ("--num_processes", "2", path, "--lr", "1")
        assert program.title == "train.py"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "found none"),
        ([sys.executable], "name the script"),
        (["missing.py"], "check the path"),
        (["ls"], "Python"),
        (["accelerate", "config"], "launch a script"),
    ],
)
def test_a_command_that_is_no_python_program_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        parse_command(words)


@pytest.mark.parametrize(
    ("option", "number"),
    [("--nproc_per_node", "²"), ("--nproc_per_node", "x"), ("--nproc_per_node", "0"), ("--nnodes", "²"),
     ("--nnodes", "x:2"), ("--nnodes", "9" * 5_000)],
)  # fmt: skip
def test_a_wrong_number_of_processes_is_a_sentence(option, number):
    with pytest.raises(UserError, match=f"expected {option.replace('_', '-')} to be a whole number from 1, found"):
        unwrapped(Program("torchrun", "torchrun", (option, number, "train.py")))


def test_the_report_says_what_the_script_takes(tmp_path, capsys):
    snapshot = tmp_path / "memory.pickle"
    path = script(tmp_path)
    code, out, err = run_cold(
        capsys, "--json", "--snapshot", str(snapshot), "--", sys.executable, path, "--epochs", "2"
    )
    answer = json.loads(out)
    assert code == 0 and "ended ['--epochs', '2']" in err
    weights, x = 4 * 1024 * 1024 + 4096, 4 * 64 * 1024
    assert answer["run"]["phases_mib"]["loading"]["allocated"] == round((weights + x) / MIB, 1)
    steady = 2 * weights + 8_519_680 * 2  # weights and gradients, cuBLAS for forward and backward
    assert answer["allocated_mib"] == pytest.approx((steady + 4 * x) / MIB, abs=0.6)
    assert answer["verdict"] == "fits" and answer["run"]["ending"] == "the script ended"
    assert len(answer["run"]["steps"]) == 3 and answer["run"]["steps"][0]["shapes"] == [[64, 1024]]
    others = {item["device"]: item for item in answer["run"]["devices"]}
    assert others["rtx_4090"]["verdict"] == "fits" and others["rtx_4090"]["safe_mib"] > answer["allocated_mib"]
    assert pickle.loads(snapshot.read_bytes())["device_traces"][0]


def test_the_page_shows_phases_steps_and_lines(tmp_path):
    path = script(tmp_path, extra="print(loss.item())")
    code, out, _ = HOST.run("--steps", "2", "--device", "rtx_4090", "--", sys.executable, path)
    assert code == 0 and "stopped after 2 optimizer steps" in out
    assert "loading" in out and "optimizer" in out and f"{path}:" in out and "rtx_3060" in out
    assert "an unknown float32 value was read from the device and taken as 1.0" in out


def test_a_script_that_does_not_fit_is_run_again_for_its_need(tmp_path):
    path = script(tmp_path, batch=8 * 1024 * 1024)
    code, out, err = HOST.run("--json", "--device", "rtx_3060", "--", sys.executable, path)
    answer = json.loads(out)
    assert code == 0 and "running again on an unbounded device" in err
    assert answer["run"]["ran_out_of_memory"] and "OutOfMemoryError" in answer["run"]["failure"]
    assert "train.py:7" in answer["run"]["failure"] and answer["verdict"] != "fits"
    assert answer["allocated_mib"] > 3 * 32 * 1024, "input, output and its square, 32 GiB each"


def test_a_script_that_fails_after_a_step_is_reported_and_no_success(tmp_path):
    path = script(tmp_path, extra="raise ValueError('a bug')")
    code, out, err = HOST.run("--", sys.executable, path)
    assert code == 3 and "ValueError: a bug" in err and "train.py:9" in err
    assert "the figures are those of the 1 optimizer steps before it" in err
    assert "The run: the script failed; 1 step" in out and "ValueError: a bug" in out
    assert "simulated peaks" in out, "what was measured until then"


def test_a_script_that_exits_with_a_code_is_no_success(tmp_path):
    path = script(tmp_path, extra="sys.exit(7)")
    code, out, err = HOST.run("--json", "--", sys.executable, path)
    answer = json.loads(out)["run"]
    assert code == 3 and answer["ending"] == "the script failed" and answer["failure"] == "it exited with code 7"
    assert "the script failed: it exited with code 7" in err and "Traceback" not in err


def test_a_script_that_fails_before_a_step_has_no_report(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_that_name")
    code, out, err = HOST.run("--", sys.executable, str(tmp_path / "broken.py"))
    assert code == 3 and "ModuleNotFoundError" in err and not out


def test_a_fault_of_the_virtual_gpu_is_not_the_scripts(monkeypatch, tmp_path, capsys):
    def failing(work):
        with pytest.raises(Exception) as caught:
            work()
        return caught.value

    with vramcast.VirtualGPU() as gpu:
        x = torch.ones(3, device="cuda")
        assert not is_fault_of_virtual_gpu(failing(lambda: torch.zeros("three", device="cuda")))
        assert not is_fault_of_virtual_gpu(failing(lambda: x + torch.ones(3))), "tensors on two devices"
        assert not is_fault_of_virtual_gpu(failing(x.numpy))
        monkeypatch.setattr(gpu._cuda.tracer, "values", None)
        ours = failing(lambda: x + 1)
        monkeypatch.undo()
    assert is_fault_of_virtual_gpu(ours)
    report = replace(gpu.report, failure=str(ours), internal=True)
    monkeypatch.setattr("vramcast.commands.run.run_command.run_script", lambda *_: report)
    code, _, err = run_cold(capsys, "--", sys.executable, script(tmp_path))
    assert code == 1 and "this is an error of vramcast, not of the script" in err and "script failed" not in err


def test_a_script_without_a_gpu_is_told_so(tmp_path):
    (tmp_path / "host.py").write_text("import torch; torch.ones(3).sum()")
    code, _, err = HOST.run("--", sys.executable, str(tmp_path / "host.py"))
    assert code == 2 and "none ran there: check that it picks 'cuda' (the script ended)" in err


@pytest.mark.slow
def test_a_loop_that_waits_for_the_loss_is_stopped(tmp_path):
    path = script(tmp_path, steps=1, extra="while loss.item() > 0.5: loss = loss + 0")
    code, out, _ = HOST.run("--json", "--timeout", "5", "--", sys.executable, path)
    assert code == 0 and json.loads(out)["run"]["ending"] == "stopped after 5 s, the limit (--timeout)"


def test_a_script_that_never_trains_in_time_is_told_so(tmp_path):
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    code, _, err = HOST.run("--timeout", "0.2", "--", sys.executable, str(tmp_path / "slow.py"))
    assert code == 2 and "raise --timeout (stopped after 0.2 s, the limit (--timeout))" in err


def test_torchrun_with_one_rank_runs(tmp_path):
    code = "import os, torch.distributed as dist; dist.init_process_group('nccl'); assert dist.get_world_size() == 1\n"
    code += "assert os.environ['LOCAL_RANK'] == '0'\n"
    path = tmp_path / "ranked.py"
    wrap = "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1024, 1024).to(device))"
    body = dedent(TRAIN).format(steps=2, batch=64, extra="pass")
    path.write_text(code + body.replace("model = torch.nn.Linear(1024, 1024).to(device)", wrap))
    words = ("--json", "--", sys.executable, "-m", "torch.distributed.run", "--nproc_per_node")
    status, out, _ = HOST.run(*words, "1", str(path))
    answer = json.loads(out)
    assert status == 0 and any("DistributedDataParallel" in item for item in answer["run"]["assumptions"])


def test_options_are_checked(tmp_path):
    path = script(tmp_path)
    wrong = (("--steps", "0"), ("--timeout", "-1"), ("--assume-nonzero", "2"), ("--device", "none"), ("--risk", "0"),
             ("--bucket-mib", "0"), ("--rank", "x"), ("--snapshot", f"{tmp_path}/none/s.pickle"),
             ("--checkpoint", "BADNAME"))  # fmt: skip
    for words in wrong:
        code, out, err = HOST.run(*words, "--", sys.executable, path)
        assert code == 2 and not out and words[1] in err, words
        assert "ended" not in err, f"{words}: the script must not start"


def test_the_context_manager_answers(monkeypatch):
    with vramcast.VirtualGPU("rtx_4090") as gpu:
        network = torch.nn.Linear(1024, 1024).cuda()
        optimizer = torch.optim.Adam(network.parameters())
        for _ in range(2):
            network(torch.randn(64, 1024, device="cuda")).sum().backward()
            optimizer.step()
    answer = gpu.answer()
    assert answer.verdict == "fits" and answer.device == "rtx_4090"
    assert (
        gpu.report.steps[0].shapes == ((64, 1024),)
        and answer.allocated_mib == gpu.report.simulation.peaks["rtx_4090"].bounded.allocated_bytes / MIB
    )
    assert SCRIPTS.is_dir() and not torch.cuda.is_available()


def test_other_devices_that_take_other_kernels_are_named():
    from vramcast.device.profiles import load_profile
    from vramcast.simulation.scripts.observation import report_of
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation

    def simulated(dtype):
        gpu = CudaEmulation(load_profile("a100_40gb"))
        with gpu:
            layer = torch.nn.TransformerEncoderLayer(256, 4, batch_first=True, device="cuda", dtype=dtype)
            optimizer = torch.optim.SGD(layer.parameters())
            layer(torch.randn(2, 128, 256, device="cuda", dtype=dtype)).sum().backward()
            optimizer.step()
            others = [load_profile(name) for name in ("t4", "rtx_4090")]
            return report_of(gpu, others, ending="the script ended").simulation

    half = simulated(torch.bfloat16)
    assert len(half.notes) == 1 and "the figures for t4 replay the kernels that a100_40gb runs" in half.notes[0]
    noted = {name: half.notes[0] in item.bounded.notes for name, item in half.peaks.items()}
    assert noted == {"a100_40gb": False, "t4": True, "rtx_4090": False}


def test_a_capability_holds_for_devices_that_decide_alike():
    capability = RecordedCapability(8.6)
    assert capability.decides_alike(7.0) and not capability.compared
    assert capability >= 8.0 and not 9.0 <= capability and capability.compared  # noqa: SIM300
    assert capability.decides_alike(8.9) and not capability.decides_alike(7.5) and not capability.decides_alike(9.0)


@pytest.mark.slow
def test_a_hundred_steps_of_random_lengths_cover_a_thousand():
    words = ("--json", "--device", "a100_40gb", "--", sys.executable, str(SCRIPTS / "random_lengths.py"))
    hundred, thousand = (json.loads(HOST.run("--steps", count, *words)[1]) for count in ("100", "1000"))
    assert len(thousand["run"]["steps"]) == 1000
    context = thousand["breakdown_mib"]["context"]
    assert hundred["safe_mib"] >= thousand["reserved_mib"] + context, "the safe figure covers the longer run"
    assert hundred["safe_mib"] < 2.5 * (thousand["reserved_mib"] + context), "and is not absurd"


@pytest.mark.parametrize("capacity_mib", [700.0, 1400.0, 2500.0, 8000.0])
def test_the_safe_figure_of_a_long_run_and_its_probability_come_from_one_distribution(capacity_mib):
    source = random.Random(2)
    sizes = [int((400 + source.expovariate(1 / 60)) * 2**20) for _ in range(60)]
    steps = tuple(StepPeak(size, size, "backward", ()) for size in sizes)
    bucket = Bucket(index=0, lower_mib=0, upper_mib=1024, probability=1)
    answer = Answer(
        target="graphs.py", batch_size=1, device="any", bucket=bucket, estimate_mib=650, safe_mib=690,
        allocated_mib=600, reserved_mib=620, capacity_mib=capacity_mib, oom_probability=0.0, risk=0.01,
        out_of_distribution=False, checkpoint="any", profile="any", seconds=1.0, breakdown_mib={"context": 100.0},
    )  # fmt: skip
    long = covers_long_run(answer, SimpleNamespace(steps=steps, has_stopped=True, forwarded_after=None))
    assert long.safe_mib > answer.safe_mib, "steps that differ in what they allocate vary, whatever their batches are"
    assert (long.oom_probability > long.risk) == (long.safe_mib > capacity_mib) == (long.verdict == "tight")
    ended = SimpleNamespace(steps=steps, has_stopped=False, forwarded_after=None)
    assert covers_long_run(answer, ended) == answer, "a script that came to its own end is not extrapolated"
    same = SimpleNamespace(steps=steps[:2] * 30, has_stopped=True, forwarded_after=None)
    assert covers_long_run(answer, same) == answer, "two networks that step by turns do not vary"


def test_the_growth_of_exponential_peaks_is_found():
    source = random.Random(1)
    peaks = [100 + source.expovariate(0.1) for _ in range(200)]
    longer = [100 + source.expovariate(0.1) for _ in range(1000)]
    factor = growth_factor(peaks, 0.01)
    assert max(longer) < factor * max(peaks) < 100 + 10 * math.log(1000 / 0.01) * 1.5
    assert not is_ordered(peaks) and is_ordered(sorted(peaks)) and not is_ordered([5] * 100)
    assert growth_factor([5], 0.01) == 1.0 and growth_factor([7] * 50, 0.01) == 1.0


def test_a_notebook_shows_the_report_with_all_texts_escaped():
    with pytest.raises(ValueError, match="<b>"), vramcast.VirtualGPU("rtx_4090") as gpu:
        network = torch.nn.Linear(1024, 1024).cuda()
        network(torch.randn(64, 1024, device="cuda")).sum().backward()
        raise ValueError("<b>a & b</b>")
    report = replace(gpu.report, assumptions=("<script>alert(1)</script>",) * 13, missing=("the end of <i>",))
    html = report._repr_html_()
    assert "<b>&lt;b&gt;a &amp; b&lt;/b&gt;</b>" in html and "<script>" not in html and "<i>" not in html
    assert "and 1 more" in html and "<td>backward</td>" in html
    assert f"{report.phases[0].allocated_bytes / MIB:,.1f} MiB" in html
    assert report_html.shown_shapes(((8, 128), (), (2, 3), (4,), (5,))) == "8x128, scalar, 2x3, 4, and 1 more"
