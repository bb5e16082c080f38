"""The command `vramcast train`: one composed configuration is one run."""

import signal
import sys
from collections.abc import Sequence
from types import FrameType

from vramcast.commands.exit_codes import exit_code

_USAGE = """\
usage: vramcast train [KEY=VALUE ...]        train, evaluate, and write a run directory
       vramcast train --cfg [KEY=VALUE ...]  print the configuration instead

  task=fit|kfold|search|release
  data=virtual|gpumemnet|mixed  data.path=DIR   the directory with the public tables
  family=mlp|cnn|transformer|template           one family of the data
  features=full|gpumemnet  estimator=mlp|transformer  bucket_mib=1024
  trainer.epochs=200  estimator.members=3  logger=csv|tensorboard|mlflow  seed=0
  run.resume=DIR                                resume an interrupted run

All keys are in conf/train.yaml and its groups. Ctrl-C is safe at any time: the run can be resumed.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a task and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code("vramcast train", lambda: _dispatch(words))


def _dispatch(words: Sequence[str]) -> None:
    overrides = [word for word in words if word != "--cfg"]
    if {"-h", "--help"} & set(words):
        print(_USAGE, end="")
    elif len(overrides) < len(words):
        _show(overrides)
    else:
        _run(overrides)


def _show(overrides: Sequence[str]) -> None:
    from omegaconf import OmegaConf

    from vramcast.dataset_builder.composition import compose_config
    from vramcast.train.configuration import COMMAND

    print(OmegaConf.to_yaml(compose_config(COMMAND, overrides)), end="")


def _run(overrides: Sequence[str]) -> None:
    from vramcast.train.configuration import configure
    from vramcast.train.tasks import run_task

    signal.signal(signal.SIGTERM, _interrupt)
    run_task(configure(overrides), list(overrides))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
