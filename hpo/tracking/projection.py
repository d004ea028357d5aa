"""Computes from the ledger's rows what a tracker should show of a study: runs, batches and their order.

The mirror sends these batches and `verify` compares them with what the tracker has, so the two cannot disagree about
what ought to be there. A state of the ledger and what the tracker shows:

    running              RUNNING
    waiting, paused      SCHEDULED     a trial that is to go on
    complete, pruned     FINISHED      a trial that was stopped on purpose has not failed
    infeasible, failed   FAILED

The tag `hpo.state` holds the ledger's own word, and the description why a trial is not complete. The metric `objective`
is of complete trials alone, so that an order by it has the best first: what was stopped was stopped early. A trial gets
its run when a worker first claims it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpo.ledger import mirror_queries, queries, tags
from hpo.ledger.mirror_queries import STUDY
from hpo.ledger.rows import Connection, RowMapping
from hpo.search.strategies.base import STRATEGIES
from hpo.space.trial_state import STATES, TERMINAL_STATES
from hpo.storage import artifacts, locations, metrics_json
from hpo.storage.home import Home
from hpo.tracking import curves, datasets, pages, run_files
from hpo.tracking.ahead import MARK, mark
from hpo.tracking.base import Batch, Model, Point, Run, Status
from hpo.tracking.names import entry_name
from hpo.tracking.rows import LARGEST, Facts, finite, milliseconds
from hpo.tracking.run_files import checkpoint_name
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
_LOOKED_AT = 100  # trials, for the parameters that they have
# Tags that runs of earlier releases are without; a person may have written a description of their own.
LATER = ("hpo.preemptions", "hpo.micro_batch_size", "hpo.train_seed", pages.NOTE, MARK, curves.MARK)
EARLIER_STATUS = {"pruned": "KILLED"}  # of runs that ended under an earlier release


@dataclass(frozen=True)
class Pending:
    """A trial with what its run has yet to get; of the files, those in a bucket are to be fetched (`artifacts.fetch`).
    `run_id` is None where no run is recorded."""

    trial_id: int
    number: int
    revision: int  # the ledger's, once `batch` is sent
    run_id: str | None
    run: Run
    batch: Batch
    place: Disk


def behind(connection: Connection, tracker: str, study: RowMapping) -> int:
    """How many of the ledger's transactions on the study and its trials the tracker has not got; one cheap query."""
    count = mirror_queries.behind(connection, tracker, study["id"])
    cursor = mirror_queries.study_cursor(connection, tracker, study["id"])
    return count + study["revision"] - (-1 if cursor is None else cursor.revision)


def pending(
    connection: Connection, tracker: str, study: RowMapping, home: Home, after: int = -1, n: int = 32
) -> list[Pending]:
    """The next `n` trials, by number, with a number above `after`, that the tracker is behind on.

    Trials are read first: rows committed in between belong to a later revision and are at worst sent twice.
    """
    rows = mirror_queries.pending(connection, tracker, study["id"], after, n)
    if not rows:
        return []
    facts = Facts(connection, tracker, study, rows)
    place = locations.place(home, study)
    batches = [_batch(study, row, facts, home, place) for row in rows]
    return [
        Pending(row["id"], row["number"], row["revision"], row["run_id"], trial_run(study, row), batch, place)
        for row, batch in zip(rows, batches, strict=True)
    ]


def everything(connection: Connection, study: RowMapping, home: Home) -> Iterator[Pending]:
    """Every trial that has a run, with all that its run should show."""
    after = -1
    while found := pending(connection, _NO_TRACKER, study, home, after):
        yield from found
        after = found[-1].number


def unsent(connection: Connection, trial: Pending, revision: int) -> set[tuple[str, int]]:
    """(key, step) of the points of a trial that a cursor at `revision` has not passed."""
    values = mirror_queries.unsent(connection, trial.trial_id, revision)
    found = {(metric_key(name, fold), step) for key, step, fold in values for name in (key, "epoch")}
    return found | {(point.key, point.step) for point in trial.batch.points if point.key.startswith("objective")}


def study_run(study: RowMapping) -> Run:
    """What opens the study's own run."""
    tags = {"hpo.run_uid": study["uid"], "hpo.kind": "study", "hpo.study": study["name"]}
    return Run(study["uid"], study["name"], milliseconds(study["created_at"]), tags, *_provenance(study))


def study_batch(connection: Connection, study: RowMapping, home: Home, state: str, after: int = 0) -> Batch:
    """What the study's run shows now; `state` is running, interrupted, complete or stopped. Its curves are those of the
    ends that come `after` so many."""
    points = curves.points(connection, study, after)
    given, removed = tags.split(tags.every(connection, study["id"], [STUDY]).get(STUDY, {}))
    shown = given | {"hpo.state": state, "hpo.requested": str(study["requested"]), **curves.mark(points, after)}
    shown |= {f"hpo.spec.{key}": _text(value, MAX_TAG) for key, value in study["spec"].items() if _scalar(value)}
    shown["hpo.spec.strategy"] = study["spec"].get("strategy", {}).get("name", "none")
    described = {**_environment(study), **study["environment"].get("versions", {})}
    shown |= {f"hpo.env.{key}": _text(value, MAX_TAG) for key, value in described.items() if _scalar(value)}
    best = queries.bests(connection, study)
    shown |= _best_tags(study, best)
    shown[pages.NOTE] = _study_note(connection, study, best)
    ended = None
    if STUDY_STATUS[state] in ("FINISHED", "FAILED"):
        ended = mirror_queries.last_end(connection, study["id"])
    soup = queries.newest_event(connection, study["id"], "soup")
    declared = {name: study[name] for name in ("name", "uid", "spec", "identity")}
    declared["environment"] = _environment(study)
    contents = {"study.json": declared} | ({"soup.json": soup} if soup else {})
    texts = {name: json.dumps(content, indent=2, sort_keys=True) + "\n" for name, content in contents.items()}
    files = run_files.of_study(home, study["name"], artifacts.of_study(connection, study["id"]))
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


def experiment_tags(connection: Connection, study: RowMapping) -> dict[str, str]:
    """What the experiment of a study says of it; the parameters shown are those that most trials have, of the lowest
    tier first: these are the ones that the study declares to matter most."""
    first = mirror_queries.first_params(connection, study["id"], _LOOKED_AT)
    known = Counter(path for params in first for path in params)
    space = study["identity"].get("space", {})
    tiers = {path: space[path].get("tier", 1) for path in known if path in space}
    shown = sorted(known, key=lambda path: (-known[path], tiers.get(path, 1)))
    note = _study_note(connection, study, queries.bests(connection, study))
    return pages.experiment_tags(study, shown, note)


def _study_note(connection: Connection, study: RowMapping, best: Sequence[queries.Best]) -> str:
    found = mirror_queries.counts(connection, study["id"])
    counts = {state: found[state] for state in STATES if state in found and state in TERMINAL_STATES}
    return pages.study_note(study, counts, best)[:MAX_TAG]


def _best_tags(study: RowMapping, best: Sequence[queries.Best]) -> dict[str, str]:
    """The best trial and its value; with several objectives the trials of the front and theirs, as JSON by number."""
    if len(study["spec"]["objectives"]) == 1:
        return {"hpo.best.trial": str(best[0].number), "hpo.best.value": repr(best[0].value)} if best else {}
    values = {str(one.number): list(one.values.values()) for one in best}
    return {"hpo.front.trials": ", ".join(values)[:MAX_TAG], "hpo.front.values": json.dumps(values)[:MAX_TAG]}


def trial_run(study: RowMapping, trial: RowMapping) -> Run:
    """What opens a trial's run."""
    tags = {
        "hpo.run_uid": f"{study['uid']}/{trial['number']}",
        "hpo.kind": "trial",
        "hpo.study": study["name"],
        "hpo.trial": str(trial["number"]),
        "hpo.seed": str(trial["seed"]),  # of the proposal
        "hpo.config_hash": trial["config_hash"],
    }
    if (seed := (trial["config"].get("train") or {}).get("seed")) is not None:
        tags["hpo.train_seed"] = str(seed)
    if trial["parent"] is not None:
        tags["hpo.parent"] = str(trial["parent"])
    if trial["parent"] is not None or _in_generations(study["spec"].get("strategy", "none")):
        tags["hpo.generation"] = str(trial["generation"])
    if trial["start"] is not None:
        tags["hpo.start"] = trial["start"]
    if trial["ranks"] > 1:
        tags["hpo.ranks"] = str(trial["ranks"])
    started = milliseconds(trial["started_at"] or trial["created_at"])
    name = pages.run_name(study["name"], trial["number"])
    return Run(tags["hpo.run_uid"], name, started, tags, *_provenance(study))


def _in_generations(strategy: str | Mapping[str, Any]) -> bool:
    """Whether it is one of populations; by its place, since the strategies take long to import."""
    name = strategy if isinstance(strategy, str) else str(strategy["name"])
    return STRATEGIES.get(name, "").startswith("hpo.search.population.")


def metric_key(key: str, fold: int = 0) -> str:
    """Returns the name of a metric in the tracker, of a fold above 0 with the fold before it."""
    return entry_name(f"fold{fold}/{key}" if fold else key)


def stored(value: float) -> float:
    """A metric's value as MLflow stores it: infinities become the largest floats."""
    return math.copysign(LARGEST, value) if math.isinf(value) else value


def _batch(study: RowMapping, trial: RowMapping, facts: Facts, home: Home, place: Disk) -> Batch:
    found, root = facts.checkpoints.get(trial["id"], []), home.checkpoints(study["name"], trial["number"])
    saved, removed = run_files.checkpoint_changes(found, trial["sent"], root)
    here = place is DISK
    files = saved if here else {}
    files |= run_files.handed_over(home, study["name"], trial, facts.artifacts.get(trial["id"], []))
    new, ended = trial["sent"] == 0, trial["state"] in TERMINAL_STATES
    texts = {"config.json": run_files.config_text(trial)} if new else {}
    texts |= {} if here else run_files.places(place, saved, found)
    models: list[Model] = []
    if ended and here:
        models = run_files.models(study, trial, found, reported(facts.saved.get(trial["id"], [])), root)
    if ended:
        kept = [row for row in found if row["state"] == "kept"]
        last, judged = facts.last.get(trial["id"], {}), facts.judged.get(trial["id"])
        texts[metrics_json.NAME] = metrics_json.text(
            study, trial, last, judged, kept, lambda row: checkpoint_name(row["step"])
        )
    given, removed_tags = tags.split(facts.tags.get(trial["number"], {}))
    return Batch(
        points=_points(study, trial, facts.values.get(trial["id"], [])),
        params={entry_name(path): _text(value, MAX_PARAM) for path, value in trial["params"].items()} if new else {},
        tags=given | _tags(study, trial, facts) | run_files.checkpoint_tags(found),
        removed_tags=removed_tags,
        texts=texts,
        files=files,
        datasets=datasets.of_trial(study, trial["config"]) if new else (),
        removed=removed,
        models=models,
        values=values if (values := trial["values"]) and None not in values else (),
        violations=dict(
            zip(
                (one["metric"] for one in study["spec"].get("constraints", ())), trial["violations"] or (), strict=False
            )
        ),
        removed_models=[run_files.model_name(trial["number"], name) for name in removed] if ended else (),
        status=TRIAL_STATUS[trial["state"]],
        ended_at=milliseconds(trial["ended_at"]) if ended else None,
    )


def reported(values: Sequence[RowMapping]) -> list[Point]:
    """Values as the metrics of a model: finite ones alone, since MLflow stores a model's NaN as 0."""
    return [
        Point(metric_key(row["key"], row["fold"]), row["step"], milliseconds(row["at"]), row["value"])
        for row in values
        if finite(row["value"])
    ]


def _points(study: RowMapping, trial: RowMapping, values: Sequence[RowMapping]) -> list[Point]:
    """Every value with its own time, the epoch a step closed, and at the end of a complete trial the value of each
    objective."""
    points = []
    for row in values:
        value = math.nan if row["value"] is None else row["value"]
        at = milliseconds(row["at"])
        points.append(Point(metric_key(row["key"], row["fold"]), row["step"], at, value))
        if row["epoch"] is not None and row["first"]:
            points.append(Point(metric_key("epoch", row["fold"]), row["step"], at, float(row["epoch"])))
    if trial["state"] == "complete" and trial["values"]:
        names = pages.objective_keys(study["spec"]["objectives"])
        ended = milliseconds(trial["ended_at"])
        points += [
            Point(name, trial["step"], ended, v)
            for name, v in zip(names, trial["values"], strict=True)
            if v is not None
        ]
    return list(dict.fromkeys(points))


def _tags(study: RowMapping, trial: RowMapping, facts: Facts) -> dict[str, str]:
    tags = {"hpo.state": trial["state"], "hpo.fence": str(trial["fence"]), "hpo.losses": str(trial["losses"])}
    tags[MARK] = mark(trial, facts.reported.get(trial["id"]))
    tags["hpo.preemptions"] = str(facts.preemptions.get(trial["id"], 0))
    for shrunk in facts.shrunk.get(trial["id"], [])[-1:]:
        tags["hpo.micro_batch_size"] = str(shrunk["fields"]["micro_batch_size"])
    tags |= {"hpo.group": trial["group"]} if trial["group"] else {}  # whose lanes were trained as one model
    if trial["outcome"]:
        tags["hpo.outcome"] = trial["outcome"]
    if trial["error"]:
        tags["hpo.error"] = trial["error"][:MAX_TAG]
    for stop in facts.stops.get(trial["id"], [])[-1:]:
        tags["hpo.stopped_by"] = f"{stop['strategy']} at step {stop['step']}: {stop['reason']}"[:MAX_TAG]
    if note := pages.trial_note(study, trial, tags.get("hpo.stopped_by", ""), tags.get("hpo.error", "")):
        tags[pages.NOTE] = note
    odd = sorted({metric_key(row["key"], row["fold"]) for row in facts.nonfinite.get(trial["id"], [])})
    if odd:
        tags["hpo.nonfinite"] = ", ".join(odd)[:MAX_TAG]
    return tags


def _provenance(study: RowMapping) -> tuple[str, str]:
    git = study["environment"].get("git") or {}
    return study["spec"].get("reference", ""), git.get("commit", "")


def _environment(study: RowMapping) -> dict[str, Any]:
    """Without what concerns this host alone; a tracker's URI may hold a password besides."""
    own = ("home", "tracking_uri", "trackers", "alerts")
    return {key: value for key, value in study["environment"].items() if key not in own}


def _scalar(value: Any) -> bool:
    return isinstance(value, str | int | float | bool)


def _text(value: Any, limit: int) -> str:
    """A value exactly, floats by their shortest representation; longer text is cut, `config.json` has it whole."""
    text = value if isinstance(value, str) else repr(value)
    return text[:limit]
