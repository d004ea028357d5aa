"""Turns a study of the ledger into an Optuna study, for its plots, its importances and optuna-dashboard."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

import optuna
from optuna.distributions import json_to_distribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpo.errors import StudyError
from hpo.ledger import Ledger, imports, queries, tags
from hpo.ledger.rows import RowMapping
from hpo.search.samplers.optuna_sampler import quiet_study
from hpo.space.dimension import Dimension
from hpo.space.objective import Constraint, Objective
from hpo.storage.home import Home
from hpo.tracking.optuna_tracker import STATES, value_distribution


class SearchedSpace(Protocol):
    @property
    def dimensions(self) -> Mapping[str, Dimension]: ...


class Searched(Protocol):
    """What is searched and how it is judged: a `Study`, or what the ledger has recorded of one."""

    @property
    def objectives(self) -> Sequence[Objective]: ...

    @property
    def constraints(self) -> Sequence[Constraint]: ...

    @property
    def space(self) -> SearchedSpace: ...


def to_optuna(
    study: Searched,
    home: str | os.PathLike[str] | None,
    name: str,
    storage: str | None = None,
    curve: str | None = None,
) -> optuna.Study:
    """An in-memory Optuna study with every trial of study `name`, numbers, parameters, curves and times as they are.

    `curve` names the metric of the intermediate values, by default the only objective; of several objectives, of which
    Optuna itself keeps no curves, none.

    User attributes of a trial: `state`, `outcome` and `error` of the ledger, `config_hash`, and the last value of
    every metric; of the study: `metrics`, the objectives' names. Trials that were imported from Optuna are as they were
    there, and those of another tool have its attributes. Raises StudyError for an unknown name, a
    study that trains another's configurations again, or parameters that the declared space does not hold.
    """
    url = storage or Home.at(home).storage
    ledger = Ledger(url, create=False)
    try:
        with ledger.read() as connection:
            row = queries.study_row(connection, name)
            _check_searched(row)
            trials = queries.trial_rows(connection, row["id"])
            records = imports.records_by_id(connection, row["id"]) if row["spec"].get("imported") else {}
            given = tags.given(connection, row["id"])
            metrics = queries.last_values(connection, [trial["id"] for trial in trials])
            curves: dict[int, dict[int, float]] = {}
            keys = [curve] if curve else [one.metric for one in study.objectives if len(study.objectives) == 1]
            for number, _, _, epoch, value in queries.curves(connection, row["id"], keys) if keys else ():
                if epoch is not None:
                    curves.setdefault(number, {})[epoch] = value
    finally:
        ledger.close()
    copy = quiet_study([objective.direction for objective in study.objectives], name=name)
    copy.set_user_attr("metrics", [objective.metric for objective in study.objectives])
    origin = row["spec"].get("imported") or {}
    for key, value in json.loads(origin.get("attributes", "{}")).items():
        copy.set_user_attr(key, value)
    for trial in trials:
        record, points = records.get(trial["id"], {}), curves.get(trial["number"], {})
        if "final_step" in record:
            points.pop(record["final_step"], None)
        if distributions := record.get("exact", {}).get("distributions"):
            frozen = _restored(trial, record, distributions, points)
        else:
            tagged = {f"tags.{key}": value for key, value in given.get(trial["number"], {}).items()}
            attributes = {**(record.get("attributes") or metrics.get(trial["id"], {})), **tagged}
            frozen = _frozen(study, trial, points, attributes)
        copy.add_trial(_dated(frozen, trial))
    return copy


def _check_searched(row: RowMapping) -> None:
    if of := row["spec"].get("listed_of"):
        raise StudyError(f"{row['name']} trains configurations of {of} again and searches nothing: give --study {of}.")


def _restored(
    trial: Mapping[str, Any], record: Mapping[str, Any], distributions: Mapping[str, str], curve: dict[int, float]
) -> FrozenTrial:
    """A trial that Optuna had, as it was there."""
    exact = record["exact"]
    return create_trial(
        state=TrialState[exact["state"]],
        values=exact["values"],
        params=trial["params"] | exact["params"],
        distributions={name: json_to_distribution(one) for name, one in distributions.items()},
        intermediate_values=curve,
        user_attrs=record["attributes"],
        system_attrs=exact["system_attrs"],
    )


def _frozen(
    study: Searched, trial: dict[str, Any], curve: dict[int, float], attributes: Mapping[str, Any]
) -> FrozenTrial:
    values = None if trial["values"] is None or None in trial["values"] else trial["values"]
    state = TrialState.COMPLETE if trial["state"] == "infeasible" and values else TrialState[STATES[trial["state"]]]
    params, distributions = {}, {}
    for path, value in trial["params"].items():
        if path not in study.space.dimensions:
            raise StudyError(f"trial {trial['number']} has {path}={value!r}, which the declared space does not search.")
        distributions[path] = value_distribution(study.space.dimensions[path])
        params[path] = value if not isinstance(value, list | dict) else json.dumps(value)
    broken = {"feasible": 1.0} if trial["state"] == "infeasible" else {}
    held = zip((one.metric for one in study.constraints), trial["violations"] or (), strict=False)
    try:
        return create_trial(
            state=state,
            values=values,
            params=params,
            distributions=distributions,
            intermediate_values=curve,
            constraints=dict(held) or broken or None,
            user_attrs={key: trial[key] for key in ("state", "outcome", "error", "config_hash")} | dict(attributes),
        )
    except ValueError as error:  # a value outside its distribution: the space has changed since
        raise StudyError(f"trial {trial['number']} does not fit the declared space: {error}") from error


def _dated(frozen: FrozenTrial, trial: Mapping[str, Any]) -> FrozenTrial:
    state = frozen.state
    if state is not TrialState.WAITING:
        frozen.datetime_start = datetime.fromtimestamp(trial["started_at"] or trial["created_at"])
    if state.is_finished():
        frozen.datetime_complete = datetime.fromtimestamp(trial["ended_at"])
    return frozen
