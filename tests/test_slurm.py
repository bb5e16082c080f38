"""Slurm's plugins under a real Lua, with a stub of Slurm's API and a service on loopback."""

import hashlib
import importlib
import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from loopback import Loopback, loopback

PLUGIN = Path(__file__).parents[1] / "deploy" / "slurm" / "vramcast.lua"
ANSWER = b"need_mib=6812\nestimate_mib=6000\nshards=7\nverdict=fits\ndevice=a100_40gb\n"
SPEC = '{"family": "mlp", "network": {"arch": "uniform"}, "training": {"batch_size": 8}}'
SCRIPT = f"#!/bin/bash\n#SBATCH --time=10\n#VRAMCAST {SPEC}\npython train.py\n"

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl, which the plugins ask with")

STUB = """
slurm = {SUCCESS = 0, ERROR = -1, logged = {}, told = {}}
function slurm.log_info(format, ...) slurm.logged[#slurm.logged + 1] = string.format(format, ...) end
slurm.log_error, slurm.log_debug = slurm.log_info, slurm.log_info
function slurm.log_user(...) slurm.told[#slurm.told + 1] = string.format(...) end
"""


class Pipe:
    """The result of io.popen, made by Python: the Lua in the package lupa is built without it."""

    def __init__(self, command: str, _mode: str = "r") -> None:
        self.process = subprocess.Popen(command, shell=True, stdout=subprocess.PIPE)

    def read(self, _format: str) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.read().decode()

    def close(self) -> bool:
        return self.process.wait() == 0


def runtime_of(lua: str) -> Any:
    found = importlib.import_module(f"lupa.{lua}").LuaRuntime(unpack_returned_tuples=True)
    found.execute(STUB)
    found.globals().io.popen = Pipe
    return found


def installed(folder: Path, url: str, **settings: str) -> Path:
    """Install the plugin as an operator does: under its two names, with other settings."""
    text = PLUGIN.read_text(encoding="utf-8")
    for name, value in {"service": f'"{url}"', "token_file": f'"{folder}/token"', **settings}.items():
        text, count = re.subn(rf"(?m)^    {name} = [^,]*,", f"    {name} = {value},", text)
        assert count == 1, name
    for name in ("job_submit", "cli_filter"):
        (folder / f"{name}.lua").write_text(text, encoding="utf-8")
    return folder


class Slurm:
    """A Lua as in slurmctld or sbatch, with one plugin loaded."""

    def __init__(self, folder: Path, plugin: str, url: str, lua: str, **settings: str) -> None:
        self.lua = runtime_of(lua)
        self.lua.globals().dofile(str(installed(folder, url, **settings) / f"{plugin}.lua"))

    def call(self, function: str, fields: dict[str, Any], status: int = 0) -> dict[str, Any]:
        """Return the fields of a job after the plugin has run."""
        table = self.lua.table_from(
            {key: self.lua.table_from(item) if isinstance(item, list) else item for key, item in fields.items()}
        )
        assert self.lua.globals()[function](table, None, 1000) == status
        return dict(table)

    def said(self, where: str) -> str:
        return "\n".join(self.lua.globals().slurm[where].values())


@pytest.fixture(params=["lua51", "lua53", "lua54"])
def lua(request: pytest.FixtureRequest) -> str:
    """Return a Lua version; Slurm is built with any of them."""
    pytest.importorskip(f"lupa.{request.param}")
    return str(request.param)


@pytest.fixture(autouse=True)
def outside_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables that the plugins read."""
    for name in ("SLURM_JOB_ID", "VRAMCAST_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def submit(service: Loopback, folder: Path, lua: str, **fields: Any) -> tuple[Slurm, dict[str, Any]]:
    slurm = Slurm(folder, "job_submit", service.url, lua)
    return slurm, slurm.call("slurm_job_submit", fields)


def test_a_script_with_a_job_gets_shards(tmp_path: Path, lua: str) -> None:
    with loopback((200, ANSWER)) as service:
        slurm, job = submit(service, tmp_path, lua, script=SCRIPT)
    assert job["tres_per_node"] == "gres:shard:7"
    assert service.asked[0][:2] == ("/v1/slurm", SPEC.encode())
    assert "6812 MiB" in slurm.said("told")


def test_the_message_says_that_a_need_was_observed(tmp_path: Path, lua: str) -> None:
    with loopback((200, ANSWER.replace(b"=fits", b"=does_not_fit") + b"basis=observed\n")) as service:
        slurm, job = submit(service, tmp_path, lua, script=SCRIPT)
    assert job["tres_per_node"] == "gres:shard:7"
    assert "6812 MiB of GPU memory (observed before)" in slurm.said("told")


def test_the_job_may_be_in_the_comment_and_other_resources_stay(tmp_path: Path, lua: str) -> None:
    with loopback((200, ANSWER)) as service:
        job = submit(service, tmp_path, lua, comment="vramcast:gpumemnet:a_b.out", tres_per_node="gres:nvme:1")[1]
    assert job["tres_per_node"] == "gres:nvme:1,gres:shard:7"
    assert service.asked[0][1] == b"gpumemnet:a_b.out"


@pytest.mark.parametrize("field", ["tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task"])
def test_gpus_that_a_user_requested_are_not_changed(tmp_path: Path, field: str) -> None:
    with loopback((200, ANSWER)) as service:
        for request in ("gres/gpu:1", "gres:gpu:1", "gres:shard:0", "gres:none", "gres/mps:50"):
            slurm, job = submit(service, tmp_path, "lua54", script=SCRIPT, **{field: request})
            assert job == {"script": SCRIPT, field: request}
            assert slurm.said("told") == ""
    assert service.asked == [], "slurmctld does not wait for a figure that it does not use"


def test_a_script_without_a_job_sends_no_request(tmp_path: Path) -> None:
    with loopback((200, ANSWER)) as service:
        for fields in (
            {},
            {"script": "#!/bin/sh\n#VRAMCASTING x\n"},
            {"comment": "about vramcast: nice"},
            {"script": 7},
        ):
            assert submit(service, tmp_path, "lua54", **fields)[1] == fields
    assert service.asked == []


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (503, b'{"status":"error","error":"come back"}'),
        (200, b"shards=many"),
        (200, b"shards=-3\nneed_mib=1"),
        (200, b""),
    ],
)
def test_without_an_answer_the_job_is_not_changed(tmp_path: Path, lua: str, status: int, answer: bytes) -> None:
    with loopback((status, answer)) as service:
        slurm, job = submit(service, tmp_path, lua, script=SCRIPT)
    assert "tres_per_node" not in job
    assert "no estimate" in slurm.said("logged")


def test_a_slow_service_does_not_delay_a_job_and_is_left_alone_for_a_while(tmp_path: Path) -> None:
    with loopback((200, ANSWER), delay_seconds=3.0) as service:
        slurm = Slurm(tmp_path, "job_submit", service.url, "lua54", pause_seconds="3600")
        start = time.perf_counter()
        job = slurm.call("slurm_job_submit", {"script": SCRIPT})
        first_seconds = time.perf_counter() - start
        assert "tres_per_node" not in job
        assert first_seconds < 1.5, "0.2 s, and the start of a process on a busy machine"
        for _ in range(30):
            assert "tres_per_node" not in slurm.call("slurm_job_submit", {"script": SCRIPT})
        assert len(service.asked) == 1
    assert slurm.said("logged").count("no answer in time") == 1
    assert slurm.said("logged").count("a moment ago") == 30


def test_the_service_is_asked_again_after_the_pause(tmp_path: Path) -> None:
    with loopback((200, ANSWER), delay_seconds=1.0) as service:
        slurm = Slurm(tmp_path, "job_submit", service.url, "lua54", pause_seconds="1")
        assert "tres_per_node" not in slurm.call("slurm_job_submit", {"script": SCRIPT})
        service.delay_seconds = 0.0
        time.sleep(2.1)  # Lua counts whole seconds
        for _ in range(5):  # a busy machine may take longer than 0.2 s for one of them
            job = slurm.call("slurm_job_submit", {"script": SCRIPT})
            if "tres_per_node" in job:
                break
            time.sleep(2.1)
        assert job["tres_per_node"] == "gres:shard:7"


def test_a_hung_service_costs_a_command_a_probe_and_no_more(tmp_path: Path, lua: str) -> None:
    with loopback((200, ANSWER), delay_seconds=4.0, hung=True) as service:
        slurm = Slurm(tmp_path, "cli_filter", service.url, lua)
        start = time.perf_counter()
        options = slurm.call("slurm_cli_pre_submit", {"comment": "vramcast:x"})
        seconds = time.perf_counter() - start
        assert [path for path, *_ in service.asked] == ["/healthz"]
    assert "gres" not in options
    assert seconds < 1.5
    assert "no answer in time" in slurm.said("logged")


def test_a_missing_service_does_not_delay_a_job(tmp_path: Path) -> None:
    with loopback((200, ANSWER)) as service:
        away = service.url
    slurm = Slurm(tmp_path, "job_submit", away, "lua54")
    assert "tres_per_node" not in slurm.call("slurm_job_submit", {"script": SCRIPT})
    assert slurm.call("slurm_job_modify", {}) == {}


def test_a_missing_service_is_named(tmp_path: Path) -> None:
    with loopback((200, ANSWER)) as service:
        away = service.url
    for plugin, function in (("job_submit", "slurm_job_submit"), ("cli_filter", "slurm_cli_pre_submit")):
        slurm = Slurm(tmp_path, plugin, away, "lua54")
        assert slurm.call(function, {"comment": "vramcast:x"}) == {"comment": "vramcast:x"}
        assert f"no service at {away}" in slurm.said("logged")


def test_slurm_since_23_11_takes_another_form(tmp_path: Path, lua: str) -> None:
    with loopback((200, ANSWER)) as service:
        slurm = Slurm(tmp_path, "job_submit", service.url, lua)
        slurm.lua.execute("slurm.GRES_ONE_TASK_PER_SHARING = 8")
        job = slurm.call("slurm_job_submit", {"script": SCRIPT, "tres_per_node": "gres/nvme:1"})
    assert job["tres_per_node"] == "gres/nvme:1,gres/shard:7"


UNSET, UNSET_16 = 4294967294, 65534


@pytest.mark.parametrize(
    ("per_node", "tasks", "nodes", "shards", "sentence"),
    [
        (UNSET_16, UNSET, (UNSET, UNSET), 7, "this job will take"),
        (2, UNSET, (UNSET, UNSET), 14, "each process of this job will take"),
        (UNSET_16, 3, (1, 1), 21, "each process of this job will take"),
        (UNSET_16, 3, (1, 2), 7, "state --ntasks-per-node"),
        (UNSET_16, 1, (1, 1), 7, "this job will take"),
    ],
)
def test_shards_are_for_all_processes_on_a_node(
    tmp_path: Path, per_node: int, tasks: int, nodes: tuple[int, int], shards: int, sentence: str
) -> None:
    numbers = {"ntasks_per_node": per_node, "num_tasks": tasks, "min_nodes": nodes[0], "max_nodes": nodes[1]}
    options = {"ntasks-per-node": -2 if per_node == UNSET_16 else per_node, "ntasks": 1 if tasks == UNSET else tasks}
    text = {(1, 1): "1", (1, 2): "1-2"}.get(nodes, "1-0")
    with loopback((200, ANSWER)) as service:
        slurm, job = submit(service, tmp_path, "lua54", script=SCRIPT, **numbers)
        assert job["tres_per_node"] == f"gres:shard:{shards}"
        assert sentence in slurm.said("told")
        command = Slurm(tmp_path, "cli_filter", service.url, "lua54")
        changed = command.call("slurm_cli_pre_submit", {"comment": "vramcast:x", "nodes": text, **options})
        assert changed["gres"] == f"shard:{shards}"
        assert sentence in command.said("logged")


TOO_LARGE = b"need_mib=44000\nshards=43\ngpu_shards=40\nverdict=does_not_fit\ndevice=a100_40gb\n"


def test_a_job_that_fits_no_gpu_is_told_so_or_refused(tmp_path: Path, lua: str) -> None:
    largest = "needs shard:43 of one GPU, and the largest request that fits is shard:40 (a100_40gb)"
    with loopback((200, TOO_LARGE)) as service:
        slurm, job = submit(service, tmp_path, lua, script=SCRIPT)
        assert job["tres_per_node"] == "gres:shard:43"
        assert f"{largest}: without a larger GPU it waits forever" in slurm.said("told")
        for plugin, function in (("job_submit", "slurm_job_submit"), ("cli_filter", "slurm_cli_pre_submit")):
            slurm = Slurm(tmp_path, plugin, service.url, lua, refuse_too_large="true")
            assert slurm.call(function, {"comment": "vramcast:x"}, status=-1) == {"comment": "vramcast:x"}
            assert f"{largest}: it is refused; make it smaller" in slurm.said("told") + slurm.said("logged")
        slurm = Slurm(tmp_path, "job_submit", service.url, lua, refuse_too_large="true", gpu_shards="80")
        assert slurm.call("slurm_job_submit", {"script": SCRIPT})["tres_per_node"] == "gres:shard:43"
        assert "waits forever" not in slurm.said("told")


def test_a_step_of_a_job_sends_no_request_but_a_job_from_a_job_does(
    tmp_path: Path, lua: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with loopback((200, ANSWER)) as service:
        slurm = Slurm(tmp_path, "cli_filter", service.url, lua)
        for kind in ("srun", None):
            step = slurm.call("slurm_cli_pre_submit", {"comment": "vramcast:x", "type": kind})
            assert "gres" not in step
        assert service.asked == []
        assert slurm.call("slurm_cli_pre_submit", {"comment": "vramcast:x", "type": "sbatch"})["gres"] == "shard:7"


def test_no_resources_stay_none(tmp_path: Path) -> None:
    script = SCRIPT.replace("#VRAMCAST", "#SBATCH --gres=none\n#VRAMCAST")
    with loopback((200, ANSWER)) as service:
        slurm, job = submit(service, tmp_path, "lua54", script=script)
        assert (job, slurm.said("told")) == ({"script": script}, "")
        command = Slurm(tmp_path, "cli_filter", service.url, "lua54")
        options = command.call("slurm_cli_pre_submit", {"comment": "vramcast:x", "gres": "none"})
        assert options["gres"] == "shard:0", "sbatch would not send 'none' to slurmctld"


def test_nothing_of_a_script_reaches_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    nasty = """$(touch owned) `touch owned` '; touch owned; ' " & touch owned & \\"""
    with loopback((200, ANSWER)) as service:
        submit(service, tmp_path, "lua54", script=f"#VRAMCAST {nasty}\n")
    assert service.asked[0][1].decode() == nasty
    assert not (tmp_path / "owned").exists()


def test_the_client_side_waits_longer_and_reads_the_script(tmp_path: Path, lua: str) -> None:
    script = tmp_path / "job.sh"
    script.write_text(SCRIPT, encoding="utf-8")
    with loopback((200, ANSWER), delay_seconds=0.3) as service:
        slurm = Slurm(tmp_path, "cli_filter", service.url, lua)
        options = slurm.call("slurm_cli_pre_submit", {"argv": [str(script)]})
        assert options["gres"] == "shard:7"
        assert slurm.call("slurm_cli_pre_submit", {"argv": [str(script)], "gpus": "1"}).get("gres") is None
        commented = slurm.call("slurm_cli_pre_submit", {"comment": "vramcast:x", "gres": "nvme:1"})
        assert commented["gres"] == "nvme:1,shard:7"
        assert slurm.call("slurm_cli_pre_submit", {"argv": ["/nowhere/job.sh"]}).keys() == {"argv"}
        assert slurm.call("slurm_cli_setup_defaults", {}) == slurm.call("slurm_cli_post_submit", {}) == {}


@pytest.mark.parametrize("lua", ["lua51", "lua53"])
def test_an_exported_job_is_read_by_the_command_and_never_by_slurmctld(
    tmp_path: Path, lua: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("pass\n")
    hashes = {"train.py": hashlib.sha256(b"pass\n").hexdigest(), "$(touch bad).py": "0" * 64, "gone.py": "0" * 64}
    export = json.dumps({"vramcast_job": 1, "code": hashes}, separators=(",", ":"))
    (tmp_path / "job.json").write_text(export)
    (tmp_path / "large.json").write_text("{" + 200_000 * " " + "}")
    script = "#!/bin/bash\n#VRAMCAST job.json\n"
    (tmp_path / "job.sh").write_text(script)
    with loopback((200, ANSWER)) as service:
        slurm = Slurm(tmp_path, "cli_filter", service.url, lua)
        assert slurm.call("slurm_cli_pre_submit", {"argv": ["job.sh"]})["gres"] == "shard:7"
        assert service.asked[0][1].decode() == export
        assert not any("changed" in line for line in slurm.lua.globals().slurm.logged.values())
        (tmp_path / "train.py").write_text("print()\n")
        slurm.call("slurm_cli_pre_submit", {"argv": ["job.sh"]})
        assert any("train.py changed since" in line for line in slurm.lua.globals().slurm.logged.values())
        for missing in ("none.json", "large.json"):
            assert "gres" not in slurm.call("slurm_cli_pre_submit", {"comment": f"vramcast:{missing}"})
        assert len(service.asked) == 2
        daemon = Slurm(tmp_path, "job_submit", service.url, lua)
        assert "tres_per_node" not in daemon.call("slurm_job_submit", {"script": script})
        assert any("reads no files" in line for line in daemon.lua.globals().slurm.logged.values())
        assert len(service.asked) == 2
    assert not (tmp_path / "bad").exists()


def test_the_token_is_sent_but_not_on_a_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text('a"b\n', encoding="utf-8")
    with loopback((200, ANSWER)) as service:
        installed(tmp_path, service.url)
        runtime = runtime_of("lua54")
        runtime.execute(
            "popen = io.popen; io.popen = function(command, mode) asked = command; return popen(command, mode) end"
        )
        runtime.globals().dofile(str(tmp_path / "job_submit.lua"))
        runtime.globals().slurm_job_submit(runtime.table_from({"script": SCRIPT}), None, 0)
        assert service.asked[0][2]["Authorization"] == 'Bearer a"b'
        assert 'a"b' not in runtime.globals().asked
        monkeypatch.setenv("VRAMCAST_TOKEN", "c")
        command = Slurm(tmp_path, "cli_filter", service.url, "lua54")
        command.call("slurm_cli_pre_submit", {"comment": "vramcast:x"})
        assert service.asked[1][2]["Authorization"] == "Bearer c", "of the user, who cannot read the file"


@pytest.mark.parametrize("program", ["lua5.1", "lua5.3", "lua5.4"])
def test_a_lua_interpreter_gives_the_same_result(tmp_path: Path, program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"no {program} here: apt-get install {program}")
    with loopback((200, ANSWER)) as service:
        installed(tmp_path, service.url)
        ask = f"""{STUB}
        dofile("{tmp_path}/job_submit.lua")
        job = {{comment = "vramcast:it's \\"x\\""}}
        assert(slurm_job_submit(job, nil, 0) == 0)
        print(job.tres_per_node)"""
        found = subprocess.run([program, "-e", ask], capture_output=True, text=True, check=False)
    assert found.stdout == "gres:shard:7\n", found.stderr
    assert service.asked[0][1] == b'it\'s "x"'
