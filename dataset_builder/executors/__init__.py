"""Executors: where specs are measured, in this process or in workers beside it."""

from vramcast.dataset_builder.executors._base import Executor
from vramcast.dataset_builder.executors.local import LocalExecutor
from vramcast.dataset_builder.executors.serial import SerialExecutor

__all__ = ["Executor", "SerialExecutor", "LocalExecutor"]
