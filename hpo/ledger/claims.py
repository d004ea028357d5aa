"""Claims trials for a worker, renews their leases, and tells the worker when one is lost.

Holds bodies for `Ledger.transact`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from sqlalchemy import func, select, update
from sqlalchemy.engine import Connection, Row

from hpo.ledger import quotas
from hpo.ledger.database import statements as sql
from hpo.ledger.database.tables import attempts, studies, trials
from hpo.ledger.read import every
from hpo.ledger.rows import NumberedCheckpoint
from trainer.errors import Fenced

if TYPE_CHECKING:
    from hpo.space.trial_config import TrialShape

_Taken: TypeAlias = "Row[*tuple[Any, ...]]"  # a trial's row, as statements.TAKE returns it
Alike = Callable[[Mapping[str, Any], Mapping[str, Any]], bool]
_LOOKED_AT = 256  # waiting trials that are compared when looking for similar ones
_COMPANY = 2  # losses in a row after which a trial trains alone: if it kills its worker, no other trial is lost


@dataclass(frozen=True)
class Claim:
    """A trial taken by a worker; `fence` is its proof in every later transaction."""

    trial_id: int
    study_id: int
    number: int
    fence: int
    high_step: int  # the highest reported by earlier attempts
    params: Mapping[str, Any]
    config: Mapping[str, Any]
    config_hash: str
    lease_seconds: float  # it is lost after this time without a renewal
    committed: tuple[NumberedCheckpoint, ...]  # the kept ones, newest first
    changes: Mapping[str, Any]  # set by a restart: path -> value, on top of `config`
    isolated: bool = False  # whether it may have killed its workers

    @classmethod
    def of(cls, json: Mapping[str, Any]) -> Claim:
        """Returns the claim from the `json` that `dataclasses.asdict` makes of one."""
        committed = tuple(NumberedCheckpoint(**row) for row in json["committed"])
        fields: dict[str, Any] = {**json, "committed": committed}
        return cls(**fields)

    @cached_property
    def shape(self) -> TrialShape:
        """Returns the shape of the trial's training."""
        from hpo.space.trial_config import TrialShape  # imports the trainer's configuration, which few readers need

        return TrialShape.of(self.config, self.changes)


def claim(connection: Connection, worker_id: str, token: str, among: Collection[int], n: int = 1) -> list[Claim]:
    """Takes up to `n` waiting trials of the studies `among`, lowest numbers first, each with a new fence.

    The caller makes a `token` for each claim: with it a retry finds what the first try took. Takes no more than the
    quotas of the studies' owners allow, except a trial before one that trains, since that one may wait for it.
    """
    taken = connection.execute(sql.CLAIMED, {"studies": list(among), "token": token}).all()
    if not taken:
        room = quotas.room(connection, among)
        with_room = [study_id for study_id in among if room.get(study_id, 0) >= 1]
        most = int(min([n, *(room[study_id] for study_id in with_room)]))
        waiting_ids = connection.execute(sql.WAITING, {"n": most, "studies": with_room}).scalars().all()
        if not waiting_ids and len(with_room) < len(among):
            waiting_ids = connection.execute(sql.OVERDUE, {"n": 1, "studies": list(among)}).scalars().all()
        taken = [_take(connection, worker_id, token, trial_id) for trial_id in waiting_ids]
    return [_claim(connection, row) for row in taken]


def open_trials(connection: Connection, study_id: int) -> tuple[int, int]:
    """Returns how many trials of the study wait, and how many train.

    It only reads, unlike a transaction that would have to wait for the writers.
    """
    of_state = select(trials.c.state, func.count()).where(trials.c.study_id == study_id).group_by(trials.c.state)
    rows = connection.execute(of_state.where(trials.c.state.in_(("waiting", "running")))).all()
    counts = {row[0]: row[1] for row in rows}
    return counts.get("waiting", 0), counts.get("running", 0)


def any_news(connection: Connection, among: Collection[int]) -> bool:
    """Returns whether a trial of these studies waits, or one has ended; it only reads, like `open_trials`."""
    waiting = select(trials.c.id).where(trials.c.study_id.in_(among), trials.c.state == "waiting").limit(1)
    ended = select(studies.c.id).where(studies.c.id.in_(among), studies.c.state != "open").limit(1)
    return any(connection.execute(query).first() is not None for query in (waiting, ended))


def claim_alike(
    connection: Connection, worker_id: str, token: str, study_id: int, group: str, n: int, alike: Alike, in_order: bool
) -> list[Claim]:
    """Claims up to `n` waiting trials of the study that are `alike`, for `group`.

    Compares configurations and a restart's changes. Lowest numbers come first; with `in_order`, stops at the first
    trial that is not alike. A trial that must train alone is like no other.
    """
    scope = {"studies": [study_id]}
    taken = connection.execute(sql.CLAIMED, scope | {"token": token}).all()
    if taken:
        return [_claim(connection, row) for row in taken]
    n = int(min(n, quotas.room(connection, [study_id])[study_id]))
    for trial_id in connection.execute(sql.WAITING, {"n": _LOOKED_AT, **scope}).scalars().all():
        if len(taken) == n:
            break
        asked_row = connection.execute(sql.ASKED, {"trial": trial_id}).one()
        if asked_row.losses < _COMPANY and alike(asked_row.config, changes_of(connection, trial_id)):
            taken = [*taken, _take(connection, worker_id, token, trial_id, group)]
        elif in_order:
            break
    return [_claim(connection, row) for row in taken]


def join(connection: Connection, taken: Claim, group: str) -> None:
    """Records that a singly claimed trial trains in `group`."""
    this_attempt = (trials.c.id == taken.trial_id) & (trials.c.fence == taken.fence)
    connection.execute(update(trials).where(this_attempt).values(group=group, revision=trials.c.revision + 1))


def take(connection: Connection, worker_id: str, token: str, trial_id: int) -> Claim:
    """Claims that waiting trial with a new fence; `token` is as for `claim`, and `taken` finds the trial in a retry."""
    return _claim(connection, _take(connection, worker_id, token, trial_id))


def taken(connection: Connection, token: str, study_id: int) -> Claim | None:
    """Returns the trials of the claim with this token, if it was committed."""
    row = connection.execute(sql.CLAIMED, {"studies": [study_id], "token": token}).first()
    return None if row is None else _claim(connection, row)


def _take(connection: Connection, worker_id: str, token: str, trial_id: int, group: str | None = None) -> _Taken:
    now = time.time()
    row = connection.execute(sql.TAKE, {"trial": trial_id, "now": now, "of_group": group}).one()
    kept, _ = _committed(connection, row)
    from_step = kept[0].step if kept else 0
    attempt = {"trial_id": trial_id, "fence": row.fence, "worker_id": worker_id, "claim": token, "started_at": now}
    connection.execute(sql.INSERT_ATTEMPT, attempt | {"from_step": from_step, "step": from_step})
    return row


def _claim(connection: Connection, row: _Taken) -> Claim:
    kept, changes = _committed(connection, row)
    params, config, config_hash, lease_seconds, losses = connection.execute(sql.ASKED, {"trial": row.id}).one()
    return Claim(
        trial_id=row.id,
        study_id=row.study_id,
        number=row.number,
        fence=row.fence,
        high_step=row.step,
        params={**params, **changes},
        config=config,
        config_hash=config_hash,
        lease_seconds=lease_seconds,
        committed=kept,
        changes=changes,
        isolated=losses >= _COMPANY,
    )


def _committed(connection: Connection, row: _Taken) -> tuple[tuple[NumberedCheckpoint, ...], Mapping[str, Any]]:
    """Returns the checkpoints that an attempt may start from, newest first, and the values set by a restart.

    Checkpoints saved before a restart count as older than the restart's own; the checkpoint that the trial was asked to
    begin from is the oldest.
    """
    first = [_source(connection, row.study_id, row.start)] if row.start else []
    if row.fence == 1:
        return tuple(first), {}
    kept_rows = every(NumberedCheckpoint, connection.execute(sql.KEPT, {"trial": row.id}))
    restart = connection.execute(sql.RESTART, {"trial": row.id}).first()
    if restart is None:
        return (*kept_rows, *first), {}
    start = _source(connection, row.study_id, restart.checkpoint)
    since = [kept for kept in kept_rows if kept.fence > restart.obeyed]
    before = [kept for kept in kept_rows if kept.fence <= restart.obeyed]
    return (*since, start, *before, *first), restart.params


def begin_earlier(connection: Connection, taken: Claim) -> None:
    """Records where the attempt actually begins if its intended checkpoint is damaged."""
    columns = (trials.c.id, trials.c.study_id, trials.c.number, trials.c.start, trials.c.fence)
    row = connection.execute(select(*columns).where(trials.c.id == taken.trial_id)).one()
    kept, _ = _committed(connection, row)
    step = kept[0].step if kept else 0
    this_attempt = (attempts.c.trial_id == taken.trial_id) & (attempts.c.fence == taken.fence)
    unmoved = attempts.c.step == attempts.c.from_step
    connection.execute(update(attempts).where(this_attempt, unmoved).values(from_step=step, step=step))


def _source(connection: Connection, study_id: int, checkpoint: str) -> NumberedCheckpoint:
    return NumberedCheckpoint(*connection.execute(sql.SOURCE, source(study_id, checkpoint)).one())


def changes_of(connection: Connection, trial_id: int) -> Mapping[str, Any]:
    """Returns path -> value as set by the trial's last restart, on top of its configuration."""
    restart = connection.execute(sql.RESTART, {"trial": trial_id}).first()
    return {} if restart is None else restart.params


def source(study_id: int, checkpoint: str) -> dict[str, Any]:
    """Returns the parameters that find a verdict's checkpoint, `<trial number>/<path>`."""
    number, _, path = checkpoint.partition("/")
    return {"study": study_id, "trial_number": int(number), "directory": path}


def renew(connection: Connection, taken: Claim) -> None:
    """Records that the worker is alive; raises Fenced if the trial belongs to another attempt."""
    if not renewed(connection, taken):
        raise fenced(taken)


def renewed(connection: Connection, taken: Claim) -> bool:
    """Records that the worker is alive; returns False if the trial belongs to another attempt."""
    return connection.execute(sql.RENEW, {"trial": taken.trial_id, "held": taken.fence}).rowcount == 1


def fenced(taken: Claim) -> Fenced:
    """Returns the error for a trial that belongs to another attempt."""
    return Fenced(f"trial {taken.number} was taken from this attempt (fence {taken.fence}).")


def bump(connection: Connection, taken: Claim) -> int:
    """Returns the next revision of the trial. Raises Fenced if another attempt has it."""
    revision = connection.execute(sql.BUMP, {"trial": taken.trial_id, "held": taken.fence}).scalar()
    if revision is None:
        raise fenced(taken)
    return revision
