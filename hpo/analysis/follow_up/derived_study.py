"""Derives a study of listed configurations from another study, runs it and reads its results."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpo.analysis.results.best import chosen_best, none_complete
from hpo.declaration.resolved import ResolvedStudy
from hpo.declaration.spec import StudySpec
from hpo.declaration.study import Study
from hpo.door import option
from hpo.driver.request import RunRequest, request_of
from hpo.errors import UserError
from hpo.ledger import answer, queries
from hpo.search import pareto
from hpo.search.confirming import NONE, SEED
from hpo.search.ranking import losses
from hpo.space.config import as_json, flatten
from hpo.space.objective import Objective
from hpo.space.trial_state import TERMINAL_STATES
from hpo.storage import locations
from hpo.workers.executors.placement import PlacementRequest

if TYPE_CHECKING:
    from hpo.ledger import Ledger
    from hpo.storage.home import Home


@dataclass(frozen=True)
class SourceStudy:
    """A study in its present state: its declaration, its request and its complete trials.

    base    its default configuration, flat
    ranked  its complete trials, best first, each with `number`, `values`, `params`, its whole `config`, flat, and
            `changed`: whether its parameters changed during training, so that they alone do not repeat it
    """

    name: str
    study: Study
    spec: StudySpec
    placement: PlacementRequest
    checkpoints: str | None  # the bucket they go to
    base: Mapping[str, Any]
    ranked: Sequence[Mapping[str, Any]]
    answer: Sequence[int]  # the best trial, or the front, as in `hpo best`

    @property
    def objectives(self) -> Sequence[Objective]:
        return self.study.objectives

    def best(self, top: int) -> list[Mapping[str, Any]]:
        """Returns the `top` best trials; with several objectives, the trials that together cover the front best."""
        trials = {trial["number"]: trial for trial in self.ranked}
        return [trials[number] for number in pareto.ranked(losses(self.spec.objectives, _values(self.ranked)))[:top]]

    def unused_seeds(self, count: int) -> range:
        """Returns the seeds above the largest one that the study has used; they took no part in the selection."""
        first = 1 + max(trial["config"][SEED] for trial in self.ranked)
        return range(first, first + count)

    def chosen(self, number: int | None) -> Mapping[str, Any]:
        """Returns the trial of this number, else the best one.

        Raises UserError if the trial is not complete, or if several trials are best by several objectives.
        """
        if number is None:
            return chosen_best([trial for trial in self.ranked if trial["number"] in self.answer], None)
        named = next((trial for trial in self.ranked if trial["number"] == number), None)
        if named is None:
            numbers = ", ".join(str(trial["number"]) for trial in self.ranked[:10])
            more = " ..." if self.ranked[10:] else ""
            raise UserError(f"study {self.name!r} has no complete trial {number}: it has {numbers}{more}, best first.")
        return named


def found(ledger: Ledger, name: str, *, complete: bool = True) -> SourceStudy:
    """Returns the study in its present state.

    Raises HpoError if `complete` is set and no trial is complete, and UserError if the study has no seed.
    """
    with ledger.read() as connection:
        row = queries.study_row(connection, name)
        resolved = ResolvedStudy.stored(row.spec.json)
        spec, study = resolved.spec, resolved.study
        ranked, bests = queries.ranked(connection, row), answer.bests(connection, row)
        values = answer.scored(connection, row)
        trials = queries.trial_rows(connection, row.id)
        trial_of, changed = {trial.number: trial for trial in trials}, queries.changed(trials)
        best = [trial_of[number] for number in ranked]
        configs = queries.configs(connection, [trial.id for trial in best])
    if complete and not ranked:
        raise none_complete(name)
    base = flatten(as_json(study.config))
    if SEED not in base:
        raise UserError(
            f"study {name!r} has no field {SEED}, by which a training could be repeated under another seed: give the "
            "configuration that field."
        )
    rows = [
        {
            "number": trial.number,
            "values": values[trial.number],
            "params": trial.params,
            "config": flatten(configs[trial.id]),
            "changed": trial.number in changed,
        }
        for trial in best
    ]
    bucket, numbers = locations.url(row) or None, [best.number for best in bests]
    return SourceStudy(name, study, spec, PlacementRequest.of(row.environment), bucket, base, rows, numbers)


def not_repeated(trials: Sequence[int]) -> list[str]:
    """Returns a line about the trials whose parameters changed during training; no line where there are none."""
    if not trials:
        return []
    named = f"trial{'' if len(trials) == 1 else 's'} {', '.join(map(str, sorted(trials)))}"
    return [
        f"not repeated: the parameters of {named} changed in the middle of training; here the last ones train it all"
    ]


@dataclass(frozen=True)
class RunDefaults:
    """The flags by which a derived study is run; None stands for the setting of its source study."""

    home: Home
    placement: PlacementRequest
    storage: str | None
    tracking_uri: str | None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    one_by_one: Collection[str] = ()


def request(
    of: SourceStudy,
    name: str,
    listed: Sequence[Mapping[str, object]],
    driven: RunDefaults,
    confirm: str = NONE,
) -> RunRequest:
    """Returns the request that runs the `listed` configurations as study `name`. Raises UserError for Ray Tune.

    confirm  the race of `hpo confirm` whose first rounds they are, so that its command can be named
    """
    if driven.placement.executor == "ray-tune":
        raise UserError(
            f"{option('executor', 'ray-tune')} asks a scheduler what is trained, and here a list says it: take another."
        )
    placement = driven.placement.over(of.placement if of.placement.executor != "ray-tune" else PlacementRequest())
    return request_of(
        driven.home,
        of.spec.reference,
        checkpoints=of.checkpoints,
        name=name,
        trials=len(listed),
        executor=placement.executor,
        workers=placement.workers,
        resources=placement.resources,
        sampler="random",
        strategy="none",
        order="ordered",
        confirm=confirm,
        enqueue=[],
        listed=listed,
        listed_of=of.name,
        overrides={**_kept(of.spec, driven.overrides), **driven.overrides},
        one_by_one=driven.one_by_one,
        storage=driven.storage,
        tracking_uri=driven.tracking_uri,
    )


def _kept(spec: StudySpec, overrides: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the overrides of a study that hold for one derived from it: a preset replaces that of the search."""
    if "preset" not in overrides:
        return spec.overrides
    return {path: value for path, value in spec.overrides.items() if path not in spec.of_search_alone}


def grown(ledger: Ledger, name: str, listed: Sequence[Mapping[str, object]]) -> Sequence[Mapping[str, Any]]:
    """Returns the configurations of study `name` after it has taken in `listed`: the stored ones, then the new ones.

    Raises UserError if the study exists, lacks some of `listed` and has trained a configuration not in it.
    """
    with ledger.read() as connection:
        if name not in queries.study_names(connection):
            return listed
        stored: Sequence[Mapping[str, Any]] = queries.study_row(connection, name).spec.listed
    new = [entry for entry in listed if entry not in stored]
    if not stored or (new and any(entry not in listed for entry in stored)):
        raise UserError(f"study {name!r} is there already and has trained others: name a new one by {option('name')}.")
    return [*stored, *new]


def _values(trials: Sequence[Mapping[str, Any]]) -> dict[int, Sequence[float]]:
    return {trial["number"]: trial["values"] for trial in trials}


@dataclass(frozen=True)
class SeedRun:
    """One trial of a derived study: for each objective its value, and the held-out metric's value at the same step.

    A value that is missing is None.

    by_fold  whether it trained on its own fold of the data
    """

    values: Sequence[float | None]
    held_out: Sequence[float | None]
    by_fold: bool = False


def repeats(ledger: Ledger, name: str, hold_outs: Sequence[str | None] = ()) -> dict[str, list[SeedRun]]:
    """Returns the ended trials of a derived study by label, in the order of the list.

    hold_outs  a held-out metric for each objective, or none at all
    """
    with ledger.read() as connection:
        row = queries.study_row(connection, name)
        listed = row.spec.listed
        grouped: dict[str, list[SeedRun]] = {entry["label"]: [] for entry in listed}
        trials = [trial for trial in queries.trial_rows(connection, row.id) if trial.state in TERMINAL_STATES]
        judged = queries.judged(connection, row, [trial for trial in trials if trial.state == "complete"])
        for trial in trials:
            judged_at, values = judged.get(trial.id), trial.values if trial.state == "complete" else None
            values_held_out = [judged_at.metrics.get(key or "") if judged_at else None for key in hold_outs]
            entry = listed[trial.number]
            run = SeedRun(values or [None] * len(row.spec.objectives), values_held_out, "fold" in entry)
            grouped[entry["label"]].append(run)
    return grouped
