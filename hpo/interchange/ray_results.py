"""Reads the directory of a Ray Tune experiment without importing Ray or opening its pickles.

It reads experiment_state-*.json, and params.json, result.json and error.txt of each trial.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpo.errors import UserError
from hpo.interchange.record import ImportedStudy, ImportedTrial, Point, State, judged_by
from hpo.interchange.texts import as_number, as_time, flat, json_object
from hpo.text import counted
from trainer.quote import quoted

_STATES: dict[str, State] = {"TERMINATED": "complete", "ERROR": "failed"}
_STEP, _TIMES = "training_iteration", ("start_time", "last_result_time")
# The keys that Tune adds to every result of a trainable.
_OWN = (
    "timestamp",
    "checkpoint_dir_name",
    "done",
    _STEP,
    "trial_id",
    "date",
    "time_this_iter_s",
    "time_total_s",
    "pid",
)
_OWN = (*_OWN, "hostname", "node_ip", "config", "time_since_restore", "iterations_since_restore", "experiment_tag")
_OWN = (*_OWN, "should_checkpoint", "timesteps_total", "episodes_total", "experiment_id", "warmup_time")


@dataclass(frozen=True)
class _Stored:
    """A trial as stored in the experiment's state."""

    id: str
    status: str
    directory: Path
    config: Mapping[str, Any]
    started: float | None
    ended: float | None
    tag: str


def read(
    directory: str, study: str | None = None, metrics: Sequence[str] = (), directions: Sequence[str] = ()
) -> ImportedStudy:
    """Returns the trials of the experiment. Raises UserError, with file and line, for damaged content."""
    root = Path(directory).expanduser()
    stored = sorted(_stored(_state_file(root, directory), root), key=lambda trial: trial.id)
    open_ = Counter(trial.status for trial in stored if trial.status not in _STATES)
    ended_trials = [trial for trial in stored if trial.status in _STATES]
    curves = {trial.id: _curves(trial.directory / "result.json") for trial in ended_trials}
    known = {metric for by_metric in curves.values() for metric in by_metric}
    objectives = judged_by(metrics, directions, known, directory)
    judged = [objective.metric for objective in objectives]
    trials, guessed = _stopped([_trial(trial, curves[trial.id], judged) for trial in ended_trials], judged)
    left = [f"{counted(count, 'trial')} in state {state}, which may end yet" for state, count in open_.items()]
    left += ["checkpoints, which stay where they are"]
    return ImportedStudy("ray", study or root.absolute().name, directory, tuple(objectives), trials, {}, left, guessed)


def _state_file(root: Path, shown: str) -> Path:
    """Returns the newest state file of the experiment."""
    if not root.is_dir():
        raise UserError(
            f"{shown} is not a directory: name that of an experiment of Ray Tune's, such as ~/ray_results/NAME."
        )
    if states := sorted(root.glob("experiment_state-*.json")):
        return states[-1]
    below = sorted({path.parent.name for path in root.glob("*/experiment_state-*.json")})
    hint = f"name one of those in it, {', '.join(below)}" if below else "name that of an experiment"
    raise UserError(f"{shown} has no experiment_state-*.json, so it is not an experiment of Ray Tune's: {hint}.")


def _stored(file: Path, root: Path) -> Iterator[_Stored]:
    content = json_object(file.read_text(encoding="utf-8", errors="replace"), str(file), UserError)
    try:
        for trial, runtime in content["trial_data"]:
            described = json_object(trial, f"{file}, a trial in it,", UserError)
            ran = json_object(runtime, f"{file}, a trial in it,", UserError)
            begun, ended = (at if at and at > 0 else None for at in map(as_time, map(ran.get, _TIMES)))
            tag, directory = str(described.get("experiment_tag", "")), root / described["relative_logdir"]
            if not isinstance(described["config"], dict):
                raise TypeError(described["config"])
            yield _Stored(
                str(described["trial_id"]), str(described["status"]), directory, described["config"], begun, ended, tag
            )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{file} is not as Ray Tune 2 writes it ({quoted(error)}: missing, or of another type): restore it."
        ) from error


def _curves(file: Path) -> dict[str, list[Point]]:
    """Returns the points of each metric that is a number, from a trial's results."""
    curves: dict[str, dict[int, Point]] = {}
    if not file.is_file():
        return {}
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            row = json_object(line, f"{file}:{number}", UserError)
            step, timestamp = row.get(_STEP), as_time(row.get("timestamp"))
            if not isinstance(step, int):
                raise UserError(f"{file}:{number} has no {_STEP}, which Ray Tune gives every result: restore the file.")
            reported = {name: value for name, value in row.items() if name not in _OWN}
            for metric, value in flat(reported, "/").items():
                if (number := as_number(value)) is not None:
                    curves.setdefault(metric, {})[step] = Point(step, number, timestamp)
    return {metric: [points[step] for step in sorted(points)] for metric, points in curves.items()}


def _trial(stored: _Stored, curves: Mapping[str, Sequence[Point]], judged: Sequence[str]) -> ImportedTrial:
    params = stored.directory / "params.json"
    config = stored.config
    if params.is_file():
        config = json_object(params.read_text(encoding="utf-8", errors="replace"), str(params), UserError)
    missing = [metric for metric in judged if metric not in curves]
    state: State = "failed" if missing else _STATES[stored.status]
    error = f"it never reported {' and '.join(missing)}" if missing else ""
    texts = stored.directory / "error.txt"
    if stored.status == "ERROR":
        output = texts.read_text(encoding="utf-8", errors="replace").strip() if texts.is_file() else ""
        error = output.splitlines()[-1] if output else error
    return ImportedTrial(
        key=stored.id,
        state=state,
        params=_plain(flat(config, ".")),
        values=[curves[metric][-1].value for metric in judged] if state == "complete" else None,
        curves=curves,
        started=stored.started,
        ended=stored.ended if curves else None,
        error=error,
        attributes={"experiment tag": stored.tag, "directory": stored.directory.name},
    )


def _plain(params: Mapping[str, object]) -> dict[str, Any]:
    """Returns parameters as JSON values; numbers that are not finite become their names."""
    return json.loads(json.dumps(params, default=str), parse_constant=lambda name: {"NaN": "nan"}.get(name, name))


def _stopped(trials: Sequence[ImportedTrial], judged: Sequence[str]) -> tuple[list[ImportedTrial], list[str]]:
    """Returns the trials; those that ended before the longest count as stopped, since Tune writes TERMINATED for
    both."""
    steps = {trial.key: trial.curves[judged[0]][-1].step for trial in trials if trial.state == "complete"}
    longest = max(steps.values(), default=0)
    short = {key for key, step in steps.items() if step < longest}
    if not short:
        return list(trials), []
    marked = [
        replace(trial, state="pruned", error=f"after {steps[trial.key]} of {longest} iterations")
        if trial.key in short
        else trial
        for trial in trials
    ]
    return marked, [f"{counted(len(short), 'trial')} with fewer than {longest} iterations were stopped by a scheduler"]
