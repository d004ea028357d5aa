"""Promotes a trial's checkpoint to a version of a registered model in MLflow, and undoes that, for `hpo promote`.

The ledger holds each promotion as an event of the study, written after the version and before its alias. If a promotion
is killed, the next call completes or undoes it. No second version is made of one checkpoint.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import Any

from hpo.analysis.models.checkpoints import KeptCheckpoint, declared, nothing_kept, trained
from hpo.analysis.models.registered_model import facts, name_of, registered, tags_of
from hpo.analysis.results.best import none_complete
from hpo.analysis.results.trial import detail
from hpo.clock import SystemClock
from hpo.errors import HpoError, UserError
from hpo.ledger import Ledger, answer, audit, leases, queries, transactions
from hpo.ledger.finished import trained_as
from hpo.ledger.process_id import Process
from hpo.ledger.promotions import EVENT, Promotion, standing
from hpo.ledger.rows import Connection, StudyRow
from hpo.ledger.views import mirror as mirror_queries
from hpo.ledger.views import trial as trial_queries
from hpo.storage.home import Home
from hpo.text import command
from hpo.tracking import mirror_process, projection
from hpo.tracking.mirror import LEASE_TIMEOUT
from hpo.tracking.mlflow.registry import check_names
from hpo.tracking.mlflow.tracker import MlflowTracker
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
    """Registers the best kept checkpoint of a complete trial as a version of model `name`, with `alias` pointing to it.

    The trial is the best by default. If the checkpoint is registered already, only the alias is set. With `dry_run`
    nothing is written, but everything is checked. Raises UserError, in one sentence, for a checkpoint that cannot be
    promoted, Unreachable if MLflow does not answer, Refused if it rejects the checkpoint.
    """
    check_names(name, alias)
    row, kept, points = ledger.look(lambda connection: _chosen(connection, home, study, number))
    with _tracker(ledger, home, row, tracking_uri) as tracker:
        registry, run_id = tracker.registry(), _run_id(tracker, row, kept.number)
        if run_id is None:
            raise HpoError(
                f"MLflow at {tracker.name} has no run of trial {kept.number} of study {study!r} yet: "
                f"`{command('sync')}`."
            )
        version, before = registry.find(name, tags_of(row, kept)), registry.aliased(name, alias)
        note = ""
        if version is None and not dry_run:
            declaration = ledger.look(lambda connection: declared(connection, study))
            with registered(row, declaration, kept, points) as (model, note):
                objectives = [objective["metric"] for objective in row.spec.objectives]
                version = registry.register(name, run_id, model, facts(row, objectives, kept, points))
        promotion = Promotion(
            kept.number, kept.step, kept.epoch, name, alias, version, before, run_id, name_of(kept), tracker.name, note
        )
        if not dry_run:
            promoted = ledger.look(lambda connection: standing(connection, row.id))
            noted = [(past.version, past.before) for past in promoted if past.target == promotion.target]
            if before != version and (version, before) not in noted:  # a call that was killed may have noted it
                _note(ledger, row, promotion, undone=False)
                failpoint("promote.after_event")
            registry.point(name, alias, version)
    return promotion


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
    """Undoes the newest promotion of the study, among those of this trial, model and alias if given.

    The alias points to its previous version again, and the version is deleted unless another promotion needs it. An
    alias that was set to another version in the meantime is left alone. Raises UserError if no promotion matches.
    """
    row = ledger.look(lambda connection: queries.study_row(connection, study))
    with _tracker(ledger, home, row, tracking_uri) as tracker:
        registry = tracker.registry()
        wanted = {"trial": number, "name": name, "alias": alias, "tracker": tracker.name}
        promoted = ledger.look(lambda connection: standing(connection, row.id))
        matching = [
            past for past in promoted if all(value in (None, getattr(past, key)) for key, value in wanted.items())
        ]
        if not matching:
            raise UserError(
                f"study {study!r} has no such promotion in MLflow at {tracker.name}: there is nothing to take back."
            )
        last = matching[-1]
        if dry_run:
            return last
        others = [
            past for past in promoted if past is not last and (past.tracker, past.name) == (last.tracker, last.name)
        ]
        if last.version is not None and registry.aliased(last.name, last.alias) == last.version:
            back = last.before if last.before and registry.has_version(last.name, last.before) else None
            registry.point(last.name, last.alias, back)
        failpoint("promote.after_undone_alias")
        if all(past.version != last.version for past in others):
            used = any(
                past.model == last.model for past in promoted if past is not last and past.tracker == tracker.name
            )
            registry.remove(last.name, last.version or "", last.run_id, None if used else last.model)
        _note(ledger, row, last, undone=True)
    return last


def _chosen(
    connection: Connection, home: Home, study: str, number: int | None
) -> tuple[StudyRow, KeptCheckpoint, list[Any]]:
    """Returns the study's row, the trial's checkpoint and its metrics."""
    row = queries.study_row(connection, study)
    if row.spec.imported:
        raise UserError(f"study {study!r} was imported: it has no checkpoints here to be promoted.")
    if number is None:
        best = answer.bests(connection, row)
        if not best:
            raise none_complete(study)
        number = best[0].number
    source, source_number = trained_as(connection, row, number)
    shown = detail(connection, home, source, source_number)
    if shown["state"] != "complete":
        raise UserError(
            f"trial {number} of study {study!r} is {shown['state']}, and only complete trials are promoted: "
            f"`{command(f'compare --study {study}')}` shows which are."
        )
    kept = trained(connection, home, study, number)
    if kept is None:
        raise nothing_kept(declared(connection, study), shown)
    trial = trial_queries.find_trial(connection, queries.study_row(connection, source).id, source_number)
    saved = mirror_queries.saved_values(connection, [trial.id]).get(trial.id, []) if trial else []
    points = [point for point in projection.reported(saved) if point.step == kept.step]
    return row, kept, points


@contextmanager
def _tracker(ledger: Ledger, home: Home, row: StudyRow, tracking_uri: str | None) -> Iterator[MlflowTracker]:
    """Yields the MLflow tracker with the whole study sent; one process at a time works on a study."""
    study = row.name
    uri = tracking_uri_of(ledger, study, home, tracking_uri)
    name, process = f"promote:{row.id}", Process.current()
    lease = leases.acquire(ledger, name, study, process, SystemClock(), LEASE_TIMEOUT)
    try:
        mirror_process.send(ledger, home, study, tracking_uri)  # a later step reports what it lacks
        with closing(MlflowTracker(uri, home.artifacts)) as tracker:
            yield tracker
    finally:
        lease.release()


def _run_id(tracker: MlflowTracker, row: StudyRow, number: int) -> str | None:
    return next((view.run_id for view in tracker.find(row.name, f"{row.uid}/{number}")), None)


def _note(ledger: Ledger, study: StudyRow, promotion: Promotion, *, undone: bool) -> None:
    uid, entry = uuid.uuid4().hex, audit.Entry(study.name, "promote")
    fields = {**asdict(promotion), "undone": undone}

    def body(connection: Connection) -> None:
        transactions.note(connection, study.id, EVENT, fields, uid)
        entry.write(connection)

    ledger.transact(body)


def describe(done: Promotion, *, undone: bool, dry_run: bool) -> str:
    """Returns a sentence about what was done, or would be."""
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
