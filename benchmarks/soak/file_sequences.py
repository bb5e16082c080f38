"""Random sequences of file operations, which a script carries out on directories that exist before it starts.

`prepare` makes the directories. `python -m benchmarks.soak.file_sequences ROOT FIRST END` carries the sequences out and
prints what they returned and how the directories look to the script; `fingerprint` says how they look to others.
"""

import errno
import hashlib
import json
import mmap
import os
import random
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any

import numpy as np

LENGTH = 24
"""Operations in a sequence."""
_NAMES = ("a", "b", "c.bin", "d", "d/e", "d/f.bin", "d/g", "d/g/h", "i", "i/a", "j", "k", "k/e")
"""Few, so that operations meet the results of others. `j` is a link to a file, `k` one to a directory."""
_Operation = Callable[[random.Random, str], Any]


def prepare(root: Path, seed: int) -> None:
    """Make the directory of a sequence, with files, directories and links, some of which cannot be written."""
    draw = random.Random(f"prepare {seed}")
    for name in ("d", "d/g", "i"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("a", "b", "c.bin", "d/e", "d/f.bin", "d/g/h", "i/a"):
        if draw.random() < 0.8:
            (root / name).write_bytes(draw.randbytes(draw.choice((0, 1, 100, 5000))))
            (root / name).chmod(draw.choice((0o644, 0o600, 0o444, 0o755)))
            os.utime(root / name, ns=(draw.randrange(10**18), draw.randrange(10**18)))
    (root / "j").symlink_to(draw.choice(("a", "d/e", "absent", str(root / "b"))))
    (root / "k").symlink_to(draw.choice(("d", "i", "absent", str(root / "d"))))
    if draw.random() < 0.3:
        (root / "i").chmod(0o555)


def fingerprint(root: Path) -> dict[str, tuple[object, ...]]:
    """Return kind, mode, owner, time and content of all that is below a directory."""
    entries: dict[str, tuple[object, ...]] = {}
    for path in [root, *_below(root)]:
        status = path.lstat()
        content: object = None
        if stat.S_ISLNK(status.st_mode):
            content = str(path.readlink())
        elif stat.S_ISREG(status.st_mode):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        owner = (status.st_uid, status.st_gid, status.st_ino, status.st_mtime_ns)
        entries[str(path.relative_to(root))] = (status.st_mode, *owner, content)
    return entries


def _below(root: Path) -> Iterator[Path]:
    for directory, directories, files in os.walk(root):
        for name in directories + files:
            yield Path(directory, name)


def view(root: str) -> list[list[object]]:
    """Return what a script sees below a directory: kind, mode and content."""
    entries: list[list[object]] = []
    for directory, directories, files in os.walk(root):
        for name in sorted(directories + files):
            path = f"{directory}/{name}"
            mode, content = 0, None
            with suppress(PermissionError):
                mode = os.lstat(path).st_mode
                if stat.S_ISLNK(mode):
                    content = os.readlink(path).replace(root, "ROOT")
                elif stat.S_ISREG(mode):
                    with open(path, "rb") as file:
                        content = hashlib.sha256(file.read()).hexdigest()
            entries.append([os.path.relpath(path, root), oct(mode), content])
    return sorted(entries, key=lambda item: str(item[0]))


def _data(draw: random.Random) -> bytes:
    return draw.randbytes(draw.choice((0, 3, 200)))


def _write(draw: random.Random, path: str) -> None:
    mode = draw.choice(("wb", "ab", "xb", "r+b", "w+b", "a+b", "w", "x"))
    with open(path, mode) as file:
        file.write(_data(draw) if "b" in mode else "text")


def _write_by_path(draw: random.Random, path: str) -> None:
    Path(path).write_bytes(_data(draw))


def _open_with_flags(draw: random.Random, path: str) -> None:
    access = draw.choice((os.O_WRONLY, os.O_RDWR))
    flags = [flag for flag in (os.O_CREAT, os.O_TRUNC, os.O_EXCL, os.O_APPEND, os.O_NOFOLLOW) if draw.random() < 0.4]
    descriptor = os.open(path, access | sum(flags), draw.choice((0o600, 0o644)))
    with os.fdopen(descriptor, "wb", closefd=True) as file:
        os.pwrite(descriptor, _data(draw), draw.choice((0, 10)))
        file.truncate(draw.choice((0, 7, 300)))


def _map(draw: random.Random, path: str) -> None:
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
        pages[0] = draw.randrange(256)


def _link(draw: random.Random, path: str) -> None:
    os.link(path, _other(draw, path), follow_symlinks=draw.random() < 0.5)


def _symlink(draw: random.Random, path: str) -> None:
    os.symlink(draw.choice((_other(draw, path), "a", "../a", "d", ".")), path)


def _other(draw: random.Random, path: str) -> str:
    root, name = _ROOT[0], draw.choice(_NAMES)
    return f"{root}/{name}" if path.startswith("/") else name


_ROOT = [""]
"""The directory of the sequence that is being carried out."""


def _remove_tree(draw: random.Random, path: str) -> None:
    shutil.rmtree(path, ignore_errors=draw.random() < 0.5)


def _temporary(draw: random.Random, path: str) -> str:
    with tempfile.NamedTemporaryFile(dir=path, delete=False) as file:
        file.write(_data(draw))
    os.replace(file.name, f"{path}/a")
    return "replaced"


def _relative_to_descriptor(draw: random.Random, path: str) -> None:
    directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    name = os.path.basename(path)
    try:
        draw.choice(
            (
                lambda: os.unlink(name, dir_fd=directory),
                lambda: os.rename(name, "moved", src_dir_fd=directory, dst_dir_fd=directory),
                lambda: os.mkdir(name, dir_fd=directory),
                lambda: os.close(os.open(name, os.O_WRONLY | os.O_TRUNC, dir_fd=directory)),
                lambda: os.chmod(name, 0o600, dir_fd=directory),
            )
        )()
    finally:
        os.close(directory)


def _by_descriptor(draw: random.Random, path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        draw.choice(
            (
                lambda: os.fchmod(descriptor, 0o640),
                lambda: os.chmod(descriptor, 0o640),
                lambda: os.utime(descriptor, (5, 5)),
            )
        )()
    finally:
        os.close(descriptor)


def _in_another_process(draw: random.Random, path: str) -> int:
    operation = draw.choice((_write, _write_by_path, lambda draw, path: os.unlink(path)))
    pid = os.fork()
    if pid == 0:
        with suppress(OSError):
            operation(draw, path)
            os._exit(0)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _save_array(draw: random.Random, path: str) -> None:
    array = np.frombuffer(draw.randbytes(64), dtype=np.uint8)
    draw.choice((lambda: np.save(path, array), lambda: array.tofile(path), lambda: np.savetxt(path, array)))()


def _walked(_: random.Random, path: str) -> list[object]:
    return sorted([os.path.relpath(item[0], path), sorted(item[1]), sorted(item[2])] for item in os.walk(path))


def _scanned(_: random.Random, path: str) -> list[object]:
    with os.scandir(path) as entries:
        return sorted([item.name, item.is_dir(), item.is_file(), item.is_symlink()] for item in entries)


def _status(_: random.Random, path: str) -> list[object]:
    status, own = os.stat(path), os.lstat(path)
    size = status.st_size if stat.S_ISREG(status.st_mode) else None
    return [oct(status.st_mode), size, oct(own.st_mode), os.access(path, os.W_OK), os.access(path, os.X_OK)]


def _read(_: random.Random, path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def _move_up(draw: random.Random, path: str) -> str:
    with chdir(path):
        Path("made-here").write_bytes(_data(draw))
        return str(Path.cwd())


OPERATIONS: dict[str, _Operation] = {
    "write": _write,
    "write_bytes": _write_by_path,
    "open": _open_with_flags,
    "map": _map,
    "save_array": _save_array,
    "truncate": lambda draw, path: os.truncate(path, draw.choice((0, 5, 400))),
    "unlink": lambda draw, path: os.unlink(path),
    "remove_path": lambda draw, path: Path(path).unlink(missing_ok=True),
    "rmdir": lambda draw, path: os.rmdir(path),
    "rmtree": _remove_tree,
    "rename": lambda draw, path: os.rename(path, _other(draw, path)),
    "replace": lambda draw, path: os.replace(_other(draw, path), path),
    "link": _link,
    "symlink": _symlink,
    "mkdir": lambda draw, path: os.mkdir(path, draw.choice((0o755, 0o700))),
    "makedirs": lambda draw, path: os.makedirs(f"{path}/x/y", exist_ok=draw.random() < 0.5),
    "chmod": lambda draw, path: os.chmod(path, draw.choice((0o600, 0o755))),
    "utime": lambda draw, path: os.utime(path, (1, 1)),
    "touch": lambda draw, path: Path(path).touch(exist_ok=draw.random() < 0.5),
    "copy": lambda draw, path: str(shutil.copy(path, _other(draw, path))),
    "copytree": lambda draw, path: str(shutil.copytree(path, _other(draw, path), symlinks=True)),
    "move": lambda draw, path: str(shutil.move(path, _other(draw, path))),
    "temporary": _temporary,
    "descriptor": _by_descriptor,
    "directory_descriptor": _relative_to_descriptor,
    "process": _in_another_process,
    "chdir": _move_up,
    "list": lambda draw, path: sorted(os.listdir(path)),
    "scan": _scanned,
    "walk": _walked,
    "status": _status,
    "read": _read,
    "readlink": lambda draw, path: os.readlink(path),
    "realpath": lambda draw, path: os.path.realpath(path),
    "glob": lambda draw, path: sorted(map(str, Path(path).rglob("*"))),
    "exists": lambda draw, path: [os.path.exists(path), os.path.isdir(path), os.path.islink(path)],
}


def perform(root: str, seed: int, length: int = LENGTH) -> list[list[object]]:
    """Carry out a sequence. Return the name and the result of each operation: a value, or the name of the error."""
    draw = random.Random(seed)
    _ROOT[0] = root
    results: list[list[object]] = []
    with chdir(root):
        for _ in range(length):
            name = draw.choice(list(OPERATIONS))
            path = draw.choice(_NAMES)
            path = f"{root}/{path}" if draw.random() < 0.5 else path
            own = random.Random(draw.random())  # so that an error does not change what comes next
            results.append([name, path.replace(root, "ROOT"), _result(OPERATIONS[name], own, path, root)])
    return results


def _result(operation: _Operation, draw: random.Random, path: str, root: str) -> object:
    try:
        text = json.dumps(operation(draw, path)).replace(root, "ROOT")
        return json.loads(text.replace(os.path.dirname(root), "PARENT"))
    except shutil.Error as error:
        return f"shutil.Error with {len(error.args[0])}" if isinstance(error.args[0], list) else "shutil.Error"
    except OSError as error:
        return errno.errorcode[error.errno] if error.errno else type(error).__name__
    except ValueError as error:  # an empty file is not mapped
        return type(error).__name__


def main() -> None:
    """Train a network, so that there is a report, then carry out the sequences of the command line."""
    import torch  # noqa: PLC0415

    root, first, end = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if torch.cuda.is_available():
        network = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        network(torch.randn(8, 64, device="cuda")).sum().backward()
        optimizer.step()
    for seed in range(first, end):
        directory = f"{root}/{seed}"
        print(json.dumps([seed, perform(directory, seed), view(directory)]), flush=True)


if __name__ == "__main__":
    main()
