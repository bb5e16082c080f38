"""Executors: where specs are measured, in this process or in workers beside it."""

from dataset_builder.executors._base import Executor
from dataset_builder.executors.local import LocalExecutor
from dataset_builder.executors.serial import SerialExecutor

__all__ = ["Executor", "SerialExecutor", "LocalExecutor"]
