"""What `python -m train` can be asked to do: one file a task."""

import sys
from pathlib import Path

from train.configuration import Configuration
from train.run import Run, begin, take_up


def carry_out(configuration: Configuration, overrides: list[str]) -> None:
    """Do what the configuration's task says. A task imports what it needs when it runs: optuna alone takes a second."""
    if configuration.run.resume is not None:
        _in_directory(take_up(Path(configuration.run.resume), overrides))
    elif configuration.task["name"] == "search":
        from train.tasks.search import search  # noqa: PLC0415

        search(configuration)
    elif configuration.task["name"] == "release":
        from train.tasks.release import release  # noqa: PLC0415

        release(configuration, overrides)
    else:
        _in_directory(begin(configuration))


def _in_directory(run: Run) -> None:
    """The tasks that leave a run directory, and that go on where they were stopped."""
    from train.tasks.fit import fit  # noqa: PLC0415
    from train.tasks.kfold import kfold  # noqa: PLC0415

    print(f"run directory {run.directory}", file=sys.stderr)
    try:
        {"fit": fit, "kfold": kfold}[run.configuration.task["name"]](run)
    except KeyboardInterrupt:
        print(f"go on with: python -m train run.resume={run.directory}", file=sys.stderr)
        raise
