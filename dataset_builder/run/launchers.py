"""torchrun and accelerate launch with one process: the script runs here, in the environment that they would set up."""

import importlib
import os
import sys
from typing import Any

from vramcast.dataset_builder.run.command_line import Program
from vramcast.errors import UserError

_MANY = (
    "expected one process, found {count}: several ranks are not simulated by this command yet; "
    "run one rank with --nproc_per_node 1"
)


def unwrapped(program: Program) -> Program:
    """Return the program that a launcher would start, after setting its environment."""
    if program.kind == "torchrun":
        return _torchrun(list(program.arguments))
    if program.kind == "accelerate":
        return _accelerate(list(program.arguments))
    return program


def check_ranks(count: int) -> None:
    """Refuse more than one process; simulations of many ranks replace this check."""
    if count != 1:
        raise UserError(_MANY.format(count=count))


def _set_rank() -> None:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK="0")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")


def _torchrun(arguments: list[str]) -> Program:
    launcher: Any = importlib.import_module("torch.distributed.run")
    parsed = launcher.parse_args(arguments)
    nodes = str(parsed.nnodes).partition(":")[0]
    processes = str(parsed.nproc_per_node)
    count = int(processes) if processes.isdigit() else 1  # 'gpu' and 'auto': as many as there are, one
    check_ranks(count * int(nodes))
    _set_rank()
    kind = "module" if parsed.module else "file"
    return Program(kind, parsed.training_script, tuple(parsed.training_script_args))


def _accelerate(arguments: list[str]) -> Program:
    try:
        launch: Any = importlib.import_module("accelerate.commands.launch")
    except ImportError as error:
        raise UserError(f"expected accelerate in {sys.executable}, found none: install it there") from error
    words = arguments[1:] if arguments[:1] == ["launch"] else arguments
    parsed: Any = launch.launch_command_parser().parse_args(words)
    parsed, *_ = launch._validate_launch_command(parsed)
    check_ranks(int(parsed.num_processes or 1))
    _, environment = launch.prepare_simple_launcher_cmd_env(parsed)
    os.environ.update({name: str(value) for name, value in environment.items()})
    kind = "module" if parsed.module else "file"
    return Program(kind, parsed.training_script, tuple(parsed.training_script_args))
