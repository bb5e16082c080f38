"""Zip archives from strangers: one member is read, however large or numerous the others are."""

import zipfile
from collections.abc import Callable
from pathlib import Path

from vramcast.errors import UserError
from vramcast.jobs.network_files.limits import FILE_BYTES, shown

_END, _END_64_LOCATOR = b"PK\x05\x06", b"PK\x06\x07"
_END_BYTES, _LONGEST_COMMENT = 22, 2**16
_DIRECTORY_BYTES = 32 << 20
"""Of the list of members, which zipfile reads as a whole: room for 300,000 of them."""


class Archive:
    """A zip archive whose members are read within bounds."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        try:
            _check_directory(path)
            self._zip = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError, UnicodeError) as error:
            raise UserError(
                f"expected a sound zip archive in {shown(path.name)}, found: {shown(str(error))}; save it again"
            ) from error
        self.names = self._zip.namelist()

    def __enter__(self) -> "Archive":
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def find(self, wanted: Callable[[str], bool]) -> str | None:
        """Return the first member with such a name."""
        return next((name for name in self.names if wanted(name)), None)

    def read(self, name: str) -> bytes:
        """Return a member; raise a UserError for one that unpacks to more than a description may have."""
        try:
            with self._zip.open(name) as file:
                data = file.read(FILE_BYTES + 1)
        except (OSError, zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
            raise UserError(
                f"expected {shown(name)} in {shown(self._name)} to be sound, found: {shown(str(error))}; save it"
            ) from error
        except Exception as error:  # zlib.error, lzma.LZMAError: they share no base class
            raise UserError(f"expected {shown(name)} to unpack, found {type(error).__name__}: save it again") from error
        if len(data) > FILE_BYTES:
            raise UserError(
                f"expected {shown(name)} to unpack to at most {FILE_BYTES >> 20} MiB, found more: save the network "
                "alone, without data"
            )
        return data


def _check_directory(path: Path) -> None:
    """Raise if the archive lists more members than a network has."""
    with path.open("rb") as file:
        file.seek(0, 2)
        size = file.tell()
        file.seek(max(size - _END_BYTES - _LONGEST_COMMENT, 0))
        tail = file.read(_END_BYTES + _LONGEST_COMMENT)
        start = tail.rfind(_END)
        if start < 0 or len(tail) - start < _END_BYTES:
            raise zipfile.BadZipFile("no end of the archive: it is truncated")
        length = int.from_bytes(tail[start + 12 : start + 16], "little")
        locator = tail.rfind(_END_64_LOCATOR, 0, start)
        if locator >= 0:  # a 64-bit archive states its length in a record of its own
            file.seek(min(int.from_bytes(tail[locator + 8 : locator + 16], "little"), size))
            length = max(int.from_bytes(file.read(48)[40:48], "little"), length if length < 2**32 - 1 else 0)
    if length > _DIRECTORY_BYTES:
        raise zipfile.BadZipFile(f"a list of members of {length} bytes, and a network has a few thousand members")
