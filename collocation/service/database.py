"""The database of the service, SQLite or PostgreSQL: its connections, and its tables with their versions."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from vramcast.errors import UserError

_POSTGRESQL = "postgresql"
_SCHEMES = (_POSTGRESQL, "postgres", "postgresql+psycopg")
_LOCK = 7_215_330_991
"""The advisory lock of PostgreSQL under which one replica at a time migrates."""
_CONNECT_SECONDS = 2
_STATEMENT_MS = 3000
READ = {"reads": True}
"""Execution options of a transaction that only reads."""

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE observed (job {bytes} PRIMARY KEY, runs BIGINT NOT NULL, peak_bytes BIGINT NOT NULL,"
        " seen_at DOUBLE PRECISION NOT NULL)",
        "CREATE INDEX observed_seen_at ON observed (seen_at)",
        "CREATE TABLE approved (id {serial}, pod TEXT NOT NULL, node TEXT NOT NULL, gpu TEXT NOT NULL,"
        " need_mib DOUBLE PRECISION NOT NULL, free_mib DOUBLE PRECISION NOT NULL, until DOUBLE PRECISION NOT NULL)",
        "CREATE INDEX approved_node ON approved (node)",
        "CREATE INDEX approved_pod ON approved (pod)",
        "CREATE INDEX approved_until ON approved (until)",
        "CREATE TABLE waiting (id {serial}, job {bytes} NOT NULL, peak_bytes BIGINT)",
        "CREATE TABLE imported (content TEXT PRIMARY KEY)",
    ),
)
"""The statements that lead from each version of the tables to the next. Published ones are never changed."""
_WORDS = {
    "sqlite": {"bytes": "BLOB", "serial": "INTEGER PRIMARY KEY AUTOINCREMENT"},
    _POSTGRESQL: {"bytes": "BYTEA", "serial": "BIGSERIAL PRIMARY KEY"},
}


class StorageDownError(Exception):
    """A database that does not answer. `detail` is for the log: it may name hosts and users."""

    def __init__(self, reason: str, detail: str | None = None) -> None:
        super().__init__(reason)
        self.detail = detail or reason


def is_url(text_: str) -> bool:
    """Return True for the URL of a database, and False for the path of a file."""
    return "://" in text_


def open_database(place: str | Path | None) -> Engine:
    """Return the connections to a database: by its URL, in a file, or in memory. Raise `UserError` for a bad URL."""
    if isinstance(place, str):
        return _open_postgresql(place)
    if place is None:
        engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    else:
        engine = create_engine(f"sqlite:///{place}", connect_args={"timeout": 10, "check_same_thread": False})

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # the driver begins no transactions of its own
        if place is not None:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")  # a commit is on the disk

    @event.listens_for(engine, "begin")
    def begun(connection: Connection) -> None:
        # a transaction that reads and then writes must not begin as a reader: another one may write between
        connection.exec_driver_sql("BEGIN" if connection.get_execution_options().get("reads") else "BEGIN IMMEDIATE")

    return engine


def migrate(engine: Engine) -> None:
    """Update the tables to the version of this release. Raise `UserError` if they are of a later one."""
    with transaction(engine) as connection:
        if engine.dialect.name == _POSTGRESQL:
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        connection.execute(text("CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL)"))
        version = connection.execute(text("SELECT COALESCE(MAX(version), 0) FROM schema_version")).scalar_one()
        if version > len(MIGRATIONS):
            raise UserError(
                f"expected a history of version {len(MIGRATIONS)} or earlier, found version {version}: "
                "install a newer vramcast, or choose another --history"
            )
        for number, statements in enumerate(MIGRATIONS[version:], version + 1):
            for statement in statements:
                connection.execute(text(statement.format(**_WORDS[engine.dialect.name])))
            connection.execute(text("INSERT INTO schema_version VALUES (:number)"), {"number": number})


@contextmanager
def transaction(engine: Engine, **options: Any) -> Iterator[Connection]:
    """Yield a connection in a transaction. Raise `StorageDownError` for whatever the database does not do."""
    try:
        with engine.connect().execution_options(**options) as connection, connection.begin():
            yield connection
    except SQLAlchemyError as error:
        cause = error.orig if isinstance(error, DBAPIError) else None
        detail = str(cause or error).strip().partition("\n")[0] or type(error).__name__
        shared = engine.dialect.name == _POSTGRESQL
        raise StorageDownError("a database that does not answer" if shared else detail, detail) from error


def _open_postgresql(place: str) -> Engine:
    scheme = place.partition("://")[0]
    if scheme not in _SCHEMES:
        raise UserError(f"expected a file or a URL of postgresql:// for --history, found {scheme}://: change it")
    try:
        url = make_url(place).set(drivername="postgresql+psycopg")
        return create_engine(
            url,
            pool_pre_ping=True,
            pool_timeout=_CONNECT_SECONDS,
            connect_args={
                "connect_timeout": _CONNECT_SECONDS,
                "tcp_user_timeout": _STATEMENT_MS,
                "options": f"-c statement_timeout={_STATEMENT_MS} -c lock_timeout={_STATEMENT_MS}",
                "prepare_threshold": None,  # a pooler such as PgBouncer keeps no prepared statements
            },
        )
    except (ArgumentError, ValueError) as error:
        raise UserError(
            "expected --history postgresql://USER:PASSWORD@HOST/DATABASE, found another form: fix it"
        ) from error
    except ModuleNotFoundError as error:
        raise UserError(f"expected psycopg, found no {error.name}: pip install 'vramcast[postgresql]'") from error
