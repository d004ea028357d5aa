"""Converts a study of the ledger into an Optuna study, for its plots, its importances and optuna-dashboard."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    json_to_distribution,
)
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpo.door import option
from hpo.errors import StudyError
from hpo.ledger import Ledger, imports, queries, removed, tags
from hpo.ledger.rows import AskedTrial, Connection, StudyRow
from hpo.search.samplers.optuna_sampler import quiet_study
from hpo.space.dimension import Dimension
from hpo.space.dimensions import Choice, Float, Int
from hpo.space.objective import Constraint, Objective
from hpo.storage.home import Home

# The ledger's states as Optuna's. Optuna has no pause: a paused trial counts as running. A trial that broke a
# constraint is complete if it has values, and records the constraint in any case.
STATES = {
    "waiting": "WAITING",
    "running": "RUNNING",
    "paused": "RUNNING",
    "complete": "COMPLETE",
    "pruned": "PRUNED",
    "infeasible": "PRUNED",
    "failed": "FAIL",
}
_NOTED = ("state", "outcome", "error", "config_hash")


class SearchedSpace(Protocol):
    @property
    def dimensions(self) -> Mapping[str, Dimension]: ...


class Searched(Protocol):
    """The space and objectives of a study: a `Study`, or the ledger's record of one."""

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
    """Returns an in-memory Optuna study with the numbers, parameters, curves and times of all trials of study `name`.

    `curve` names the metric of the intermediate values, by default the only objective; with several objectives none,
    because Optuna keeps no curves for them.

    User attributes of a trial: `state`, `outcome` and `error` of the ledger, `config_hash`, and the last value of every
    metric; of the study: `metrics`, the objectives' names. Trials imported from Optuna are exactly as they were there;
    those of another tool have its attributes. Raises StudyError for an unknown name, a study that trains another's
    configurations again, or parameters outside the declared space.
    """
    url = storage or Home.at(home).storage
    ledger = Ledger(url, create=False)
    try:
        with ledger.read() as connection:
            row = queries.study_row(connection, name)
            _check_searched(row)
            trials = queries.trial_rows(connection, row.id, removed=True)
            removed_numbers = removed.numbers(connection, row.id)
            records = imports.records_by_id(connection, row.id) if row.spec.imported else {}
            tags_of = tags.given(connection, row.id)
            metrics = queries.last_values(connection, [trial.id for trial in trials])
            curves: dict[int, dict[int, float]] = {}
            keys = (
                [curve] if curve else [objective.metric for objective in study.objectives if len(study.objectives) == 1]
            )
            for number, _, _, epoch, value in queries.curves(connection, row.id, keys) if keys else ():
                if epoch is not None:
                    curves.setdefault(number, {})[epoch] = value
    finally:
        ledger.close()
    copy = quiet_study([objective.direction for objective in study.objectives], name=name)
    copy.set_user_attr("metrics", [objective.metric for objective in study.objectives])
    origin = row.spec.imported or {}
    for key, value in json.loads(origin.get("attributes", "{}")).items():
        copy.set_user_attr(key, value)
    distributions = _distributions(study)
    for trial in trials:
        if trial.number in removed_numbers:  # a stand-in, so that the others keep their numbers
            copy.add_trial(create_trial(state=TrialState.FAIL))
            continue
        record, points = records.get(trial.id, {}), curves.get(trial.number, {})
        if "final_step" in record:
            points.pop(record["final_step"], None)
        tagged = {f"tags.{key}": value for key, value in tags_of.get(trial.number, {}).items()}
        attributes = {**(record.get("attributes") or metrics.get(trial.id, {})), **tagged}
        copy.add_trial(_dated(_trial(study, distributions, trial, record, points, attributes), trial))
    return copy


class _Complete(InMemoryStorage):
    """Holds trials for reading, without the copy that Optuna makes of each trial that is added."""

    def __init__(self, trials: list[FrozenTrial]) -> None:
        super().__init__()
        self._complete = trials
        for number, trial in enumerate(trials):
            trial._trial_id = number  # pyright: ignore[reportPrivateUsage]  # evaluators tell trials apart by it

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        return self._complete if states is None or TrialState.COMPLETE in states else []


def complete_trials(
    connection: Connection, study: Searched, name: str, trials: Sequence[AskedTrial] | None = None
) -> optuna.Study:
    """Returns an Optuna study of the complete trials of study `name`, from which importances are computed.

    The trials have neither curves nor metrics, and none can be added. `trials` are all shown trials, if they have been
    read. Raises StudyError as `to_optuna` does.
    """
    row = queries.study_row(connection, name)
    _check_searched(row)
    trials = queries.trial_rows(connection, row.id) if trials is None else trials
    records = imports.records_by_id(connection, row.id) if row.spec.imported else {}
    distributions = _distributions(study)
    frozen = [
        _trial(study, distributions, trial, records.get(trial.id, {}), {}, {})
        for trial in trials
        if row.spec.imported or STATES[trial.state] == "COMPLETE" or trial.state == "infeasible"
    ]
    storage = _Complete([trial for trial in frozen if trial.state is TrialState.COMPLETE])
    copy = quiet_study([objective.direction for objective in study.objectives], storage, name)
    copy.set_user_attr("metrics", [objective.metric for objective in study.objectives])
    return copy


def fill(made: optuna.Study, study: optuna.Study) -> None:
    """Copies the result of `to_optuna` into a new study of another storage."""
    for key, value in study.user_attrs.items():
        if key != "metrics":
            made.set_user_attr(key, value)
    names = study.user_attrs["metrics"]
    if names != numbered(len(names)):
        made.set_metric_names(names)
    made.add_trials(study.get_trials(deepcopy=False))


def numbered(count: int) -> list[str]:
    """Returns the names that Optuna's tables give the values of a study without names."""
    return ["value"] if count == 1 else [f"value_{n}" for n in range(count)]


def value_distribution(dimension: Dimension) -> BaseDistribution:
    """Returns Optuna's distribution of a dimension's values, for a plot's axis."""
    if isinstance(dimension, Float):
        return FloatDistribution(dimension.low, dimension.high, log=dimension.log, step=dimension.step)
    if isinstance(dimension, Int):
        log = dimension.log or dimension.powers_of_two
        return IntDistribution(dimension.low, dimension.high, log=log, step=dimension.step)
    assert isinstance(dimension, Choice)
    return CategoricalDistribution(
        [json.dumps(option) if isinstance(option, list | tuple | dict) else option for option in dimension.options]
    )


def _check_searched(row: StudyRow) -> None:
    if source := row.spec.listed_of:
        raise StudyError(
            f"{row.name} trains configurations of {source} again and searches nothing: give {option('study', source)}."
        )


def _distributions(study: Searched) -> dict[str, BaseDistribution]:
    return {path: value_distribution(dimension) for path, dimension in study.space.dimensions.items()}


def _trial(
    study: Searched,
    distributions: Mapping[str, BaseDistribution],
    trial: AskedTrial,
    record: Mapping[str, Any],
    curve: dict[int, float],
    attributes: Mapping[str, object],
) -> FrozenTrial:
    """Returns a trial, one imported from Optuna exactly as it was there, without its times."""
    if known := record.get("exact", {}).get("distributions"):
        return _restored(trial, record, known, curve)
    return _frozen(study, distributions, trial, curve, attributes)


def _restored(
    trial: AskedTrial, record: Mapping[str, Any], distributions: Mapping[str, str], curve: dict[int, float]
) -> FrozenTrial:
    """Returns a trial imported from Optuna, exactly as it was there."""
    exact = record["exact"]
    return create_trial(
        state=TrialState[exact["state"]],
        values=exact["values"],
        params=trial.params | exact["params"],
        distributions={name: json_to_distribution(text) for name, text in distributions.items()},
        intermediate_values=curve,
        user_attrs=record["attributes"],
        system_attrs=exact["system_attrs"],
    )


def _frozen(
    study: Searched,
    distributions: Mapping[str, BaseDistribution],
    trial: AskedTrial,
    curve: dict[int, float],
    attributes: Mapping[str, object],
) -> FrozenTrial:
    values = None if trial.values is None or None in trial.values else trial.values
    state = TrialState.COMPLETE if trial.state == "infeasible" and values else TrialState[STATES[trial.state]]
    params = {}
    for path, value in trial.params.items():
        if path not in distributions:
            raise StudyError(f"trial {trial.number} has {path}={value!r}, which the declared space does not search.")
        params[path] = value if not isinstance(value, list | dict) else json.dumps(value)
    broken = {"feasible": 1.0} if trial.state == "infeasible" else {}
    violations = zip((constraint.metric for constraint in study.constraints), trial.violations or (), strict=False)
    try:
        return create_trial(
            state=state,
            values=values,
            params=params,
            distributions={path: distributions[path] for path in params},
            intermediate_values=curve,
            constraints=dict(violations) or broken or None,
            user_attrs={key: getattr(trial, key) for key in ("state", "outcome", "error", "config_hash")}
            | dict(attributes),
        )
    except ValueError as error:  # a value outside its distribution: the space has changed since
        raise StudyError(f"trial {trial.number} does not fit the declared space: {error}") from error


def _dated(frozen: FrozenTrial, trial: AskedTrial) -> FrozenTrial:
    state = frozen.state
    if state is not TrialState.WAITING:
        frozen.datetime_start = datetime.fromtimestamp(trial.started_at or trial.created_at)
    if state.is_finished() and trial.ended_at is not None:
        frozen.datetime_complete = datetime.fromtimestamp(trial.ended_at)
    return frozen
