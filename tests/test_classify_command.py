"""`vramcast classify`, with children that run users' code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vramcast.commands.classify.classify_command import main, make_parser, with_target
from vramcast.commands.classify.request import ClassifyRequest
from vramcast.commands.classify.simulators import Simulators
from vramcast.errors import UserError
from vramcast.jobs.targets import BuildRequest, parse_target
from vramcast.simulation.sandbox.client import ChildSimulator
from vramcast.simulation.sandbox.failures import InternalError, NetworkError, raise_failure
from vramcast.virtual_gpu.tracing.source_lines import is_internal, is_network_code

FILE = Path(__file__).parent / "support" / "written_networks.py"
GPUMEMNET = "gpumemnet:input:784_output:10_depth:3_arch:pyramid_batch:64.out"
SPEC = {
    "family": "mlp",
    "network": {"arch": "uniform", "input_features": 30, "output_features": 3, "depth": 1},
    "training": {"batch_size": 16},
}


def classified(capfd, *words):
    code = main([*words, "--json"])
    out, err = capfd.readouterr()
    return code, [json.loads(line) for line in out.splitlines()], err


def test_many_jobs_are_answered_in_order_and_errors_stop_none(capfd, tmp_path):
    (tmp_path / "spec.json").write_text(json.dumps(SPEC))
    unet = {"target": f"{FILE}:UNet", "batch_size": 4, "input": "3,32,32"}
    lines = [
        json.dumps({"target": GPUMEMNET}),
        json.dumps(unet),
        json.dumps({**unet, "batch_size": 8, "optimizer": "sgd", "device": "t4"}),
        json.dumps({"target": f"{FILE}:broken", "batch_size": 4, "input": "3"}),
        "no JSON",
        json.dumps({"target": str(tmp_path / "spec.json"), "max_batch": True, "device": "rtx_4060"}),
        json.dumps({**unet, "colour": "red"}),
        json.dumps({"target": f"{FILE}:UNet"}),
    ]
    (tmp_path / "jobs.jsonl").write_text("\n".join(lines) + "\n")
    code, found, errors = classified(capfd, "--jobs", str(tmp_path / "jobs.jsonl"))
    assert code == 2
    assert errors.endswith("4 of 8 jobs have no answer: see their errors\n")
    assert [item["status"] for item in found] == ["ok", "ok", "ok", "error", "error", "ok", "error", "error"]
    assert [item["target"] for item in found[:4]] == [GPUMEMNET, *[f"{FILE}:UNet"] * 2, f"{FILE}:broken"]
    assert found[0]["batch_size"] == 64
    assert (found[2]["device"], found[2]["batch_size"]) == ("t4", 8)
    assert found[3]["error"].startswith("ValueError: a fault of the user's own (at ")
    assert found[4]["target"] is None
    assert found[5]["max_batch_size"] > 100
    assert "colour" in found[6]["error"]
    assert "--batch-size" in found[7]["error"]
    assert not any("\n" in item.get("error", "") for item in found)


def test_a_users_packages_come_first_and_his_prints_do_no_harm(tmp_path):
    """As a user runs it: in a directory of his own, with packages that have our names."""
    for package in ("models", "conf"):
        (tmp_path / package).mkdir()
    (tmp_path / "models" / "__init__.py").write_text("")
    (tmp_path / "models" / "net.py").write_text("WIDTH = 12\n")
    (tmp_path / "conf" / "__init__.py").write_text("CLASSES = 3\n")
    (tmp_path / "train.py").write_text(
        "import sys\nfrom torch import nn\nfrom models.net import WIDTH\nfrom conf import CLASSES\n"
        "print('{\"event\": \"done\"}')\nsys.stderr.write('noise')\n"
        "def make():\n    print('more')\n    return nn.Linear(WIDTH, CLASSES)\n"
    )
    words = [sys.executable, "-m", "vramcast", "classify", "train:make", "--batch-size", "8", "--input", "12", "--json"]
    home = str(Path(__file__).parent.parent)
    found = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": home}, check=False
    )
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["target"] == "train:make"


def test_a_users_exception_is_his_with_its_line_and_code_three(capfd):
    code, _, err = classified(capfd, f"{FILE}:broken", "--batch-size", "2", "--input", "3")
    line = next(n for n, text in enumerate(FILE.read_text().splitlines(), 1) if "a fault of the user's own" in text)
    assert code == 3
    assert f'File "{FILE}", line {line}, in broken' in err
    assert "dataset_builder/inspection" not in err
    assert err.rstrip().endswith(f"ValueError: a fault of the user's own (at {FILE}:{line})")


@pytest.fixture(scope="module")
def child():
    with ChildSimulator(BuildRequest(target=parse_target(f"{FILE}:mismatched"), inputs=("10",))) as found:
        yield found


def test_shapes_that_do_not_fit_are_told_with_their_layer(child):
    with pytest.raises(NetworkError, match="in the layer '1'"):
        child.simulate({"batch_size": 2}, [])


def test_a_child_lives_on_after_an_error(child):
    child.build(BuildRequest(target=parse_target(f"{FILE}:Undecided"), inputs=("10",)))
    with pytest.raises(UserError, match=rf"a number read from a tensor.*\(at {FILE}:\d+\)"):
        child.simulate({"batch_size": 2}, [])
    assert child.alive


def test_code_that_ends_the_process_is_told(child):
    child.build(BuildRequest(target=parse_target("os:abort"), inputs=("10",)))
    with pytest.raises(NetworkError, match="the child was killed by SIGABRT"):
        child.simulate({"batch_size": 2}, [])
    assert not child.alive


def test_a_child_that_takes_too_long_or_too_much_is_ended():
    target = parse_target(f"{FILE}:endless")
    for limits, why in (((0.2, 8192), "within 0.2 s"), ((60, 20), "in 20 MiB")):
        with ChildSimulator(BuildRequest(target=target), *limits) as found, pytest.raises(UserError, match=why):
            found.simulate({"batch_size": 2}, [])
        assert not found.alive


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "found no target"),
        (["timm:resnet18"], "give --batch-size"),
        ([GPUMEMNET, "--risk", "2"], "risk"),
        ([GPUMEMNET, "--dtype", "int8"], "dtype"),
        ([GPUMEMNET, "--device", "abacus"], "expected device to be one of"),
        ([GPUMEMNET, "--device", "A100"], "did you mean a100_40gb or a100_80gb?"),
        ([str(FILE), "--batch-size", "4"], f"name one of {FILE}:UNet, "),
        ([GPUMEMNET, "--input", "3"], "leave it out"),
        ([GPUMEMNET, "--plot", "picture.gif"], "ends in one of"),
        ([GPUMEMNET, "--arg", "depth"], "expected an argument such as"),
        ([GPUMEMNET, "--step", "step"], "leave it out"),
        ([GPUMEMNET, "--autocast", "fp32"], "autocast"),
        ([GPUMEMNET, "--batch-size", str(10**30)], "at most"),
        (["nothing.json"], "expected a file that describes a network"),
        (["--jobs", "nothing.jsonl"], "expected a file of jobs"),
    ],
)
def test_bad_words_get_a_sentence_and_code_two(capfd, words, why):
    code, out, err = classified(capfd, *words)
    assert (code, out) == (2, [])
    assert why in err
    assert "Traceback" not in err


@pytest.mark.parametrize("flag", ["--checkpointing", "--liger"])
@pytest.mark.parametrize("target", ["hf:gpt2", "own.py:Network", "layers.json"])
def test_a_target_may_follow_a_bare_form(flag, target):
    arguments = with_target(make_parser().parse_args(["--batch-size", "1", flag, target]))
    assert arguments.target == target and getattr(arguments, flag.removeprefix("--")) is True


def test_a_form_is_not_taken_for_a_target(capfd):
    arguments = with_target(make_parser().parse_args(["--checkpointing", "every=2", "--liger", "rope"]))
    assert (arguments.target, arguments.checkpointing, arguments.liger) == (None, "every=2", "rope")
    assert main([GPUMEMNET, "--checkpointing", "hf:gpt2"]) == 2  # there is a target
    assert "expected checkpointing such as" in capfd.readouterr().err
    assert main(["--batch-size", "0", "--checkpointing", GPUMEMNET]) == 2
    assert "batch_size" in capfd.readouterr().err


def test_the_screen_says_what_to_do(capfd, tmp_path):
    network = {"arch": "uniform", "input_features": 3000, "output_features": 3, "depth": 2}
    (tmp_path / "spec.json").write_text(json.dumps({**SPEC, "network": network, "training": {"batch_size": 400_000}}))
    assert main([str(tmp_path / "spec.json"), "--device", "rtx_4060", "--plot", str(tmp_path / "a.svg")]) == 0
    out = " ".join(capfd.readouterr().out.split())
    assert "DOES NOT FIT" in out
    for words in ("At the peak", "costliest layers", "rtx_4090", "The largest batch",
                  "--autocast bf16", "SGD without", "a bigger device", "accumulation (--batch-size",
                  "Changes that make it fit"):  # fmt: skip
        assert words in out
    assert (tmp_path / "a.svg").stat().st_size > 1000


def test_a_table_wants_a_batch_size(capfd, tmp_path):
    table = {"layers": [{"kind": "Linear", "output_shape": [10], "parameters": 50}], "input_elements": 4}
    (tmp_path / "table.json").write_text(json.dumps(table))
    code, _, err = classified(capfd, str(tmp_path / "table.json"))
    assert code == 2
    assert "give --batch-size" in err


@pytest.mark.parametrize("value", [5, [3, 224, 224], {"x": "3"}])
def test_an_input_that_is_no_text_is_refused(value):
    with pytest.raises(UserError, match="expected input to be texts"):
        ClassifyRequest.of({"target": "timm:resnet18", "batch_size": 4, "input": value})


def test_a_request_keeps_what_it_was_given():
    found = ClassifyRequest.of(
        {"target": "timm:resnet18", "batch_size": 4, "input": ["3,64,64"], "args": {"num_classes": 5}}
    )
    assert found.build_request().inputs == ("3,64,64",)
    assert found.build_request().arguments == {"num_classes": 5}


def test_check_exits_with_one_if_the_job_does_not_fit_safely(capfd, tmp_path):
    (tmp_path / "spec.json").write_text(json.dumps({**SPEC, "training": {"batch_size": 2**28}}))
    assert classified(capfd, GPUMEMNET, "--check")[0] == 0
    assert classified(capfd, str(tmp_path / "spec.json"), "--device", "rtx_4060")[0] == 0
    assert classified(capfd, str(tmp_path / "spec.json"), "--device", "rtx_4060", "--check")[0] == 1


def test_an_answer_names_its_inputs_and_the_versions_it_was_traced_with(capfd):
    words = [f"{FILE}:Tagger", "--batch-size", "4", "--input", "9:100"]
    code, (answer,), _ = classified(capfd, *words, "--dtype", "float32")
    assert code == 0
    assert answer["inputs"] == [{"shape": [9], "dtype": "int64"}]
    assert answer["traced_with"].keys() == {"torch"}
    assert main(words) == 0
    assert "input sequence length 9, traced with torch 2" in capfd.readouterr().out


def test_an_error_of_ours_is_not_blamed_on_the_network(capfd, monkeypatch):
    report = {"event": "internal", "summary": "KeyError: 'x'", "place": None, "traceback": "Traceback of ours"}
    with pytest.raises(InternalError) as raised:
        raise_failure(report)

    def fail(*_):
        raise raised.value

    monkeypatch.setattr(Simulators, "start", fail)
    code, _, err = classified(capfd, f"{FILE}:Tagger", "--batch-size", "4", "--input", "9:100")
    assert code == 1
    assert "Traceback of ours" in err
    assert "KeyError: 'x': this is an error of vramcast, not of the network: please report it" in err


def failing(work):
    try:
        work()
    except Exception as error:
        return error


def test_a_fault_is_ours_if_our_frame_raised():
    assert is_internal(failing(lambda: parse_target(None)))
    assert not is_internal(failing(lambda: 1 / 0))
    assert not is_internal(failing(lambda: torch.nn.Linear(2, 2)(torch.empty(3, 3))))


@pytest.mark.parametrize(
    ("filename", "expected"),
    [
        (__file__, True),
        ("/x/site-packages/timm/models/resnet.py", True),
        ("/x/site-packages/torch/nn/modules/linear.py", True),
        ("/x/site-packages/torch/optim/adam.py", False),
        (is_network_code.__code__.co_filename, False),
    ],
)
def test_code_of_networks_is_told_from_ours_and_from_torch(filename, expected):
    assert is_network_code(filename) == expected
