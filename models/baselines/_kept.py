"""What all baselines share: a state that can be written down."""

from abc import abstractmethod
from pathlib import Path
from typing import Self

from vramcast.models._base import Estimator
from vramcast.models.storage import State, read_state, write_state


class Baseline(Estimator):
    """An estimator whose name says which kind it is."""

    @abstractmethod
    def state(self) -> State:
        """What was learned."""

    @classmethod
    @abstractmethod
    def from_state(cls, state: State) -> Self:
        """The baseline that a state was taken of."""

    def save(self, directory: Path) -> None:
        """Write the state as safetensors and JSON."""
        write_state(directory, self.name, self.state())

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read what `save` wrote; a damaged or foreign directory is refused with a sentence."""
        return cls.from_state(read_state(directory, cls.name))
