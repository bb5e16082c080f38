"""The base class of baselines."""

from abc import abstractmethod
from pathlib import Path
from typing import Self

from vramcast.models.estimators._base import Estimator
from vramcast.models.storage import State, read_state, write_state


class Baseline(Estimator):
    """An estimator that is saved under its name."""

    @property
    def needs_simulation(self) -> bool:
        """Whether examples need a simulated measurement."""
        return False

    @abstractmethod
    def state(self) -> State:
        """Return the learned state."""

    @classmethod
    @abstractmethod
    def from_state(cls, state: State) -> Self:
        """Restore a baseline from its state."""

    def save(self, directory: Path) -> None:
        """Write the state as safetensors and JSON."""
        write_state(directory, self.name, self.state())

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read a directory that `save` wrote; raise a UserError for a damaged or foreign one."""
        return cls.from_state(read_state(directory, cls.name))
