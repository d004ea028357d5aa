"""Opens a study's row in the ledger: creates it, compares it with what is asked for now, brings it up to date."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from hpo.clock import SystemClock
from hpo.declaration.environment import describe
from hpo.declaration.identity import drift, identity
from hpo.declaration.loading import is_another
from hpo.declaration.naming import check_name
from hpo.declaration.resolved import ResolvedStudy
from hpo.driver.request import DriverOptions
from hpo.errors import DriftError, UserError
from hpo.ledger import Ledger, driver_queries, queries, transactions
from hpo.ledger.leases import Lease
from hpo.ledger.removal import check_whole
from hpo.ledger.rows import Connection, RowMapping
from hpo.space.config import flatten
from hpo.storage import locations
from hpo.storage.home import Home
from hpo.text import command
from hpo.tracking.uri import tracker_name

_AS_BEGUN = ("tracking_uri", "checkpoints")  # of the environment: where a study began to be written


def open_study(ledger: Ledger, resolved: ResolvedStudy, options: DriverOptions, *, anew: bool = False) -> RowMapping:
    """The study's row, made if there is none; DriftError, naming what changed, if the ledger knows another one.

    With `anew` a study that has nothing to lose is returned all the same: the driver sets its trials aside.
    """
    spec = resolved.spec
    row = ledger.look(lambda connection: queries.find_study(connection, spec.name))
    if row is None:
        _check_unknown(options.home, spec.name)
        new = _new_row(resolved, options)
        row = ledger.transact(lambda connection: driver_queries.create_study(connection, new))
    check_whole(row)
    now = identity(resolved)
    if row["identity"].get("objectives") != now["objectives"] and _judged(ledger, row):
        raise DriftError(
            f"study {spec.name!r} has trials, judged by {_judged_by(row['spec'])}, and its objectives are now "
            f"{_judged_by(spec.to_json())}: undo that, or start another study by `hpo run --study {spec.reference} "
            "--name NAME`."
        )
    changed = drift(row["identity"], now, resolved.study.code)
    if changed and not options.allow_drift and is_another(row["spec"]["reference"], spec.reference):
        raise DriftError(
            f"study {spec.name!r} of this ledger is that of {row['spec']['reference']}, and {spec.reference} declares "
            f"another one ({'; '.join(changed)}): give this one a name of its own by --name NAME, or take it for the "
            "same by --allow-drift."
        )
    if changed and not options.allow_drift and not (anew and _without_value(ledger, row["id"])):
        again = command(f"rm --study {spec.name}")
        raise DriftError(
            f"study {spec.name!r} is in the ledger already, and {'; '.join(changed)}: undo that, continue with "
            f"--allow-drift, start another study by `hpo run --study {spec.reference} --name NAME`, or delete what "
            f"there is by `{again}`."
        )
    return row


def _check_unknown(home: Home, name: str) -> None:
    """Raise UserError where a study that the ledger does not know has checkpoints: it would take them for leftovers."""
    if there := home.with_checkpoints(check_name(name)):
        raise UserError(
            f"{there} has checkpoints of a study {name!r} that the ledger does not know: restore the ledger from a "
            "backup, take another --home or --name, or delete that directory."
        )


def _without_value(ledger: Ledger, study_id: int) -> bool:
    return ledger.look(lambda connection: driver_queries.without_value(connection, study_id))


def _judged(ledger: Ledger, row: RowMapping) -> bool:
    """Whether a trial has been: one whose objective was never reported has not, and its name may be mended."""
    return ledger.look(lambda connection: driver_queries.any_judged(connection, row["id"]))


def _judged_by(spec: Mapping[str, Any]) -> str:
    judged = ["{metric} ({direction}, {select})".format(**objective) for objective in spec["objectives"]]
    bounds = ["{metric} from {lower} to {upper}".format(**one) for one in spec.get("constraints", ())]
    return ", ".join(judged + bounds)


def _new_row(resolved: ResolvedStudy, options: DriverOptions) -> dict[str, Any]:
    spec = resolved.spec
    row = {"name": spec.name, "uid": uuid.uuid4().hex, "created_at": SystemClock().wall(), "state": "open"}
    row |= options.budget.columns() | {"spec": spec.to_json(), "identity": identity(resolved)}
    begun = {"home": str(options.home.root), "tracking_uri": tracker_name(options.tracking_uri)}
    begun |= {"checkpoints": options.checkpoints} if options.checkpoints else {}
    return row | {"environment": _environment(resolved, options) | begun}


def _environment(resolved: ResolvedStudy, options: DriverOptions) -> dict[str, Any]:
    data = {"data": dict(options.data)} if options.data else {}
    driving = {"allow_drift": options.allow_drift} | options.placement.to_json()
    kept = {"max_bytes": options.max_bytes, "trackers": [*options.trackers], "alerts": [*options.alerts]}
    driving |= {name: value for name, value in kept.items() if value}
    return describe(resolved.study) | driving | data


def check_home(ledger: Ledger, row: RowMapping, home: Home) -> None:
    """Raise UserError if the study's checkpoints lie in another home; else mark this one as theirs."""
    if ledger.look(lambda connection: driver_queries.any_saved(connection, row["id"])):
        locations.check(home, row)
    locations.mark(home, row)


def continued(row: RowMapping, resolved: ResolvedStudy, options: DriverOptions) -> dict[str, Any]:
    """What the row of a study that is driven on has to become: what was asked for, and where it runs now."""
    values: dict[str, Any] = {"spec": resolved.spec.to_json(), "identity": identity(resolved)}
    as_begun = _AS_BEGUN if locations.url(row) else (*_AS_BEGUN, "home")  # beside a bucket each driver has a home
    values["environment"] = {"home": str(options.home.root)}
    values["environment"] |= {name: row["environment"][name] for name in as_begun if name in row["environment"]}
    values["environment"] |= _environment(resolved, options)
    return {"state": "open", "lease_seconds": options.lease_timeout} | values


def remembered(row: RowMapping, options: DriverOptions) -> dict[str, Any]:
    """What of a command a study that has ended keeps: the bytes its checkpoints may take."""
    return {"environment": row["environment"] | {"max_bytes": options.max_bytes}} if options.max_bytes else {}


def write_changes(connection: Connection, row: RowMapping, lease: Lease, values: Mapping[str, Any]) -> None:
    """Bring the row to `values`, with an event for each thing a user may want to know of; nothing where nothing is new.

    Idempotent: an event is named by the lease.
    """
    new = {name: value for name, value in values.items() if value != row[name]}
    if not new:
        return
    driver_queries.change_study(connection, row["id"], new)
    if changed := drift(row["identity"], values.get("identity", row["identity"])):
        transactions.note(connection, row["id"], "drift", {"changed": changed}, f"{lease.name}.{lease.fence}.drift")
    before, after = flatten(row["environment"]), flatten(values.get("environment", row["environment"]))
    moved = {path: [before.get(path), after.get(path)] for path in sorted(before.keys() | after.keys())}
    if moved := {path: both for path, both in moved.items() if both[0] != both[1]}:
        transactions.note(connection, row["id"], "environment", moved, f"{lease.name}.{lease.fence}.environment")
