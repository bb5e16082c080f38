"""The source of advice: answers for one job under changed training options."""

from typing import Any, Protocol

from vramcast.models.answer import Answer


class VariedAnswers(Protocol):
    """Answers for one job; a command has them from its child process, the service from its workers."""

    @property
    def target(self) -> str:
        """The name of the network, as the user wrote it."""

    def answer(self, device: str, **changes: Any) -> Answer:
        """Return the answer for one device, with some training options changed.

        Raises:
            UserError: The network does not support the options.
            NetworkError: Its own code failed under them.
        """
