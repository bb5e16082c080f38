"""Executors measure specs in this process, in worker processes, or on a Ray cluster."""

from vramcast.dataset_builder.executors._base import Executor
from vramcast.dataset_builder.executors.local import LocalExecutor
from vramcast.dataset_builder.executors.serial import SerialExecutor

__all__ = ["Executor", "SerialExecutor", "LocalExecutor"]
