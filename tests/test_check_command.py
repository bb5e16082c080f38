"""`vramcast check`: exit codes, the baseline, the pull request's comment, the hook, and completion."""

import importlib.util
import json
import shlex
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
import yaml

import vramcast
from vramcast.cli import main
from vramcast.commands.check.baseline import Baseline
from vramcast.commands.check.check_command import Check
from vramcast.commands.completion_command import whole_parser
from vramcast.commands.wrapping import wrapped
from vramcast.errors import UserError
from vramcast.models.json_figures import rounded
from vramcast.simulation.scripts.report import StepPeak

ROOT = Path(__file__).parents[1]
JOB = ("table.json", "--batch-size", "16", "--device", "rtx_3060")
ANSWER = {"verdict": "fits", "device": "rtx_3060", "capacity_mib": 12037.0, "safe_mib": 1000.0}


@pytest.fixture
def check(monkeypatch, capsys):
    """Check in the directory of the golden jobs, with the answers of the real command."""
    monkeypatch.chdir(ROOT / "tests" / "golden")

    def checked(*words):
        code = main(["check", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return checked


def test_a_check_passes_writes_its_baseline_and_fails_on_growth(check, tmp_path):
    file = tmp_path / "memory.json"
    code, out, _ = check("--json", "--baseline", str(file), "--write-baseline", *JOB)
    safe = json.loads(out)["safe_mib"]
    assert code == 0 and json.loads(out)["passed"] and json.loads(out)["answer"]["safe_mib"] == safe
    written = json.loads(file.read_text())
    assert written["jobs"][shlex.join(JOB)]["safe_mib"] == safe
    code, out, _ = check("--baseline", str(file), *JOB)
    assert code == 0 and f"baseline {safe:,.0f} MiB (+0.0%)" in out
    written["jobs"][shlex.join(JOB)]["safe_mib"] = safe / 1.05
    file.write_text(json.dumps(written))
    code, out, _ = check("--baseline", str(file), *JOB)
    assert code == 1 and out.startswith("failed") and "grew by 5.0%, more than the 1.0% that is tolerated" in out
    assert check("--baseline", str(file), "--tolerate", "0.06", *JOB)[0] == 0
    code, out, _ = check("--max-mib", "10", *JOB)
    assert code == 1 and "above the limit of 10 MiB" in out


def test_the_words_of_a_check_are_checked(check, tmp_path):
    damaged = tmp_path / "damaged.json"
    damaged.write_text('{"format": 1, "jobs": {"a": {"safe_mib": "much"}}}')
    for words, sentence in (
        ((), "name what is to be checked"),
        (("--max-mib", "0", *JOB), "expected --max-mib to be a number above 0"),
        (("--tolerate", "-1", *JOB), "expected --tolerate"),
        (("--write-baseline", *JOB), "name the file"),
        (("--jobs", "x.jsonl"), "run vramcast check for each"),
        (("--baseline", str(tmp_path / "none"), *JOB), "make it with --write-baseline"),
        (("--baseline", str(damaged), *JOB), "the job 'a' without a safe_mib"),
        (("--", "no_such_script.py"), "check the path"),
        (("nothing.json", "--batch-size", "1"), "check the path"),
    ):
        code, out, err = check(*words)
        assert code == 2 and not out and sentence in err, (words, err)


def test_run_and_check_share_exit_codes(monkeypatch, tmp_path, capsys):
    with vramcast.VirtualGPU("rtx_3060", unbounded=True) as gpu:
        torch.nn.Linear(32, 2**30, device="cuda")(torch.ones(1, 32).cuda())
    report = gpu.report
    monkeypatch.setattr("vramcast.commands.run.run_command.run_script", lambda *_: report)
    monkeypatch.setattr("vramcast.device.profiles.gpu_profiles", lambda: ())
    (tmp_path / "train.py").touch()
    words = ("--device", "rtx_3060", "--", sys.executable, str(tmp_path / "train.py"))
    assert main(["run", *words]) == 0 and main(["run", "--check", *words]) == 1
    capsys.readouterr()
    assert main(["check", *words]) == 1
    out = capsys.readouterr().out
    assert out.startswith("failed  --device rtx_3060") and "does not fit: rtx_3060 has 12,037 MiB" in out
    report = replace(report, failure="a bug", steps=(StepPeak(1, 1, "backward", ()),))
    assert main(["run", "--check", *words]) == main(["check", *words]) == 3


def test_an_incomplete_or_tight_answer_fails_a_check():
    assert not Check("job", ANSWER).failures
    for verdict in ("tight", "incomplete", "does not fit"):
        assert Check("job", {**ANSWER, "verdict": verdict}).failures[0].startswith(verdict)
    smaller = Check("job", ANSWER, baseline_mib=2000.0)
    assert not smaller.failures and "(-50.0%)" in str(smaller)


def test_a_baseline_keeps_the_jobs_of_others(tmp_path):
    path = tmp_path / "b.json"
    Baseline.read(path, may_be_absent=True).write("one", ANSWER)
    Baseline.read(path).write("two", {**ANSWER, "safe_mib": 5.0})
    read = Baseline.read(path)
    assert read.safe_mib("one") == 1000 and read.safe_mib("two") == 5
    with pytest.raises(UserError, match="expected 'three' in the baseline"):
        read.safe_mib("three")


def test_figures_are_rounded_by_their_keys():
    lines = [{"place": "a.py:3", "mib": 2.04}]
    values = {"safe_mib": 1.26, "breakdown_mib": {"context": 0.449}, "seconds": 0.123456, "oom_probability": 1.23456e-7}
    expected = {"safe_mib": 1.3, "breakdown_mib": {"context": 0.4}, "seconds": 0.12, "oom_probability": 1.235e-7}
    others = {"count": 7, "shapes": [[8, 128]], "risk": 0.012345678}
    values, expected = {**values, **others, "lines": lines}, {**expected, **others, "lines": [{**lines[0], "mib": 2.0}]}
    assert rounded(values) == expected


def test_no_line_ends_inside_of_a_shape_or_a_name():
    text = "a batch of (8, 128, 256) values comes from a long-named-loader and /a/path/that/is/longer/than/the/line"
    for width in range(12, 60):
        lines = wrapped(text, width)
        assert " ".join(lines) == text
        assert any("(8, 128, 256)" in line for line in lines) and any("long-named-loader" in line for line in lines)


def test_completion_knows_all_commands_options_and_devices():
    shtab = pytest.importorskip("shtab")
    parser = whole_parser(shtab)
    commands = next(action.choices for action in parser._actions if action.choices)
    from vramcast.cli import COMMANDS

    assert commands.keys() == COMMANDS.keys()
    for name in ("classify", "run", "check"):
        device = next(action for action in commands[name]._actions if "--device" in action.option_strings)
        assert "rtx_4090" in device.choices
    bash = shtab.complete(parser, shell="bash")
    asked = "COMP_WORDS=(vramcast run --device rtx_409); COMP_CWORD=3; _shtab_vramcast; echo ${COMPREPLY[@]}"
    done = subprocess.run(["bash", "-c", f"{bash}\n{asked}"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["rtx_4090"]


def test_the_hook_is_one_that_pre_commit_accepts():
    entry = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())[0]
    assert entry["entry"] == "vramcast check" and entry["pass_filenames"] is False
    if importlib.util.find_spec("pre_commit"):
        from pre_commit.clientlib import load_manifest

        assert load_manifest(str(ROOT / ".pre-commit-hooks.yaml"))[0]["language"] in ("system", "unsupported")


# --- the pull request ------------------------------------------------------------------------------------------------


class Api(BaseHTTPRequestHandler):
    """The part of GitHub's API that comments use."""

    def reply(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle_any(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        server = self.server
        server.requests.append((self.command, self.path, self.headers["Authorization"]))
        if server.status != 200:
            self.reply({"message": "Resource not accessible by integration"}, server.status)
        elif self.command == "GET":
            page = int(self.path.rpartition("page=")[2])
            self.reply(server.comments[100 * (page - 1) : 100 * page])
        elif self.command == "POST":
            server.comments.append({"id": 1000 + len(server.comments), **body})
            self.reply(server.comments[-1], 201)
        else:
            own = int(self.path.rpartition("/")[2])
            next(item for item in server.comments if item["id"] == own).update(body)
            self.reply({})

    do_GET = do_POST = do_PATCH = handle_any

    def log_message(self, *_):
        pass


@pytest.fixture
def api():
    server = HTTPServer(("127.0.0.1", 0), Api)
    server.requests, server.status = [], 200
    server.comments = [{"id": number, "body": "a review"} for number in range(130)]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def pull_request(api, tmp_path, monkeypatch):
    """Run the action's script in a repository whose base branch has a baseline; `vramcast` is a stub that answers."""
    repository, programs = tmp_path / "repository", tmp_path / "bin"
    repository.mkdir(), programs.mkdir()
    monkeypatch.chdir(repository)
    (repository / "memory.json").write_text(json.dumps({"format": 1, "jobs": {"-- python a.py": {"safe_mib": 800.0}}}))
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "base"]):
        subprocess.run(["git", *words], check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    program = programs / "vramcast"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, shlex, sys\nassert 'VRAMCAST_TOKEN' not in os.environ\n"
        + """
words = sys.argv[sys.argv.index("memory.json") + 1:]
if "broken|`@all`.py" in words:
    print("vramcast run: expected a file, found <none> | `@all`", file=sys.stderr)
    sys.exit(2)
passed = "b.py" not in words
answer = {"device": "rtx_3060", "verdict": "fits" if passed else "tight"}
print(json.dumps({"job": shlex.join(words), "passed": passed, "failures": [] if passed else ["tight: x"],
                  "safe_mib": 1000.0, "baseline_mib": 1000.0, "answer": answer}))
sys.exit(0 if passed else 1)
"""
    )
    program.chmod(0o755)
    event = tmp_path / "event.json"
    event.write_text(json.dumps({"pull_request": {"number": 7, "base": {"sha": commit}}}))
    environment = {
        "PATH": f"{programs}:/usr/bin:/bin", "GITHUB_EVENT_PATH": str(event), "GITHUB_REPOSITORY": "owner/name",
        "GITHUB_API_URL": f"http://127.0.0.1:{api.server_port}", "VRAMCAST_TOKEN": "secret",
        "VRAMCAST_BASELINE": "memory.json", "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
    }  # fmt: skip

    def run(*jobs):
        script = ROOT / "deploy" / "github" / "check_pull_request.py"
        return subprocess.run(
            [sys.executable, str(script)], env={**environment, "VRAMCAST_JOBS": "\n".join(jobs)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


def test_a_pull_request_gets_one_comment_that_later_runs_change(api, pull_request, tmp_path):
    done = pull_request("-- python a.py", "", "-- python 'broken|`@all`.py'")
    assert done.returncode == 2, done.stderr
    [comment] = [item["body"] for item in api.comments if item["id"] >= 1000]
    first, second = comment.splitlines()[-2:]
    assert "| 1,000 MiB | 800 MiB | +200 MiB (+25.0%) |" in first and "fits" in first
    assert "`" not in second and "@" not in second and second.count("|") == 7, "texts cannot leave their cells"
    assert "&#60;none&#62;" in second
    assert {auth for _, _, auth in api.requests} == {"Bearer secret"} and "secret" not in done.stdout
    assert comment in (tmp_path / "summary.md").read_text()
    assert pull_request("-- python b.py").returncode == 1
    [changed] = [item["body"] for item in api.comments if item["id"] >= 1000]
    assert "b.py" in changed and "tight" in changed and "a.py" not in changed
    assert api.requests[-1][:2] == ("PATCH", "/repos/owner/name/issues/comments/1130"), "found on the second page"


def test_a_token_that_may_not_comment_fails_no_check(api, pull_request):
    api.status = 403
    done = pull_request("-- python a.py")
    assert done.returncode == 0 and "::warning::the pull request was not commented: HTTP Error 403" in done.stdout


def test_the_action_passes_its_inputs_as_variables():
    action = yaml.safe_load((ROOT / "deploy" / "github" / "action.yml").read_text())
    [step] = action["runs"]["steps"]
    assert (
        "${{" not in step["run"]
        and (ROOT / "deploy" / "github" / Path(step["run"].strip('"').split("/")[-1])).is_file()
    )
    source = (ROOT / "deploy" / "github" / "check_pull_request.py").read_text()
    assert all(name in source for name in step["env"]), "each input is read"
    assert all(f"inputs.{name} " in str(step["env"]) for name in action["inputs"])
