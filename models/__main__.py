"""`python -m models`, which is `vramcast evaluate`."""

import sys
from collections.abc import Sequence

from dataset_builder.exits import exit_code
from models import evaluate


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command of this package; the return value is the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code("vramcast evaluate", lambda: evaluate.main(words[1:] if words[:1] == ["evaluate"] else words))


if __name__ == "__main__":
    sys.exit(main())
