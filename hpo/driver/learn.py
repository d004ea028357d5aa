"""Reads the knowledge that a new study takes from earlier studies of the home."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpo.declaration import release_0_1
from hpo.declaration.resolved import ResolvedStudy
from hpo.declaration.spec import StudySpec
from hpo.declaration.study import Study
from hpo.door import flag, option
from hpo.driver.request import AUTO, NONE
from hpo.errors import HpoError, UserError
from hpo.ledger import Ledger, queries
from hpo.ledger.removal import check_whole
from hpo.ledger.rows import AskedTrial, Connection, StudyRow
from hpo.search.knowledge import MOST, Trial, regrets, teach
from hpo.search.samplers.registry import Kind
from hpo.space.space import Space
from hpo.text import command, counted

DEFAULT = "HPO_LEARN_FROM"  # the variable that names the studies to learn from where no option does
_READ = 1000  # trials of a study, the newest
_MIDDLE = 1.0  # the regret of the median: a stopped trial has no less


@dataclass(frozen=True)
class Lessons:
    """The knowledge that a new study takes from earlier ones.

    asked      the names of studies, or auto or none alone
    trials     study -> the number of its trials that were read
    knowledge  as made by hpo.search.knowledge
    unread     a sentence for each study that was named, or is damaged, and teaches nothing
    """

    requested: Sequence[str]
    trials: Mapping[str, int]
    knowledge: Mapping[str, Any]
    unread: Sequence[str] = ()

    @property
    def named(self) -> bool:
        return self.requested not in ([AUTO], [NONE])

    def taken(self, spec: StudySpec) -> StudySpec:
        """Returns the specification with the knowledge that the study's sampler can use.

        There is none for a grid, which tries every configuration, nor, by default, for a sampler that does not learn.
        """
        idle = "grid" in spec.planned or not (self.named or Kind.of(spec.sampler).warms)
        if idle or not self.knowledge:
            return spec.model_copy(update={"learn_from": [], "knowledge": {}})
        portfolio = self.knowledge["portfolio"]
        kept = [entry for entry in portfolio if not any(_is_within(entry["params"], first) for first in spec.enqueue)]
        names = [*self.requested] if self.named else [*self.trials]
        return spec.model_copy(update={"learn_from": names, "knowledge": {**self.knowledge, "portfolio": kept}})

    def notices(self, resolved: ResolvedStudy, trials: int | None) -> tuple[str, ...]:
        """Returns the notices for the user: the studies that this one learns from, and the command that repeats it."""
        spec = resolved.spec
        if not spec.knowledge:
            return tuple(self.unread)
        teachers = ", ".join(f"{name} ({counted(count, 'trial')})" for name, count in self.trials.items())
        first = counted(len(spec.knowledge["portfolio"]), "configuration")
        names = ",".join(name for name in spec.learn_from if name in self.trials)
        budget = "" if trials is None else f" {flag('trials')} {trials}"
        runs_without = command(
            f"run --study {spec.reference} --name NAME{budget} --seed {spec.seed} --learn-from {names}"
        )
        learned = (
            f"learned from {teachers}: the search tries {first} that did best there, and draws half of its random "
            f"proposals near good ones while that helps; `{runs_without}` repeats it with this "
            f"run's other options, {option('learn_from', NONE)} turns it off"
        )
        return (*self.unread, learned)


def requested(given: Sequence[str] | None, begun: StudySpec | None) -> list[str] | None:
    """Returns the studies to learn from, auto or none; None if an existing study keeps its knowledge."""
    if begun is None:
        return [*given] if given is not None else [os.environ.get(DEFAULT) or AUTO]
    same = ([AUTO], begun.learn_from, [begun.warm_start])
    if given is None or [*given] in same or ([*given] == [NONE] and not (begun.knowledge or begun.earlier)):
        return None
    return [*given]


def read(ledger: Ledger | None, name: str, study: Study, requested: Sequence[str]) -> Lessons:
    """Returns the knowledge for `study` under the name `name`.

    Raises UserError if studies are named and none of them teaches anything.
    """
    if requested == [NONE] or (requested == [AUTO] and (ledger is None or not len(study.space))):
        return Lessons(requested, {}, {})
    if ledger is None:
        raise UserError(
            f"{option('learn_from', ','.join(requested))}: this home holds no study yet; name the home of that one by "
            f"{option('home')}."
        )
    with ledger.read() as connection:
        if requested == [AUTO]:
            studies, unread = _all(connection, name, study)
        else:
            studies, unread = _those(connection, name, study, requested)
    knowledge = teach(study.space, studies)
    taught = [lesson["study"] for lesson in knowledge.get("studies", ())]
    if requested != [AUTO]:
        unread += [
            _refusal(teacher, "fewer than two of its trials lie in this study's space")
            for teacher in sorted(studies.keys() - {*taught})
        ]
        if not knowledge:
            raise UserError(f"{' '.join(unread)} Name another study, or leave {option('learn_from')} out.")
    return Lessons(requested, {teacher: len(studies[teacher]) for teacher in taught}, knowledge, unread)


def _all(connection: Connection, own: str, study: Study) -> tuple[dict[str, list[Trial]], list[str]]:
    """Returns the trials of the newest finished studies with the same objectives and at least half of the dimensions,
    oldest first, and a sentence for each damaged study."""
    studies: dict[str, list[Trial]] = {}
    unread: list[str] = []
    for name in reversed(queries.study_names(connection)):
        if name == own or len(studies) == MOST:
            continue
        try:
            row = queries.study_row(connection, name)
            derived = row.spec.listed_of
            if row.state != "complete" or derived or _other_judge(row, study):
                continue
            paths = _shared(row, study.space)
            trials = _trials(connection, row, paths) if 2 * len(paths) >= len(study.space) else []
        except (HpoError, ValueError, KeyError, TypeError, AttributeError) as error:
            unread.append(_damaged(name, error))
            continue
        if len(trials) > 1:
            studies[name] = trials
    return dict(reversed(studies.items())), unread


def _those(
    connection: Connection, own: str, study: Study, names: Sequence[str]
) -> tuple[dict[str, list[Trial]], list[str]]:
    """Returns the trials of the named studies, and a sentence for each that teaches nothing."""
    studies: dict[str, list[Trial]] = {}
    unread: list[str] = []
    for name in names:
        if name == own:
            unread.append(_refusal(name, "it is this study itself, which learns from its own trials anyway"))
            continue
        try:
            row = queries.study_row(connection, name)
            check_whole(row)
            reason = _other_judge(row, study)
            paths = _shared(row, study.space)
            trials = _trials(connection, row, paths) if paths and not reason else []
        except HpoError as error:
            unread.append(f"{option('learn_from', name)}: {error}")
            continue
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            unread.append(_damaged(name, error))
            continue
        reason = reason or ("" if paths else "it has searched none of this study's dimensions")
        if not reason and len(trials) < 2:
            reason = (
                f"it has {counted(len(trials), 'trial')} with a finite value, and two are needed to tell good from bad"
            )
        if reason:
            unread.append(_refusal(name, reason))
        else:
            studies[name] = trials
    return studies, unread


def _refusal(name: str, reason: str) -> str:
    return f"{option('learn_from', name)} teaches nothing: {reason}."


def _damaged(name: str, error: Exception) -> str:
    return f"study {name} teaches nothing, since it cannot be read ({error}): `hpo doctor` looks for damage."


def _other_judge(row: StudyRow, study: Study) -> str:
    """Returns a clause about how a study's objectives differ from this one's; empty if they do not."""
    judged = [f"{objective['direction']} {objective['metric']}" for objective in row.spec.objectives]
    here = [f"{objective.direction} {objective.metric}" for objective in study.objectives]
    return (
        "" if judged == here else f"its trials are judged by {', '.join(judged)}, and this study's by {', '.join(here)}"
    )


def _shared(row: StudyRow, space: Space) -> set[str]:
    """Returns the dimensions that both a study and this space search, of the same kind (numbers or options)."""
    imported = row.spec.imported
    described = imported["space"] if imported else release_0_1.translated(row.identity).get("space", {})
    numeric = {path: "low" in dimension for path, dimension in described.items()}
    return {
        path
        for path, dimension in space.dimensions.items()
        if path in numeric and numeric[path] == ("low" in dimension.describe())
    }


def _trials(connection: Connection, row: StudyRow, paths: set[str]) -> list[Trial]:
    """Returns the newest ended trials of a study in the order of their numbers: parameters at `paths` and regrets.

    Trials whose parameters changed during training are left out, since their value is not the result of these
    parameters, and so are stopped trials that another trial continued. The list is empty if fewer than two trials
    have a finite value.
    """
    trials = queries.trial_rows(connection, row.id)
    changed, parents = queries.changed(trials), {trial.parent for trial in trials}
    ended_rows = [
        trial
        for trial in trials
        if trial.number not in changed
        and (trial.state in ("complete", "infeasible") or (trial.state == "pruned" and trial.number not in parents))
    ][-_READ:]
    signs = [-1.0 if objective["direction"] == "maximize" else 1.0 for objective in row.spec.objectives]
    losses = [_losses(trial, signs) for trial in ended_rows]
    if sum(loss is not None for loss in losses) < 2:
        return [({}, 0.0)] * sum(loss is not None for loss in losses)
    whole = any(trial.state == "complete" for trial in ended_rows)
    scored = zip(ended_rows, regrets(losses), strict=True)
    return [
        (
            {path: value for path, value in trial.params.items() if path in paths},
            max(regret, _MIDDLE) if whole and trial.state == "pruned" else regret,
        )
        for trial, regret in scored
    ]


def _losses(trial: AskedTrial, signs: Sequence[float]) -> list[float] | None:
    """Returns the values of a trial as losses; None if it has no values that count."""
    values = trial.values
    if trial.state == "infeasible" or not values or not _are_finite(values):
        return None
    return [sign * value for sign, value in zip(signs, values, strict=True)]


def _are_finite(values: Sequence[float | None]) -> bool:
    return all(value is not None and math.isfinite(value) for value in values)


def _is_within(params: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    """Returns whether an enqueued configuration has these parameters."""
    return all(path in entry and entry[path] == value for path, value in params.items())
