"""Shows one trial in full: parameters, results, attempts, checkpoints, events and error."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpo.analysis.results.compare import headline
from hpo.analysis.results.format import duration, judgement, number, sparkline
from hpo.declaration.user_code import own_part
from hpo.door import option
from hpo.errors import UserError
from hpo.ledger import imports, queries, tags
from hpo.ledger.database.json import plain
from hpo.ledger.external import KEY
from hpo.ledger.finished import Finished, finished
from hpo.ledger.promotions import standing
from hpo.ledger.removed import FREED, REMOVED
from hpo.ledger.views import trial as trial_queries
from hpo.ledger.views import workers as worker_queries
from hpo.search.samplers.base import ORIGIN
from hpo.space.config import flatten
from hpo.space.trial_config import TrialShape
from hpo.storage import locations
from hpo.storage.home import Home
from hpo.text import aligned, command, counted, megabytes

if TYPE_CHECKING:
    from hpo.ledger.rows import Connection

_TRIAL = (
    "number",
    "state",
    "outcome",
    "epoch",
    "step",
    "error",
    "traceback",
    "losses",
    "parent",
    "generation",
    "start",
)


_ATTEMPT = ("fence", "from_step", "step", "outcome", "started_at", "ended_at", "host", "pid")
_CHECKPOINT = ("step", "epoch", "path", "state", "best", "size", "sha256", "metrics")
_DECISION = ("step", "fold", "verdict", "strategy", "reason")
_EVENT = ("kind", "fields", "at")
_PINNED = "set for the study, not searched"


def detail(connection: Connection, home: Home, name: str, number: int) -> dict[str, Any]:
    """Returns everything the ledger holds about a trial, as JSON values. Raises UserError if there is none."""
    study = queries.study_row(connection, name)
    row = trial_queries.find_trial(connection, study.id, number)
    if row is None:
        raise UserError(f"study {name!r} has no trial {number}: {trial_queries.there(connection, study.id)}.")
    metrics = [objective["metric"] for objective in study.spec.objectives]
    judged = queries.judged(connection, study, [row]).get(row.id)
    location = locations.of(home, study)
    end = finished(connection, study).get(number)
    tries = trial_queries.attempts_of(connection, row.id)
    curves: dict[str, list[list[Any]]] = {}
    for _, key, step, epoch, value in queries.curves(connection, study.id, numbers=[number]):
        curves.setdefault(key, []).append([step, epoch, _plain(value)])
    return {
        "study": name,
        **_columns(row, _TRIAL),
        "lineage": trial_queries.ancestors(connection, study.id, row.parent),
        "values": dict(zip(metrics, row.values or [None] * len(metrics), strict=True)),
        "judged": judged and _plainly(judged),
        "seconds": row.seconds,
        "seconds_trained": sum(
            attempt.ended_at - attempt.started_at for attempt in tries if attempt.ended_at is not None
        ),
        "tags": tags.given(connection, study.id).get(number, {}),
        "promoted": [promotion.label for promotion in standing(connection, study.id) if promotion.trial == number],
        "params": row.params,
        "overrides": study.spec.overrides,
        "config": row.config,
        "config_hash": row.config_hash,
        "finished": end and asdict(end),
        "origin": row.trial_attrs.get(ORIGIN),
        "imported": _imported(study.spec.imported, row.trial_attrs),
        "metrics": study.spec.metrics,
        "curves": curves,
        "folds": _folds(connection, row.id, metrics),
        "lanes": worker_queries.trained_with(connection, row),
        "attempts": [_columns(attempt, _ATTEMPT) for attempt in tries],
        "checkpoints": [
            _columns(saved, _CHECKPOINT) | {"path": location.shown(home.checkpoints(name, number) / saved.path)}
            for saved in trial_queries.checkpoints_of(connection, row.id)
        ],
        "decisions": [_columns(decision, _DECISION) for decision in trial_queries.decisions_of(connection, row.id)],
        "events": [_columns(event, _EVENT) for event in trial_queries.events_of(connection, row.id)],
    }


def _columns(row: object, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names}


def _imported(origin: Mapping[str, object] | None, trial_attrs: Mapping[str, object]) -> dict[str, Any] | None:
    """Returns the origin of an imported trial and its notes there; None for a trial that was trained here."""
    if origin is None:
        return None
    noted = plain(imports.record_of(trial_attrs)["attributes"])
    return {"tool": origin["tool"], "study": origin["label"], "trial": trial_attrs[KEY], "attributes": noted}


def _plainly(judged: queries.Judged) -> dict[str, Any]:
    metrics = {key: _plain(value) for key, value in sorted(judged.metrics.items())}
    return {"step": judged.step, "epoch": judged.epoch, "metrics": metrics}


def _folds(connection: Connection, trial_id: int, metrics: Sequence[str]) -> dict[int, dict[str, list[list[Any]]]]:
    """Returns fold, from 1 -> objective -> its [step, value]; empty for a trial that is not cross-validated."""
    by_fold: dict[int, dict[str, list[list[Any]]]] = {}
    for row in trial_queries.folds_of(connection, trial_id, metrics):
        value = None if row.value is None else _plain(row.value)
        by_fold.setdefault(row.fold, {}).setdefault(row.key, []).append([row.step, value])
    return by_fold


def _parts(trial: Mapping[str, Any]) -> str:
    """Returns "seeds" or "folds", in which the repeated trainings of a trial differ, and the reports of folds above
    0."""
    return "seeds" if TrialShape.of(trial["config"]).seeds > 1 else "folds"


def kept_checkpoints(trial: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the checkpoints still kept: the best, then from the newest to the oldest."""
    kept = [checkpoint for checkpoint in trial["checkpoints"] if checkpoint["state"] == "kept"]
    return sorted(kept, key=lambda checkpoint: (checkpoint["best"], checkpoint["step"]), reverse=True)


def kept_checkpoint(trial: Mapping[str, object]) -> dict[str, Any] | None:
    """Returns the best checkpoint still kept, else the newest."""
    return next(iter(kept_checkpoints(trial)), None)


def checkpoint_at(trial: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Returns where a checkpoint was taken, and the metrics there.

    It was taken at `epoch` of `epochs`, in one of `folds` parts, if any; `fold_of` says whether they are folds or
    seeds. `metrics` holds the metric that train.checkpoint monitors, then each objective, if they have values.
    `kept_for` is a text such as `the largest val/accuracy` for the checkpoint kept as the best, else None.
    """
    keep = flatten(trial["config"])
    monitor, largest = keep.get("train.checkpoint.monitor"), keep.get("train.checkpoint.mode") == "max"
    names = dict.fromkeys([*([monitor] if monitor else []), *trial["values"]])
    return {
        "epoch": checkpoint["epoch"],
        "epochs": trial["epoch"],
        "folds": len(trial["folds"]),
        "fold_of": _parts(trial),
        "metrics": {name: value for name in names if (value := checkpoint["metrics"].get(name)) is not None},
        "kept_for": f"the {'largest' if largest else 'least'} {monitor}" if checkpoint["best"] else None,
    }


def of_checkpoint(at: Mapping[str, Any], shown: Callable[[Any], str] = number) -> str:
    """Returns text such as `epoch 1 of 6: val/loss 0.31, val/accuracy 0.9; kept for the least val/loss`."""
    of_whole = f"one of {at['folds']} {at['fold_of']}" if at["folds"] else at["epochs"]  # a fold has epochs of its own
    text = f"epoch {at['epoch']} of {of_whole}"
    text += ": " if at["metrics"] else ""
    text += ", ".join(f"{name} {shown(value)}" for name, value in at["metrics"].items())
    return text + (f"; kept for {at['kept_for']}" if at["kept_for"] else "")


def base_config(connection: Connection, name: str) -> dict[str, Any]:
    """Returns the study's configuration before its trials' own parameters; loads the declaration."""
    from hpo.declaration.resolved import ResolvedStudy
    from hpo.space.config import as_json

    return as_json(ResolvedStudy.stored(queries.study_row(connection, name).spec.json).study.config)


def differences(base: object, config: object, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields (path, base value, trial's value) where two configurations differ; a missing part is None."""
    if isinstance(base, dict) and isinstance(config, dict):
        for key in dict.fromkeys([*base, *config]):
            yield from differences(base.get(key), config.get(key), f"{prefix}{key}.")
    elif base != config:
        yield prefix.removesuffix("."), base, config


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def describe(trial: Mapping[str, object], base: Mapping[str, object] | str, *, every: bool = True) -> str:
    """Returns the trial as text. `base` is the configuration to compare with, or why there is none."""
    return "\n".join(_lines(trial, base, every))


def _lines(trial: Mapping[str, Any], base: Mapping[str, Any] | str, every: bool) -> Iterator[str]:
    took = f", trained for {duration(trial['seconds_trained'])}" if trial["seconds_trained"] else ""
    if trial["seconds"] is not None and round(trial["seconds"]) > round(trial["seconds_trained"]):
        took += f", {duration(trial['seconds'])} from its start to its end"
    yield f"{trial['study']}, trial {trial['number']}: {trial['state']}"
    yield f"epoch {trial['epoch']}, step {trial['step']}{took}"
    if REMOVED in (kinds := [event["kind"] for event in trial["events"]]):
        removes = command(f"rm {trial['number']} --study {trial['study']}")
        left = "its checkpoints, files and runs are gone" if FREED in kinds else f"`{removes}` frees what it keeps"
        yield f"removed by `hpo rm`: {left}, and only `hpo show` shows it"
    if trial["finished"]:
        end = Finished(**trial["finished"])
        yield f"{end.described()}: {', '.join(f'{value:.6g}' for value in end.values)}"
    if trial["origin"]:
        yield f"proposed by: {trial['origin']}"
    if trial["lineage"]:
        origin = f", began from {trial['start']}" if trial["start"] else ""
        yield f"generation {trial['generation']}: descends from {' <- '.join(map(str, trial['lineage']))}{origin}"
    if trial["error"]:
        yield f"error: {trial['error']}"
    if beside := [f"{number}" for number in trial["lanes"] if number != trial["number"]]:
        yield f"trained as a lane of one model beside {'trials' if len(beside) > 1 else 'trial'} {', '.join(beside)}"
    if origin := trial["imported"]:
        yield f"imported from {origin['tool']} {origin['study']!r}, where it is {origin['trial']}"
        yield from (f"  {name}: {json.dumps(value)}" for name, value in origin["attributes"].items())
    if skipped := _skipped(trial):
        yield f"{skipped} skipped, whose loss or gradient was not finite"
    if values := {metric: value for metric, value in trial["values"].items() if value is not None}:
        kept, judged = kept_checkpoint(trial), trial["judged"] and queries.Judged(**trial["judged"])
        yield judgement(values, judged, trial["epoch"], saved=kept["epoch"] if kept else None)
    yield from (f"promoted as {label}" for label in trial["promoted"])
    yield from _section("tags", ([key, value] for key, value in trial["tags"].items()))
    yield from _section("parameters", _parameters(trial, base))
    if isinstance(base, str) and base:
        yield f"  ({base})"
    curves = trial["curves"]
    shown = headline(list(curves), list(trial["values"]), trial["metrics"], every=every)
    yield from _section("curves", (_curve(key, curves[key]) for key in shown))
    if len(shown) < len(curves):
        yield f"  ({counted(len(curves) - len(shown), 'more curve')}: {option('all')})"
    folds = ((f"{fold}", *curve) for fold, by_metric in trial["folds"].items() for curve in by_metric.items())
    rows = ([fold, *_curve(key, [[0, 0, value] for _, value in curve])] for fold, key, curve in folds)
    yield from _section(_parts(trial), rows)
    yield from _section(
        "attempts",
        (
            [
                f"{a['fence']}",
                f"{a['host']}:{a['pid']}",
                f"steps {a['from_step']} to {a['step']}",
                a["outcome"] or "running",
            ]
            for a in trial["attempts"]
        ),
    )
    yield from _section(
        "decisions",
        ([f"step {d['step']}", d["verdict"], f"by {d['strategy']}", d["reason"]] for d in trial["decisions"]),
    )
    remaining = [c for c in trial["checkpoints"] if c["state"] != "deleted"]
    yield from _section(
        "checkpoints",
        (
            [f"step {c['step']}", of_checkpoint(checkpoint_at(trial, c)), c["state"], megabytes(c["size"]), c["path"]]
            for c in remaining
        ),
    )
    if len(remaining) < len(trial["checkpoints"]):
        yield f"  ({counted(len(trial['checkpoints']) - len(remaining), 'older one')} dropped by retention)"
    yield from _section("events", ([event["kind"], json.dumps(event["fields"])] for event in trial["events"]))
    if trial["traceback"]:
        yield from ("", trial["traceback"].rstrip() if every else own_part(trial["traceback"]))


def _skipped(trial: Mapping[str, Any]) -> str:
    """Returns how many steps were skipped; for folds, how often skipping began.

    The curves of folds are the means of their best epochs, so they do not hold the number.
    """
    if trial["folds"]:
        times = sum(event["kind"] == "skipped_step" for event in trial["events"])
        return f"{counted(times, 'time')} steps were" if times else ""
    steps = sum(value or 0 for _, _, value in trial["curves"].get("train/skipped_steps", ()))
    return counted(int(steps), "step") if steps else ""


def _parameters(trial: Mapping[str, Any], base: Mapping[str, object] | str) -> Iterator[list[str]]:
    """Yields each parameter, and other differences from the study's configuration, beside the study's default."""
    pinned = {path: value for path, value in trial["overrides"].items() if path not in trial["params"]}
    if isinstance(base, str):
        yield from ([path, json.dumps(value), ""] for path, value in trial["params"].items())
        yield from ([path, json.dumps(value), _PINNED] for path, value in pinned.items())
        return
    changed = {path: (old, new) for path, old, new in differences(base, trial["config"])}
    for path, value in trial["params"].items():
        old, _ = changed.pop(path, (value, value))
        yield [path, json.dumps(value), _instead(old)]
    yield from ([path, json.dumps(new), _instead(old)] for path, (old, new) in changed.items())
    yield from ([path, json.dumps(value), _PINNED] for path, value in pinned.items() if path not in changed)


def _instead(old: object) -> str:
    rounded = float(f"{old:.8g}") if isinstance(old, float) else old
    return f"default {json.dumps(rounded)}"


def _curve(key: str, curve: list[list[Any]]) -> list[str]:
    values = [math.nan if value is None else value for _, _, value in curve]
    finite = [value for value in values if math.isfinite(value)]
    bounds = [f"min {number(min(finite))}", f"max {number(max(finite))}"] if finite else ["", ""]
    odd = f"{len(values) - len(finite)} not finite" if len(finite) < len(values) else ""
    return [key, sparkline(values, 32), f"last {number(values[-1])}", *bounds, odd]


def _section(title: str, rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yields a title and its rows in columns; nothing without rows."""
    cells = list(rows)
    if not cells:
        return
    yield from ("", title)
    yield from (f"  {line}" for line in aligned(cells))
