"""Observed peaks and approvals in a database. Everything here blocks: see `storage_access`."""

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, Engine, bindparam, text

from vramcast.collocation.observed_peak import ObservedPeak
from vramcast.collocation.service.database import READ, StorageDownError, migrate, open_database, transaction
from vramcast.errors import UserError
from vramcast.files.durable import held, sync

CHANNEL = "vramcast_history"
"""The channel of PostgreSQL on which replicas learn which jobs changed."""
_KEYS_OF_A_NOTE = 200
"""Their text stays below the 8000 bytes of a notification."""
_PRUNED_AFTER = 1000
"""Changes between two counts of the jobs."""

_ADD = text(
    "INSERT INTO observed (job, runs, peak_bytes, seen_at) VALUES (:job, :runs, :peak_bytes, :now)"
    " ON CONFLICT (job) DO UPDATE SET runs = observed.runs + excluded.runs, seen_at = excluded.seen_at, peak_bytes ="
    " CASE WHEN excluded.peak_bytes > observed.peak_bytes THEN excluded.peak_bytes ELSE observed.peak_bytes END"
    " RETURNING runs, peak_bytes"
)
_LOOK_UP = text("SELECT job, runs, peak_bytes FROM observed WHERE job IN :keys").bindparams(
    bindparam("keys", expanding=True)
)
_PRUNE = text(
    "DELETE FROM observed WHERE job IN (SELECT job FROM observed ORDER BY seen_at LIMIT :excess) RETURNING job"
)


@dataclass(frozen=True)
class Change:
    """A change of the history."""

    key: bytes
    peak_bytes: int | None
    """None to forget the job."""


@dataclass(frozen=True)
class Changed:
    """The outcome of changes."""

    after: list[ObservedPeak | None]
    """The observed peak after each change."""
    dropped: list[bytes]
    """Jobs that made room for others."""


class Storage:
    """One database: a file with one writer, a server that replicas share, or memory."""

    def __init__(self, place: str | Path | None, most_jobs: int, option: str = "--history") -> None:
        self.is_shared = isinstance(place, str)
        self.is_inline = place is None
        """True if calls take microseconds, and need no thread."""
        self._most_jobs = most_jobs
        self._unpruned = 0
        self._is_ready = False
        self.jobs = 0
        """The number of jobs, counted from time to time."""
        with ExitStack() as stack:
            path = place.resolve() if isinstance(place, Path) else None
            if path:
                _check_file(path)
                lock = path.with_name(f"{path.name}.lock")
                stack.enter_context(held(lock, path, "service", f"{option} FILE"))
            self.engine: Engine = open_database(path or place)
            stack.callback(self.engine.dispose)
            if not self.is_shared:
                self._open_file(path)
            self._stack = stack.pop_all()

    def _open_file(self, path: Path | None) -> None:
        try:
            self.prepare()
            if path:
                sync(path.parent)
        except (StorageDownError, OSError) as error:
            raise UserError(f"expected to write {path}, found: {error}; choose another --history FILE") from error

    def prepare(self) -> None:
        """Update the tables to the version of this release; only once."""
        if not self._is_ready:
            migrate(self.engine)
            self._is_ready = True
            with self.reading() as connection:
                self.jobs = int(connection.execute(text("SELECT COUNT(*) FROM observed")).scalar_one())

    def reading(self) -> AbstractContextManager[Connection]:
        """Return a transaction that only reads."""
        return transaction(self.engine, **READ)

    def writing(self) -> AbstractContextManager[Connection]:
        """Return a transaction."""
        self.prepare()
        return transaction(self.engine)

    def peaks(self, keys: Sequence[bytes]) -> dict[bytes, ObservedPeak]:
        """Return the observed peaks of the jobs that have some."""
        self.prepare()
        with self.reading() as connection:
            rows = connection.execute(_LOOK_UP, {"keys": list(keys)}).all()
        return {bytes(job): ObservedPeak(int(runs), int(peak)) for job, runs, peak in rows}

    def change(self, changes: Sequence[Change]) -> Changed:
        """Make changes. They are on the disk when this returns."""
        runs = [(item.key, None if item.peak_bytes is None else ObservedPeak(1, item.peak_bytes)) for item in changes]
        with self.writing() as connection:
            after = self._changed(connection, runs)
            dropped = self._pruned(connection, len(changes))
            self._note(connection, [item.key for item in changes] + dropped)
        return Changed(after, dropped)

    def add_file(self, peaks: Mapping[bytes, ObservedPeak], content: bytes) -> bool:
        """Add the peaks of a file of an earlier version. Return False if it was added before."""
        digest = {"content": hashlib.sha256(content).hexdigest()}
        with self.writing() as connection:
            row = "INSERT INTO imported VALUES (:content) ON CONFLICT (content) DO NOTHING RETURNING content"
            if connection.execute(text(row), digest).first() is None:
                return False
            self._changed(connection, list(peaks.items()))
            self._note(connection, list(peaks))
        return True

    def _changed(
        self, connection: Connection, runs: Sequence[tuple[bytes, ObservedPeak | None]]
    ) -> list[ObservedPeak | None]:
        """Add runs; None forgets a job. Rows are locked in the order of their keys, so that replicas never deadlock."""
        after: list[ObservedPeak | None] = [None] * len(runs)
        for index in sorted(range(len(runs)), key=lambda index: runs[index][0]):
            key, peak = runs[index]
            if peak is None:
                gone = connection.execute(text("DELETE FROM observed WHERE job = :job"), {"job": key}).rowcount
                self.jobs -= gone
                continue
            values = {"job": key, "runs": peak.runs, "peak_bytes": peak.peak_bytes, "now": time.time()}
            row = connection.execute(_ADD, values).one()
            after[index] = ObservedPeak(int(row.runs), int(row.peak_bytes))
            self.jobs += after[index] == peak
        return after

    def _pruned(self, connection: Connection, changes: int) -> list[bytes]:
        """Drop the jobs that were observed longest ago, once there are too many. Return them."""
        self._unpruned += changes
        if self.jobs <= self._most_jobs and self._unpruned < _PRUNED_AFTER:
            return []
        self._unpruned = 0
        self.jobs = int(connection.execute(text("SELECT COUNT(*) FROM observed")).scalar_one())
        if self.jobs <= self._most_jobs:
            return []
        rows = connection.execute(_PRUNE, {"excess": self.jobs - self._most_jobs}).all()
        self.jobs -= len(rows)
        return [bytes(row.job) for row in rows]

    def _note(self, connection: Connection, keys: Sequence[bytes]) -> None:
        """Tell other replicas which jobs changed, once the transaction is committed."""
        for start in range(0, len(keys) if self.is_shared else 0, _KEYS_OF_A_NOTE):
            payload = ",".join(key.hex() for key in keys[start : start + _KEYS_OF_A_NOTE])
            connection.execute(text("SELECT pg_notify(:channel, :payload)"), {"channel": CHANNEL, "payload": payload})

    # --- changes that wait for another database ---------------------------------------------------------------------

    def count_waiting(self) -> int:
        """Return the number of changes that wait."""
        with self.reading() as connection:
            return int(connection.execute(text("SELECT COUNT(*) FROM waiting")).scalar_one())

    def wait(self, changes: Sequence[Change]) -> None:
        """Append changes. They are on the disk when this returns."""
        rows = [{"job": item.key, "peak_bytes": item.peak_bytes} for item in changes]
        with self.writing() as connection:
            connection.execute(text("INSERT INTO waiting (job, peak_bytes) VALUES (:job, :peak_bytes)"), rows)

    def waiting(self, most: int) -> tuple[int, list[Change]]:
        """Return the id of the last of the first changes, and these."""
        with self.reading() as connection:
            rows = connection.execute(text("SELECT * FROM waiting ORDER BY id LIMIT :most"), {"most": most}).all()
        return (int(rows[-1].id) if rows else 0), [Change(bytes(row.job), row.peak_bytes) for row in rows]

    def end_waiting(self, last: int) -> None:
        """Remove the changes up to an id."""
        with self.writing() as connection:
            connection.execute(text("DELETE FROM waiting WHERE id <= :last"), {"last": last})

    def close(self) -> None:
        """Close all connections."""
        self._stack.close()


def _check_file(path: Path) -> None:
    """Refuse a file that is no database before anything is written."""
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"expected to write {path}, found: {error.strerror}; choose another --history FILE") from error
    if start and start != b"SQLite format 3\0":
        old = start.startswith(b'{"type":"history')
        fix = f"move it, and import it by --import-history {path}" if old else "choose another --history FILE"
        kind = "one of an earlier version" if old else "another kind of file"
        raise UserError(f"expected a history of vramcast serve at {path}, found {kind}: {fix}")
