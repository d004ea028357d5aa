"""`hpo promote`: a trial's checkpoint as a version of a registered model in MLflow, and that taken back.

The ledger holds each promotion as an event of the study, written between the version and its alias: a promotion that
was killed is completed, or undone, by the next call, and no second version is made of one checkpoint.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import Any

from hpo.analysis.models.checkpoints import KeptCheckpoint, declared, nothing_kept, trained
from hpo.analysis.models.registered_model import facts, name_of, registered, tags_of
from hpo.analysis.results.best import none_complete
from hpo.analysis.results.trial import detail
from hpo.clock import SystemClock
from hpo.errors import HpoError, UserError
from hpo.ledger import Ledger, leases, mirror_queries, queries, transactions, trial_queries
from hpo.ledger.process_id import Process
from hpo.ledger.promotions import EVENT, Promotion, standing
from hpo.ledger.rows import Connection, RowMapping
from hpo.storage.home import Home
from hpo.text import command
from hpo.tracking import mirror_process, projection
from hpo.tracking.mirror import LEASE_TIMEOUT
from hpo.tracking.mlflow import MlflowTracker
from hpo.tracking.mlflow_registry import check_names
from hpo.tracking.uri import tracking_uri_of
from trainer.runtime.failpoint import failpoint


def promote(
    ledger: Ledger,
    home: Home,
    study: str,
    number: int | None,
    name: str,
    alias: str,
    tracking_uri: str | None = None,
    *,
    dry_run: bool = False,
) -> Promotion:
    """Register the best kept checkpoint of a complete trial, by default of the best, as a version of the model `name`,
    and have `alias` stand for it; of one that is registered already, the alias alone.

    With `dry_run` only what can be refused is. Raises UserError in one sentence for what cannot be promoted,
    Unreachable where MLflow is away, Refused where it does not take it.
    """
    check_names(name, alias)
    row, values, kept, points = ledger.look(lambda connection: _chosen(connection, home, study, number))
    with _tracker(ledger, home, row, tracking_uri) as tracker:
        registry, run_id = tracker.registry(), _run_id(tracker, row, kept.number)
        if run_id is None:
            raise HpoError(
                f"MLflow at {tracker.name} has no run of trial {kept.number} of study {study!r} yet: "
                f"`{command('sync')}`."
            )
        version, before = registry.find(name, tags_of(row, kept)), registry.aliased(name, alias)
        told = ""
        if version is None and not dry_run:
            declaration = ledger.look(lambda connection: declared(connection, study))
            with registered(row, declaration, kept, points) as (model, told):
                version = registry.register(name, run_id, model, facts(row, values, kept))
        done = Promotion(
            kept.number, kept.step, kept.epoch, name, alias, version, before, run_id, name_of(kept), tracker.name, told
        )
        if not dry_run:
            there = ledger.look(lambda connection: standing(connection, row["id"]))
            noted = [(one.version, one.before) for one in there if one.target == done.target]
            if before != version and (version, before) not in noted:  # by a call that was killed before the alias
                _note(ledger, row["id"], done, undone=False)
                failpoint("promote.after_event")
            registry.point(name, alias, version)
    return done


def undo(
    ledger: Ledger,
    home: Home,
    study: str,
    number: int | None,
    name: str | None,
    alias: str | None,
    tracking_uri: str | None = None,
    *,
    dry_run: bool = False,
) -> Promotion:
    """Take the newest promotion of the study back, of those of this trial, model and alias where these are given: the
    alias stands for what it did before, and the version goes, unless another promotion needs it.

    An alias that somebody has set to another version meanwhile stays. Raises UserError where there is none.
    """
    row = ledger.look(lambda connection: queries.study_row(connection, study))
    with _tracker(ledger, home, row, tracking_uri) as tracker:
        registry = tracker.registry()
        wanted = {"trial": number, "name": name, "alias": alias, "tracker": tracker.name}
        there = ledger.look(lambda connection: standing(connection, row["id"]))
        found = [one for one in there if all(value in (None, getattr(one, key)) for key, value in wanted.items())]
        if not found:
            raise UserError(
                f"study {study!r} has no such promotion in MLflow at {tracker.name}: there is nothing to take back."
            )
        last = found[-1]
        if dry_run:
            return last
        others = [one for one in there if one is not last and (one.tracker, one.name) == (last.tracker, last.name)]
        if last.version is not None and registry.aliased(last.name, last.alias) == last.version:
            back = last.before if last.before and registry.has_version(last.name, last.before) else None
            registry.point(last.name, last.alias, back)
        failpoint("promote.after_undone_alias")
        if all(one.version != last.version for one in others):
            used = any(one.model == last.model for one in there if one is not last and one.tracker == tracker.name)
            registry.remove(last.name, last.version or "", last.run_id, None if used else last.model)
        _note(ledger, row["id"], last, undone=True)
    return last


def _chosen(
    connection: Connection, home: Home, study: str, number: int | None
) -> tuple[RowMapping, Mapping[str, float | None], KeptCheckpoint, list[Any]]:
    """The study's row, the trial's values, its checkpoint and the metrics of that."""
    row = queries.study_row(connection, study)
    if row["spec"].get("imported"):
        raise UserError(f"study {study!r} was imported: it has no checkpoints here to be promoted.")
    if number is None:
        best = queries.bests(connection, row)
        if not best:
            raise none_complete(study)
        number = best[0].number
    shown = detail(connection, home, study, number)
    if shown["state"] != "complete":
        raise UserError(
            f"trial {number} of study {study!r} is {shown['state']}, and only complete trials are promoted: "
            f"`{command(f'compare --study {study}')}` shows which are."
        )
    kept = trained(connection, home, study, number)
    if kept is None:
        raise nothing_kept(declared(connection, study), shown)
    trial = trial_queries.find_trial(connection, row["id"], number)
    saved = mirror_queries.saved_values(connection, [trial["id"]]).get(trial["id"], []) if trial else []
    points = [point for point in projection.reported(saved) if point.step == kept.step]
    return row, shown["values"], kept, points


@contextmanager
def _tracker(ledger: Ledger, home: Home, row: RowMapping, tracking_uri: str | None) -> Iterator[MlflowTracker]:
    """MLflow, with all of the study; one process at a time for each study."""
    study = row["name"]
    uri = tracking_uri_of(ledger, study, home, tracking_uri)
    name, me = f"promote:{row['id']}", Process.current()
    lease = leases.acquire(ledger, name, study, me, SystemClock(), LEASE_TIMEOUT)
    try:
        mirror_process.send(ledger, home, study, tracking_uri)  # what is lacking is told by who misses it
        with closing(MlflowTracker(uri, home.artifacts)) as tracker:
            yield tracker
    finally:
        lease.release()


def _run_id(tracker: MlflowTracker, row: RowMapping, number: int) -> str | None:
    return next((view.run_id for view in tracker.find(row["name"], f"{row['uid']}/{number}")), None)


def _note(ledger: Ledger, study_id: int, promotion: Promotion, *, undone: bool) -> None:
    uid = uuid.uuid4().hex
    fields = {**asdict(promotion), "undone": undone}
    ledger.transact(lambda connection: transactions.note(connection, study_id, EVENT, fields, uid))


def describe(done: Promotion, *, undone: bool, dry_run: bool) -> str:
    """What was done, or would be, in a sentence."""
    version = f"version {done.version}" if done.version else "a new version"
    if undone:
        verb = "would be taken back" if dry_run else "is taken back"
        stands = f"version {done.before} again" if done.before else "nothing now"
        back = f"; the alias stands for {stands}, unless somebody has moved it" if not dry_run else ""
        return f"trial {done.trial} as {version} of model {done.name}, alias {done.alias}, {verb}{back}."
    already = done.version is not None and done.before == done.version
    verb = "would be" if dry_run else "already is" if already else "is"
    why = f"\n{done.told}." if done.told else ""
    return f"trial {done.trial} (epoch {done.epoch}) {verb} {version} of model {done.name}: {done.uri}{why}"
