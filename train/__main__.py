"""Run `python -m train` from a checkout: the same as `vramcast train`."""

import sys

from vramcast.commands.train_command import main

if __name__ == "__main__":
    sys.exit(main())
