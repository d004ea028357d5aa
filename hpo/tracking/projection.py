"""Computes from the ledger's rows what a tracker should show of a study: runs, batches and their order.

The mirror sends these batches and `verify` compares them with the tracker's data, so both use one definition. The
ledger's states and the tracker's:

    running              RUNNING
    waiting, paused      SCHEDULED     a trial that is to go on
    complete, pruned     FINISHED      a trial that was stopped on purpose has not failed
    infeasible, failed   FAILED

The tag `hpo.state` holds the ledger's state, and the description tells why a trial is not complete. Only complete
trials have the metric `objective`, so that sorting by it puts the best first: a pruned trial was stopped early. A trial
gets its run when a worker first claims it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpo.ledger import answer, queries, tags
from hpo.ledger import removed as removed_trials
from hpo.ledger.rows import Connection, StudyRow, UnsentTrial, UnsentValue, ValueRow
from hpo.ledger.views import mirror as mirror_queries
from hpo.ledger.views.mirror import LEFT, STUDY
from hpo.search.strategies.registry import STRATEGIES
from hpo.space.trial_state import STATES, TERMINAL_STATES
from hpo.storage import artifacts, locations, metrics_json
from hpo.storage.home import Home
from hpo.tracking import curves, pages, run_files
from hpo.tracking.base import Batch, Model, Point, Run, Status
from hpo.tracking.mlflow import datasets
from hpo.tracking.names import entry_name
from hpo.tracking.rows import LARGEST, Facts, finite, milliseconds
from hpo.tracking.run_files import checkpoint_name
from hpo.tracking.runs_ahead import MARK, mark
from trainer.checkpoint.location import DISK, Disk

_NO_TRACKER = ""  # has no cursors

TRIAL_STATUS: dict[str, Status] = {
    "waiting": "SCHEDULED",
    "running": "RUNNING",
    "paused": "SCHEDULED",
    "complete": "FINISHED",
    "pruned": "FINISHED",
    "infeasible": "FAILED",
    "failed": "FAILED",
}
STUDY_STATUS: dict[str, Status] = {
    "running": "RUNNING",
    "interrupted": "SCHEDULED",
    "complete": "FINISHED",
    "stopped": "FAILED",
}

# Limits that every release of MLflow 3 keeps.
MAX_PARAM, MAX_TAG = 6000, 5000
_LOOKED_AT = 100  # trials whose parameters are counted
# Tags that runs of earlier releases lack; a person may have written a description.
LATER = ("hpo.preemptions", "hpo.micro_batch_size", "hpo.train_seed", pages.NOTE, MARK, curves.MARK)
EARLIER_STATUS = {"pruned": "KILLED"}  # of runs that ended under an earlier release


@dataclass(frozen=True)
class Pending:
    """A trial with the data that its run lacks; `run_id` is None without a run. `run_files.fetch` fetches files in a
    bucket."""

    trial_id: int
    number: int
    revision: int  # the ledger's revision that the run shows once `batch` is sent
    run_id: str | None
    run: Run
    batch: Batch
    location: Disk


def behind(connection: Connection, tracker: str, study: StudyRow) -> int:
    """Returns how many of the ledger's transactions on the study and its trials the tracker lacks, cheaply."""
    cursor = mirror_queries.study_cursor(connection, tracker, study.id)
    if cursor is not None and cursor.revision == LEFT:
        return 0
    count = mirror_queries.behind(connection, tracker, study.id)
    return count + study.revision - (-1 if cursor is None else cursor.revision)


def pending(
    connection: Connection, tracker: str, study: StudyRow, home: Home, after: int = -1, n: int = 32
) -> list[Pending]:
    """Returns the next `n` trials by number, above `after`, whose runs lack something. Reads the trials first: rows
    committed in between belong to a later revision and are at worst sent twice."""
    rows = mirror_queries.pending(connection, tracker, study.id, after, n)
    if not rows:
        return []
    facts = Facts(connection, tracker, study, rows)
    location = locations.of(home, study)
    batches = [_batch(study, row, facts, home, location) for row in rows]
    return [
        Pending(row.id, row.number, row.revision, row.run_id, trial_run(study, row), batch, location)
        for row, batch in zip(rows, batches, strict=True)
    ]


def everything(connection: Connection, study: StudyRow, home: Home) -> Iterator[Pending]:
    """Yields every trial that has a run, with everything that its run should show."""
    after = -1
    while page := pending(connection, _NO_TRACKER, study, home, after):
        yield from page
        after = page[-1].number


def unsent(connection: Connection, trial: Pending, revision: int) -> set[tuple[str, int]]:
    """Returns (key, step) of the points of a trial that a cursor at `revision` has not passed."""
    values = mirror_queries.unsent(connection, trial.trial_id, revision)
    shown = {(metric_key(name, fold), step) for key, step, fold in values for name in (key, "epoch")}
    return shown | {(point.key, point.step) for point in trial.batch.points if point.key.startswith("objective")}


def study_run(study: StudyRow) -> Run:
    """Returns the data that opens the study's own run."""
    tags = {"hpo.run_uid": study.uid, "hpo.kind": "study", "hpo.study": study.name}
    return Run(study.uid, study.name, milliseconds(study.created_at), tags, *_provenance(study))


def study_batch(connection: Connection, study: StudyRow, home: Home, state: str, after: int = 0) -> Batch:
    """Returns the batch that the study's run shows in `state` (running, interrupted, complete or stopped), with the
    curves after the first `after` ends."""
    points = curves.points(connection, study, after)
    own_tags, removed = tags.split(tags.every(connection, study.id, [STUDY]).get(STUDY, {}))
    shown = own_tags | {"hpo.state": state, "hpo.requested": str(study.requested), **curves.mark(points, after)}
    shown |= {f"hpo.spec.{key}": _text(value, MAX_TAG) for key, value in study.spec.json.items() if _scalar(value)}
    shown["hpo.spec.strategy"] = study.spec.strategy.get("name", "none")
    described = {**_environment(study), **study.environment.get("versions", {})}
    shown |= {f"hpo.env.{key}": _text(value, MAX_TAG) for key, value in described.items() if _scalar(value)}
    best = answer.bests(connection, study)
    shown |= _best_tags(study, best)
    if not best and removed_trials.numbers(connection, study.id):
        removed += [key for key in ("hpo.best.trial", "hpo.best.value") if key not in shown]
    shown[pages.NOTE] = _study_note(connection, study, best)
    ended = None
    if STUDY_STATUS[state] in ("FINISHED", "FAILED"):
        ended = mirror_queries.last_end(connection, study.id)
    soup = queries.newest_event(connection, study.id, "soup")
    declared = {"name": study.name, "uid": study.uid, "spec": study.spec.json, "identity": study.identity}
    declared["environment"] = _environment(study)
    contents = {"study.json": declared} | ({"soup.json": soup} if soup else {})
    texts = {name: json.dumps(content, indent=2, sort_keys=True) + "\n" for name, content in contents.items()}
    files = run_files.of_study(home, study.name, artifacts.of_study(connection, study.id))
    ended_at = None if ended is None else milliseconds(ended)
    return Batch(
        points=points,
        tags=shown,
        removed_tags=removed,
        texts=texts,
        files=files,
        datasets=datasets.of_study(study),
        status=STUDY_STATUS[state],
        ended_at=ended_at,
    )


def experiment_tags(connection: Connection, study: StudyRow) -> dict[str, str]:
    """Returns the tags of a study's experiment. The parameters shown are those that most trials have; ties go to the
    lowest tier, which the study declares to matter most."""
    first = mirror_queries.first_params(connection, study.id, _LOOKED_AT)
    known = Counter(path for params in first for path in params)
    space = study.identity.get("space", {})
    tiers = {path: space[path].get("tier", 1) for path in known if path in space}
    shown = sorted(known, key=lambda path: (-known[path], tiers.get(path, 1)))
    note = _study_note(connection, study, answer.bests(connection, study))
    return pages.experiment_tags(study, shown, note)


def _study_note(connection: Connection, study: StudyRow, best: Sequence[answer.Best]) -> str:
    by_state = mirror_queries.counts(connection, study.id)
    counts = {state: by_state[state] for state in STATES if state in by_state and state in TERMINAL_STATES}
    return pages.study_note(study, counts, best)[:MAX_TAG]


def _best_tags(study: StudyRow, best: Sequence[answer.Best]) -> dict[str, str]:
    """Returns the tags of the best trial and its value; with several objectives, those of the front as JSON."""
    if len(study.spec.objectives) == 1:
        return {"hpo.best.trial": str(best[0].number), "hpo.best.value": repr(best[0].value)} if best else {}
    values = {str(trial.number): list(trial.values.values()) for trial in best}
    return {"hpo.front.trials": ", ".join(values)[:MAX_TAG], "hpo.front.values": json.dumps(values)[:MAX_TAG]}


def trial_run(study: StudyRow, trial: UnsentTrial) -> Run:
    """Returns the data that opens a trial's run."""
    tags = {
        "hpo.run_uid": f"{study.uid}/{trial.number}",
        "hpo.kind": "trial",
        "hpo.study": study.name,
        "hpo.trial": str(trial.number),
        "hpo.seed": str(trial.seed),  # of the proposal
        "hpo.config_hash": trial.config_hash,
    }
    train: Mapping[str, object] = trial.config.get("train") or {}
    if (seed := train.get("seed")) is not None:
        tags["hpo.train_seed"] = str(seed)
    if trial.parent is not None:
        tags["hpo.parent"] = str(trial.parent)
    if trial.parent is not None or _in_generations(study.spec.strategy):
        tags["hpo.generation"] = str(trial.generation)
    if trial.start is not None:
        tags["hpo.start"] = trial.start
    if trial.ranks > 1:
        tags["hpo.ranks"] = str(trial.ranks)
    started = milliseconds(trial.started_at or trial.created_at)
    name = pages.run_name(study.name, trial.number)
    return Run(tags["hpo.run_uid"], name, started, tags, *_provenance(study))


def _in_generations(strategy: str | Mapping[str, object]) -> bool:
    """Returns whether the strategy trains in generations, judged by its module, since strategies are slow to import."""
    name = strategy if isinstance(strategy, str) else str(strategy["name"])
    return STRATEGIES.get(name, "").startswith("hpo.search.population.")


def metric_key(key: str, fold: int = 0) -> str:
    """Returns the name of a metric in the tracker, prefixed with the fold if that is above 0."""
    return entry_name(f"fold{fold}/{key}" if fold else key)


def metric_keys(connection: Connection, study: StudyRow) -> set[str]:
    """Returns the names of all metrics that the runs of the study's trials have."""
    reported = mirror_queries.reported(connection, study.id)
    names = {metric_key(name, fold) for key, fold in reported for name in (key, "epoch")}
    return names | {*pages.objective_keys(study.spec.objectives)}


def stored(value: float) -> float:
    """Returns a metric's value as MLflow stores it: infinities become the largest floats."""
    return math.copysign(LARGEST, value) if math.isinf(value) else value


def _batch(study: StudyRow, trial: UnsentTrial, facts: Facts, home: Home, location: Disk) -> Batch:
    checkpoints, root = facts.checkpoints.get(trial.id, []), home.checkpoints(study.name, trial.number)
    saved, removed = run_files.checkpoint_changes(checkpoints, trial.sent, root)
    on_disk = location is DISK
    files = saved if on_disk else {}
    files |= run_files.handed_over(home, study.name, trial, facts.artifacts.get(trial.id, []))
    new, ended = trial.sent == 0, trial.state in TERMINAL_STATES
    texts = {"config.json": run_files.config_text(trial.config)} if new else {}
    texts |= {} if on_disk else run_files.model_files(location, saved, checkpoints)
    models: list[Model] = []
    if ended and on_disk:
        models = run_files.models(study, trial, checkpoints, reported(facts.saved.get(trial.id, [])), root)
    if ended:
        kept = [row for row in checkpoints if row.state == "kept"]
        last, judged = facts.last.get(trial.id, {}), facts.judged.get(trial.id)
        texts[metrics_json.NAME] = metrics_json.text(
            study, trial, last, judged, kept, lambda row: checkpoint_name(row.step)
        )
    own_tags, removed_tags = tags.split(facts.tags.get(trial.number, {}))
    return Batch(
        points=_points(study, trial, facts.values.get(trial.id, [])),
        params={entry_name(path): _text(value, MAX_PARAM) for path, value in trial.params.items()} if new else {},
        tags=own_tags | _tags(study, trial, facts) | run_files.checkpoint_tags(checkpoints),
        removed_tags=removed_tags,
        texts=texts,
        files=files,
        datasets=datasets.of_trial(study, trial.config) if new else (),
        removed=removed,
        models=models,
        removed_models=[run_files.model_name(trial.number, name) for name in removed] if ended else (),
        status=TRIAL_STATUS[trial.state],
        ended_at=milliseconds(trial.ended_at) if ended and trial.ended_at is not None else None,
    )


def reported(values: Sequence[ValueRow]) -> list[Point]:
    """Returns values as the metrics of a model: only finite ones, since MLflow stores a model's NaN as 0."""
    return [
        Point(metric_key(row.key, row.fold), row.step, milliseconds(row.at), row.value)
        for row in values
        if row.value is not None and finite(row.value)
    ]


def _points(study: StudyRow, trial: UnsentTrial, values: Sequence[UnsentValue]) -> list[Point]:
    """Returns every value with its own time, the epoch that a step closed, and a complete trial's objective values."""
    points: list[Point] = []
    for row in values:
        value = math.nan if row.value is None else row.value
        at = milliseconds(row.at)
        points.append(Point(metric_key(row.key, row.fold), row.step, at, value))
        if row.epoch is not None and row.first:
            points.append(Point(metric_key("epoch", row.fold), row.step, at, float(row.epoch)))
    if trial.state == "complete" and trial.values and trial.ended_at is not None:
        names = pages.objective_keys(study.spec.objectives)
        ended_at = milliseconds(trial.ended_at)
        points += [
            Point(name, trial.step, ended_at, v)
            for name, v in zip(names, trial.values, strict=True)
            if v is not None  # pyright: ignore
        ]
    return list(dict.fromkeys(points))


def _tags(study: StudyRow, trial: UnsentTrial, facts: Facts) -> dict[str, str]:
    tags = {"hpo.state": trial.state, "hpo.fence": str(trial.fence), "hpo.losses": str(trial.losses)}
    tags[MARK] = mark(trial, facts.reported.get(trial.id))
    tags["hpo.preemptions"] = str(facts.preemptions.get(trial.id, 0))
    for shrunk in facts.shrunk.get(trial.id, [])[-1:]:
        tags["hpo.micro_batch_size"] = str(shrunk.fields["micro_batch_size"])
    tags |= {"hpo.group": trial.group} if trial.group else {}  # of trials that were trained as one model
    if trial.outcome:
        tags["hpo.outcome"] = trial.outcome
    if trial.error:
        tags["hpo.error"] = trial.error[:MAX_TAG]
    for stop in facts.stops.get(trial.id, [])[-1:]:
        tags["hpo.stopped_by"] = f"{stop.strategy} at step {stop.step}: {stop.reason}"[:MAX_TAG]
    if note := pages.trial_note(study, trial, tags.get("hpo.stopped_by", ""), tags.get("hpo.error", "")):
        tags[pages.NOTE] = note
    odd = sorted({metric_key(row.key, row.fold) for row in facts.nonfinite.get(trial.id, [])})
    if odd:
        tags["hpo.nonfinite"] = ", ".join(odd)[:MAX_TAG]
    return tags


def _provenance(study: StudyRow) -> tuple[str, str]:
    git = study.environment.get("git") or {}
    return study.spec.reference, git.get("commit", "")


def _environment(study: StudyRow) -> dict[str, Any]:
    """Returns the environment without the entries of this host and without the tracker's URI, which may hold a
    password."""
    host_keys = ("home", "tracking_uri", "trackers", "alerts")
    return {key: value for key, value in study.environment.items() if key not in host_keys}


def _scalar(value: object) -> bool:
    return isinstance(value, str | int | float | bool)


def _text(value: object, limit: int) -> str:
    """Returns a value as text, floats by their shortest exact form, cut to `limit`; `config.json` has it in full."""
    text = value if isinstance(value, str) else repr(value)
    return text[:limit]
