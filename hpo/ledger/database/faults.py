"""Distinguishes passing errors of the database from lasting ones, and turns each into a sentence with its fix."""

from __future__ import annotations

import errno
import os
import re
import sqlite3
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import exc

from hpo.door import option
from hpo.errors import DamagedLedger, HomeError, HpoError, StorageAway, StorageError, UserError
from hpo.ledger.database import damage
from hpo.text import command

if TYPE_CHECKING:
    from hpo.ledger.database.store import Ledger

DATABASE_ERRORS = (exc.SQLAlchemyError, sqlite3.Error)  # errors that a database raises, through SQLAlchemy or directly

# Passing errors, and those a user can fix, by the primary result code of SQLite and by SQLSTATE, whose first two
# characters are a class (PostgreSQL documentation, appendix A).
_PASSING_SQLITE = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
_PASSING_SQLSTATE = {"40001", "40P01", "53300", "55P03", "57P01", "57P02", "57P03"}
_CONTENTION = {"40001", "40P01", "55P03"}  # another transaction was in the way
_FULL = ("too many clients", "too many connections", "remaining connection slots are reserved")
_PLAIN = "no encryption"  # how a refusal of pg_hba.conf ends that may hold for connections without TLS alone
_REFUSALS = ("password authentication failed", "does not exist", "no pg_hba.conf entry")
# Connections that the client gives up by the parameters of its URL, or the server by its certificates. Waiting helps
# with none of them. The patterns are searched in libpq's answer without what it quotes.
_PARAMETERS = "sslmode, sslrootcert, sslcert and sslkey"
_UNMET = (
    (
        "certificate verify failed",
        "name the file of the authority that has signed the server's certificate as sslrootcert",
    ),
    ("does not match host name", "name the host as the server's certificate does"),
    ("does not support SSL", "turn TLS on in the server (ssl = on), or ask for less by sslmode"),
    ("certificate|unknown ca|private key file|SSL protocol version", f"correct {_PARAMETERS}"),
    ("connection is bad: (?:invalid|weak) |invalid connection option", "correct that parameter"),
)
_NOT_ALLOWED = "make it readable and writable, or choose another with {home} or {storage}"
_NO_RIGHT = "use a role that may write there, on a server that takes writes, or choose another ledger with {storage}"
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
        "the file is damaged: restore it from a backup, or choose another {home}",
    ),
    ({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM}, _NOT_ALLOWED),
    ({"42501", "25006"}, _NO_RIGHT),  # insufficient privilege, a server that only reads
    (
        {sqlite3.SQLITE_ERROR, "42P01", "42703"},  # no such table, no such column
        "it is not a ledger of this platform: name another with {home} or {storage}",
    ),
)


def _code(error: exc.DBAPIError) -> int | str | None:
    """Returns SQLite's primary result code or the SQLSTATE; None if the driver itself or the network failed."""
    code = getattr(error.orig, "sqlite_errorcode", None)
    return getattr(error.orig, "sqlstate", None) if code is None else code & 0xFF


def is_transient(error: exc.DBAPIError) -> bool:
    """Returns True if a retry may succeed: the connection broke or failed, or the database was busy."""
    if _refused(error) or _unmet(error):
        return False
    if error.connection_invalidated or getattr(error.orig, "pgconn", None) is not None:
        return True  # psycopg passes its connection with an error only if that was never made
    code = _code(error)
    if code is None:  # psycopg's operational errors have no SQLSTATE if the server did not answer
        return isinstance(error, exc.OperationalError) and not isinstance(error.orig, sqlite3.Error)
    return code in _PASSING_SQLITE or code in _PASSING_SQLSTATE or str(code).startswith("08")


def is_away(error: exc.DBAPIError) -> bool:
    """Returns True if a server does not answer, or has no connection left; a process of a study waits for it."""
    return isinstance(code := _code(error), str | None) and code not in _CONTENTION and is_transient(error)


def unanswered(error: exc.DBAPIError) -> str:
    """Returns how a server fails to answer, as a clause about it."""
    answer = _answer(error)
    if is_full(error):
        return f"has no connection left for this process ({answer}): raise its max_connections, or start fewer workers"
    return f"does not answer ({answer})"


def is_full(error: exc.DBAPIError) -> bool:
    """Returns True if the server has no connection left, which others may not notice."""
    return any(words in str(error.orig) for words in _FULL)


def _answer(error: exc.DBAPIError) -> str:
    return str(error.orig).strip().splitlines()[0]


def _unmet(error: exc.DBAPIError) -> tuple[str, str] | None:
    """Returns the answer and the fix if a connection cannot be as its URL demands, such as verified; else None."""
    if isinstance(error.orig, sqlite3.Error) or _code(error) is not None:  # a statement, of a connection that was made
        return None
    for line in str(error.orig).splitlines():
        for pattern, fix in _UNMET:
            if re.search(pattern, re.sub('"[^"]*"', "", line)):
                return line.strip(), fix
    return None


def _refused(error: exc.DBAPIError) -> bool:
    """Returns True if a server rejects this user or has no such database; libpq gives no code for that."""
    answer = str(error.orig)
    return getattr(error.orig, "pgconn", None) is not None and any(words in answer for words in _REFUSALS)


def _storage_error(ledger: Ledger, error: exc.DBAPIError) -> HpoError:
    if (unmet := _unmet(error)) is not None:
        answer, fix = unmet
        return UserError(
            f"the ledger {ledger.shown} cannot be connected to as its URL demands ({answer}): {fix} in the URL of "
            f"{option('storage')}, HPO_STORAGE or HPO_STORAGE_FILE."
        )
    if _refused(error):
        answer = _answer(error)
        parts = "user, password, database and sslmode" if answer.endswith(_PLAIN) else "user, password and database"
        return UserError(
            f"the ledger {ledger.shown} is not open to you ({answer}): check {parts} in the URL of "
            f"{option('storage')}, HPO_STORAGE or HPO_STORAGE_FILE, where / : @ # and % in a password are "
            "percent-encoded."
        )
    code, unknown = _code(error), "check that the database runs and can be reached"
    if is_away(error):
        kind, fix = (StorageError, "") if is_full(error) else (StorageAway, f": {unknown}")
        return kind(f"the ledger {ledger.shown} {unanswered(error)}{fix}.")
    # The code is None for text that is not UTF-8: the driver repeats the statement's text.
    unread = code is None or "malformed JSON" in str(error.orig)
    if unread and (damaged := _misread(ledger)):
        return damaged
    fix = next((fix for codes, fix in _FIXES if code in codes), unknown)
    cause = _cause(Path(ledger.engine.url.database or "")) if code == sqlite3.SQLITE_IOERR else ""
    fix = _NOT_ALLOWED if cause == os.strerror(errno.EPERM) else fix
    kind = HomeError if fix in (_NOT_ALLOWED, _NO_RIGHT) else StorageError
    fix = fix.format(home=option("home"), storage=option("storage"), resume=command("resume"), cause=cause)
    return kind(f"the ledger {ledger.shown} failed ({_answer(error)}): {fix}.")


def _cause(path: Path) -> str:
    """Returns why SQLite cannot use its files at `path`. SQLite does not report it, so the files are tested."""
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


# The errors of code that trusts the ledger's rows, raised when one of them is wrong.
_MISREAD = (AttributeError, LookupError, TypeError, ValueError)


def _misread(ledger: Ledger) -> DamagedLedger | None:
    """Returns the error that names a damaged value of the ledger; None if there is none, so that the cause is
    another."""
    try:
        with ledger.engine.connect() as connection:
            damaged = damage.first(connection)
    except exc.DBAPIError:  # the ledger cannot be read completely: the first error is raised
        return None
    if not damaged:
        return None
    return DamagedLedger(
        f"the ledger {ledger.shown} is damaged: {damaged}: restore the file from a backup, or choose another "
        f"{option('home')}."
    )


@contextmanager
def one_sentence(ledger: Ledger) -> Generator[None]:
    """Converts the database's errors within the block to errors of one sentence."""
    try:
        yield
    except exc.DBAPIError as error:
        raise _storage_error(ledger, error) from error
    except _MISREAD as error:
        if (damaged := _misread(ledger)) is None:
            raise
        raise damaged from error
