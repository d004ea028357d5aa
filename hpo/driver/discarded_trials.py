"""Discards trials without a value after the declaration has changed, so that the study begins anew.

Until a trial has a value, a changed declaration invalidates no result. The trials leave the ledger in one transaction,
which gives the study a new uid; their files are deleted afterwards, before any new trial is asked for.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from hpo.clock import Clock
from hpo.declaration import content, release_0_1
from hpo.declaration.identity import drift, identity
from hpo.declaration.resolved import ResolvedStudy
from hpo.driver.open import check_home, open_study
from hpo.driver.reclaim import Reclaimer
from hpo.driver.request import DriverOptions
from hpo.errors import DriftError
from hpo.ledger import Ledger, removal
from hpo.ledger.leases import Lease, acquire
from hpo.ledger.process_id import Process
from hpo.ledger.rows import Connection, StudyRow
from hpo.ledger.views import driver as driver_queries
from hpo.storage.home import Home
from hpo.storage.removal import remove_trials
from hpo.terminal import print
from hpo.text import counted
from hpo.tracking.mirror import LEASE_TIMEOUT
from hpo.tracking.trackers import leases_of
from trainer.runtime.failpoint import failpoint


def take_over(ledger: Ledger, resolved: ResolvedStudy, options: DriverOptions, lease: Lease, clock: Clock) -> StudyRow:
    """Returns the study's row, in its home, for the driver that holds `lease`.

    The study begins anew if its declaration has changed and no trial has a value. Raises as `open_study` and
    `check_home` do.
    """
    row = open_study(ledger, resolved, options, anew=True, held=True)
    check_home(ledger, row, options.home)
    if release_0_1.began(row.identity):
        print(release_0_1.notice(row.name, resolved.spec.behaviour), file=sys.stderr)
    now = identity(resolved)
    changed = [] if options.allow_drift else drift(row.identity, now, partial(content.code, resolved.study))
    if changed:
        values = {"spec": resolved.spec.to_json(), "identity": now}
        _set_aside(ledger, lease, row, values, changed, clock, options.lease_timeout)
    if _clear(ledger, lease, row, options.home) or changed:
        row = open_study(ledger, resolved, options, held=True)
        check_home(ledger, row, options.home)
    return row


def _set_aside(
    ledger: Ledger,
    lease: Lease,
    row: StudyRow,
    values: Mapping[str, object],
    changed: Sequence[str],
    clock: Clock,
    timeout: float,
) -> None:
    """Begins the study anew with `values` for its row.

    Raises DriftError if a live worker still trains one of its trials, and Busy while its mirror runs.
    """
    Reclaimer(ledger, row.id, clock, timeout).reclaim(counted=False)
    if going := ledger.look(lambda connection: driver_queries.running(connection, row.id)):
        trial = going[0]
        raise DriftError(
            f"study {row.name!r} has changed ({'; '.join(changed)}), and trial {trial.number} is still being "
            f"trained by host {trial.host}, pid {trial.pid}: wait for it or stop it."
        )
    new = {**values, "uid": uuid.uuid4().hex}
    me, leases = Process.current(), [lease]

    def body(connection: Connection) -> int:
        for taken in leases:
            taken.check(connection)
        return removal.set_aside(connection, row, new, list(changed))

    try:
        for name in leases_of(row):
            leases.append(acquire(ledger, name, row.name, me, clock, LEASE_TIMEOUT))
        count = ledger.transact(body)
    finally:
        for taken in leases[1:]:
            taken.release()
    failpoint("removal.after_set_aside")
    if count:
        print(
            f"study {row.name!r} has no trial with a value, and {'; '.join(changed)}: {counted(count, 'trial')} "
            f"set aside, and it begins anew with trial 0.",
            file=sys.stderr,
        )


def _clear(ledger: Ledger, lease: Lease, row: StudyRow, home: Home) -> bool:
    """Removes the files of trials set aside, also by a driver that was killed; returns whether there were any."""
    uids = ledger.look(lambda connection: removal.uncleared(connection, row.id))
    for uid in uids:
        remove_trials(home, replace(row, uid=uid))
        lease.write(lambda connection, uid=uid: removal.cleared(connection, row.id, uid))
    return bool(uids)
