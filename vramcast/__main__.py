"""Run `python -m vramcast`."""

import sys

from vramcast.cli import main

sys.exit(main())
