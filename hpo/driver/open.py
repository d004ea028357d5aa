"""Opens a study's row in the ledger: creates it, compares it with this run's declaration, and updates it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any

from hpo.clock import SystemClock
from hpo.declaration import content
from hpo.declaration.environment import describe
from hpo.declaration.goal import Goal
from hpo.declaration.identity import drift, identity
from hpo.declaration.loading import is_another
from hpo.declaration.naming import check_name
from hpo.declaration.resolved import ResolvedStudy
from hpo.declaration.spec import StudySpec
from hpo.door import option, step
from hpo.driver.cell_versions import DECLARED
from hpo.driver.request import DriverOptions
from hpo.errors import DriftError, UserError
from hpo.ledger import Ledger, queries, transactions
from hpo.ledger.finished import phases_of
from hpo.ledger.leases import Lease
from hpo.ledger.removal import check_whole
from hpo.ledger.rows import Connection, StudyRow
from hpo.ledger.stored_spec import StoredSpec
from hpo.ledger.views import driver as driver_queries
from hpo.search.confirming import NONE
from hpo.space.config import flatten
from hpo.storage import locations
from hpo.storage.home import Home
from hpo.text import command
from hpo.tracking.uri import tracker_name

_AS_BEGUN = ("tracking_uri", "checkpoints")  # entries of the environment that stay as when the study began


def open_study(
    ledger: Ledger, resolved: ResolvedStudy, options: DriverOptions, *, anew: bool = False, held: bool = False
) -> StudyRow:
    """Returns the study's row and creates it if needed.

    Raises DriftError, which names the changes, if the ledger has a different study of that name. With `anew` a changed
    study without values is still returned: the driver discards its trials. Before the lease is `held` the row is the
    one that the plan has read; afterwards no other process changes it, and it is read again.
    """
    spec = resolved.spec
    row = None if held else options.stored
    if row is None:
        row = ledger.look(lambda connection: queries.find_study(connection, spec.name))
    if row is None:
        _check_unknown(options.home, spec.name)
        new = _new_row(resolved, options)
        row = ledger.transact(lambda connection: driver_queries.create_study(connection, new))
    check_whole(row)
    now = identity(resolved)
    if row.identity.get("objectives") != now["objectives"] and _judged(ledger, row):
        raise DriftError(
            f"study {spec.name!r} has trials, judged by {_judged_by(row.spec)}, and its objectives are now "
            f"{_judged_by(spec)}: undo the change, or start another study with "
            f"`{step(f'run --study {spec.reference} --name NAME')}`."
        )
    changed = drift(row.identity, now, partial(content.code, resolved.study))
    if changed and not options.allow_drift and is_another(row.spec.reference, spec.reference):
        raise DriftError(
            f"study {spec.name!r} of this ledger is that of {row.spec.reference}, and {spec.reference} declares "
            f"another one ({'; '.join(changed)}): give this one a name of its own by {option('name', 'NAME')}, or "
            "take it for the "
            f"same by {option('allow_drift')}."
        )
    if changed and not options.allow_drift and not (anew and _without_value(ledger, row.id)):
        another = f"continue with {option('allow_drift')}, start another study with "
        another += f"`{step(f'run --study {spec.reference} --name NAME')}`"
        by_search = spec.listed_of and spec.name in phases_of(spec.listed_of) and spec.confirm == NONE
        if spec.listed and not by_search:  # confirm, ablate and extend have no such option
            another = f"start another study by {option('name', 'NAME')}"
        raise DriftError(
            f"study {spec.name!r} is in the ledger already, and {'; '.join(changed)}: undo the change, {another}, or "
            f"delete this one with `{command(f'rm --study {spec.name}')}`."
        )
    return row


def _check_unknown(home: Home, name: str) -> None:
    """Raises UserError if a study that the ledger does not know has checkpoints, which would be deleted as
    leftovers."""
    if checkpoints := home.with_checkpoints(check_name(name)):
        raise UserError(
            f"{checkpoints} has checkpoints of a study {name!r} that the ledger does not know: restore the ledger from "
            f"a backup, take another {option('home')} or {option('name')}, or delete that directory."
        )


def _without_value(ledger: Ledger, study_id: int) -> bool:
    return ledger.look(lambda connection: driver_queries.without_value(connection, study_id))


def _judged(ledger: Ledger, row: StudyRow) -> bool:
    """Returns whether any trial was judged. If none was, since the objective was never reported, its name may still be
    corrected."""
    return ledger.look(lambda connection: driver_queries.any_judged(connection, row.id))


def _judged_by(spec: StoredSpec | StudySpec) -> str:
    judged = ["{metric} ({direction}, {select})".format(**objective) for objective in spec.objectives]
    bounds = ["{metric} from {lower} to {upper}".format(**constraint) for constraint in spec.constraints]
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
    data |= {DECLARED: dict(options.declared)} if options.declared else {}
    driving = {"allow_drift": options.allow_drift} | options.placement.to_json()
    kept = {"max_bytes": options.max_bytes, "trackers": [*options.trackers], "alerts": [*options.alerts]}
    driving |= {name: value for name, value in kept.items() if value} | options.goal.to_json()
    return describe(resolved.study) | driving | data


def check_home(ledger: Ledger, row: StudyRow, home: Home) -> None:
    """Raises UserError if the study's checkpoints are in another home; otherwise marks this home as theirs."""
    if ledger.look(lambda connection: driver_queries.any_saved(connection, row.id)):
        locations.check(home, row)
    locations.mark(home, row)


def continued(row: StudyRow, resolved: ResolvedStudy, options: DriverOptions) -> dict[str, Any]:
    """Returns the new values of a continued study's row: this run's options and location."""
    values: dict[str, Any] = {"spec": resolved.spec.to_json(), "identity": identity(resolved)}
    as_begun = _AS_BEGUN if locations.url(row) else (*_AS_BEGUN, "home")  # beside a bucket each driver has a home
    values["environment"] = {"home": str(options.home.root)}
    values["environment"] |= {name: value for name, value in row.environment.items() if name in as_begun}
    values["environment"] |= _environment(resolved, options)
    return {"state": "open", "lease_seconds": options.lease_timeout} | values


def remembered(row: StudyRow, resolved: ResolvedStudy, options: DriverOptions) -> dict[str, Any]:
    """Returns the row's values that a command changes for a study that has ended: the bytes its checkpoints may take,
    its goal, and which phases follow."""
    goal = Goal.of(row.environment).to_json()
    environment = {name: value for name, value in row.environment.items() if name not in goal}
    environment |= options.goal.to_json() | ({"max_bytes": options.max_bytes} if options.max_bytes else {})
    spec, now = row.spec.json, resolved.spec
    phases = {"finish": now.finish} if "finish" in spec else {}
    phases |= {"confirm": now.confirm} if "confirm" in spec or now.confirm != NONE else {}
    return {"environment": environment} | ({"spec": {**spec, **phases}} if phases else {})


def write_changes(connection: Connection, row: StudyRow, lease: Lease, values: Mapping[str, Any]) -> None:
    """Updates the row to `values` and writes events for changes of the declaration and the environment.

    Writes nothing if no value is new. Idempotent, since the lease names the events.
    """
    stored = {name: getattr(row, name) for name in values} | {"spec": row.spec.json}
    new = {name: value for name, value in values.items() if value != stored[name]}
    if not new:
        return
    driver_queries.change_study(connection, row.id, new)
    if changed := drift(row.identity, values.get("identity", row.identity)):
        transactions.note(connection, row.id, "drift", {"changed": changed}, f"{lease.name}.{lease.fence}.drift")
    driven: dict[str, Any] = {**row.environment}
    before, after = flatten(driven), flatten(values.get("environment", driven))
    moved = {path: [before.get(path), after.get(path)] for path in sorted(before.keys() | after.keys())}
    if moved := {path: both for path, both in moved.items() if both[0] != both[1]}:
        transactions.note(connection, row.id, "environment", moved, f"{lease.name}.{lease.fence}.environment")
