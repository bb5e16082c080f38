"""`vramcast build`: a fast start, one error for bad input, and every sub-command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from omegaconf.errors import OmegaConfBaseException

from vramcast.commands.build.build_command import main
from vramcast.commands.build.build_subcommands import COMMANDS
from vramcast.dataset_builder.store import read_journal
from vramcast.dataset_builder.store.splits import Split
from vramcast.errors import UserError, WorkerError, nearest_names
from vramcast.jobs.targets import read_document

NAME = "input:8_output:3_depth:2_arch:pyramid_batch:4.out"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("rows")
    assert main(["family=cnn", "n=30", "backend=static", "executor=serial", f"out={out}"]) == 0
    return out


@pytest.mark.parametrize(
    "words", [["--help"], ["build", "--help"], ["build", "status", "--help"], ["device", "--help"], ["--version"]]
)
def test_help_imports_nothing_heavy(words):
    code = f"import sys, vramcast.cli; sys.argv = ['vramcast', *{words!r}]\n"
    code += "try: vramcast.cli.main()\nexcept SystemExit: pass\n"
    code += (
        "print('loaded', sorted({'torch', 'hydra', 'pandas', 'numpy', 'sympy'} & sys.modules.keys()), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "loaded []" in result.stderr
    assert result.stdout


def test_the_console_command_runs_a_subcommand():
    command = Path(sys.executable).with_name("vramcast")
    result = subprocess.run([command, "build", "specification"], capture_output=True, text=True, check=True)
    assert "process Conv2d" in result.stdout
    assert subprocess.run([command, "fly"], capture_output=True, text=True, check=False).returncode == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["famly=cnn"], "did you mean family?"),
        (["family=rnn"], "expected family to be one of ['cnn', 'mlp', 'template', 'transformer'], found 'rnn'"),
        (["space=nowhere"], "expected space to be one of"),
        (["backend=quantum"], "expected backend to be one of"),
        (["sampler.strength=5"], "expected sampler.strength to be one of [2, 3], found 5"),
        (["n=0"], "expected n to be a whole number from 1, found 0"),
        (["n=many"], "expected n to be a whole number from 1, found 'many'"),
        (["seed=-1"], "expected seed to be a whole number from 0"),
        (["+extra=1"], "found ['extra']"),
        (["space.factors.depth.int=[0,3]"], "expected network.depth to be a whole number from 1, found 0"),
        (["space.factors.depth.int=[9,3]"], "expected a range from low to high"),
        (["space.network.wdith=3"], "add it as +space.network.wdith=VALUE"),
        (["+space.network.wdith=3"], "expected the mlp network to have only"),
        (["space.network.arch==shape"], "expected"),
        (["space.training.batch_size='=__import__(\"os\")'"], "__import__"),
        (["family=cnn", "space=mlp"], "drop space= or family="),
        (["out=/dev/null/rows"], "expected"),
        (["hello"], "see vramcast build --help"),
        (["n="], "expected n to be"),
        (["[broken"], "expected"),
        (["executor.workers=0.5"], "expected executor.workers"),
        (["executor.workers=0"], "expected executor.workers to be a whole number from 1, found 0"),
        (["executor.timeout_seconds=long"], "expected the time limit to be over 0 s, found 'long'"),
        (["+executor.wrokers=2"], "found ['timeout_seconds', 'workers', 'wrokers']"),
        (["+backend.device=0"], "expected other settings of the backend virtual, found ['device']"),
        (["backend=cuda", "backend.interval_ms=50"], "expected backend.interval_ms up to 20, found 50"),
        (["backend=cuda", "+backend.colour=red"], "expected the settings of the backend cuda to have only"),
        (["backend=cuda", "backend.verify_cap=maybe"], "expected backend.verify_cap to be true or false"),
        (["backend=cuda", "executor.timeout_seconds=240"], "executor.timeout_seconds above the 480 s"),
        (["backend=cuda", "backend.verify_cap=true", "executor.timeout_seconds=480"], "above the 720 s"),
        (["seed=4294967296"], "expected seed to be below 4294967296"),
        (["out=7"], "use out=DIR"),
        (["out="], "use out=DIR"),
        (["space=null"], "must be a string"),
        (["~n"], "found no ['n']"),
        (["~sampler.name"], "use sampler=NAME"),
        (["space.name=7"], "expected the space to have name as in conf/space, found 7"),
        (["space.family=[1]"], "expected the space to have family"),
        (["space.network=7"], "expected the space to have network"),
        (["space.factors=7"], "expected the space to have factors"),
        (["space.factors.depth=7"], "expected factor depth to have one of"),
        (["+space.factors.__builtins__={choice: [1]}"], "found ['__builtins__']: rename them"),
        (["+space.factors.two-words={choice: [1]}"], "found ['two-words']: rename them"),
        (["space.factors.depth={choice: [1]}"], "~space.factors.depth to replace all of it"),
        (["space.factors.depth.int=[null,3]"], "for factor depth"),
        (["+space.factors.depth.step=2"], "expected factor depth to begin at a multiple of 2, found 1"),
        (["space.factors.inputs.log=maybe"], "expected log of factor inputs to be true or false, found 'maybe'"),
        (["space.network.dropout=nan"], "expected finite numbers"),
        (["space.training.checkpointing=7"], "expected training.checkpointing to be true, false or a form, found 7"),
        (["space.training.optimizer=7"], "expected a name such as 'Adam'"),
        (["space.training.optimizer='Adam(lr=1,lr=2)'"], "expected a name such as 'Adam'"),
        (["space.training.optimizer='Adam(**7)'"], "expected a name such as 'Adam'"),
        (["status", "/nonexistent"], "expected a build directory"),
        (["status"], "the following arguments are required: directory; see vramcast build status --help"),
        (["status", "x", "--bucket-mib", "wide"], "invalid int value: 'wide'"),
        (["status", "x", "y"], "unrecognized arguments: y; see vramcast build --help"),
        (["emit", "abc"], "add --from DIR"),
        (["emit", "gpumemnet:x"], "expected a file name of GPUMemNet"),
        (["emit", "missing.json"], "expected a spec as JSON"),
        (["import", "missing.csv", "--out", "x"], "expected a CSV table"),
    ],
)
def test_bad_input_is_one_error_with_exit_code_2(words, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert errors[-1].startswith("vramcast build: ")
    assert sentence in errors[-1]
    assert "Traceback" not in "\n".join(errors)


def test_deleting_and_adding_replaces_a_factor(tmp_path, capsys):
    words = ["~space.factors.depth", "+space.factors.depth={choice: [3]}", "n=4", "executor=serial", f"out={tmp_path}"]
    assert main(words) == 0
    assert {row.spec.network["depth"] for row in read_journal(tmp_path).rows} == {3}


@pytest.mark.parametrize("words", [["family=mlp"], ["--cfg"], ["status", "anywhere"]])
def test_ctrl_c_during_the_start_gives_no_traceback(words, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise OmegaConfBaseException("as OmegaConf wraps it") from KeyboardInterrupt()

    def plainly(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("vramcast.dataset_builder.composition.compose", interrupted)
    monkeypatch.setattr("vramcast.commands.build.build_subcommands.iter_records", plainly)
    assert main(words) == 130
    assert capsys.readouterr().err == "stopped\n"


def test_workers_that_cannot_start_are_one_error(tmp_path, monkeypatch, capsys):
    def die(*_):
        raise WorkerError("expected workers to measure specs, found 3 in a row that died")

    monkeypatch.setattr("vramcast.dataset_builder.executors.LocalExecutor.run", die)
    assert main(["family=mlp", "n=3", f"out={tmp_path}"]) == 1
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("vramcast build: expected workers")


def test_a_missing_extra_is_one_error(tmp_path, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "vramcast.dataset_builder.executors.on_ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["executor=ray", f"out={tmp_path}"]) == 2
    error = "expected Ray for executor=ray, found none: pip install 'vramcast[ray]'"
    assert capsys.readouterr().err == f"vramcast build: {error}\n"


def test_an_operating_system_error_is_one_error(monkeypatch, capsys):
    def fail(*_):
        raise PermissionError(13, "Permission denied", "rows")

    monkeypatch.setattr("vramcast.commands.build.build_subcommands.iter_records", fail)
    assert main(["status", "rows"]) == 2
    assert "Permission denied: 'rows'" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["n=3", "--help"], ["-h", "family=cnn"]])
def test_help_is_printed_at_any_position(words, capsys):
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("usage: vramcast build")


def test_a_build_of_other_settings_in_the_same_directory_is_refused(built, capsys):
    assert main(["family=cnn", "n=30", "seed=1", "backend=static", "executor=serial", f"out={built}"]) == 2
    assert "seed=1 (it was 0)" in capsys.readouterr().err


def test_a_corrupt_journal_is_refused_and_can_be_repaired(tmp_path, capsys):
    words = ["family=mlp", "n=20", "backend=static", "executor=serial", f"out={tmp_path}"]
    assert main(words) == 0
    path = tmp_path / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[7] = lines[7].replace(b'"batch_size"', b'"batch_syze"')
    path.write_bytes(b"".join(lines))
    assert main(words) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "line 8" in error
    assert "repair" in error
    assert main(["repair", str(tmp_path)]) == 0
    assert main(words) == 0
    assert len(read_journal(tmp_path).rows) == 20


def test_a_full_disk_loses_no_row_and_the_build_resumes(tmp_path):
    """The kernel's limit on file sizes simulates a full disk."""
    limited = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY));"
        "from vramcast.commands.build.build_command import main; sys.exit(main(sys.argv[1:]))"
    )
    words = ["family=mlp", "n=100", "backend=static", "executor=serial", f"out={tmp_path}"]
    result = subprocess.run([sys.executable, "-c", limited, *words], capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr
    assert "expected room to write a row" in result.stderr.splitlines()[-1]
    before = [row.spec.id for row in read_journal(tmp_path).rows]
    assert before
    assert main(words) == 0
    after = [row.spec.id for row in read_journal(tmp_path).rows]
    assert after[: len(before)] == before
    assert len(after) == 100


def test_status_as_text_and_as_json(built, capsys):
    assert main(["status", str(built)]) == 0
    text = capsys.readouterr().out
    assert "30 rows" in text
    assert "rejected because:" in text
    assert main(["status", str(built), "--json", "--bucket-mib", "512"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["rows"] == 30 == sum(figures["buckets"].values())
    assert figures["families"] == {"cnn": 30}


def test_emit_and_layers_find_a_row_by_the_beginning_of_its_id(built, tmp_path, capsys):
    key = read_journal(built).rows[3].spec.id
    assert main(["emit", key[:12], "--from", str(built), "-o", str(tmp_path / "row.py")]) == 0
    compile((tmp_path / "row.py").read_text(), "row.py", "exec")
    assert key in (tmp_path / "row.py").read_text()
    assert main(["layers", key[:12], "--from", str(built)]) == 0
    assert "static estimate" in capsys.readouterr().out
    assert main(["emit", "", "--from", str(built)]) == 2


def test_emit_reads_a_spec_from_a_file_and_a_public_name(built, tmp_path, capsys):
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(read_journal(built).rows[0].spec.to_json()))
    assert main(["emit", str(path)]) == 0
    assert main(["emit", f"gpumemnet:{NAME}"]) == 0
    assert "nn.Linear(in_features=8, out_features=4)" in capsys.readouterr().out
    path.write_text('{"family": "mlp"}')
    assert main(["emit", str(path)]) == 2


def test_emit_notes_a_bad_row_and_refuses_a_bad_path(tmp_path, capsys):
    network = {
        "arch": "uniform",
        "input_features": 4,
        "output_features": 2,
        "depth": 1,
        "norm": "batch",
        "head": "none",
    }
    path = tmp_path / "spec.json"
    path.write_text(json.dumps({"family": "mlp", "network": network, "training": {"batch_size": 1}}))
    assert main(["emit", str(path)]) == 0
    printed = capsys.readouterr()
    assert "note: this training fails when it runs: BatchNorm1d at '0.1'" in printed.err
    assert "'head'" not in printed.out.split('"""')[1]  # a spelled-out default makes no other spec
    assert main(["emit", str(path), "-o", str(tmp_path / "missing" / "row.py")]) == 2
    assert "missing/row.py" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_view_has_every_row(built, tmp_path, suffix):
    path = tmp_path / f"rows.{suffix}"
    assert main(["view", str(built), str(path)]) == 0
    frame = pd.read_csv(path) if suffix == "csv" else pd.read_parquet(path)
    assert len(frame) == 30
    assert set(frame["provenance.origin"]) == {"static"}


def test_a_split_is_stored_beside_the_rows(built, capsys):
    assert main(["split", str(built), "--fractions", "train=0.5,test=0.5", "--seed", "3"]) == 0
    split = Split.load(built / "split.json")
    assert split.seed == 3
    groups = {row.spec.group for row in read_journal(built).rows}
    assert {group for part in split.parts.values() for group in part} == groups
    for wrong in ("train:0.5", "=0.5,test=0.5", "train=0.5,train=0.5", "train=half,test=half"):
        capsys.readouterr()
        assert main(["split", str(built), "--fractions", wrong]) == 2
        assert "such as train=0.8,test=0.2" in capsys.readouterr().err


def test_the_configuration_can_be_shown(capsys):
    assert main(["--cfg", "family=transformer", "n=7"]) == 0
    text = capsys.readouterr().out
    assert "family: transformer" in text
    assert "'n': 7" in text


def test_every_sub_command_is_in_the_help(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize("words", [["specification"], ["--help"]])  # output larger and smaller than a buffer
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_to_a_closed_pipe_is_not_an_error(words, unbuffered):
    command = [sys.executable, "-m", "vramcast", "build", *words]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (0, b"")


def test_a_similar_name_is_suggested_before_one_that_contains_the_letters():
    assert nearest_names("mpl", ["cnn", "mlp", "template", "transformer"]) == ["mlp"]
    assert nearest_names("4090", ["rtx_4060", "rtx_4090"]) == ["rtx_4090"]
    assert nearest_names("A100", ["a100_40gb", "a100_40gb_timm_2024", "a100_80gb"]) == ["a100_40gb", "a100_80gb"]


@pytest.mark.parametrize(("name", "text"), [("deep.json", "[" * 100_000), ("date.yaml", "day: 2020-13-45")])
def test_a_document_that_cannot_be_parsed_is_refused_in_one_sentence(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=f"expected {name.rpartition('.')[2].upper()} in .*{name}"):
        read_document(str(tmp_path / name))
