"""Manages the ledger's engine: connections, transactions, retries, the schema's version."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.engine.interfaces import DBAPIConnection

from hpo.clock import Backoff
from hpo.door import option
from hpo.errors import HomeError, NoLedger, OlderLedger, StorageError, UserError
from hpo.ledger.database import schema
from hpo.ledger.database.faults import is_away, is_full, is_transient, one_sentence, unanswered
from hpo.ledger.database.server_url import parsed, with_password
from hpo.ledger.database.sqlite_url import path_of
from hpo.text import command
from trainer.files import outage
from trainer.redaction import ENCODE, redacted_url, unclear

T = TypeVar("T")

NETWORK_FILESYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "lustre", "ceph", "afs"}
# Seconds to keep trying a database in which others are in the way, and in a command one that went away.
PATIENCE = 60.0
# Without them a connection whose server has vanished from the network is noticed after hours (libpq, 34.1.2), and while
# a statement is on its way, after a quarter of an hour.
_WATCH = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3, "tcp_user_timeout": 60_000}
_NETWORK = {"connect_timeout": 10, **_WATCH}
BUSY_SECONDS = 30.0  # SQLite's own wait for a lock, unless two processes wait for each other


class Ledger:
    """An open database. Threads and processes each get their own connections.

    `url` is `sqlite:///PATH` (WAL, synchronous FULL) or `postgresql+psycopg://...`; a server's password may be in
    PGPASSWORD, and is added to the URL, since trials run without that variable. With `create` a missing schema is made;
    without it NoLedger is raised. An older schema is upgraded for writers, with `create` or `upgrade`, and refused with
    a StorageError for readers. An upgrade that would lock out a running process of an older release raises LedgerInUse,
    unless `evict` is set. A newer schema is used if its release allows it. A server that does not answer is tried again
    by the processes of a study, for as long as they wait for an outage (`trainer.files.outage`), and for `patience`
    seconds by others; a command fails at once, since its user may have mistyped the URL. A locked file is tried again:
    another process is making its tables. If it
    is `read_only`, the database itself prevents writing.
    """

    def __init__(
        self,
        url: str,
        *,
        create: bool = True,
        upgrade: bool = False,
        patience: float = 0.0,
        read_only: bool = False,
        evict: bool = False,
    ) -> None:
        self.url = with_password(url)
        self.engine = _engine(self.url, create)
        self._outage = outage.Outage(f"the ledger {self.shown}")
        weakref.finalize(self, self.engine.dispose).atexit = False  # from 3.13, Python warns of connections left open
        if read_only:
            _refuse_writes(self.engine)
        try:
            with one_sentence(self):
                self._prepare(create, create or upgrade, patience, evict)
        except BaseException:
            self.close()
            raise

    @property
    def shown(self) -> str:
        """Returns the URL without its password, for messages."""
        return redacted_url(self.url)

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    @contextmanager
    def read(self) -> Generator[Connection]:
        """Yields a consistent read-only view, for commands; long-lived processes use `look`.

        A process that waits for outages waits until the ledger answers; it does not repeat the block.
        """
        if outage.seconds() > 0:
            self.look(lambda _: None)
        with one_sentence(self), self._reader.begin() as connection:
            yield connection

    @contextmanager
    def write(self) -> Generator[Connection]:
        """Yields one write transaction, committed at the end of the block.

        Use `transact` if a retry must be possible.
        """
        with one_sentence(self), self._writer.begin() as connection:
            yield connection

    def transact(self, body: Callable[[Connection], T]) -> T:
        """Runs `body` in one write transaction and commits; retries if the connection broke or the database was busy.

        The outcome of a commit that broke is unknown, so `body` must be idempotent.
        """
        return self._retrying(self._writer, body)

    def look(self, body: Callable[[Connection], T]) -> T:
        """Returns `body` of a consistent view, retried like `transact`; writes nothing."""
        return self._retrying(self._reader, body)

    def _retrying(self, engine: Engine, body: Callable[[Connection], T], patience: float = PATIENCE) -> T:
        patience, deadline = outage.seconds(patience), time.monotonic() + PATIENCE
        backoff = Backoff(0.05, 2.0)
        with one_sentence(self):
            while True:
                try:
                    with engine.begin() as connection:
                        answer = body(connection)
                    self._outage.over()
                    return answer
                except exc.DBAPIError as error:
                    if is_away(error):
                        if self._outage.again(unanswered(error), patience, alone=is_full(error)):
                            continue
                        raise
                    if not is_transient(error) or time.monotonic() > deadline:
                        raise
                time.sleep(backoff.seconds)
                backoff.grow()

    def close(self) -> None:
        self.engine.dispose()

    def __getstate__(self) -> Any:
        raise TypeError("a Ledger is opened in each process by its URL, never pickled")

    def _prepare(self, create: bool, upgrade: bool, patience: float, evict: bool) -> None:
        self._writer = self.engine.execution_options(hpo_write=True)
        # SQLite's readers see a snapshot anyway.
        snapshot = {} if self.is_sqlite else {"isolation_level": "REPEATABLE READ"}
        self._reader = self.engine.execution_options(**snapshot)
        stored = self._retrying(self.engine, schema.read, patience)
        if stored.version == schema.SCHEMA_VERSION:
            return
        if stored.version is None and not create:
            raise NoLedger(
                f"{self.shown} holds no ledger: run a study first, or name the right {option('home')} or "
                f"{option('storage')}."
            )
        if stored.version is not None and not stored.is_of_hpo:
            raise StorageError(
                f"{self.shown} is the database of another program: name one of its own by {option('storage')}."
            )
        if stored.is_newer:
            since = f", which release {stored.oldest_release} and later can use" if stored.oldest_release else ""
            raise StorageError(
                f"{self.shown} was written by a newer release (schema {stored.version}, known "
                f"{schema.SCHEMA_VERSION}){since}: upgrade hpo."
            )
        if (stored.version or "") > schema.SCHEMA_VERSION:
            return  # a later release has expanded it
        if not upgrade:
            raise OlderLedger(
                f"{self.shown} was written by an older release (schema {stored.version}, now {schema.SCHEMA_VERSION}): "
                f"`{command('resume')}` or `hpo run` upgrades it."
            )
        self.transact(partial(schema.upgrade, evict=evict))


def _engine(url: str, create: bool) -> Engine:
    shown, parts = option("storage", repr(redacted_url(url))), parsed(url)
    if parts.get_backend_name() == "sqlite":
        return _sqlite_engine(parts, path_of(url), create)
    if unclear(url):
        raise UserError(f"{shown} cannot be taken apart: {ENCODE}.")
    if parts.get_backend_name() == "postgresql":
        try:
            options = {name: value for name, value in _NETWORK.items() if name not in parts.query}
            server = parts.set(drivername="postgresql+psycopg")
            engine = sa.create_engine(server, connect_args=options, pool_pre_ping=True)
        except ModuleNotFoundError as error:
            raise UserError("PostgreSQL needs psycopg: pip install 'hpo[postgres]'.") from error
        _have_server_watch(engine, {name: str(parts.query.get(name, default)) for name, default in _WATCH.items()})
        return engine
    raise UserError(f"{shown} is not supported: use sqlite:///PATH or postgresql+psycopg://...")


def _have_server_watch(engine: Engine, watch: Mapping[str, str]) -> None:
    """Makes the server look after its end of each connection as this process looks after its own.

    A host that vanishes in a transaction keeps its locks otherwise, for two hours by PostgreSQL's defaults.
    """
    settings = [(f"tcp_{name.removeprefix('tcp_')}", setting) for name, setting in watch.items()]
    wanted = ", ".join(["(%s, %s)"] * len(settings))
    statement = (
        f"SELECT set_config(name, setting, false) FROM (VALUES {wanted}) AS wanted (name, setting) "
        "WHERE current_setting(name, true) IS NOT NULL"  # PostgreSQL 11 has no tcp_user_timeout
    )

    @event.listens_for(engine, "connect")
    def configure(connection: DBAPIConnection, _: object) -> None:
        cursor = connection.cursor()
        cursor.execute(statement, [text for setting in settings for text in setting])
        cursor.close()
        connection.commit()


def _sqlite_engine(url: sa.URL, path: Path | None, create: bool) -> Engine:
    if path is None:
        raise UserError(
            f"{option('storage')} needs a file: sqlite:///PATH; a database in memory would not outlive the command."
        )
    try:
        exists = path.exists()
    except OSError as error:
        raise HomeError(
            f"{path} cannot be used ({error.strerror}): choose another with {option('home')} or {option('storage')}."
        ) from error
    if not create and not exists:
        raise NoLedger(
            f"the ledger {path} does not exist: run a study first, or name the right {option('home')} or "
            f"{option('storage')}."
        )
    if (kind := filesystem_of(path)) in NETWORK_FILESYSTEMS:
        raise StorageError(f"{path} lies on {kind}, where SQLite's WAL is unsafe: use a local disk or PostgreSQL.")
    read_only = not create and not writable(path)
    url = read_only_url(url, path) if read_only else url
    engine = sa.create_engine(url, connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False})
    traces_at_start = _traces(path)

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _: object) -> None:
        connection.isolation_level = None  # SQLAlchemy's begin event opens the transaction, not the driver
        if not read_only and connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A reader that becomes a writer can fail at once with "database is locked"; a declared writer waits its turn.
        write = connection.get_execution_options().get("hpo_write")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    @event.listens_for(engine, "commit")
    def end(connection: Connection) -> None:
        if "immutable" in url.query and _traces(path) != traces_at_start:
            raise HomeError(f"{path} was written while it was read, by one who may not write it: try again.")

    return engine


def _refuse_writes(engine: Engine) -> None:
    @event.listens_for(engine, "begin")
    def refuse(connection: Connection) -> None:
        if connection.dialect.name == "sqlite":
            connection.exec_driver_sql("PRAGMA query_only = ON")
        else:
            connection.exec_driver_sql("SET TRANSACTION READ ONLY")


def backend(url: str) -> str:
    """Returns the kind of database that a URL names: `sqlite`, `postgresql` or another.

    Raises UserError for an invalid URL.
    """
    return parsed(url).get_backend_name()


def writable(path: Path) -> bool:
    """Returns whether SQLite may write the database at `path`, and the files that it makes beside it."""
    return os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)


def read_only_url(url: sa.URL, path: Path) -> sa.URL:
    """Returns a URL for reading the database without write permission (SQLite's "WAL", read-only databases).

    A WAL of a running or earlier writer is read too. Without one, the file is complete, and is opened as immutable,
    since SQLite would otherwise make one.
    """
    immutable = {} if any(_traces(path)[1:]) else {"immutable": "1"}
    return url.set(database=f"file:{quote(str(path.absolute()))}", query={"mode": "ro", "uri": "true"} | immutable)


def read_only(url: str, path: Path) -> str:
    """Returns `read_only_url` as text with the driver, for a library that connects by itself."""
    return str(read_only_url(parsed(url), path).set(drivername="sqlite+pysqlite"))


def _traces(path: Path) -> tuple[int, bool, bool]:
    """Returns the traces of a writer: the file's time of change, whether a WAL is filled, whether a wal-index is
    shared."""
    wal, shared = (path.with_name(f"{path.name}-{suffix}") for suffix in ("wal", "shm"))
    changed = path.stat().st_mtime_ns if path.exists() else 0
    return changed, wal.exists() and wal.stat().st_size > 0, shared.exists()


def filesystem_of(path: Path) -> str:
    """Returns the type of the file system that will hold `path`, or "" if unknown."""
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return ""
    target, best, kind = str(path.absolute()), "", ""
    for line in mounts.read_text().splitlines():
        _, point, filesystem, *_ = line.split(" ")
        inside = point == "/" or target == point or target.startswith(point.rstrip("/") + os.sep)
        if inside and len(point) >= len(best):
            best, kind = point, filesystem
    return kind
