"""torchrun and accelerate launch: the first rank of the script runs here, in the environment that they would set up."""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vramcast.error_words import shortened
from vramcast.errors import UserError
from vramcast.simulation.scripts.command_line import Program

_AS_MANY_AS_THERE_ARE = ("auto", "gpu", "cpu", "xpu")
"""Words of torchrun for a number of processes: there is one device."""
_LONGEST_COUNT = 6
"""Digits."""


def unwrapped(program: Program, rank: int = 0, world_size: int = 1) -> Program:
    """Return the program that a launcher would start, after setting the environment of one rank.

    Args:
        program: The program of the command.
        rank: The rank to run.
        world_size: The number of ranks of a script that starts them itself, as Lightning does; 1 if it is not known.
    """
    if program.kind == "torchrun":
        return _torchrun(list(program.arguments), rank)
    if program.kind == "accelerate":
        return _accelerate(list(program.arguments), rank)
    if rank and world_size > 1:
        os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size))
    elif rank:
        raise UserError(
            f"expected a launcher of several ranks with --rank {rank}, found none: use torchrun or accelerate launch"
        )
    return program


def _set_rank(rank: int, nodes: int, processes: int) -> None:
    if rank >= nodes * processes:
        raise UserError(f"expected a rank below {nodes * processes}, found {rank}: change --rank")
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank % processes,
        "GROUP_RANK": rank // processes,
        "WORLD_SIZE": nodes * processes,
        "LOCAL_WORLD_SIZE": processes,
    }
    os.environ.update({name: str(value) for name, value in values.items()})
    if nodes * processes > 1:
        importlib.import_module("torch.distributed.optim")  # it compiles functions, which needs torch without patches
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")


def _count(option: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= _LONGEST_COUNT and int(text)):
        raise UserError(f"expected {option} to be a whole number from 1, found {shortened(text, 100)!r}: change it")
    return int(text)


def _torchrun(arguments: list[str], rank: int) -> Program:
    launcher: Any = importlib.import_module("torch.distributed.run")
    parsed = launcher.parse_args(arguments)
    nodes = _count("--nnodes", str(parsed.nnodes).partition(":")[0])
    processes = str(parsed.nproc_per_node)
    count = 1 if processes in _AS_MANY_AS_THERE_ARE else _count("--nproc-per-node", processes)
    _set_rank(rank, nodes, count)
    kind = "module" if parsed.module else "file"
    return Program(kind, parsed.training_script, tuple(parsed.training_script_args))


@contextmanager
def _one_gpu() -> Iterator[None]:
    """Let accelerate count one GPU where its command line and its configuration file name no number of processes."""
    cuda: Any = importlib.import_module("torch").cuda
    names = ("device_count", "is_available")
    before = {name: getattr(cuda, name) for name in names}
    cuda.device_count, cuda.is_available = (lambda: 1), (lambda: True)
    try:
        yield
    finally:
        for name in names:
            setattr(cuda, name, before[name])


def _accelerate(arguments: list[str], rank: int) -> Program:
    try:
        launch: Any = importlib.import_module("accelerate.commands.launch")
    except ImportError as error:
        raise UserError(f"expected accelerate in {sys.executable}, found none: install it there") from error
    parsed: Any = launch.launch_command_parser().parse_args(arguments)
    with _one_gpu():
        parsed, *_ = launch._validate_launch_command(parsed)
    if parsed.use_deepspeed or parsed.use_megatron_lm or parsed.tpu:
        raise UserError(
            "expected accelerate launch on one GPU, with DDP or with FSDP, found DeepSpeed, Megatron-LM or a TPU: "
            "use --multi_gpu or --use_fsdp, or vramcast classify --parallel"
        )
    count, nodes = int(parsed.num_processes or 1), int(parsed.num_machines or 1)
    if (count > 1 or parsed.use_fsdp) and not parsed.cpu:
        environment = launch.prepare_multi_gpu_env(parsed)
        _set_rank(rank, nodes, count // nodes)
    else:
        _, environment = launch.prepare_simple_launcher_cmd_env(parsed)
    os.environ.update({name: str(value) for name, value in environment.items()})
    kind = "module" if parsed.module else "file"
    return Program(kind, parsed.training_script, tuple(parsed.training_script_args))
