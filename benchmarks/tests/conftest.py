"""Settings of the tests of benchmarks, which `make bench` runs."""

import atexit
import os
import shutil
import tempfile
from importlib import import_module

os.environ.setdefault("OMP_NUM_THREADS", "1")

# The developer's own device profiles must not change results.
os.environ["VRAMCAST_CONFIG"] = tempfile.mkdtemp(prefix="vramcast-config-")
atexit.register(shutil.rmtree, os.environ["VRAMCAST_CONFIG"], ignore_errors=True)

# Before a test imports lightning, and after the threads are set: it imports torch.
import_module("vramcast.jobs.families.libraries").tolerate_broken_torchvision()
