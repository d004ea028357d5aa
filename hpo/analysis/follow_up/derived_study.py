"""Derives a study of listed configurations from another study, runs it and reads its results."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from hpo.analysis.results.best import chosen_best, none_complete
from hpo.declaration.resolved import ResolvedStudy
from hpo.declaration.spec import StudySpec
from hpo.declaration.study import Study
from hpo.driver.request import RunRequest
from hpo.errors import UserError
from hpo.ledger import queries
from hpo.search import pareto
from hpo.search.ranking import best_of, losses
from hpo.space.config import as_json, flatten
from hpo.space.objective import Objective
from hpo.space.trial_state import TERMINAL_STATES
from hpo.storage import locations
from hpo.text import counted
from hpo.workers.executors.placement import PlacementRequest

if TYPE_CHECKING:
    from hpo.ledger import Ledger
    from hpo.storage.home import Home

SEED = "train.seed"


@dataclass(frozen=True)
class SourceStudy:
    """A study as it stands: what was declared and asked for, its own configuration, flat, and its complete trials,
    best first, each with `number`, `values`, `params`, its whole `config`, flat, and `changed`: whether its parameters
    changed in the middle of training, so that they alone do not give it again."""

    name: str
    study: Study
    spec: StudySpec
    placement: PlacementRequest
    checkpoints: str | None  # the bucket they go to
    base: Mapping[str, Any]
    ranked: Sequence[Mapping[str, Any]]

    @property
    def objectives(self) -> Sequence[Objective]:
        return self.study.objectives

    def best(self, top: int) -> list[Mapping[str, Any]]:
        """The `top` best trials; with several objectives those that together cover the front best."""
        of = {one["number"]: one for one in self.ranked}
        return [of[number] for number in pareto.ranked(losses(self.spec.objectives, _values(self.ranked)))[:top]]

    def unused_seeds(self, count: int) -> range:
        """Those that follow on the largest the study has used: by these nothing was selected."""
        first = 1 + max(trial["config"][SEED] for trial in self.ranked)
        return range(first, first + count)

    def chosen(self, number: int | None) -> Mapping[str, Any]:
        """The trial that is named, else the best one. Raises UserError where the one is not complete, or where several
        objectives leave several best."""
        if number is None:
            front = best_of(self.spec.objectives, _values(self.ranked))
            return chosen_best([one for one in self.ranked if one["number"] in front], None)
        named = next((one for one in self.ranked if one["number"] == number), None)
        if named is None:
            there = ", ".join(str(one["number"]) for one in self.ranked[:10])
            more = " ..." if self.ranked[10:] else ""
            raise UserError(f"study {self.name!r} has no complete trial {number}: it has {there}{more}, best first.")
        return named


def found(ledger: Ledger, name: str) -> SourceStudy:
    """Raises HpoError where no trial is complete, and UserError where the study has no seed to be varied."""
    with ledger.read() as connection:
        row = queries.study_row(connection, name)
        resolved = ResolvedStudy.stored(row["spec"])
        spec, study = resolved.spec, resolved.study
        ranked = queries.ranked(connection, row)
        trials = queries.trial_rows(connection, row["id"])
        of, changed = {trial["number"]: trial for trial in trials}, queries.changed(trials)
        best = [of[number] for number in ranked]
        configs = queries.configs(connection, [one["id"] for one in best])
    if not ranked:
        raise none_complete(name)
    base = flatten(as_json(study.config))
    if SEED not in base:
        raise UserError(f"study {name!r} has no field {SEED}, by which a training could be repeated otherwise.")
    rows = [
        {
            "number": one["number"],
            "values": one["values"],
            "params": one["params"],
            "config": flatten(configs[one["id"]]),
            "changed": one["number"] in changed,
        }
        for one in best
    ]
    at = locations.url(row) or None
    return SourceStudy(name, study, spec, PlacementRequest.of(row["environment"]), at, base, rows)


def not_repeated(trials: Sequence[int]) -> list[str]:
    """A line on those whose parameters changed in the middle of training; none where there is no such one."""
    if not trials:
        return []
    named = f"trial{'' if len(trials) == 1 else 's'} {', '.join(map(str, sorted(trials)))}"
    return [
        f"not repeated: the parameters of {named} changed in the middle of training; here the last ones train it all"
    ]


@dataclass(frozen=True)
class RunDefaults:
    """How a derived study is to be run, as the flags have it; None: as the study it comes from."""

    home: Home
    placement: PlacementRequest
    storage: str | None
    tracking_uri: str | None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    one_by_one: Collection[str] = ()


def request(of: SourceStudy, name: str, listed: Sequence[Mapping[str, Any]], driven: RunDefaults) -> RunRequest:
    """What runs the study `name` of the `listed` configurations. Raises UserError where Ray Tune is to do that."""
    if driven.placement.executor == "ray-tune":
        raise UserError("--executor ray-tune asks a scheduler what is trained, and here a list says it: take another.")
    placement = driven.placement.over(of.placement if of.placement.executor != "ray-tune" else PlacementRequest())
    return RunRequest(
        home=driven.home,
        checkpoints=of.checkpoints,
        reference=of.spec.reference,
        name=name,
        trials=len(listed),
        executor=placement.executor,
        workers=placement.workers,
        resources=placement.resources,
        sampler="random",
        strategy="none",
        order="ordered",
        enqueue=[],
        listed=listed,
        listed_of=of.name,
        overrides={**of.spec.overrides, **driven.overrides},
        one_by_one=driven.one_by_one,
        storage=driven.storage,
        tracking_uri=driven.tracking_uri,
    )


def grown(ledger: Ledger, name: str, listed: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """What the study `name` is to train, that it has all of `listed`: what it has trained, and behind it what is new.

    Raises UserError where it is there already and has trained what is not of them, unless it has them all.
    """
    with ledger.read() as connection:
        if name not in queries.study_names(connection):
            return listed
        stored: Sequence[Mapping[str, Any]] = queries.study_row(connection, name)["spec"]["listed"]
    new = [one for one in listed if one not in stored]
    if not stored or (new and any(one not in listed for one in stored)):
        raise UserError(f"study {name!r} is there already and has trained others: name a new one by --name.")
    return [*stored, *new]


def _values(trials: Sequence[Mapping[str, Any]]) -> dict[int, Sequence[float]]:
    return {one["number"]: one["values"] for one in trials}


@dataclass(frozen=True)
class SeedRun:
    """One trial of a derived study: its value by each objective, and that of the metric held out beside it at the same
    step; None where it has none."""

    values: Sequence[float | None]
    held_out: Sequence[float | None]


def repeats(ledger: Ledger, name: str, hold_outs: Sequence[str | None] = ()) -> dict[str, list[SeedRun]]:
    """The ended trials of a derived study by label, in the order of the list. Of the metrics held out there is one for
    each objective, or none at all."""
    with ledger.read() as connection:
        row = queries.study_row(connection, name)
        listed = row["spec"]["listed"]
        grouped: dict[str, list[SeedRun]] = {one["label"]: [] for one in listed}
        trials = [one for one in queries.trial_rows(connection, row["id"]) if one["state"] in TERMINAL_STATES]
        judged = queries.judged(connection, row, [one for one in trials if one["state"] == "complete"])
        for trial in trials:
            at, complete = judged.get(trial["id"]), trial["state"] == "complete" and trial["values"]
            values = trial["values"] if complete else [None] * len(row["spec"]["objectives"])
            held = [at.metrics.get(key or "") if at else None for key in hold_outs]
            grouped[listed[trial["number"]]["label"]].append(SeedRun(values, held))
    return grouped


@dataclass(frozen=True)
class Spread:
    """A mean and its standard error, which takes two values."""

    mean: float
    error: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """Of the values that there are and that are finite; None where there is none."""
        known = [value for value in values if value is not None and math.isfinite(value)]
        if not known:
            return None
        return cls(fmean(known), stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None, len(known))

    @classmethod
    def of_pairs(
        cls, values: Sequence[float | None], before: Sequence[float | None], sign: float = 1.0
    ) -> Spread | None:
        """Of `sign` times value minus value before, pair by pair, of the pairs that have both."""
        pairs = zip(values, before, strict=False)
        return cls.of([None if a is None or b is None else sign * (a - b) for a, b in pairs])

    def interval(self, count: int | None = None) -> tuple[float, float]:
        """The 95 % confidence interval of the mean by Student's t, had there been `count` values of this deviation: by
        default as many as there were. Of one value it is all there is."""
        from scipy.special import stdtrit

        if self.error is None:
            return -math.inf, math.inf
        wanted = count or self.count
        reach = float(stdtrit(wanted - 1, 0.975)) * self.error * math.sqrt(self.count / wanted)
        return self.mean - reach, self.mean + reach

    def described(self, of: str) -> str:
        """`+0.012 (standard error 0.0042, n = 3 seeds)`, signed."""
        error = "" if self.error is None else f"standard error {self.error:.2g}, "
        return f"{self.mean:+.3g} ({error}n = {counted(self.count, of)})"

    def __str__(self) -> str:
        return f"{self.mean:.5g}" + (f" ± {self.error:.2g}" if self.error is not None else "")
