"""Reads the directory of a Ray Tune experiment: experiment_state-*.json, and of each trial params.json, result.json and
error.txt. Ray is not imported, and none of its pickles is opened.
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
from hpo.interchange.texts import flat, json_object
from hpo.text import counted

_STATES: dict[str, State] = {"TERMINATED": "complete", "ERROR": "failed"}
_STEP, _TIMES = "training_iteration", ("start_time", "last_result_time")
# What Tune puts into every result beside what a trainable has reported.
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
    """A trial as the experiment's state has it."""

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
    """The trials of the experiment. Raises UserError, with the file and the line of what is damaged."""
    root = Path(directory).expanduser()
    stored = sorted(_stored(_state_file(root, directory), root), key=lambda one: one.id)
    open_ = Counter(one.status for one in stored if one.status not in _STATES)
    ended = [one for one in stored if one.status in _STATES]
    curves = {one.id: _curves(one.directory / "result.json") for one in ended}
    known = {metric for one in curves.values() for metric in one}
    objectives = judged_by(metrics, directions, known, directory)
    judged = [one.metric for one in objectives]
    trials, guessed = _stopped([_trial(one, curves[one.id], judged) for one in ended], judged)
    left = [f"{counted(count, 'trial')} in state {state}, which may end yet" for state, count in open_.items()]
    left += ["checkpoints, which stay where they are"]
    return ImportedStudy("ray", study or root.absolute().name, directory, tuple(objectives), trials, {}, left, guessed)


def _state_file(root: Path, shown: str) -> Path:
    """The newest state of the experiment."""
    if not root.is_dir():
        raise UserError(
            f"{shown} is no directory: name that of an experiment of Ray Tune's, such as ~/ray_results/NAME."
        )
    if found := sorted(root.glob("experiment_state-*.json")):
        return found[-1]
    below = sorted({path.parent.name for path in root.glob("*/experiment_state-*.json")})
    hint = f"name one of those in it, {', '.join(below)}" if below else "name that of an experiment"
    raise UserError(f"{shown} has no experiment_state-*.json, so it is no experiment of Ray Tune's: {hint}.")


def _stored(file: Path, root: Path) -> Iterator[_Stored]:
    content = json_object(file.read_text(encoding="utf-8", errors="replace"), str(file), UserError)
    try:
        for trial, runtime in content["trial_data"]:
            one = json_object(trial, f"{file}, a trial in it,", UserError)
            ran = json_object(runtime, f"{file}, a trial in it,", UserError)
            begun, ended = (at if isinstance(at, float) and at > 0 else None for at in map(ran.get, _TIMES))
            tag, where = str(one.get("experiment_tag", "")), root / one["relative_logdir"]
            yield _Stored(one["trial_id"], one["status"], where, one["config"], begun, ended, tag)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{file} is not as Ray Tune 2 writes it ({error!r} is missing or no text): restore it."
        ) from error


def _curves(file: Path) -> dict[str, list[Point]]:
    """Metric -> its points, of a trial's results; of numbers alone."""
    found: dict[str, dict[int, Point]] = {}
    if not file.is_file():
        return {}
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            result = json_object(line, f"{file}:{number}", UserError)
            step, at = result.get(_STEP), result.get("timestamp")
            if not isinstance(step, int):
                raise UserError(f"{file}:{number} has no {_STEP}, which Ray Tune gives every result: restore the file.")
            own = {name: value for name, value in result.items() if name not in _OWN}
            for metric, value in flat(own, "/").items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    found.setdefault(metric, {})[step] = Point(step, float(value), at)
    return {metric: [points[step] for step in sorted(points)] for metric, points in found.items()}


def _trial(one: _Stored, curves: Mapping[str, Sequence[Point]], judged: Sequence[str]) -> ImportedTrial:
    params = one.directory / "params.json"
    config = one.config
    if params.is_file():
        config = json_object(params.read_text(encoding="utf-8", errors="replace"), str(params), UserError)
    missing = [metric for metric in judged if metric not in curves]
    state: State = "failed" if missing else _STATES[one.status]
    error = f"it never reported {' and '.join(missing)}" if missing else ""
    texts = one.directory / "error.txt"
    if one.status == "ERROR":
        said = texts.read_text(encoding="utf-8", errors="replace").strip() if texts.is_file() else ""
        error = said.splitlines()[-1] if said else error
    return ImportedTrial(
        key=one.id,
        state=state,
        params=_plain(flat(config, ".")),
        values=[curves[metric][-1].value for metric in judged] if state == "complete" else None,
        curves=curves,
        started=one.started,
        ended=one.ended if curves else None,
        error=error,
        attributes={"experiment tag": one.tag, "directory": one.directory.name},
    )


def _plain(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as JSON values: numbers that are not finite as their names."""
    return json.loads(json.dumps(params, default=str), parse_constant=lambda name: {"NaN": "nan"}.get(name, name))


def _stopped(trials: Sequence[ImportedTrial], judged: Sequence[str]) -> tuple[list[ImportedTrial], list[str]]:
    """The trials, of which those count as stopped that ended before the longest: Tune writes TERMINATED of both."""
    steps = {one.key: one.curves[judged[0]][-1].step for one in trials if one.state == "complete"}
    longest = max(steps.values(), default=0)
    short = {key for key, step in steps.items() if step < longest}
    if not short:
        return list(trials), []
    marked = [
        replace(one, state="pruned", error=f"after {steps[one.key]} of {longest} iterations")
        if one.key in short
        else one
        for one in trials
    ]
    return marked, [f"{counted(len(short), 'trial')} with fewer than {longest} iterations were stopped by a scheduler"]
