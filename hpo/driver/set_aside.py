"""Sets trials aside that came to no value, where the declaration has changed since: the study begins anew.

Until a trial has a value, nothing has been learnt that another declaration could spoil. The trials leave the ledger in
one transaction, with a new uid for the study; their files go after it, before anything new is asked for.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from hpo.clock import Clock
from hpo.declaration import release_0_1
from hpo.declaration.identity import drift, identity
from hpo.declaration.resolved import ResolvedStudy
from hpo.driver.open import check_home, open_study
from hpo.driver.reclaim import Reclaimer
from hpo.driver.request import DriverOptions
from hpo.errors import DriftError
from hpo.ledger import Ledger, removal
from hpo.ledger.leases import Lease, acquire
from hpo.ledger.process_id import Process
from hpo.ledger.rows import Connection, RowMapping
from hpo.storage.home import Home
from hpo.storage.removal import remove_trials
from hpo.terminal import print
from hpo.text import counted
from hpo.tracking.mirror import LEASE_TIMEOUT
from hpo.tracking.trackers import leases_of
from trainer.runtime.failpoint import failpoint


def take_over(
    ledger: Ledger, resolved: ResolvedStudy, options: DriverOptions, lease: Lease, clock: Clock
) -> RowMapping:
    """The study's row for the driver that holds `lease`, as the last one left it and in its home; begun anew where the
    declaration has changed and no trial has a value. Raises as `open_study` and `check_home` do."""
    row = open_study(ledger, resolved, options, anew=True)
    check_home(ledger, row, options.home)
    if release_0_1.began(row["identity"]):
        print(release_0_1.notice(row["name"], resolved.spec.behaviour), file=sys.stderr)
    now = identity(resolved)
    changed = [] if options.allow_drift else drift(row["identity"], now, resolved.study.code)
    if changed:
        values = {"spec": resolved.spec.to_json(), "identity": now}
        _set_aside(ledger, lease, row, values, changed, clock, options.lease_timeout)
    if _clear(ledger, lease, row, options.home) or changed:
        row = open_study(ledger, resolved, options)
        check_home(ledger, row, options.home)
    return row


def _set_aside(
    ledger: Ledger,
    lease: Lease,
    row: RowMapping,
    values: Mapping[str, Any],
    changed: Sequence[str],
    clock: Clock,
    timeout: float,
) -> None:
    """Begin the study anew with the `values` of its row. Raises DriftError where a worker that lives still trains one
    of its trials, and Busy while its mirror does."""
    Reclaimer(ledger, row["id"], clock, timeout).reclaim(counted=False)
    if going := ledger.look(lambda connection: removal.running(connection, row["id"])):
        one = going[0]
        raise DriftError(
            f"study {row['name']!r} has changed ({'; '.join(changed)}), and trial {one['number']} is still being "
            f"trained by host {one['host']}, pid {one['pid']}: wait for it or stop it."
        )
    new = {**values, "uid": uuid.uuid4().hex}
    me, held = Process.current(), [lease]

    def body(connection: Connection) -> int:
        for one in held:
            one.check(connection)
        return removal.set_aside(connection, row, new, list(changed))

    try:
        for name in leases_of(row):
            held.append(acquire(ledger, name, row["name"], me, clock, LEASE_TIMEOUT))
        count = ledger.transact(body)
    finally:
        for one in held[1:]:
            one.release()
    failpoint("removal.after_set_aside")
    if count:
        print(
            f"study {row['name']!r} has no trial with a value, and {'; '.join(changed)}: {counted(count, 'trial')} "
            f"set aside, and it begins anew with trial 0.",
            file=sys.stderr,
        )


def _clear(ledger: Ledger, lease: Lease, row: RowMapping, home: Home) -> bool:
    """Remove the files of what was set aside, also by a driver that was killed before it did; whether there was any."""
    uids = ledger.look(lambda connection: removal.uncleared(connection, row["id"]))
    for uid in uids:
        remove_trials(home, {**row, "uid": uid})
        lease.write(lambda connection, uid=uid: removal.cleared(connection, row["id"], uid))
    return bool(uids)
