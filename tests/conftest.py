"""What several test files share."""

import atexit
import csv
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from nvml_stub import Driver, compile_stub
from scripted_backend import worker_processes
from warm_runs import HOST, WarmRuns

# Before anything imports torch: two test processes with two threads each get in each other's way on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The developer's own device profiles must not change results.
os.environ["VRAMCAST_CONFIG"] = tempfile.mkdtemp(prefix="vramcast-config-")
atexit.register(shutil.rmtree, os.environ["VRAMCAST_CONFIG"], ignore_errors=True)

# A shell starts what runs in its background with Ctrl-C ignored, which children inherit: none could be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests to inherit live in modules of their own, whose asserts should speak as clearly as others.
pytest.register_assert_rewrite("estimator_contract")

# Before a test imports lightning, and after the threads are set: it imports torch.
import_module("vramcast.jobs.families.libraries").tolerate_broken_torchvision()

DATA = Path(os.environ.get("VRAMCAST_DATA", Path(__file__).parents[2] / "shared" / "data"))

# For properties that run torch: slow examples, and the same ones every time.
settings.register_profile(
    "torch",
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def public_table() -> Callable[[str], Path]:
    """The path of a table of the public measurements; where it is absent the test is skipped."""

    def locate(name: str) -> Path:
        if not (DATA / name).exists():
            pytest.skip(f"no {name} in {DATA}: set VRAMCAST_DATA to the directory of the public measurements")
        return DATA / name

    return locate


@pytest.fixture
def public_rows(public_table: Callable[[str], Path]) -> Callable[[str], list[dict[str, str]]]:
    """The lines of a table of the public measurements."""

    def read(name: str) -> list[dict[str, str]]:
        with public_table(name).open(newline="") as lines:
            return list(csv.DictReader(lines))

    return read


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of what is in the file, not of when it is on the disk."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)


@pytest.fixture
def no_process_is_left() -> Iterator[None]:
    """Whatever a test does to workers, none of them outlives it."""
    yield
    assert worker_processes() == []


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """A Ray cluster with one CPU slot, to which this process is connected; tests may add nodes."""
    ray = pytest.importorskip("ray", reason="needs Ray: pip install 'vramcast[ray]'")
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # its sockets need a short path
    # A dead node refuses to answer, which is to be noticed soon; a slow one is given time.
    health = {"health_check_period_ms": 300, "health_check_failure_threshold": 3, "health_check_timeout_ms": 20_000}
    head = {"include_dashboard": False, "temp_dir": folder, "_system_config": health}
    cluster = Cluster()
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_TMPDIR", folder)  # where the connection below notes the cluster's address
    (Path(folder) / "ray").mkdir()
    try:
        with environment_of_nodes():
            cluster.add_node(num_cpus=1, object_store_memory=80 << 20, **head)
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        patch.undo()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def second_node(ray_cluster: Any) -> Iterator[Any]:
    """Another node, with a CPU slot and a GPU that does not exist; tests may kill it."""
    with environment_of_nodes():
        node = ray_cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=80 << 20)
    yield node
    if node in ray_cluster.worker_nodes:
        ray_cluster.remove_node(node, allow_graceful=False)


@contextmanager
def environment_of_nodes() -> Iterator[None]:
    """What the tasks on a node inherit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "support"))
        yield


@pytest.fixture(scope="session")
def warm_host() -> Iterator[WarmRuns]:
    """Runs of scripts whose children need not import torch again."""
    yield HOST
    HOST.close()


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a stub libnvidia-ml.so.1."""
    found = compile_stub(tmp_path_factory.mktemp("nvml"))
    if found is None:
        pytest.skip("needs a C compiler for the stub of NVML: install cc, or name one in CC")
    return found


@pytest.fixture
def driver(nvml_library: Path, tmp_path: Path) -> Driver:
    """A machine with a stub as its driver; a test defines its GPUs."""
    return Driver(nvml_library, tmp_path)
