"""Run `python -m vramcast`."""

import sys

from vramcast.cli import main

if __name__ == "__main__":
    sys.exit(main())
