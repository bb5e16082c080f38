"""`task=search`: trials are pruned and stored, and a study resumes."""

import optuna
import pytest
from made_examples import measured_mlps
from omegaconf import OmegaConf
from optuna.trial import TrialState

from vramcast.errors import UserError
from vramcast.train.configuration import configure
from vramcast.train.experiment import Parts
from vramcast.train.tasks import search as task

SMALL = [
    "task=search", "trainer.epochs=3", "estimator.width=8", "task.startup_trials=1", "task.warmup_epochs=1",
    "search.estimator.width.choice=[4,8]", "search.estimator.blocks.int=[1,2]",
]  # fmt: skip


@pytest.fixture
def configured(tmp_path, monkeypatch):
    parts = Parts(measured_mlps(30), measured_mlps(10, 30), measured_mlps(10, 50))
    monkeypatch.setattr(task, "load_parts", lambda configuration: parts)
    return lambda *words: configure([*SMALL, f"task.storage={tmp_path / 'studies' / 'made.db'}", *words])


def _states(study: optuna.Study) -> list[TrialState]:
    return [trial.state for trial in study.trials]


def test_a_search_runs_its_trials_and_prints_the_best(configured, tmp_path, capsys):
    study = task.search(configured("task.trials=3"))
    assert len(study.trials) == 3
    assert {"estimator.width", "trainer.learning_rate"} <= study.best_params.keys()
    assert f"best validation loss {study.best_value:.4f}" in capsys.readouterr().out
    stored = OmegaConf.load(tmp_path / "studies" / "made.yaml")
    assert stored.validation_loss == study.best_value
    configure([f"{name}={value}" for name, value in stored.settings.items()])  # valid overrides as they are


def test_the_same_command_resumes_and_draws_new_trials(configured):
    first = [trial.params for trial in task.search(configured("task.trials=2")).trials]
    second = task.search(configured("task.trials=4"))
    assert [trial.params for trial in second.trials[:2]] == first
    rates = [trial.params["trainer.learning_rate"] for trial in second.trials]
    assert len(set(rates)) == 4
    assert len(task.search(configured("task.trials=4")).trials) == 4


def test_a_trial_of_a_killed_process_does_not_count(configured):
    configuration = configured("task.trials=2")
    study = task._open(configuration)
    study.ask()  # and the process is killed
    study = task.search(configuration)
    assert _states(study).count(TrialState.FAIL) == 1
    assert sum(state in (TrialState.COMPLETE, TrialState.PRUNED) for state in _states(study)) == 2


def test_an_interrupted_search_keeps_its_trials(configured, monkeypatch):
    configuration, fit = configured("task.trials=3"), task.NetworkClassifier.fit_prepared
    calls = []

    def interrupted(self, data):
        calls.append(data)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return fit(self, data)

    monkeypatch.setattr(task.NetworkClassifier, "fit_prepared", interrupted)
    with pytest.raises(KeyboardInterrupt):
        task.search(configuration)
    assert _states(task.search(configuration))[:2] == [TrialState.COMPLETE, TrialState.FAIL]


def test_a_trial_that_is_worse_than_others_at_the_same_epoch_is_pruned(configured):
    words = ("task.trials=8", "task.warmup_epochs=0", "search.trainer.learning_rate.float=[1e-7,0.1]", "seed=1")
    assert TrialState.PRUNED in _states(task.search(configured(*words)))


def test_a_study_of_another_configuration_is_refused(configured):
    task.search(configured("task.trials=1", "task.study=made"))
    with pytest.raises(UserError, match=r"use task\.study=OTHER"):
        task.search(configured("task.trials=2", "task.study=made", "bucket_mib=2000"))


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("search.estimator.width.choice=[]", "expected search.estimator.width to be such as"),
        ("search.estimator.blocks.int=[4,1]", "expected search.estimator.blocks to be such as"),
        ("search.trainer.learning_rate.log=7", "expected search.trainer.learning_rate to be such as"),
        ("+search.estimator.colour={choice: [1]}", "found 'estimator.colour'"),
        ("+search.bucket_mib={choice: [1000]}", "losses would not be comparable"),
        ("+search.width=7", "expected search.width to have one of choice, int, float"),
    ],
)
def test_an_invalid_search_space_is_refused(configured, word, sentence):
    with pytest.raises(UserError, match=sentence):
        task.search(configured(word))


def test_a_search_without_settings_is_refused():
    with pytest.raises(UserError, match="expected settings to vary in search"):
        dict(task.factors_of({}))
