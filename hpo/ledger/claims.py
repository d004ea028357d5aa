"""Claims trials for a worker, renews their leases, and tells the worker when one is lost. Bodies for
`Ledger.transact`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from sqlalchemy import func, select, update
from sqlalchemy.engine import Connection, Row

from hpo.ledger import statements as sql
from hpo.ledger.tables import attempts, trials
from trainer.errors import Fenced

_Taken: TypeAlias = "Row[*tuple[Any, ...]]"  # of a trial, as statements.TAKE returns it
Alike = Callable[[Mapping[str, Any], Mapping[str, Any]], bool]
_LOOKED_AT = 256  # waiting trials, for those that are alike
_COMPANY = 2  # losses of workers in a row by which a trial trains alone: one that kills its worker takes no other along


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
    lease_seconds: float  # without a renewal for so long, it is lost
    committed: tuple[Mapping[str, Any], ...]  # rows of kept checkpoints and the `number` of their trial, newest first
    changes: Mapping[str, Any]  # what a restart has set: path -> value, on top of `config`
    alone: bool = False  # whether it may be what its workers died of


def claim(connection: Connection, worker_id: str, token: str, among: Collection[int], n: int = 1) -> list[Claim]:
    """Take up to `n` waiting trials of the studies `among`, lowest numbers first, each with a new fence.

    `token` is made by the caller, once per claim: a retry finds by it what the first try took.
    """
    scope = {"studies": list(among)}
    taken = connection.execute(sql.CLAIMED, scope | {"token": token}).all()
    if not taken:
        found = connection.execute(sql.WAITING, {"n": n, **scope}).scalars().all()
        taken = [_take(connection, worker_id, token, trial_id) for trial_id in found]
    return [_claim(connection, row) for row in taken]


def open_trials(connection: Connection, study_id: int) -> tuple[int, int]:
    """How many trials of the study wait, and how many train: a look, before a transaction that would have to wait for
    the writers."""
    of_state = select(trials.c.state, func.count()).where(trials.c.study_id == study_id).group_by(trials.c.state)
    rows = connection.execute(of_state.where(trials.c.state.in_(("waiting", "running")))).all()
    counts = {row[0]: row[1] for row in rows}
    return counts.get("waiting", 0), counts.get("running", 0)


def any_waiting(connection: Connection, among: Collection[int]) -> bool:
    """Whether a trial of these studies waits: a look, before a transaction that would have to wait for the writers."""
    waiting = select(trials.c.id).where(trials.c.study_id.in_(among), trials.c.state == "waiting").limit(1)
    return connection.execute(waiting).first() is not None


def claim_alike(
    connection: Connection, worker_id: str, token: str, study_id: int, group: str, n: int, alike: Alike, in_order: bool
) -> list[Claim]:
    """Take up to `n` waiting trials of the study for the lanes of `group`, lowest numbers first, whose configuration,
    and what a restart has set on top of it, is `alike`; `in_order` none beyond one that is not. What is to train alone
    is like no other."""
    scope = {"studies": [study_id]}
    taken = connection.execute(sql.CLAIMED, scope | {"token": token}).all()
    if taken:
        return [_claim(connection, row) for row in taken]
    for trial_id in connection.execute(sql.WAITING, {"n": _LOOKED_AT, **scope}).scalars().all():
        asked = connection.execute(sql.ASKED, {"trial": trial_id}).one()
        if asked.losses < _COMPANY and alike(asked.config, changes_of(connection, trial_id)):
            taken = [*taken, _take(connection, worker_id, token, trial_id, group)]
        elif in_order:
            break
        if len(taken) == n:
            break
    return [_claim(connection, row) for row in taken]


def join(connection: Connection, taken: Claim, group: str) -> None:
    """Note that a trial which was claimed alone trains as a lane of `group`."""
    mine = (trials.c.id == taken.trial_id) & (trials.c.fence == taken.fence)
    connection.execute(update(trials).where(mine).values(group=group, revision=trials.c.revision + 1))


def take(connection: Connection, worker_id: str, token: str, trial_id: int) -> Claim:
    """That waiting trial, with a new fence; `token` as for `claim`, by `taken` a retry finds it."""
    return _claim(connection, _take(connection, worker_id, token, trial_id))


def taken(connection: Connection, token: str, study_id: int) -> Claim | None:
    """What the claim of this token took, if it went through."""
    row = connection.execute(sql.CLAIMED, {"studies": [study_id], "token": token}).first()
    return None if row is None else _claim(connection, row)


def _take(connection: Connection, worker_id: str, token: str, trial_id: int, group: str | None = None) -> _Taken:
    now = time.time()
    row = connection.execute(sql.TAKE, {"trial": trial_id, "now": now, "lanes_of": group}).one()
    kept, _ = _committed(connection, row)
    from_step = kept[0]["step"] if kept else 0
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
        alone=losses >= _COMPANY,
    )


def _committed(connection: Connection, row: _Taken) -> tuple[tuple[Mapping[str, Any], ...], Mapping[str, Any]]:
    """The checkpoints an attempt may start from, newest first, and what a restart has set.

    What a trial saved before it was restarted is older than the checkpoint it was restarted from, and the one that it
    was asked to begin from is the oldest.
    """
    first = [_source(connection, row.study_id, row.start)] if row.start else []
    if row.fence == 1:
        return tuple(first), {}
    own = [{**kept, "number": row.number} for kept in connection.execute(sql.KEPT, {"trial": row.id}).mappings()]
    restart = connection.execute(sql.RESTART, {"trial": row.id}).first()
    if restart is None:
        return (*own, *first), {}
    start = _source(connection, row.study_id, restart.checkpoint)
    since = [kept for kept in own if kept["fence"] > restart.obeyed]
    before = [kept for kept in own if kept["fence"] <= restart.obeyed]
    return (*since, start, *before, *first), restart.params


def begin_earlier(connection: Connection, taken: Claim) -> None:
    """Say where the attempt begins after all, now that a checkpoint which it was to begin from is damaged."""
    columns = (trials.c.id, trials.c.study_id, trials.c.number, trials.c.start, trials.c.fence)
    row = connection.execute(select(*columns).where(trials.c.id == taken.trial_id)).one()
    kept, _ = _committed(connection, row)
    step = kept[0]["step"] if kept else 0
    this = (attempts.c.trial_id == taken.trial_id) & (attempts.c.fence == taken.fence)
    unmoved = attempts.c.step == attempts.c.from_step
    connection.execute(update(attempts).where(this, unmoved).values(from_step=step, step=step))


def _source(connection: Connection, study_id: int, checkpoint: str) -> Mapping[str, Any]:
    return dict(connection.execute(sql.SOURCE, source(study_id, checkpoint)).mappings().one())


def changes_of(connection: Connection, trial_id: int) -> Mapping[str, Any]:
    """What the last restart of the trial has set: path -> value, on top of its configuration."""
    restart = connection.execute(sql.RESTART, {"trial": trial_id}).first()
    return {} if restart is None else restart.params


def source(study_id: int, checkpoint: str) -> dict[str, Any]:
    """Where a verdict's checkpoint, `<trial number>/<path>`, is found."""
    number, _, path = checkpoint.partition("/")
    return {"study": study_id, "trial_number": int(number), "directory": path}


def renew(connection: Connection, taken: Claim) -> None:
    """Show that the worker is alive; raise Fenced if the trial is another's."""
    if not renewed(connection, taken):
        raise fenced(taken)


def renewed(connection: Connection, taken: Claim) -> bool:
    """Show that the worker is alive; False if the trial is another's."""
    return connection.execute(sql.RENEW, {"trial": taken.trial_id, "held": taken.fence}).rowcount == 1


def fenced(taken: Claim) -> Fenced:
    """What to raise where the trial is another's."""
    return Fenced(f"trial {taken.number} was taken from this attempt (fence {taken.fence}).")
