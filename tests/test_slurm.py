"""Slurm's plugins under a real Lua, with a stub of Slurm's API and a service on loopback."""

import importlib
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from loopback import Loopback, loopback

DEPLOY = Path(__file__).parents[1] / "deploy" / "slurm"
ANSWER = b"need_mib=6812\nestimate_mib=6000\nshards=7\nverdict=fits\ndevice=a100_40gb\n"
SPEC = '{"family": "mlp", "network": {"arch": "uniform"}, "training": {"batch_size": 8}}'
SCRIPT = f"#!/bin/bash\n#SBATCH --time=10\n#VRAMCAST {SPEC}\npython train.py\n"

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl, which the plugins ask with")

STUB = """
slurm = {SUCCESS = 0, ERROR = -1, logged = {}, told = {}}
function slurm.log_info(format, ...) slurm.logged[#slurm.logged + 1] = string.format(format, ...) end
slurm.log_error, slurm.log_debug = slurm.log_info, slurm.log_info
function slurm.log_user(text) slurm.told[#slurm.told + 1] = text end
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


class Slurm:
    """A Lua as in slurmctld or sbatch, with one plugin loaded."""

    def __init__(self, folder: Path, plugin: str, url: str, lua: str) -> None:
        for path in DEPLOY.glob("*.lua"):
            text = path.read_text(encoding="utf-8").replace("http://127.0.0.1:8080", url)
            (folder / path.name).write_text(text, encoding="utf-8")
        self.lua = runtime_of(lua)
        self.lua.globals().dofile(str(folder / f"{plugin}.lua"))

    def call(self, function: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a job after the plugin has run."""
        table = self.lua.table_from(
            {key: self.lua.table_from(item) if isinstance(item, list) else item for key, item in fields.items()}
        )
        assert self.lua.globals()[function](table, None, 1000) == 0
        return dict(table)

    def said(self, where: str) -> str:
        return "\n".join(self.lua.globals().slurm[where].values())


@pytest.fixture(params=["lua51", "lua53", "lua54"])
def lua(request: pytest.FixtureRequest) -> str:
    """Return a Lua version; Slurm is built with any of them."""
    pytest.importorskip(f"lupa.{request.param}")
    return str(request.param)


def submit(service: Loopback, folder: Path, lua: str, **fields: Any) -> tuple[Slurm, dict[str, Any]]:
    slurm = Slurm(folder, "job_submit", service.url, lua)
    return slurm, slurm.call("slurm_job_submit", fields)


def test_a_script_with_a_job_gets_shards(tmp_path: Path, lua: str) -> None:
    with loopback((200, ANSWER)) as service:
        slurm, job = submit(service, tmp_path, lua, script=SCRIPT)
    assert job["tres_per_node"] == "gres/shard:7"
    assert service.asked[0][:2] == ("/v1/slurm", SPEC.encode())
    assert "6812 MiB" in slurm.said("told")


def test_the_message_says_that_a_need_was_observed(tmp_path: Path, lua: str) -> None:
    with loopback((200, ANSWER.replace(b"=fits", b"=does_not_fit") + b"basis=observed\n")) as service:
        slurm, job = submit(service, tmp_path, lua, script=SCRIPT)
    assert job["tres_per_node"] == "gres/shard:7"
    assert "6812 MiB of GPU memory (observed before)" in slurm.said("told")


def test_the_job_may_be_in_the_comment_and_other_resources_stay(tmp_path: Path, lua: str) -> None:
    with loopback((200, ANSWER)) as service:
        job = submit(service, tmp_path, lua, comment="vramcast:gpumemnet:a_b.out", tres_per_node="gres/nvme:1")[1]
    assert job["tres_per_node"] == "gres/nvme:1,gres/shard:7"
    assert service.asked[0][1] == b"gpumemnet:a_b.out"


@pytest.mark.parametrize("field", ["tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task"])
def test_gpus_that_a_user_requested_are_not_changed(tmp_path: Path, field: str) -> None:
    with loopback((200, ANSWER)) as service:
        slurm, job = submit(service, tmp_path, "lua54", script=SCRIPT, **{field: "gres/gpu:1"})
    assert job[field] == "gres/gpu:1"
    assert "shard" not in str(job.get("tres_per_node"))
    assert "6812 MiB" in slurm.said("told"), "but the estimate is told"


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


def test_a_slow_service_does_not_delay_a_job(tmp_path: Path) -> None:
    with loopback((200, ANSWER), delay_seconds=3.0) as service:
        slurm = Slurm(tmp_path, "job_submit", service.url, "lua54")
        start = time.perf_counter()
        job = slurm.call("slurm_job_submit", {"script": SCRIPT})
        seconds = time.perf_counter() - start
    assert "tres_per_node" not in job
    assert seconds < 1.5, "0.1 s, and the start of a process on a busy machine"


def test_a_missing_service_does_not_delay_a_job(tmp_path: Path) -> None:
    with loopback((200, ANSWER)) as service:
        away = service.url
    slurm = Slurm(tmp_path, "job_submit", away, "lua54")
    assert "tres_per_node" not in slurm.call("slurm_job_submit", {"script": SCRIPT})
    assert slurm.call("slurm_job_modify", {}) == {}


def test_without_its_library_the_plugin_lets_jobs_pass(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "job_submit.lua", tmp_path)
    runtime = runtime_of("lua54")
    runtime.globals().dofile(str(tmp_path / "job_submit.lua"))
    assert runtime.globals().slurm_job_submit(runtime.table_from({"script": SCRIPT}), None, 0) == 0


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


def test_the_token_is_sent_but_not_on_a_command_line(tmp_path: Path) -> None:
    shutil.copytree(DEPLOY, tmp_path, dirs_exist_ok=True)
    shared = tmp_path / "vramcast.lua"
    with loopback((200, ANSWER)) as service:
        text = shared.read_text(encoding="utf-8").replace("token = nil", "token = 'a\"b'")
        shared.write_text(text.replace("http://127.0.0.1:8080", service.url), encoding="utf-8")
        runtime = runtime_of("lua54")
        runtime.execute(
            "popen = io.popen; io.popen = function(command, mode) asked = command; return popen(command, mode) end"
        )
        runtime.globals().dofile(str(tmp_path / "job_submit.lua"))
        runtime.globals().slurm_job_submit(runtime.table_from({"script": SCRIPT}), None, 0)
        assert service.asked[0][2]["Authorization"] == 'Bearer a"b'
        assert 'a"b' not in runtime.globals().asked


@pytest.mark.parametrize("program", ["lua5.1", "lua5.3", "lua5.4"])
def test_a_lua_interpreter_gives_the_same_result(tmp_path: Path, program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"no {program} here: apt-get install {program}")
    with loopback((200, ANSWER)) as service:
        for path in DEPLOY.glob("*.lua"):
            text = path.read_text(encoding="utf-8").replace("http://127.0.0.1:8080", service.url)
            (tmp_path / path.name).write_text(text, encoding="utf-8")
        ask = f"""{STUB}
        dofile("{tmp_path}/job_submit.lua")
        job = {{comment = "vramcast:it's \\"x\\""}}
        assert(slurm_job_submit(job, nil, 0) == 0)
        print(job.tres_per_node)"""
        found = subprocess.run([program, "-e", ask], capture_output=True, text=True, check=False)
    assert found.stdout == "gres/shard:7\n", found.stderr
    assert service.asked[0][1] == b'it\'s "x"'
