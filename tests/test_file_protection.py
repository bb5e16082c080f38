"""Code that vramcast runs changes no file: `run` and `classify`, under each way of protection."""

import json
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from textwrap import dedent

import pytest
from script_runs import SCRIPTS, interpreter_for

from benchmarks.soak import file_sequences
from benchmarks.soak.file_sequences import fingerprint
from vramcast.cli import main
from vramcast.errors import UserError
from vramcast.simulation.sandbox.file_protection import kernel, overlay, protection
from vramcast.simulation.sandbox.file_protection.protection import FORCED, OVERLAY, REDIRECT

CHECKOUT = Path(__file__).resolve().parent.parent
SEQUENCES = 60
"""`make soak` carries out 1,000 under each protection."""
TRAIN = """
import os, sys
from pathlib import Path
import torch
network = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
network(torch.randn(8, 64, device="cuda")).sum().backward()
optimizer.step()
"""


MOUNTS = [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().split("\n") if line]


def _offers(way):
    if way == REDIRECT:
        return kernel.can_refuse_writes()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
        return overlay.works(Path(scratch))


@pytest.fixture(params=[OVERLAY, REDIRECT])
def way(request, monkeypatch):
    """A way to protect files that this machine offers."""
    if not _offers(request.param):
        pytest.skip(f"this machine offers no protection by {request.param}")
    monkeypatch.setenv(FORCED, request.param)
    return request.param


@pytest.fixture
def run(tmp_path, warm_host):
    """Run code in an empty directory, and return the exit code, the answer or the output, and what the code printed."""

    def run(code, *options):
        path = tmp_path / "train.py"
        path.write_text(TRAIN + dedent(code))
        return warm_host.run_script(path, *options)

    return run


def saved_in_all_ways(directory, python):
    """Run tests/scripts/saves.py. Return how each way ended."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        import saves
    finally:
        sys.path.remove(str(SCRIPTS))
    for name in saves.WAYS:
        saves.fill(directory / name)
    before = fingerprint(directory)
    assert main(["run", "--json", "--", python, str(SCRIPTS / "saves.py"), str(directory)]) == 0
    assert fingerprint(directory) == before
    return saves.NEEDS


NATIVE = {
    "pandas_parquet", "program_mv", "program_rm", "program_cp", "program_shell", "program_python", "native_file",
    "native_unlink",
}  # fmt: skip
"""What redirection refuses."""


def test_no_way_to_save_changes_a_file_that_exists(way, tmp_path, capfd):
    libraries = saved_in_all_ways(tmp_path, os.environ.get("VRAMCAST_SCRIPTS_PYTHON", sys.executable))
    out, err = capfd.readouterr()
    ended = {item["way"]: item["ended"] for item in map(json.loads, _lines(err, '{"way"'))}
    assert len(ended) == len(libraries) >= 60
    absent = {name for name, how in ended.items() if how == "absent"}
    assert all(libraries[name] not in (None, "safetensors", "transformers", "timm", "lightning") for name in absent)
    refused = NATIVE if way == REDIRECT else set()
    assert {name for name, how in ended.items() if how.startswith("refused")} == refused
    assert {name: how for name, how in ended.items() if name not in refused | absent and how != "changed"} == {}
    files = json.loads(out)["run"]["files"]
    assert files["protection"] == way and str(tmp_path / "torch_file/m.pt") in files["written"]
    assert str(tmp_path / "removed_tree/weights") in files["deleted"]


@pytest.mark.parametrize("library", ["accelerate", "datasets", "diffusers", "h5py", "keras", "peft", "trl"])
def test_the_libraries_of_scripts_are_there(library):
    interpreter_for(library)  # skips, and says what was left out above


@pytest.mark.slow
def test_random_sequences_change_nothing_and_look_as_on_the_disk(way, tmp_path, capfd, monkeypatch):
    protected, plain = tmp_path / "protected", tmp_path / "plain"
    for seed in range(SEQUENCES):
        file_sequences.prepare(protected / str(seed), seed)
        file_sequences.prepare(plain / str(seed), seed)
    before = fingerprint(protected)
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    words = [sys.executable, "-m", "benchmarks.soak.file_sequences", str(protected), "0", str(SEQUENCES)]
    assert main(["run", "--json", "--", *words]) == 0
    err = capfd.readouterr().err
    assert fingerprint(protected) == before
    seen = {item[0]: item[1:] for item in map(json.loads, _lines(err, "["))}
    different = []
    for seed in range(SEQUENCES):
        directory = str(plain / str(seed))
        expected = json.loads(json.dumps([file_sequences.perform(directory, seed), file_sequences.view(directory)]))
        if seen[seed] != expected:
            different.append(seed)
    allowed = 0 if os.geteuid() == 0 else SEQUENCES // 10  # corner cases of permissions, which root does not meet
    assert len(different) <= allowed, different
    outcomes = Counter(
        name for seed in seen for name, _, result in seen[seed][0] if result not in ("ENOENT", "ENOTDIR")
    )
    assert set(outcomes) == set(file_sequences.OPERATIONS)


def _lines(text, start):
    return [line for line in text.split("\n") if line.startswith(start)]


def test_new_files_stay_only_if_asked_for(way, run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "link"))
    (tmp_path / "link").symlink_to("hub")
    code = f"""
    os.chdir({str(tmp_path)!r})
    Path("out/deep").mkdir(parents=True)
    Path("out/deep/log.txt").write_text("a line")
    os.symlink("deep/log.txt", "out/last")
    Path("present.txt").write_text("changed")
    torch.save(network.state_dict(), "out/m.pt")
    torch.save({{"epoch": 3}}, "out/epoch.pt")
    Path("hub").mkdir()
    Path("hub/weights").write_text("downloaded")
    """
    (tmp_path / "present.txt").write_text("as it was")
    status, answer, _ = run(code)
    assert status == 0 and not (tmp_path / "out").exists() and answer["run"]["files"]["copied"] == []
    assert len(answer["run"]["files"]["written"]) == 6
    assert run(code, "--allow-network")[0] == 0
    assert (tmp_path / "hub/weights").read_text() == "downloaded" and not (tmp_path / "out").exists()
    shutil.rmtree(tmp_path / "hub")
    status, answer, _ = run(code, "--keep-files")
    names = ("hub/weights", "out/deep/log.txt", "out/epoch.pt", "out/last")
    assert sorted(answer["run"]["files"]["copied"]) == [str(tmp_path / name) for name in names]
    assert (tmp_path / "out/last").read_text() == "a line" and not (tmp_path / "out/m.pt").exists()
    assert (tmp_path / "present.txt").read_text() == "as it was"


def test_a_snapshot_is_written_through_a_linked_directory(way, run, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real/snapshot.pickle").write_text("an older one")
    status, answer, err = run("", "--snapshot", str(tmp_path / "link/snapshot.pickle"))
    assert status == 0 and answer["run"]["files"]["written"] == [], err
    assert pickle.loads((tmp_path / "real/snapshot.pickle").read_bytes())["segments"]


def test_the_script_sees_its_own_checkpoints_and_errors(way, run, tmp_path):
    code = f"""
    import pickle, sqlite3
    os.chdir({str(tmp_path)!r})
    torch.save(network.state_dict(), "m.pt")
    network.load_state_dict(torch.load("m.pt"))
    torch.save({{"epoch": 3}}, "m.pt")
    assert torch.load("m.pt") == {{"epoch": 3}}
    pickle.dump(network, open("m.pkl", "wb"))
    again = pickle.load(open("m.pkl", "rb"))
    assert again.weight.is_cuda and again.weight.shape == (64, 64)
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), "m.jit")
    assert torch.jit.load("m.jit").weight.shape == (2, 2)
    base = sqlite3.connect("rows.db")
    base.execute("create table rows (value)")
    base.commit()
    assert os.path.getsize("rows.db") > 0
    open("absent.txt")
    """
    status, answer, err = run(code)
    assert status == 3 and "FileNotFoundError" in answer["run"]["failure"], err
    assert "this is an error of vramcast" not in err
    assert list(tmp_path.iterdir()) == [tmp_path / "train.py"]


def test_a_refused_program_is_explained(run, monkeypatch):
    if not _offers(REDIRECT):
        pytest.skip("this machine has no Landlock")
    monkeypatch.setenv(FORCED, REDIRECT)
    status, _, err = run("import subprocess; subprocess.run(['cp', __file__, 'copy'], check=True)")
    assert status == 3 and "--unprotected" in err


def test_a_rename_that_the_overlay_refuses_is_carried_out(run, tmp_path, monkeypatch):
    if not _offers(OVERLAY):
        pytest.skip("this machine offers no overlay")
    monkeypatch.setenv(FORCED, OVERLAY)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as other:
        if Path(other).stat().st_dev != tmp_path.stat().st_dev:
            pytest.skip("/var/tmp and the temporary directory are on two file systems")
        Path(other, "old").mkdir()
        Path(other, "old/file").write_text("text")
        before = fingerprint(Path(other))
        code = f"""
        os.rename({other + "/old"!r}, {str(tmp_path / "new")!r})
        assert Path({str(tmp_path / "new/file")!r}).read_text() == "text" and not os.path.exists({other + "/old"!r})
        os.replace({str(tmp_path / "new/file")!r}, {other + "/file"!r})
        try:
            os.rename({str(tmp_path)!r}, {other + "/file"!r})
        except NotADirectoryError:
            sys.exit(0)
        """
        status, _, err = run(code)
        assert status == 0, err
        assert fingerprint(Path(other)) == before


def test_a_write_that_the_overlay_cannot_take_is_redirected(run, monkeypatch):
    if not (_offers(OVERLAY) and _offers(REDIRECT)):
        pytest.skip("this machine does not offer both ways")
    if os.geteuid() or "/proc" not in MOUNTS:
        pytest.skip("this user may not write in /, below which there are mounts")
    code = "Path('/new-directory').mkdir()"
    status, answer, err = run(code)
    assert status == 0 and "running again with redirection" in err, err
    assert answer["run"]["files"]["protection"] == REDIRECT and not Path("/new-directory").exists()
    monkeypatch.setenv(FORCED, OVERLAY)
    status, answer, _ = run(code)
    assert status == 3 and "--unprotected" in answer["run"]["failure"]


REDIRECTED = {
    "shared memory": """
        import mmap
        Path(SHARED).write_bytes(b"ruined")
        assert Path(SHARED).read_bytes() == b"ruined"
        """,
    "a module that the script wrote": """
        sys.path.insert(0, os.getcwd())
        Path("written_module.py").write_text("value = 5")
        import written_module
        assert written_module.value == 5
        """,
    "temporary files": """
        import tempfile
        with tempfile.NamedTemporaryFile(dir=".") as file:
            name = file.name
        assert not os.path.exists(name)
        """,
    "functions in a pool": """
        from multiprocessing import Pool
        os.mkdir("made")
        with Pool(2) as pool:
            assert pool.map(os.path.isdir, ["made", "absent"]) == [True, False]
            assert len(pool.map(os.listdir, ["made"])) == 1
        """,
    "sqlite": """
        import sqlite3
        for _ in range(2):
            sqlite3.connect(":memory:").execute("create table t (value)")
        sqlite3.connect(database="rows.db").execute("create table t (value)")
        assert os.path.exists("rows.db")
        """,
    "a checkpoint as a map": """
        torch.save(dict(weight=torch.arange(10)), "host.pt")
        assert torch.load("host.pt", mmap=True)["weight"][9] == 9
        """,
    "a working directory": """
        import subprocess
        os.mkdir("other")
        assert subprocess.run(["pwd"], cwd="other", capture_output=True).returncode == 0
        """,
    "threads that write one file": """
        from threading import Thread
        Path("sub").mkdir()
        def write(place):
            with open("records.bin", "r+b") as file:
                file.seek(place * 100000)
                file.write(bytes([place]) * 100000)
        threads = [Thread(target=write, args=(place,)) for place in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        content = Path("records.bin").read_bytes()
        assert [content[place * 100000] for place in range(8)] == list(range(8))
        """,
    "a sparse file": """
        with open("sparse.bin", "r+b") as file:
            file.write(b"start")
        assert os.path.getsize("sparse.bin") == 2**36
        """,
    "a deep tree": """
        for _ in range(1300):
            os.mkdir("d")
            os.chdir("d")
        """,
    "many deletions": """
        import shutil
        shutil.rmtree("many")
        assert not os.path.exists("many")
        """,
}


def test_what_scripts_do_works_with_redirected_files(run, tmp_path, monkeypatch):
    if not _offers(REDIRECT):
        pytest.skip("this machine has no Landlock")
    monkeypatch.setenv(FORCED, REDIRECT)
    for number in range(1500):
        (tmp_path / f"many/{number}").parent.mkdir(exist_ok=True)
        (tmp_path / f"many/{number}").touch()
    (tmp_path / "records.bin").write_bytes(bytes(800_000))
    before = fingerprint(tmp_path)
    with (tmp_path / "sparse.bin").open("wb") as file:
        file.truncate(2**36)
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as shared:
        Path(shared.name).write_bytes(b"precious")
        names = f"SHARED, HOME = {shared.name!r}, {str(tmp_path)!r}\n"
        code = "".join(f"os.chdir(HOME)\n{dedent(lines)}\nprint('done {name}')\n" for name, lines in REDIRECTED.items())
        status, _, err = run(names + code)
        assert Path(shared.name).read_bytes() == b"precious"
    assert status == 0 and _lines(err, "done ") == [f"done {name}" for name in REDIRECTED], err
    assert (tmp_path / "sparse.bin").stat().st_blocks == 0
    for name in ("sparse.bin", "train.py"):
        (tmp_path / name).unlink()
    after = fingerprint(tmp_path)
    assert after.keys() == before.keys() and all(after[key] == before[key] for key in before if key != ".")


def test_root_changes_nothing_in_the_directory_of_devices(way, run):
    if os.geteuid():
        pytest.skip("only root may change /dev")
    with tempfile.NamedTemporaryFile(dir="/dev", prefix="vramcast-test-") as file:
        Path(file.name).write_text("as it was")
        before = fingerprint(Path(file.name))
        code = f"""
        import shutil
        path = {file.name!r}
        open("/dev/null", "w").write("to nowhere")
        for change in (
            lambda: os.chmod(path, 0o604),
            lambda: os.fchmod(os.open(path, os.O_RDONLY), 0o604),
            lambda: os.chmod(f"/dev/fd/{{os.open(path, os.O_RDONLY)}}", 0o604),
            lambda: os.utime(path, (1, 1)),
            lambda: os.remove(path),
            lambda: open(path, "w"),
            lambda: open(path + ".new", "w"),
            lambda: shutil.move(__file__, path),
        ):
            try: change()
            except OSError: continue
            raise AssertionError("changed")
        """
        status, _, err = run(code)
        assert status == 0, err
        assert fingerprint(Path(file.name)) == before
        assert not Path(f"{file.name}.new").exists()


def test_a_new_file_does_not_follow_a_link_of_the_disk(way, run, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to("elsewhere")
    code = f"os.chdir({str(tmp_path)!r}); os.remove('out'); os.mkdir('out'); open('out/new.txt', 'w').close()"
    status, _, err = run(code, "--keep-files")
    assert status == 2 and "the disk has a link" in err
    assert not list((tmp_path / "elsewhere").iterdir())


def test_unprotected_code_changes_files(run, tmp_path):
    (tmp_path / "log.txt").write_text("old")
    status, answer, _ = run(f"open({str(tmp_path / 'log.txt')!r}, 'w').write('new')", "--unprotected")
    assert status == 0 and answer["run"]["files"]["protection"] == "none"
    assert (tmp_path / "log.txt").read_text() == "new"


def test_a_machine_without_protection_is_refused_before_the_script_starts(run, tmp_path, monkeypatch):
    monkeypatch.setenv(FORCED, "neither")
    status, _, err = run(f"open({str(tmp_path / 'made')!r}, 'w')")
    assert status == 2 and not (tmp_path / "made").exists()
    assert "--unprotected" in err and len(err.strip().split("\n")) == 1


def test_the_screen_says_what_would_have_been_written(way, tmp_path, warm_host):
    (tmp_path / "log.txt").write_text("old")
    lines = f"os.remove({str(tmp_path / 'log.txt')!r})\nfor name in 'ab': open({str(tmp_path)!r} + '/' + name, 'w')\n"
    (tmp_path / "train.py").write_text(TRAIN + lines)
    code, out, _ = warm_host.run("--", sys.executable, str(tmp_path / "train.py"))
    assert code == 0
    shown = " ".join(out.split())
    expected = f"{tmp_path}/a and 1 other would have been written, {tmp_path}/log.txt would have been deleted"
    assert expected in shown and "the disk is as it was" in shown


NETWORK = """
import os, shutil
from pathlib import Path
from torch import nn

def build(directory):
    os.chdir(directory)
    Path("m.pt").write_bytes(b"changed")
    os.remove("log.txt")
    shutil.rmtree("weights")
    os.replace("data.h5", "data.sqlite")
    Path("new").touch()
    assert sorted(os.listdir()) == ["data.sqlite", "m.pt", "m.safetensors", "net.py", "new"], os.listdir()
    return nn.Linear(8, 8)
"""


def test_classify_of_user_code_changes_nothing(way, tmp_path, capfd):
    for name in ("m.pt", "m.safetensors", "weights/part", "log.txt", "data.sqlite", "data.h5"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode() * 100)
    (tmp_path / "net.py").write_text(NETWORK)
    before = fingerprint(tmp_path)
    words = ["--batch-size", "4", "--arg", f"directory={tmp_path}", "--input", "8"]
    code = main(["classify", f"{tmp_path}/net.py:build", *words])
    assert code == 0, capfd.readouterr().err
    assert fingerprint(tmp_path) == before


def test_a_disk_without_space_for_a_scratch_directory_is_bad_input(tmp_path, monkeypatch):
    monkeypatch.setattr(protection, "_LASTING", tmp_path / "absent")
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    with pytest.raises(UserError, match=r"absent: No such file or directory; /proc: .*TMPDIR"):
        protection.FileProtection()


def test_a_run_inside_a_run_is_protected(way, tmp_path, run):
    (tmp_path / "precious").write_text("as it was")
    inner = TRAIN + f"open({str(tmp_path / 'precious')!r}, 'w').write('ruined')\n"
    (tmp_path / "inner.py").write_text(inner)
    code = f"""
    import subprocess
    environment = {{**os.environ, "PYTHONPATH": {str(CHECKOUT)!r}}}
    del environment[{FORCED!r}]
    command = [sys.executable, "-m", "vramcast", "run", "--", sys.executable, {str(tmp_path / "inner.py")!r}]
    subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=True)
    assert Path({str(tmp_path / "precious")!r}).read_text() == "as it was"
    """
    status, answer, err = run(code)
    assert status == 0 and "the disk is as it was" in err, err
    assert answer["run"]["files"]["written"] == []
    assert (tmp_path / "precious").read_text() == "as it was"


def test_scratch_directories_of_killed_runs_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(protection, "_LASTING", tmp_path)
    stale, fresh, foreign, unlocked = (
        tmp_path / name for name in ("vramcast-files-a", "vramcast-files-b", "other", "vramcast-files-c")
    )
    for path in (stale, fresh, foreign, unlocked):
        (path / "upper/deep").mkdir(parents=True)
        if path != unlocked:
            (path / "lock").touch()
        (path / "upper/deep").chmod(0)
    held = protection.FileProtection()
    mine = next(path for path in tmp_path.iterdir() if path not in (stale, fresh, foreign, unlocked))
    old = time.time() - 1000
    for path in (stale, foreign, mine, unlocked):
        os.utime(path, (old, old))
    other = protection.FileProtection()
    assert not stale.exists() and not unlocked.exists() and all(path.exists() for path in (fresh, foreign, mine))
    held.remove()
    other.remove()
    assert sorted(tmp_path.iterdir()) == [foreign, fresh]


def test_a_removal_that_is_cut_off_leaves_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(protection, "_LASTING", tmp_path)
    cut_off = protection.FileProtection()
    (scratch,) = tmp_path.iterdir()
    (scratch / "upper").mkdir()
    with monkeypatch.context() as killed:
        killed.setattr(Path, "rmdir", lambda _: sys.exit("killed"))
        with pytest.raises(SystemExit):
            cut_off.remove()
    assert (scratch / "lock").exists()  # the next run finds out by it that nobody uses the directory
    cut_off.remove()
    assert not scratch.exists()
