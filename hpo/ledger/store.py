"""The ledger's engine: connections, transactions, retries, the schema's version."""

from __future__ import annotations

import errno
import os
import sqlite3
import tempfile
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.engine import Connection, Engine, make_url

from hpo.errors import DamagedLedger, HomeError, HpoError, NoLedger, StorageError, UserError
from hpo.ledger import damage
from hpo.ledger.sqlite_url import path_of
from hpo.ledger.tables import metadata
from hpo.text import command
from trainer.redaction import ENCODE, redacted_url, unclear

T = TypeVar("T")

SCHEMA_VERSION = "0007"  # the newest of migrations/versions
NETWORK_FILESYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "lustre", "ceph", "afs"}
DATABASE_ERRORS = (exc.SQLAlchemyError, sqlite3.Error)  # what a database raises, through SQLAlchemy or beside it
PATIENCE = 60.0  # seconds for which a database that went away is tried again
BUSY_SECONDS = 30.0  # that SQLite itself waits for a lock, but where two wait for each other

# Errors that pass, and those a user can mend, by the primary result code of SQLite and by SQLSTATE, whose first two
# characters are a class (PostgreSQL documentation, appendix A).
_PASSING_SQLITE = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
_PASSING_SQLSTATE = {"40001", "40P01", "53300", "55P03", "57P01", "57P02", "57P03"}
_REFUSALS = ("password authentication failed", "does not exist", "no pg_hba.conf entry")
_NOT_ALLOWED = "make it readable and writable, or choose another with --home or --storage"
_FIXES = (
    (
        {sqlite3.SQLITE_FULL, "53100"},
        "free some space, then `{resume}` goes on where it stopped; what was acknowledged is kept",
    ),
    (
        {sqlite3.SQLITE_IOERR},
        "its disk or file system has refused to read or write ({cause}); see to that, then `{resume}` goes on where it "
        "stopped; what was acknowledged is kept",
    ),
    (
        {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, "XX001", "XX002"},
        "the file is damaged: restore it from a backup, or choose another --home",
    ),
    (
        {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, "42501", "25006"},
        _NOT_ALLOWED,
    ),
    (
        {sqlite3.SQLITE_ERROR, "42P01", "42703"},  # no such table, no such column
        "it is not a ledger of this platform: name another with --home or --storage",
    ),
)


class Ledger:
    """One database, opened. Threads and processes each get connections of their own.

    `url` is `sqlite:///PATH` (WAL, synchronous FULL) or `postgresql+psycopg://...`. With `create` a missing schema is
    made, without it that is NoLedger; an older one is brought up to date by whoever is to write, with `create` or
    `upgrade`, and refused by a StorageError to those who only read. A server that does not answer is tried
    for `patience` seconds more: by processes that are started for a study, not by commands, whose user may have
    mistyped the URL. A file that is locked answers later: another process makes its tables. Through a `read_only`
    one the database itself lets nothing be written.
    """

    def __init__(
        self,
        url: str,
        *,
        create: bool = True,
        upgrade: bool = False,
        patience: float = 0.0,
        read_only: bool = False,
    ) -> None:
        self.url = url
        self.engine = _engine(url, create)
        weakref.finalize(self, self.engine.dispose).atexit = False  # from 3.13, Python warns of connections left open
        if read_only:
            _refuse_writes(self.engine)
        try:
            with _one_sentence(self):
                self._prepare(create, create or upgrade, patience)
        except BaseException:
            self.close()
            raise

    @property
    def shown(self) -> str:
        """The URL without its password, for messages."""
        return redacted_url(self.url)

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    @contextmanager
    def read(self) -> Generator[Connection]:
        """A consistent view; nothing is written. For commands: processes that live on use `look`."""
        with _one_sentence(self), self._reader.begin() as connection:
            yield connection

    @contextmanager
    def write(self) -> Generator[Connection]:
        """One write transaction, committed at the end of the block. Use `transact` where a retry must be possible."""
        with _one_sentence(self), self._writer.begin() as connection:
            yield connection

    def transact(self, body: Callable[[Connection], T]) -> T:
        """Run `body` in one write transaction and commit; retry when the connection broke or the database was busy.

        The outcome of a commit that broke is unknown, so `body` must be idempotent.
        """
        return self._retrying(self._writer, body)

    def look(self, body: Callable[[Connection], T]) -> T:
        """`body` on a consistent view, retried like `transact`; nothing is written."""
        return self._retrying(self._reader, body)

    def _retrying(self, engine: Engine, body: Callable[[Connection], T], patience: float = PATIENCE) -> T:
        deadline = time.monotonic() + patience
        pause = 0.05
        with _one_sentence(self):
            while True:
                try:
                    with engine.begin() as connection:
                        return body(connection)
                except exc.DBAPIError as error:
                    if not _transient(error) or time.monotonic() > deadline:
                        raise
                time.sleep(pause)
                pause = min(2 * pause, 2.0)

    def close(self) -> None:
        self.engine.dispose()

    def __getstate__(self) -> Any:
        raise TypeError("a Ledger is opened in each process by its URL, never pickled")

    def _prepare(self, create: bool, upgrade: bool, patience: float) -> None:
        self._writer = self.engine.execution_options(hpo_write=True)
        # SQLite's readers see a snapshot anyhow.
        snapshot = {} if self.is_sqlite else {"isolation_level": "REPEATABLE READ"}
        self._reader = self.engine.execution_options(**snapshot)
        version = self._retrying(self.engine, _version, PATIENCE if self.is_sqlite else patience)
        if version == SCHEMA_VERSION:
            return
        if version is None and not create:
            raise NoLedger(f"{self.shown} holds no ledger: run a study first, or name the right --home or --storage.")
        if version is not None and not version.isdecimal():  # as those of ledgers are
            raise StorageError(f"{self.shown} is the database of another program: name one of its own by --storage.")
        if version is not None and version > SCHEMA_VERSION:
            raise StorageError(
                f"{self.shown} was written by a newer release (schema {version}, known {SCHEMA_VERSION}): upgrade hpo."
            )
        if not upgrade:
            raise StorageError(
                f"{self.shown} was written by an older release (schema {version}, now {SCHEMA_VERSION}): "
                f"`{command('resume')}` or `hpo run` upgrades it."
            )
        self.transact(_migrate)


def _parsed(url: str) -> sa.URL:
    try:
        return make_url(url)
    except (exc.ArgumentError, ValueError) as error:  # ValueError for a port that is no number
        shown = f"--storage {redacted_url(url)!r}"
        raise UserError(f"{shown} is not a database URL: use sqlite:///PATH or postgresql+psycopg://...") from error


def _engine(url: str, create: bool) -> Engine:
    shown, parsed = f"--storage {redacted_url(url)!r}", _parsed(url)
    if parsed.get_backend_name() == "sqlite":
        return _sqlite_engine(parsed, path_of(url), create)
    if unclear(url):
        raise UserError(f"{shown} cannot be taken apart: {ENCODE}.")
    if parsed.get_backend_name() == "postgresql":
        try:
            return sa.create_engine(parsed.set(drivername="postgresql+psycopg"), pool_pre_ping=True)
        except ModuleNotFoundError as error:
            raise UserError("PostgreSQL needs psycopg: pip install 'hpo[postgres]'.") from error
    raise UserError(f"{shown} is not supported: use sqlite:///PATH or postgresql+psycopg://...")


def _sqlite_engine(url: sa.URL, path: Path | None, create: bool) -> Engine:
    if path is None:
        raise UserError("--storage needs a file: sqlite:///PATH; a database in memory would not outlive the command.")
    try:
        exists = path.exists()
    except OSError as error:
        raise HomeError(
            f"{path} cannot be used ({error.strerror}): choose another with --home or --storage."
        ) from error
    if not create and not exists:
        raise NoLedger(f"there is no ledger at {path}: run a study first, or name the right --home or --storage.")
    if (kind := filesystem_of(path)) in NETWORK_FILESYSTEMS:
        raise StorageError(f"{path} lies on {kind}, where SQLite's WAL is unsafe: use a local disk or PostgreSQL.")
    read_only = not create and not writable(path)
    url = read_only_url(url, path) if read_only else url
    engine = sa.create_engine(url, connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False})
    found = _traces(path)

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _: Any) -> None:
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
        if "immutable" in url.query and _traces(path) != found:
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
    """The kind of database that a URL names: `sqlite`, `postgresql` or another. Raises UserError for no such URL."""
    return _parsed(url).get_backend_name()


def writable(path: Path) -> bool:
    """Whether SQLite may write the database at `path`, and the files that it makes beside it."""
    return os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)


def read_only_url(url: sa.URL, path: Path) -> sa.URL:
    """The database as one may read it who may not write beside it (SQLite's documentation, "WAL", read-only databases).

    Where a writer is at work, or has left a WAL, that is read too; where there is none the file is all there is, and
    is taken as immutable, since SQLite would otherwise make one.
    """
    immutable = {} if any(_traces(path)[1:]) else {"immutable": "1"}
    return url.set(database=f"file:{quote(str(path.absolute()))}", query={"mode": "ro", "uri": "true"} | immutable)


def read_only(url: str, path: Path) -> str:
    """`read_only_url` as text, which names the driver, for a library that connects by itself."""
    return str(read_only_url(make_url(url), path).set(drivername="sqlite+pysqlite"))


def _traces(path: Path) -> tuple[int, bool, bool]:
    """By what a writer is known: when the file changed, whether a WAL is filled, whether a wal-index is shared."""
    wal, shared = (path.with_name(f"{path.name}-{suffix}") for suffix in ("wal", "shm"))
    changed = path.stat().st_mtime_ns if path.exists() else 0
    return changed, wal.exists() and wal.stat().st_size > 0, shared.exists()


def _version(connection: Connection) -> str | None:
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()


def _migrate(connection: Connection) -> None:
    """Bring the schema to SCHEMA_VERSION; several processes may arrive here at once."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SELECT pg_advisory_xact_lock(7463201)")
    version = _version(connection)
    if version == SCHEMA_VERSION:
        return
    if version is None:
        # The same tables the migrations give (a test compares them), without the cost of importing Alembic.
        metadata.create_all(connection)
        connection.exec_driver_sql("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)")
        connection.exec_driver_sql(f"INSERT INTO alembic_version VALUES ('{SCHEMA_VERSION}')")
        return
    from hpo.ledger.migrations import upgrade

    upgrade(connection)


def filesystem_of(path: Path) -> str:
    """The type of the file system that will hold `path`, or "" where that cannot be told."""
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


def _code(error: exc.DBAPIError) -> int | str | None:
    """SQLite's primary result code or the SQLSTATE; None where the driver itself or the network failed."""
    code = getattr(error.orig, "sqlite_errorcode", None)
    return getattr(error.orig, "sqlstate", None) if code is None else code & 0xFF


def _transient(error: exc.DBAPIError) -> bool:
    """Whether the same may succeed later: the connection broke or could not be made, or others were in the way."""
    if _refused(error):
        return False
    if error.connection_invalidated or getattr(error.orig, "pgconn", None) is not None:
        return True  # psycopg hands over its connection with an error only if that was never made
    code = _code(error)
    return code in _PASSING_SQLITE or code in _PASSING_SQLSTATE or str(code).startswith("08")


def _refused(error: exc.DBAPIError) -> bool:
    """Whether a server that runs does not let this user in, or has no such database; libpq gives no code for it."""
    said = str(error.orig)
    return getattr(error.orig, "pgconn", None) is not None and any(words in said for words in _REFUSALS)


def _storage_error(ledger: Ledger, error: exc.DBAPIError) -> HpoError:
    if _refused(error):
        said = str(error.orig).strip().splitlines()[0]
        return UserError(
            f"the ledger {ledger.shown} is not open to you ({said}): check user, password and database in the URL of "
            "--storage, HPO_STORAGE or HPO_STORAGE_FILE, where / : @ # and % in a password are percent-encoded."
        )
    code, unknown = _code(error), "check that the database runs and can be reached"
    unread = code is None or "malformed JSON" in str(
        error.orig
    )  # None of text that is no UTF-8: the driver repeats all
    if unread and (damaged := _misread(ledger)):
        return damaged
    fix = next((fix for codes, fix in _FIXES if code in codes), unknown)
    cause = _cause(Path(ledger.engine.url.database or "")) if code == sqlite3.SQLITE_IOERR else ""
    fix = _NOT_ALLOWED if cause == os.strerror(errno.EPERM) else fix
    kind = HomeError if fix is _NOT_ALLOWED else StorageError
    fix = fix.format(resume=command("resume"), cause=cause)
    return kind(f"the ledger {ledger.shown} failed ({str(error.orig).strip().splitlines()[0]}): {fix}.")


def _cause(path: Path) -> str:
    """Why SQLite cannot use its files at `path`, which it does not tell: by what happens to one who tries."""
    try:
        for file in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
            if file.exists():
                os.close(os.open(file, os.O_RDWR))
        with tempfile.TemporaryFile(dir=path.parent) as probe:
            probe.write(bytes(1 << 16))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        allowed = error.errno not in (errno.EPERM, errno.EACCES, errno.EROFS)
        return os.strerror(error.errno or 0) if allowed else os.strerror(errno.EPERM)
    return "the system's log may say why: the disk itself, a quota, or a right that was taken away"


# What code that trusts the ledger's rows raises where one of them is not what it should be.
_MISREAD = (AttributeError, LookupError, TypeError, ValueError)


def _misread(ledger: Ledger) -> DamagedLedger | None:
    """The error that names a damaged value of the ledger; None where there is none, and the fault is another."""
    try:
        with ledger.engine.connect() as connection:
            damaged = damage.first(connection)
    except exc.DBAPIError:  # a ledger that cannot be read through at all: what went wrong first is raised
        return None
    if not damaged:
        return None
    return DamagedLedger(
        f"the ledger {ledger.shown} is damaged: {damaged}: restore the file from a backup, or choose another --home."
    )


@contextmanager
def _one_sentence(ledger: Ledger) -> Generator[None]:
    try:
        yield
    except exc.DBAPIError as error:
        raise _storage_error(ledger, error) from error
    except _MISREAD as error:
        if (damaged := _misread(ledger)) is None:
            raise
        raise damaged from error
