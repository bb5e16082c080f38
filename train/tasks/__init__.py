"""What `python -m train` can be asked to do: one file a task."""

from pathlib import Path

from train.configuration import Configuration
from train.run import begin, take_up


def carry_out(configuration: Configuration, overrides: list[str]) -> None:
    """Do what the configuration's task says. A task imports what it needs when it runs: optuna alone takes a second."""
    if configuration.run.resume is not None:
        _run_of_directory(configuration.run.resume, overrides)
    elif configuration.task["name"] == "search":
        from train.tasks.search import search  # noqa: PLC0415

        search(configuration)
    elif configuration.task["name"] == "release":
        from train.tasks.release import release  # noqa: PLC0415

        release(configuration, overrides)
    else:
        _in_directory(configuration)
