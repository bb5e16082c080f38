"""Empty CUDA libraries, with which a CUDA build of torch is imported where NVIDIA's packages are not installed.

Nothing of CUDA is called on a machine without a GPU, but the dynamic linker wants every library and symbol. Used only
where no CPU build of an old torch is to be had.
"""

import re
import subprocess
from collections import defaultdict
from pathlib import Path

_LIBRARY = re.compile(r"lib(cu|nccl|nv)")
_SYMBOL = re.compile(r"\s+[Uwv] ((?:__cu|cu|nccl|nv)\w*)(?:@(\S+))?$")
_BODIES = {"__cudaRegisterFatBinary": "static void *handle; return (long)&handle;"}
_NO_DEVICE = "return 100;"  # cudaErrorNoDevice


def write_stubs(directory: Path) -> None:
    """Write a stub beside torch's libraries for each CUDA library that they need."""
    needed: set[str] = set()
    versions: dict[str, set[str]] = defaultdict(set)
    symbols: dict[str | None, set[str]] = defaultdict(set)
    for path in directory.glob("*.so*"):
        if _LIBRARY.match(path.name):
            continue
        needed |= set(re.findall(r"NEEDED.*\[(.+)\]", _output("readelf", "-d", path)))
        for library, version in _versions(_output("readelf", "-V", "-W", path)):
            versions[library].add(version)
        for line in _output("nm", "-D", "--undefined-only", path).splitlines():
            if match := _SYMBOL.match(line):
                symbols[match[2]].add(match[1])
    plain = symbols.pop(None, set())  # of libraries without versions: any stub may hold them
    for library in sorted(name for name in needed if _LIBRARY.match(name)):
        _compile(directory / library, {name: symbols[name] for name in sorted(versions[library])}, plain)
        plain = set()


def _versions(text: str) -> list[tuple[str, str]]:
    """Return the pairs of library and version that `readelf -V` lists as needed."""
    pairs, library = [], ""
    for line in text.splitlines():
        if match := re.search(r"File: (\S+)", line):
            library = match[1]
        elif (match := re.search(r"Name: (\S+)\s+Flags", line)) and _LIBRARY.match(library):
            pairs.append((library, match[1]))
    return pairs


def _compile(path: Path, versions: dict[str, set[str]], plain: set[str]) -> None:
    names = plain.union(*versions.values())
    source, script = path.with_name("stub.c"), path.with_name("stub.map")
    source.write_text("\n".join(f"long {name}() {{ {_BODIES.get(name, _NO_DEVICE)} }}" for name in sorted(names)))
    script.write_text("\n".join(f"{name} {{ global: {'; '.join(sorted(held))}; }};" for name, held in versions.items()))
    words = ["gcc", "-w", "-fno-builtin", "-shared", "-fPIC", "-o", path, f"-Wl,-soname,{path.name}", source]
    subprocess.run([*words, *([f"-Wl,--version-script,{script}"] if versions else [])], check=True)
    source.unlink()
    script.unlink()


def _output(*words: object) -> str:
    return subprocess.run(list(map(str, words)), text=True, capture_output=True, check=True).stdout
