"""The tasks of `vramcast train`, one file each."""

import sys
from collections.abc import Callable
from pathlib import Path

from vramcast.train.configuration import Configuration
from vramcast.train.run import Run, resume_run, start_run


def run_task(configuration: Configuration, overrides: list[str]) -> None:
    """Run the task of a configuration. Imports are deferred: optuna alone takes a second to import."""
    if configuration.run.resume is not None:
        run = resume_run(Path(configuration.run.resume), overrides)
        _run_in_directory(run.configuration, lambda: run)
    elif configuration.task["name"] == "search":
        from vramcast.train.tasks.search import search  # noqa: PLC0415

        search(configuration)
    elif configuration.task["name"] == "release":
        from vramcast.train.tasks.release import release  # noqa: PLC0415

        release(configuration, overrides)
    else:
        _run_in_directory(configuration, lambda: start_run(configuration))


def _run_in_directory(configuration: Configuration, open_run: Callable[[], Run]) -> None:
    """Run a task that has a run directory and can be resumed."""
    from vramcast.train.experiment import examples_for  # noqa: PLC0415
    from vramcast.train.loggers import make_loggers  # noqa: PLC0415
    from vramcast.train.tasks.fit import fit  # noqa: PLC0415
    from vramcast.train.tasks.kfold import kfold  # noqa: PLC0415

    make_loggers(configuration.logger)  # fail on a missing library before rows are built
    examples = examples_for(configuration)
    run = open_run()  # after the data: bad data leaves no empty directory
    print(f"run directory {run.directory}", file=sys.stderr)
    try:
        {"fit": fit, "kfold": kfold}[configuration.task["name"]](run, examples)
    except KeyboardInterrupt:
        print(f"resume with: vramcast train run.resume={run.directory}", file=sys.stderr)
        raise
