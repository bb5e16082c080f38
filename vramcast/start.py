"""Run a module of vramcast in any interpreter: `python -P START MODULE [ARGUMENT ...]`.

Only `vramcast` itself is made importable. The directory that holds it may be a site-packages whose other libraries
must not be seen by the interpreter of a user, so it is not added to the path.
"""

import importlib.util
import runpy
import sys
from pathlib import Path


def main() -> None:
    """Make `vramcast` importable and run the module that the first argument names."""
    if "vramcast" not in sys.modules:
        home = Path(__file__).resolve().parent
        spec = importlib.util.spec_from_file_location(
            "vramcast", home / "__init__.py", submodule_search_locations=[str(home)]
        )
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot load vramcast from {home}")
        package = importlib.util.module_from_spec(spec)
        sys.modules["vramcast"] = package
        spec.loader.exec_module(package)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
