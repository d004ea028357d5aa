"""Records who did what to which study: a guard against mistakes, not a proof, since trials can write it too.

An entry is written in the transaction of what it records, or beside it, and outlives its study.
"""

from __future__ import annotations

import getpass
import os
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from sqlalchemy import func, select

from hpo.door import option, typed
from hpo.errors import UserError
from hpo.ledger.database.statements import insert_new
from hpo.ledger.database.tables import audit, studies
from hpo.ledger.read import every
from hpo.ledger.rows import Connection, StudyRow
from trainer.redaction import redacted

Action = Literal["run", "resume", "stop", "rm", "promote", "tag"]
_LONGEST = 2000  # characters of a command
_COLUMNS = ("at", "study", "action", "user", "role", "host", "command")


@dataclass(frozen=True, slots=True)
class AuditRow:
    """An entry of the record of who did what; the table `audit` describes its columns."""

    at: float
    study: str
    action: str
    user: str
    role: str | None
    host: str
    command: str


@dataclass(frozen=True)
class Entry:
    """A deed of this process; made outside of its transaction, so that a retry writes it once."""

    study: str
    action: Action
    uid: str = field(default_factory=lambda: uuid.uuid4().hex)
    at: float = field(default_factory=time.time)

    def write(self, connection: Connection) -> None:
        """Records the deed with the user of the system, the role in a server, the host and the command."""
        role = _role(connection)
        values = {"uid": self.uid, "at": self.at, "study": self.study, "action": self.action, "role": role}
        values |= {"user": user()[:250], "host": socket.gethostname(), "command": redacted(typed())[:_LONGEST]}
        connection.execute(insert_new(connection, audit), values)


_BEGUN = (audit.c.study == studies.c.name) & (audit.c.action == "run") & (audit.c.at >= studies.c.created_at)
# The person who began a study: the role of the server, or without one the user of the system; null if nobody knows.
OWNER = (
    select(func.coalesce(audit.c.role, audit.c.user))
    .where(_BEGUN)
    .order_by(audit.c.id)
    .limit(1)
    .correlate(studies)
    .scalar_subquery()
)


def check_owner(connection: Connection, study: StudyRow, *, as_owner: bool) -> None:
    """Raises UserError if somebody else began the study, unless the caller says so by `as_owner`."""
    owner = connection.execute(select(OWNER).where(studies.c.id == study.id)).scalar()
    caller = _role(connection) or user()
    if owner is not None and owner != caller and not as_owner:
        raise UserError(
            f"study {study.name!r} was begun by {owner}, and you are {caller}: ask, then repeat the command with "
            f"{option('as_owner')}."
        )


def _role(connection: Connection) -> str | None:
    return None if connection.dialect.name == "sqlite" else connection.execute(select(func.current_user())).scalar()


def user() -> str:
    """Returns the name of this process's user, its number where the system knows no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def entries(connection: Connection, study: str | None, last: int) -> Sequence[AuditRow]:
    """Returns the `last` entries, of one study or of all, oldest first."""
    query = select(*(audit.c[name] for name in _COLUMNS)).order_by(audit.c.id.desc()).limit(last)
    return every(AuditRow, connection.execute(query if study is None else query.where(audit.c.study == study)))[::-1]
