"""`python -m models`, which is `vramcast evaluate`."""

import sys
from collections.abc import Sequence

from dataset_builder.errors import UserError
from models import evaluate

_BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command of this package; the return value is the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        evaluate.main(words[1:] if words[:1] == ["evaluate"] else words)
    except UserError as error:
        print(f"vramcast evaluate: {error}", file=sys.stderr)
        return _BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
