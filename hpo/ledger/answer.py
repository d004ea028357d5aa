"""Reads a study's answer: the best trial, judged under other seeds if the newest study of `hpo confirm` is complete.

The best of many trials is partly the luckiest, so its own value does not outweigh the ranking under other seeds. A
stopped trial that was trained to its end counts by its values there (`finished`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any

from sqlalchemy import bindparam, select, update
from sqlalchemy.engine import Connection

from hpo.door import flag
from hpo.ledger.database.tables import asks, studies, trials
from hpo.ledger.finished import Finished, finished, phases_of
from hpo.ledger.removed import is_shown
from hpo.ledger.rows import StudyRow
from hpo.search.confirming import DEFAULT, DEFAULT_NAME, SEED, Confirm
from hpo.search.ranking import best_of, rank
from hpo.search.spread import Rival, Spread, standing
from hpo.text import command, counted

MORE_FOLDS = "more folds than the study declares"
_LABEL = "trial "
_DEFAULT = -1  # in place of the number of a trial
_OF_A_TRIAL = re.compile(rf"{_LABEL}\d+")  # not the label of an extended trial
_LISTED_OF = studies.c.spec["listed_of"].as_string()


def _seeds(count: int) -> str:
    return f"{count} seeds"


@dataclass(frozen=True)
class OtherSeeds:
    """A trial under other seeds: by metric the mean of its values and the standard error of that, None for one run.

    study        the study that trained it again
    runs         the number of values in the mean
    selected     the trials that the search itself ranks first, by number, with their values
    unconfirmed  those of `selected` that were not trained under as many other seeds: never, or they left the race
    rivals       the runner-up and the default configuration, with one objective
    trials       the number of trials that were trained again
    top          how many of the best trials, by the search, the best one and the runner-up are among
    by_fold      whether each seed trained on another fold of the data
    """

    study: str
    runs: int
    means: dict[str, float]
    errors: dict[str, float | None]
    selected: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    unconfirmed: list[int] = field(default_factory=list[int])
    rivals: list[Rival] = field(default_factory=list[Rival])
    trials: int = 0
    top: int = 0
    by_fold: bool = False

    @classmethod
    def of_json(cls, facts: Mapping[str, Any]) -> OtherSeeds:
        """Returns what `dataclasses.asdict` has made a mapping of."""
        rivals = [Rival(rival["name"], Spread(**rival["again"]), Spread(**rival["ahead"])) for rival in facts["rivals"]]
        return cls(**{name: value for name, value in facts.items() if name != "rivals"}, rivals=rivals)

    def lines(self, number: int, more: Callable[[int], str] = _seeds) -> list[str]:
        """Returns clauses on the best trial, `number`, under other seeds, and on its rivals.

        `more` names what trains more seeds. By default it is their number: a text that is kept names no command, as
        that depends on the process. Nothing trains more folds.
        """
        [metric, *others] = self.means
        more = (lambda _: MORE_FOLDS) if self.by_fold else more
        again = Spread(self.means[metric], self.errors[metric], self.runs)
        rivals = [] if others or not self.rivals else standing(f"trial {number}", again, self.rivals, more)
        return list(filter(None, [self.described(), self.instead_of(number), *rivals]))

    def with_command(self, study: str, number: int) -> list[str]:
        """Returns `lines` with the command that trains more seeds of study `study`, whose best trial is `number`."""
        top = max(self.top, self.trials)
        return self.lines(number, lambda seeds: f"`{confirming(study, self.study, Confirm(top, seeds))}`")

    @property
    def beaten(self) -> bool:
        """Returns whether the default configuration is better, by the 95 % interval of the difference."""
        return any(rival.wins for rival in self.rivals)

    def described(self) -> str:
        """Returns `val/loss 0.23 ± 0.01 under 3 other seeds (study mlp-confirm)`."""
        texts = [f"{metric} {mean:.6g}{_plus_minus(self.errors[metric])}" for metric, mean in self.means.items()]
        fold = f"{', each' if self.runs > 1 else ''} on another fold" if self.by_fold else ""
        seeds = f"{counted(self.runs, 'other seed')}{fold}"
        return f"{', '.join(texts)} under {seeds} (study {self.study})"

    def instead_of(self, number: int) -> str:
        """Returns the clause about the trial that the search itself ranks first, if it is the only one and not
        `number`."""
        if len(self.means) > 1 or number in self.selected:
            return ""
        [(selected_number, [value])] = self.selected.items()
        doubt_of_it = ", which other seeds did not confirm" if selected_number in self.unconfirmed else ""
        return f"the search itself has trial {selected_number} first, {next(iter(self.means))} {value:.6g}{doubt_of_it}"


@dataclass(frozen=True)
class Best:
    """A complete trial that no other trial beats: `value` is that of the first objective, `values` are by metric.

    It has `seeds` if runs under other seeds decided the ranking, and `finished` if it was stopped and later trained to
    its end.
    """

    number: int
    value: float
    values: dict[str, float]
    params: dict[str, Any]
    seeds: OtherSeeds | None = None
    finished: Finished | None = None


def _plus_minus(error: float | None) -> str:
    return "" if error is None else f" ± {error:.2g}"


def confirming(study: str, name: str, wanted: Confirm) -> str:
    """Returns the command that trains the best trials of a study, and its default, as `wanted` in study `name`."""
    named = "" if name in phases_of(study) else f" {flag('name')} {name}"
    by_fold = f" {flag('folds')}" if wanted.by_fold else ""
    return command(f"confirm --study {study}{named} --top {wanted.trials} --seeds {wanted.seeds}{by_fold}")


def label(number: int | str) -> str:
    """Returns the label of a trial's runs in the list of a study of `hpo confirm`."""
    return f"{_LABEL}{number}"


def confirms(listed: Sequence[Mapping[str, object]]) -> bool:
    """Returns whether these are the runs of a study that confirms another."""
    return all(entry["label"] == DEFAULT or _OF_A_TRIAL.fullmatch(str(entry["label"])) for entry in listed)


def has_folds(listed: Sequence[Mapping[str, object]]) -> bool:
    """Returns whether the runs of a study that confirms another each train on another fold of the data."""
    return any("fold" in entry for entry in listed)


def bests(connection: Connection, study: StudyRow) -> list[Best]:
    """Returns the study's answer: the best complete trial, the lowest number among equals.

    With several objectives returns the Pareto front, best first by the first objective. Once `hpo confirm` is complete,
    the means under other seeds decide.
    """
    objectives, values = study.spec.objectives, scored(connection, study)
    first, other_seeds = best_of(objectives, values), _under_other_seeds(connection, study, values)
    if not other_seeds:
        return _bests(connection, study, first, values)
    means = {number: list(seeds.means.values()) for number, seeds in other_seeds.items()}
    search_values = {number: list(values[number]) for number in first}
    unconfirmed = [number for number in first if number not in other_seeds]
    return [
        replace(best, seeds=replace(other_seeds[best.number], selected=search_values, unconfirmed=unconfirmed))
        for best in _bests(connection, study, best_of(objectives, means), values)
    ]


def selected(connection: Connection, study: StudyRow) -> list[Best]:
    """Returns the trials that the search itself ranks first, whatever their values under other seeds."""
    values = scored(connection, study)
    return _bests(connection, study, best_of(study.spec.objectives, values), values)


def _bests(
    connection: Connection, study: StudyRow, numbers: Sequence[int], values: Mapping[int, Sequence[float]]
) -> list[Best]:
    where = (trials.c.study_id == study.id) & trials.c.number.in_(numbers)
    rows = connection.execute(
        select(trials.c.number, asks.c.params).join(asks, asks.c.trial_id == trials.c.id).where(where)
    )
    params, metrics = dict(map(tuple, rows)), [objective["metric"] for objective in study.spec.objectives]
    by_metric = {number: dict(zip(metrics, values[number], strict=True)) for number in numbers}
    ends = finished(connection, study)
    return [Best(n, values[n][0], by_metric[n], params[n], finished=ends.get(n)) for n in numbers]


def scored(connection: Connection, study: StudyRow) -> dict[int, Sequence[float]]:
    """Returns the values of each complete trial that has one for every objective, by number.

    Includes trials that were stopped and then trained to their end; excludes removed ones.
    """
    complete = (trials.c.study_id == study.id) & (trials.c.state == "complete") & is_shown
    rows = connection.execute(select(trials.c.number, trials.c["values"]).where(complete).order_by(trials.c.number))
    values_of = {number: values for number, values in rows if values and None not in values}
    values_of |= {number: end.values for number, end in finished(connection, study).items()}
    return dict(sorted(values_of.items()))


def _under_other_seeds(
    connection: Connection, study: StudyRow, scored: Mapping[int, Sequence[float]]
) -> dict[int, OtherSeeds]:
    """Returns number -> values under other seeds, for complete trials of `scored` whose runs have values. Empty if no
    confirmation is complete."""
    of_study = bindparam("name") == _LISTED_OF
    newest = select(studies.c.id, studies.c.name, studies.c.spec).where(
        of_study, studies.c.state == "complete", studies.c.id > study.id
    )
    for row in connection.execute(newest.order_by(studies.c.id.desc()), {"name": study.name}).mappings():
        listed = row["spec"]["listed"]
        if confirms(listed):
            runs = _runs(connection, study.id, row["id"], listed)
            trials_of = {number: list(runs[number].values()) for number in runs if number in scored}
            summaries = _with_rivals(study, _summarized(study, row["name"], trials_of), runs, scored)
            trained = len({entry["label"] for entry in listed if entry["label"] != DEFAULT})
            by_fold = has_folds(listed)
            return {number: replace(seeds, trials=trained, by_fold=by_fold) for number, seeds in summaries.items()}
    return {}


def _with_rivals(
    study: StudyRow,
    summaries: dict[int, OtherSeeds],
    runs: Mapping[int, Mapping[int, Sequence[float]]],
    scored: Mapping[int, Sequence[float]],
) -> dict[int, OtherSeeds]:
    """Returns the summaries, of which the best one has its rivals; unchanged with several objectives."""
    [objective, *more] = study.spec.objectives
    if more or not summaries:
        return summaries
    means = {number: list(seeds.means.values()) for number, seeds in summaries.items()}
    [best] = best_of([objective], means)
    second = best_of([objective], {number: mean for number, mean in means.items() if number != best})
    names = {number: f"trial {number}" for number in second} | ({_DEFAULT: DEFAULT_NAME} if _DEFAULT in runs else {})
    sign, rivals = -1.0 if objective["direction"] == "minimize" else 1.0, list[Rival]()
    for number, name in names.items():
        seeds = [seed for seed in runs[best] if seed in runs[number]]
        values, others = ([runs[of][seed][0] for seed in seeds] for of in (best, number))
        ahead, again = Spread.of_pairs(values, others, sign), Spread.of([row[0] for row in runs[number].values()])
        rivals += [Rival(name, again, ahead)] if ahead and again else []
    ranked = sorted(scored, key=lambda number: rank(objective, number, scored[number][0]))
    top = 1 + max(map(ranked.index, [best, *second]))
    return {**summaries, best: replace(summaries[best], rivals=rivals, top=top)}


def _runs(
    connection: Connection, source: int, derived: int, listed: Sequence[Mapping[str, Any]]
) -> dict[int, dict[int, list[float]]]:
    """Returns trial number -> seed -> the values of its complete runs, for trials whose parameters were trained again.

    A trial that has left the race has fewer runs than others, and does not count. The default configuration has the
    number _DEFAULT.
    """
    labels = [str(entry["label"]) for entry in listed]
    numbered = [_DEFAULT if label == DEFAULT else int(label.removeprefix(_LABEL)) for label in labels]
    counts = Counter(number for number in numbered if number != _DEFAULT)
    numbers = {number for number, count in counts.items() if count == max(counts.values())}
    params = select(trials.c.number, asks.c.params).join(asks, asks.c.trial_id == trials.c.id)
    trained = (trials.c.study_id == source) & trials.c.number.in_(numbers)
    params_of: dict[int, Mapping[str, object]] = dict(map(tuple, connection.execute(params.where(trained))))
    params_of[_DEFAULT] = {}
    complete = (trials.c.study_id == derived) & (trials.c.state == "complete")
    values = dict(map(tuple, connection.execute(select(trials.c.number, trials.c["values"]).where(complete))))
    runs: dict[int, dict[int, list[float]]] = {}
    for run, (number, entry) in enumerate(zip(numbered, listed, strict=True)):
        if _seedless(params_of.get(number)) == _seedless(entry["params"], entry.get("fold", ())) and run in values:
            runs.setdefault(number, {})[entry["params"][SEED]] = values[run]
    return runs


def _seedless(params: Mapping[str, object] | None, fold: Collection[str] = ()) -> dict[str, Any] | None:
    """Returns the parameters without the seed and the settings of a fold."""
    return None if params is None else {path: value for path, value in params.items() if path not in (SEED, *fold)}


def _summarized(study: StudyRow, name: str, runs: Mapping[int, list[list[float]]]) -> dict[int, OtherSeeds]:
    metrics = [objective["metric"] for objective in study.spec.objectives]
    summaries: dict[int, OtherSeeds] = {}
    for number, rows in runs.items():
        columns = [[row[index] for row in rows if _is_finite(row[index])] for index in range(len(metrics))]
        if all(columns):
            errors = [stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None for values in columns]
            means = dict(zip(metrics, map(fmean, columns), strict=True))
            summaries[number] = OtherSeeds(name, len(columns[0]), means, dict(zip(metrics, errors, strict=True)))
    return summaries


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def changed(connection: Connection, study_id: int) -> None:
    """Increments the revision of the study that this one confirms, if any, since its answer may have changed."""
    source = select(_LISTED_OF).where(studies.c.id == study_id).scalar_subquery()
    raised = update(studies).where(studies.c.name == source).values(revision=studies.c.revision + 1)
    connection.execute(raised)
