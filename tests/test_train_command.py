"""`vramcast train`: end to end with tiny sizes, one sentence for bad input, resumed runs."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from vramcast.commands.build.build_command import main as build_main
from vramcast.commands.train_command import main
from vramcast.dataset_builder.store import JournalWriter, read_journal
from vramcast.dataset_builder.store.splits import Split
from vramcast.device.profiles import CONF
from vramcast.models.checkpoint import load_checkpoint
from vramcast.train.configuration import configure
from vramcast.train.data import measured_rows
from vramcast.train.tasks.kfold import split_for, summarise
from vramcast.train.tasks.release import RELEASES, read_release, replace_directory
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.measurement import Status

TINY = [
    "data.counts={mlp: 24, cnn: 0, transformer: 0, template: 0}", "executor=serial", "trainer=quick",
    "estimator.members=2", "estimator.width=8",
]  # fmt: skip


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    """A directory in which `python -m train` ran once."""
    directory = tmp_path_factory.mktemp("room")
    environment = {**os.environ, "PYTHONPATH": str(CONF.parent), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "train", *TINY],
        cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    (directory / "stdout").write_text(result.stdout)
    return directory


@pytest.fixture
def inside(room, monkeypatch) -> Path:
    monkeypatch.chdir(room)
    return room


def _newest(room: Path) -> Path:
    return max((room / "runs" / "train").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def _figures(run: Path) -> dict:
    return json.loads((run / "metrics.json").read_text())["estimators"]["this run"]


def test_a_run_writes_config_figures_pictures_and_checkpoint(room):
    run = next((room / "runs" / "train").iterdir())
    assert run.name.endswith("-virtual-mlp")
    names = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    pictures = {f"figures/{name}.png" for name in ("confusion", "curves", "projections", "reliability")}
    checkpoint = {
        f"checkpoint/{name}" for name in ("README.md", "estimator.json", "metrics.json", "weights.safetensors")
    }
    assert {"config.yaml", "split.json", "metrics.json", "metrics.txt"} | pictures | checkpoint <= names
    assert len(Split.load(run / "split.json").parts["test"]) == 2
    assert "Simulated by vramcast's virtual GPU" in (run / "checkpoint" / "README.md").read_text()
    assert load_checkpoint(run / "checkpoint").name == "mlp"


def test_the_table_has_the_estimator_the_baselines_and_the_directory(room):
    lines = (room / "stdout").read_text().splitlines()
    assert lines[0].startswith("estimator")
    assert {line.split()[0] for line in lines[1:-1]} >= {"this", "majority", "horus", "gap"}
    assert not any(line.startswith("virtual") for line in lines[:-1])  # the simulation is the label of these rows
    assert "runs/train/" in lines[-1]


def test_rows_of_earlier_builds_replace_new_ones(inside, capsys):
    (build,) = (inside / "runs" / "rows").glob("*/mlp-24-seed0")
    tiny = [word for word in TINY if not word.startswith("data.counts")]
    assert main([*tiny, f"data.builds=[{build}]", "task.figures=false"]) == 0
    assert not (inside / "runs" / "rows" / "a100_40gb" / "cnn-40-seed0").exists()
    assert _figures(_newest(inside)) == _figures(min((inside / "runs" / "train").iterdir()))


def test_rows_of_a_gpu_are_used_and_the_card_says_that_they_were_measured(room, tmp_path, monkeypatch, capsys):
    (build,) = (room / "runs" / "rows").glob("*/mlp-24-seed0")
    monkeypatch.chdir(tmp_path)
    rows = [_measured_on_a_gpu(row, alone=index > 1) for index, row in enumerate(read_journal(build).rows)]
    with JournalWriter(tmp_path / "gpu", {}) as journal:
        for row in rows:
            journal.append(row)
    tiny = [word for word in TINY if not word.startswith("data.counts")]
    assert main([*tiny, f"data.builds=[{tmp_path / 'gpu'}]", "features=full", "task.figures=false"]) == 0
    printed = capsys.readouterr()
    assert "2 rows are left out: other processes used the GPU" in printed.err
    assert any(line.startswith("virtual") for line in printed.out.splitlines())  # unlike above
    card = (_newest(tmp_path) / "checkpoint" / "README.md").read_text()
    assert "Measured by vramcast on a100_40gb." in card
    assert "virtual GPU" not in card
    assert "CC BY" not in card


def test_rows_of_a_gpu_without_a_profile_are_refused(room, tmp_path, monkeypatch, capsys):
    (build,) = (room / "runs" / "rows").glob("*/mlp-24-seed0")
    monkeypatch.chdir(tmp_path)
    with JournalWriter(tmp_path / "gpu", {}) as journal:
        row = _measured_on_a_gpu(read_journal(build).rows[0], alone=True)
        journal.append(replace(row, provenance=replace(row.provenance, device="NVIDIA A100-SXM4-40GB MIG 1g.5gb")))
    assert main([*TINY, f"data.builds=[{tmp_path / 'gpu'}]", "features=full"]) == 2
    assert "expected a device profile for the GPU NVIDIA A100-SXM4-40GB MIG 1g.5gb" in capsys.readouterr().err


def _measured_on_a_gpu(row, alone):
    provenance = replace(row.provenance, origin="measured", backend="cuda", device="NVIDIA A100-SXM4-40GB")
    used_bytes = row.measurement.peak_bytes + 30 * MIB
    return replace(row, provenance=provenance, measurement=replace(
        row.measurement, device_used_bytes=used_bytes, alone=alone
    ))  # fmt: skip


def test_builds_without_virtual_rows_are_refused(inside, tmp_path, capsys):
    words = ["family=mlp", "n=2", "backend=static", "executor=serial", f"out={tmp_path / 'static'}"]
    assert build_main(words) == 0
    assert main([*TINY, f"data.builds=[{tmp_path / 'static'}]"]) == 2
    assert "expected rows of backend=virtual or backend=cuda" in capsys.readouterr().err
    assert main([*TINY, f"data.builds={tmp_path}"]) == 2
    assert "a list of texts" in capsys.readouterr().err


def test_the_same_seed_gives_the_same_weights_and_figures(inside):
    first = _newest(inside)
    assert main(TINY) == 0
    second = _newest(inside)
    assert first != second
    weights = Path("checkpoint") / "weights.safetensors"
    assert (first / weights).read_bytes() == (second / weights).read_bytes()
    assert (first / "metrics.json").read_bytes() == (second / "metrics.json").read_bytes()


def test_an_interrupted_run_resumes(inside, monkeypatch, capsys):
    whole = _newest(inside)
    with monkeypatch.context() as patch:
        patch.setattr("vramcast.train.tasks.fit.evaluate", _interrupt)
        assert main(TINY) == 130
    stopped = _newest(inside)
    assert f"resume with: vramcast train run.resume={stopped.relative_to(inside)}" in capsys.readouterr().err
    assert not (stopped / "metrics.json").exists()
    assert main([f"run.resume={stopped}"]) == 0
    assert _figures(stopped) == _figures(whole)
    assert main([f"run.resume={stopped}"]) == 2
    assert "the run is complete" in capsys.readouterr().err


def _interrupt(*_):
    raise KeyboardInterrupt


def test_every_fold_is_the_test_part_once(inside, capsys):
    assert main([*TINY, "task=kfold", "task.folds=3", "estimator.members=1"]) == 0
    run = _newest(inside)
    summary = json.loads((run / "metrics.json").read_text())
    accuracy = summary["estimators"]["this run"]["accuracy"]
    assert summary["folds"] == len(accuracy["folds"]) == 3
    assert accuracy["mean"] == pytest.approx(sum(accuracy["folds"]) / 3)
    assert "±" in capsys.readouterr().out
    rows = [json.loads((run / f"fold{index}" / "metrics.json").read_text())["rows"]["test"] for index in range(3)]
    assert sum(rows) == 24


def test_a_split_for_a_fold_divides_the_other_folds():
    folds = Split(0, {}, {f"fold{i}": tuple(f"{i}-{j}" for j in range(10)) for i in range(3)})
    fractions = {"train": 0.8, "validation": 0.1, "test": 0.1}
    parts = split_for(folds, "fold1", fractions).parts
    assert parts["test"] == folds.parts["fold1"]
    assert sorted(len(groups) for groups in parts.values()) == [2, 10, 18]
    assert len({group for groups in parts.values() for group in groups}) == 30


def test_the_summary_leaves_out_figures_that_a_fold_lacks():
    figures = ("accuracy", "macro_f1", "too_low", "safe_too_low", "over_reservation_mib",
               "safe_over_relative_median", "median_relative_error", "mean_relative_error")  # fmt: skip
    folds = [{"estimators": {"a": {**dict.fromkeys(figures), "accuracy": value}}} for value in (0.5, 0.7, None)]
    summary = summarise(folds)["estimators"]["a"]
    assert summary["accuracy"]["mean"] == pytest.approx(0.6)
    assert summary["accuracy"]["deviation"] == pytest.approx(0.1414, abs=1e-4)
    assert summary["macro_f1"] is None


def test_measured_rows_become_a_released_checkpoint(public_table, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = public_table("gpumemnet/mlp_data_step1.csv").read_text().splitlines()[:25]
    Path("tables").mkdir()
    Path("tables/mlp_data_step1.csv").write_text("\n".join(lines) + "\n")
    words = ["task=release", "task.only=[gpumemnet_mlp_by_mlp]", "data.path=tables", "trainer=quick"]
    assert main([*words, "estimator.members=1", "executor.workers=1"]) == 0
    card = Path("checkpoints/gpumemnet_mlp_by_mlp/README.md").read_text()
    assert "CC BY 4.0" in card
    assert "data.path=DIR" in card
    assert str(tmp_path) not in card
    assert load_checkpoint(Path("checkpoints/gpumemnet_mlp_by_mlp")).members[0].settings.bucket_mib == 1000
    assert "1 checkpoints in checkpoints" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(RELEASES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_release_can_be_configured(path):
    release = read_release(path)
    configuration = configure(list(release.overrides))
    assert str(configuration.network.bucket_mib) in release.title
    assert configuration.data.path is not None


def test_a_directory_is_replaced_as_a_whole(tmp_path):
    source, target = tmp_path / "new", tmp_path / "out" / "old"
    source.mkdir()
    (source / "a").write_text("new")
    target.mkdir(parents=True)
    (target / "b").write_text("old")
    replace_directory(source, target)
    assert [path.name for path in target.iterdir()] == ["a"]
    assert [path.name for path in target.parent.iterdir()] == ["old"]


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONF)))
def test_a_file_of_the_configuration_has_few_settings(path):
    if path.parent.name not in ("space", "part", "device"):
        settings = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        assert len(settings) <= 25  # beside comments, which hold the evidence of rules


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["famly=cnn"], "did you mean family?"),
        (["task=fly"], "expected task to be one of ['fit', 'kfold', 'release', 'search'], found 'fly'"),
        (["data=nowhere"], "expected data to be one of ['gpumemnet', 'mixed', 'virtual']"),
        (["family=rnn"], "expected family to be one of"),
        (["estimator=tree"], "expected estimator to be one of ['mlp', 'simulation', 'transformer']"),
        (["features=some"], "expected features to be one of ['full', 'gpumemnet', 'layers', 'schedule']"),
        (["bucket_mib=0"], "expected bucket_mib to be a whole number from 1, found 0"),
        (["bucket_mib=wide"], "expected bucket_mib to be a whole number from 1, found 'wide'"),
        (["seed=-1"], "expected seed to be a whole number from 0"),
        (["seed=4294967296"], "expected seed to be below 4294967296"),
        (["risk=2"], "expected risk to be between 0 and 1, found 2"),
        (["estimator.members=0"], "expected estimator.members to be a whole number from 1"),
        (["estimator.wdith=3"], "add it as +estimator.wdith=VALUE"),
        (["+estimator.wdith=3"], "did you mean width?"),
        (["+estimator.seed=3"], "found ['seed']"),
        (["estimator.dropout=2"], "expected dropout to be a number from 0 to below 1, found 2"),
        (["trainer.epochs=0"], "expected trainer.epochs to be a whole number from 1"),
        (["trainer.learning_rate=fast"], "expected trainer.learning_rate to be a number above 0, found 'fast'"),
        (["trainer.learning_rate=nan"], "expected finite numbers"),
        (["+extra=1"], "found ['extra']"),
        (["~seed"], "found no ['seed']"),
        (["~task.name"], "expected task.name to be one of"),
        (["task=kfold", "task.folds=1"], "expected task.folds to be a whole number from 2, found 1"),
        (["+task.speed=1"], "found ['speed']"),
        (["split.test=0.5"], "expected fractions above 0 that sum to 1"),
        (["~split.test"], "expected the parts ['train', 'validation', 'test'] in split"),
        (["split=7"], "expected split to be settings, found 7"),
        (["data=gpumemnet", "data.path=/nonexistent"], "expected a directory with tables of measurements"),
        (["data=gpumemnet", "data.path=."], "expected tables such as"),
        (["data.path=."], "add it as +data.path=VALUE"),
        (["data.families=[cnn,rnn]"], "expected a family of data.families to be one of"),
        (["data.families=[]"], "expected data.families to be a list"),
        (["data.counts.mlp=-1"], "expected data.counts.mlp to be a whole number from 0"),
        (["data.counts={mlp: 0, cnn: 0, transformer: 0, template: 0}"], "found none: choose other families"),
        (["data.device=gtx_1"], "expected device to be one of"),
        (["run.resume=/nonexistent"], "expected the directory of a run, found no config.yaml"),
        (["run.resume=.", "seed=1"], "expected run.resume=DIR alone, found ['seed=1'] with it"),
        (["run.name=a/b"], "expected run.name to be a word"),
        (["run.root="], "expected run.root to be a text"),
        (["logger=wandb"], "expected logger to be one of ['csv', 'mlflow', 'tensorboard']"),
        (["executor.workers=0"], "expected executor.workers to be a whole number from 1"),
        (["task=release", "task.only=[best]"], "expected a checkpoint of task.only to be one of"),
        (["task=release", "task.only=7"], "expected task.only to be a list"),
        (["hello"], "expected KEY=VALUE, found 'hello': see vramcast train --help"),
        (["[broken"], "expected"),
        (["--cfg", "famly=cnn"], "did you mean family?"),
    ],
)
def test_bad_input_gets_one_sentence_and_exit_code_2(words, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vramcast.train.data.run_with_bar", None)  # errors are raised before a row is built
    assert main(words) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert errors[-1].startswith("vramcast train: ")
    assert sentence in errors[-1]
    assert "Traceback" not in "\n".join(errors)
    assert not Path("runs").exists()  # and no directory is left behind


def test_the_composed_configuration_is_printed(capsys):
    assert main(["--cfg", "family=cnn", "data=mixed", "logger=[csv,mlflow]"]) == 0
    config = OmegaConf.create(capsys.readouterr().out)
    assert config.data.families == "cnn"
    assert list(config.logger) == ["csv", "mlflow"]
    assert config.features.name == "full"


def test_simulated_rows_do_not_have_their_simulation_as_a_feature(capsys):
    assert configure([]).network.features == "gpumemnet"
    assert configure(["features=full"]).network.features == "full"
    assert configure(["data=gpumemnet"]).network.features == "full"


@pytest.mark.parametrize("words", [["--help"], ["data=mixed", "-h"]])
def test_help_imports_nothing_heavy(words):
    code = f"import sys; from vramcast.commands.train_command import main; main({words!r})\n"
    code += "print(sorted({'torch', 'lightning', 'hydra'} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("usage: vramcast train")
    assert result.stdout.endswith("[]\n")


def test_a_part_of_a_table_is_drawn_by_networks(public_table, tmp_path):
    table = public_table("realworld/timm_sgd_a100.csv")
    words = ["data=gpumemnet", f"data.path={table.parent}", "data.files=[timm_*.csv]"]
    every = measured_rows(configure(words).data)
    some, others = (measured_rows(configure([*words, '+data.most={timm_*: 40}', seed]).data)
                    for seed in ("data.seed=1", "data.seed=2"))  # fmt: skip
    assert len(some) == len(others) == 40
    assert {row.spec.id for row in some} <= {row.spec.id for row in every}
    assert {row.spec.id for row in some} != {row.spec.id for row in others}
    whole = {row.spec.group for row in some[:-1]} - {some[-1].spec.group}
    status = (Status.OK, Status.OOM)
    expected = sum(row.spec.group in whole and row.measurement.status in status for row in every)
    assert sum(row.spec.group in whole for row in some) == expected
