"""What `python -m train` can be asked to do: one file a task."""

import sys
from collections.abc import Callable
from pathlib import Path

from vramcast.train.configuration import Configuration
from vramcast.train.run import Run, begin, take_up


def carry_out(configuration: Configuration, overrides: list[str]) -> None:
    """Do what the configuration's task says. A task imports what it needs when it runs: optuna alone takes a second."""
    if configuration.run.resume is not None:
        run = take_up(Path(configuration.run.resume), overrides)
        _in_directory(run.configuration, lambda: run)
    elif configuration.task["name"] == "search":
        from vramcast.train.tasks.search import search  # noqa: PLC0415

        search(configuration)
    elif configuration.task["name"] == "release":
        from vramcast.train.tasks.release import release  # noqa: PLC0415

        release(configuration, overrides)
    else:
        _in_directory(configuration, lambda: begin(configuration))


def _in_directory(configuration: Configuration, open_run: Callable[[], Run]) -> None:
    """The tasks that leave a run directory, and that go on where they were stopped."""
    from vramcast.train.experiment import examples_for  # noqa: PLC0415
    from vramcast.train.loggers import make_loggers  # noqa: PLC0415
    from vramcast.train.tasks.fit import fit  # noqa: PLC0415
    from vramcast.train.tasks.kfold import kfold  # noqa: PLC0415

    make_loggers(configuration.logger)  # a library that is missing is told before rows are built
    examples = examples_for(configuration)
    run = open_run()  # now that there is something to train on
    print(f"run directory {run.directory}", file=sys.stderr)
    try:
        {"fit": fit, "kfold": kfold}[configuration.task["name"]](run, examples)
    except KeyboardInterrupt:
        print(f"go on with: python -m train run.resume={run.directory}", file=sys.stderr)
        raise
