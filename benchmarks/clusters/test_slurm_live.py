"""The plugins under a live slurmctld: `make slurm`. Each test states what slurmctld, the user and the jobs saw."""

import json
import re
import time
import urllib.request
from collections.abc import Iterator

import pytest

from benchmarks.clusters.slurm_cluster import (
    GPU_SHARDS,
    Cluster,
    Submission,
    left_behind,
    reason_to_skip,
    running_cluster,
)

pytestmark = pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip()))


def job(width: int) -> str:
    network = {"arch": "uniform", "input_features": width, "output_features": width, "depth": 12}
    return json.dumps({"family": "mlp", "network": network, "training": {"batch_size": 1024, "optimizer": "Adam"}})


SMALL, LARGE, TOO_LARGE = job(784), job(12000), job(13000)


def shards_of(cluster: Cluster, text: str) -> int:
    """Return the shards that the service names for a job, which is then cached."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{cluster.service.port}/v1/slurm",
        text.encode(),
        {"Content-Type": "text/plain", "Authorization": f"Bearer {cluster.token}"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as response:
        return int(re.findall(rb"(?m)^shards=(\d+)", response.read())[0])


@pytest.fixture(scope="module")
def started() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        folder = cluster.folder
        assert shards_of(cluster, SMALL) == 1
        assert GPU_SHARDS / 2 < shards_of(cluster, LARGE) <= GPU_SHARDS
        assert GPU_SHARDS < shards_of(cluster, TOO_LARGE) <= 2 * GPU_SHARDS, "it fits the node, but no GPU"
        yield cluster
    assert left_behind(folder) == [], "no process is left behind"


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    yield started
    started.clear()


def messages(submission: Submission) -> int:
    """Return the number of messages about the need of a job."""
    return submission.text.count("of GPU memory")


@pytest.mark.parametrize("plugins", ["both", "job_submit"])
def test_a_job_gets_its_shards_and_the_user_one_message(cluster: Cluster, plugins: str) -> None:
    submission = cluster.submit(cluster.script("small", SMALL), plugins=plugins)
    assert cluster.requests(submission) == "TresPerNode=gres:shard:1"
    assert messages(submission) == 1, submission.text
    assert cluster.output(submission) == ""


@pytest.mark.parametrize("plugins", ["both", "job_submit"])
@pytest.mark.parametrize(
    ("option", "requests"),
    [
        ("--gpus=1", "TresPerJob=gres:gpu:1"),
        ("--gres=gpu:1", "TresPerNode=gres:gpu:1"),
        ("--gres=shard:3", "TresPerNode=gres:shard:3"),
        ("--gres=shard:0", "TresPerNode=gres:shard:0"),
        ("--gres=disk:1", "TresPerNode=gres:disk:1,gres:shard:1"),
    ],
)
def test_a_request_of_the_user_has_priority(cluster: Cluster, plugins: str, option: str, requests: str) -> None:
    submission = cluster.submit(cluster.script("small", SMALL), option, plugins=plugins)
    assert cluster.requests(submission) == requests, submission.text
    assert messages(submission) <= 1, submission.text


def test_a_job_that_wants_no_resources_gets_none(cluster: Cluster) -> None:
    submission = cluster.submit(cluster.script("small", SMALL), "--gres=none")
    assert cluster.allocated(submission) == ""
    script = cluster.script("none", SMALL, "#SBATCH --gres=none\nsleep 1")
    for plugins in ("both", "job_submit"):
        assert cluster.allocated(cluster.submit(script, plugins=plugins)) == ""
    assert cluster.allocated(cluster.submit(cluster.script("small", SMALL))) == "shard:1"


@pytest.mark.parametrize("plugins", ["both", "job_submit"])
def test_shards_are_multiplied_by_the_processes_on_a_node(cluster: Cluster, plugins: str) -> None:
    script = cluster.script("small", SMALL)
    for options in (["--ntasks-per-node=2"], ["--nodes=1", "--ntasks=2"]):
        submission = cluster.submit(script, *options, plugins=plugins)
        assert cluster.requests(submission) == "TresPerNode=gres:shard:2", submission.text
        assert "each process" in submission.text
    submission = cluster.submit(script, "--ntasks=2", plugins=plugins)
    assert cluster.requests(submission) == "TresPerNode=gres:shard:1"
    assert "state --ntasks-per-node" in submission.text


@pytest.mark.parametrize("plugins", ["both", "job_submit"])
def test_a_job_that_fits_the_node_but_no_gpu_gets_a_sentence(cluster: Cluster, plugins: str) -> None:
    submission = cluster.submit(cluster.script("too_large", TOO_LARGE), plugins=plugins)
    assert f"the largest request that fits is shard:{GPU_SHARDS}" in submission.text
    assert "waits forever" in submission.text
    assert "JobState=PENDING" in cluster.shown(submission.job)


@pytest.mark.parametrize("plugins", ["both", "job_submit"])
def test_a_job_that_fits_no_gpu_is_refused_on_request(cluster: Cluster, plugins: str) -> None:
    cluster.set("refuse_too_large", "true")
    try:
        submission = cluster.submit(cluster.script("too_large", TOO_LARGE), plugins=plugins)
        assert submission.status != 0
        assert "it is refused; make it smaller" in submission.text
        assert "batch job" not in submission.text
        assert cluster.requests(cluster.submit(cluster.script("small", SMALL), plugins=plugins)).endswith("shard:1")
    finally:
        cluster.set("refuse_too_large", "false")


def test_two_large_jobs_run_at_once_each_on_a_gpu_of_its_own(cluster: Cluster) -> None:
    script = cluster.script("large", LARGE, "sleep 60")
    jobs = [cluster.submit(script).job for _ in range(3)]
    cluster.wait(lambda: all("JobState=RUNNING" in cluster.shown(item) for item in jobs[:2]), "two running jobs", 20)
    places = {re.findall(r" GRES=(shard:\S+)", cluster.shown(item))[0] for item in jobs[:2]}
    assert len(places) == 2, places
    assert "JobState=PENDING" in cluster.shown(jobs[2])


def test_a_step_inside_a_job_is_left_alone_and_a_job_from_a_job_is_sized(cluster: Cluster) -> None:
    large = cluster.script("step", LARGE, "echo the step ran")
    assert cluster.output(cluster.submit(cluster.script("outer", SMALL, f"srun {large}"))) == "the step ran\n"
    nested = f"sbatch -o {cluster.folder}/output/%j {cluster.script('small', SMALL)}"
    text = cluster.output(cluster.submit(cluster.script("outer", None, nested)))
    assert cluster.requests(Submission(0, text, 0.0)) == "TresPerNode=gres:shard:1"


def test_the_token_is_in_no_file_that_a_user_can_read(cluster: Cluster) -> None:
    for path in (cluster.folder / "both").glob("*.lua"):
        assert cluster.token not in path.read_text(encoding="utf-8")
    assert (cluster.folder / "token").stat().st_mode & 0o077 == 0
    # without a token in the environment, the user gets a message, and slurmctld's plugin sizes the job
    submission = cluster.submit(cluster.script("small", SMALL), token=False)
    assert "found no token" in submission.text
    assert cluster.requests(submission) == "TresPerNode=gres:shard:1"


def test_a_configless_client_needs_no_other_file(cluster: Cluster) -> None:
    sent = cluster.folder / "spool" / "conf-cache"
    assert "cli_filter.lua" in {path.name for path in sent.iterdir()}
    assert not list(sent.glob("*vramcast*"))
    submission = cluster.submit(cluster.script("small", SMALL), plugins="spool/conf-cache")
    assert cluster.requests(submission) == "TresPerNode=gres:shard:1", submission.text
    assert messages(submission) == 1


def test_a_hung_service_delays_one_job_and_then_none(cluster: Cluster) -> None:
    script = cluster.script("small", SMALL, "true")
    with cluster.hung_service():
        start = len(cluster.log())
        submissions = [cluster.submit(script, plugins="job_submit") for _ in range(30)]
        log = cluster.log()[start:]
        assert all(cluster.requests(item) == "" for item in submissions), "submitted unchanged"
        assert 1 <= log.count("no answer in time") <= 1 + sum(item.seconds for item in submissions) // 10
        assert "a moment ago" in log
        command = cluster.submit(script)
        assert "no answer in time" in command.text
        usual = cluster.submit(cluster.script("plain", None, "true"))
        assert command.seconds - usual.seconds < 1.5, "a probe of 0.2 s, and not the 5 s of an answer"
    time.sleep(11)
    assert cluster.requests(cluster.submit(script, plugins="job_submit")) == "TresPerNode=gres:shard:1"


def test_cli_filter_alone_sizes_jobs(cluster: Cluster) -> None:
    cluster.stop("slurmctld")
    cluster.start_controller("cli_filter")
    try:
        submission = cluster.submit(cluster.script("small", SMALL), plugins="cli_filter")
        assert cluster.requests(submission) == "TresPerNode=gres:shard:1"
        assert messages(submission) == 1
        assert cluster.allocated(cluster.submit(cluster.script("small", SMALL), "--gres=none")) == ""
    finally:
        cluster.stop("slurmctld")
        cluster.start_controller()


def test_a_dead_service_changes_no_job(cluster: Cluster) -> None:
    cluster.service.process.kill()
    cluster.service.process.wait()
    for plugins in ("both", "job_submit"):
        submission = cluster.submit(cluster.script("small", SMALL), plugins=plugins)
        assert cluster.requests(submission) == ""
    assert "no service at http://127.0.0.1" in cluster.submit(cluster.script("small", SMALL)).text
