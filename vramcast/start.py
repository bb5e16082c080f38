"""Run a module of vramcast in any interpreter: `python START MODULE [ARGUMENT ...] DESCRIPTOR`.

Only `vramcast` itself is made importable. The directory that holds it may be a site-packages whose other libraries
must not be seen by the interpreter of a user, so it is not added to the path.

Python 3.6 can run this file, so that an old interpreter can report what it lacks.
"""

import importlib.util
import json
import os
import runpy
import sys
from pathlib import Path

OLDEST = (3, 11)


def main() -> None:
    """Make `vramcast` importable and run the module that the first argument names."""
    home = Path(__file__).resolve().parent
    # `python FILE` puts the file's directory first, whose packages have the names of users' packages.
    sys.path[:] = [item for item in sys.path if Path(item).resolve() != home]
    if sys.version_info < OLDEST:
        _refuse("Python {}.{} or newer".format(*OLDEST), "Python {}.{}".format(*sys.version_info))
    if importlib.util.find_spec("torch") is None:
        _refuse("torch", "none")
    if "vramcast" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "vramcast", str(home / "__init__.py"), submodule_search_locations=[str(home)]
        )
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot load vramcast from {home}")
        package = importlib.util.module_from_spec(spec)
        sys.modules["vramcast"] = package
        spec.loader.exec_module(package)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _refuse(expected: str, present: str) -> None:
    """Report on the descriptor of the last argument what this interpreter lacks, and end."""
    reason = f"expected {expected} in {sys.executable}, found {present}: name the interpreter of your environment"
    os.write(int(sys.argv[-1]), json.dumps({"event": "refused", "reason": reason}).encode() + b"\n")
    sys.exit(2)


if __name__ == "__main__":
    main()
