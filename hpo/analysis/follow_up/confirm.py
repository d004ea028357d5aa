"""`hpo confirm`: trains the best trials again under other seeds, and judges them by held-out values too.

The best of many trials is partly the luckiest: on average its value is too good. Runs and data that took no part in
the selection measure what its configuration is worth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import Any

from hpo.analysis.follow_up.derived_study import SeedRun, SourceStudy, not_repeated
from hpo.declaration import content
from hpo.door import option
from hpo.errors import UserError
from hpo.ledger import Ledger, queries
from hpo.ledger.answer import MORE_FOLDS, confirming, label
from hpo.ledger.views import live as live_queries
from hpo.search.confirming import DEFAULT, DEFAULT_NAME, Confirm
from hpo.search.ranking import best_of, rank
from hpo.search.spread import Rival, Spread, nearest, seeds_needed, standing
from hpo.space.objective import Objective, hold_out_of
from hpo.text import aligned, counted


def held_out(of: SourceStudy, given: str | None) -> list[str | None]:
    """Returns the held-out metric of each objective: `test/x` for `val/x`, or `given` for a single objective.

    Raises UserError if a metric is given and the study has several objectives.
    """
    if given is None:
        return [hold_out_of(objective.metric) for objective in of.objectives]
    if len(of.objectives) > 1:
        raise UserError(
            f"{option('hold_out', given)}: study {of.name!r} has {len(of.objectives)} objectives, each with a held-out "
            "metric of its own, test/x for val/x: omit this option."
        )
    return [given]


def check_measured(
    ledger: Ledger, of: SourceStudy, own: str, given: str | None, overrides: Mapping[str, object]
) -> None:
    """Raises UserError, before anything is trained, for a metric given by --hold-out that cannot be measured.

    Such a metric was reported by no trial of either study, and neither `overrides` nor changed code can make the task
    report it.
    """
    if given is None or overrides:
        return
    with ledger.read() as connection:
        names = {of.name, own}.intersection(queries.study_names(connection))
        rows = {name: queries.study_row(connection, name) for name in names}
        if any(live_queries.has_reported(connection, row.id, given) for row in rows.values()):
            return
        if rows[of.name].identity.get("code") != content.code_sha256(of.study):
            return
        error = live_queries.unreported(connection, rows[of.name], given)
    raise UserError(f"{option('hold_out')}: {error}")


def is_reported(found: Sequence[Confirmation]) -> bool:
    """Returns whether a run has reported a held-out metric."""
    return any(row.held_out for confirmation in found for row in confirmation.rows)


def check_reported(ledger: Ledger, found: Sequence[Confirmation], given: str | None) -> None:
    """Raises UserError if no run has reported the metric that was given by --hold-out."""
    if given is None or is_reported(found):
        return
    with ledger.read() as connection:
        error = live_queries.unreported(connection, queries.study_row(connection, found[0].name), given)
    raise UserError(f"{option('hold_out')}: {error}")


@dataclass(frozen=True)
class Confirmed:
    """One configuration: its value when it was selected, and its values under other seeds.

    changed  whether its parameters changed during training; the new runs use the last ones from the beginning
    left     whether it has left the race, and so has fewer seeds than others
    """

    trial: int
    changed: bool
    selected: float
    again: Spread | None
    held_out: Spread | None
    failed: int
    left: bool = False

    @property
    def gap(self) -> float | None:
        """Returns the held-out value minus the selected one."""
        return None if self.held_out is None else self.held_out.mean - self.selected


@dataclass(frozen=True)
class Confirmation:
    """The configurations by one objective, the best under other seeds first.

    front  the trials that under other seeds no other trial beats in every objective; with one objective the best
    gap    held out minus selected, over the trials
    ahead  by how much the first one is better than the second, over the seeds
    default  the default configuration under other seeds; None where it was not trained, or is one of the trials
    gain   by how much the first one is better than the default, over the seeds
    by_fold  whether each seed trained on another fold of the data
    top    how many of the best trials, by the search, the first two are among
    """

    study: str
    name: str
    metric: str
    hold_out: str | None
    rows: Sequence[Confirmed]
    front: Sequence[int]
    gap: Spread | None
    ahead: Spread | None
    default: Spread | None = None
    gain: Spread | None = None
    by_fold: bool = False
    top: int = 0

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "rows": [{**asdict(row), "gap": row.gap} for row in self.rows]}


def confirmations(
    of: SourceStudy, name: str, hold_outs: Sequence[str | None], found: Mapping[str, Sequence[SeedRun]]
) -> list[Confirmation]:
    """Returns a confirmation for each objective."""
    trials = {trial["number"]: trial for trial in of.ranked}
    runs = {number: found[label(number)] for number in trials if label(number) in found}
    most = max(map(len, runs.values()), default=0)
    whole = {number: seeds for number, seeds in runs.items() if len(seeds) == most}
    means = {number: [_mean(seeds, index) for index in range(len(of.objectives))] for number, seeds in whole.items()}
    known = {number: values for number, values in means.items() if None not in values}
    front = best_of(of.spec.objectives, known)  # pyright: ignore[reportArgumentType]
    confirmed, default = [], found.get(DEFAULT, ())
    places = {trial["number"]: place for place, trial in enumerate(of.best(len(of.ranked)), 1)}
    for index, (objective, hold_out) in enumerate(zip(of.objectives, hold_outs, strict=True)):
        rows = [_confirmed(trials[number], seeds, index, left=number not in whole) for number, seeds in runs.items()]
        declared = objective.to_json()
        rows.sort(key=lambda row: (row.left, *rank(declared, row.trial, row.again.mean if row.again else None)))
        gap = Spread.of([row.gap for row in rows])
        ahead = _ahead(objective, index, *(runs[row.trial] for row in rows[:2])) if len(rows) > 1 else None
        base = Spread.of([run.values[index] for run in default])
        gain = _ahead(objective, index, runs[rows[0].trial], default) if rows and default else None
        by_fold = any(run.by_fold for run in chain.from_iterable(runs.values()))
        top = max((places[row.trial] for row in rows[:2]), default=0)
        shown = of.name, name, objective.metric, hold_out, rows, front
        confirmed.append(Confirmation(*shown, gap, ahead, base, gain, by_fold, top))
    return confirmed


def _ahead(objective: Objective, index: int, first: Sequence[SeedRun], second: Sequence[SeedRun]) -> Spread | None:
    """Returns by how much the first is better than the second, seed by seed."""
    values, others = ([run.values[index] for run in runs] for runs in (first, second))
    return Spread.of_pairs(values, others, -1.0 if objective.direction == "minimize" else 1.0)


def _mean(runs: Sequence[SeedRun], index: int) -> float | None:
    spread = Spread.of([run.values[index] for run in runs])
    return None if spread is None else spread.mean


def _confirmed(trial: Mapping[str, Any], runs: Sequence[SeedRun], index: int, *, left: bool) -> Confirmed:
    values = [run.values[index] for run in runs]
    hold_out = Spread.of([run.held_out[index] for run in runs])
    selected = trial["number"], trial["changed"], trial["values"][index]
    return Confirmed(*selected, Spread.of(values), hold_out, values.count(None), left)


def facts(found: Sequence[Confirmation]) -> Any:
    """Returns JSON values: an object, or a list of objects where there are several objectives."""
    rows = [confirmation.as_json() for confirmation in found]
    return rows if len(rows) > 1 else rows[0]


def describe(found: Sequence[Confirmation], given: str | None = None) -> str:
    """Returns a table and notes for each objective; `given` is the metric of --hold-out."""
    named = given is not None or len(found) > 1
    tables = "\n\n".join(_described(confirmation, named=named) for confirmation in found)
    if len(found) == 1 or not found[0].front:
        return tables
    front = ", ".join(map(str, found[0].front))
    return f"{tables}\n\nunder other seeds no trial is better in every objective than trial {front}"


def _described(found: Confirmation, named: bool) -> str:
    """Returns a table with a line for each configuration, and notes on it."""
    known = any(row.held_out for row in found.rows)
    table = [["trial", "selected", f"{found.metric} again", *([str(found.hold_out), "gap"] if known else [])]]
    for row in found.rows:
        cells = [str(row.trial), f"{row.selected:.5g}", str(row.again or "none")]
        if known:
            cells += [str(row.held_out or "none"), "" if row.gap is None else f"{row.gap:+.3g}"]
        table.append(cells)
    if found.default:
        table.append([DEFAULT, "", str(found.default), *(["", ""] if known else [])])
    return "\n".join([*aligned(table), *notes(found, named)])


def _seedless(found: Confirmation) -> bool:
    """Returns whether the values of each configuration are equal up to rounding; False if none has several."""
    several = [row.again for row in found.rows if row.again and row.again.count > 1]
    return bool(several) and all((spread.error or 0.0) <= 1e-12 * abs(spread.mean) for spread in several)


def notes(found: Confirmation, named: bool) -> list[str]:
    """Returns notes about the table, one a line.

    named  whether --hold-out was given, or cannot be, since there are several objectives
    """
    first, known = found.rows[0], any(row.held_out for row in found.rows)
    runs = max((row.again.count for row in found.rows if row.again), default=0)
    mean = f"mean ± standard error over {runs} seeds" if runs > 1 else "of one seed, which says nothing of its spread"
    mean += ", each on another fold of the data" if found.by_fold and runs > 1 else ""
    lines = [f"{mean}; selected: the value in study {found.study}"]
    if _seedless(found):
        lines.append("no value differs between the seeds: the training does not use its seed, so luck is not measured")
    lines += not_repeated([row.trial for row in found.rows if row.changed])
    if left := [row.trial for row in found.rows if row.left]:
        lines.append(f"under fewer seeds, so last: trial{'s' if left[1:] else ''} {', '.join(map(str, left))}")
    if known:
        lines.append(f"gap: {found.hold_out} minus the value it was selected by; nothing was chosen by that")
        if found.gap and found.gap.error is not None:
            lines.append(f"mean gap {found.gap.described('trial')}")
    elif found.hold_out:
        other = (
            "have the task measure it"
            if named
            else f"name a metric by {option('hold_out')}, or have the task measure it"
        )
        lines.append(f"no trial has reported {found.hold_out}: {other}")
    if failed := sum(row.failed for row in found.rows):
        lines.append(f"{counted(failed, 'run')} came to no value and {'is' if failed == 1 else 'are'} in no mean")
    if first.again is None:
        return [*lines, "no run came to a value"]
    return [*lines, *standings(found)]


def standings(found: Confirmation) -> list[str]:
    """Returns sentences on which configuration has the best mean, and on whether seeds can tell it from the next."""
    if not found.rows or not (again := found.rows[0].again):
        return []
    return standing(_first(found), again, rivals(found), partial(_quoted, found))


def rivals(found: Confirmation) -> list[Rival]:
    """Returns the runner-up, if it has not left the race, and the default configuration."""
    compared = [(f"trial {row.trial}", row.again, found.ahead) for row in found.rows[1:2] if not row.left]
    compared.append((DEFAULT_NAME, found.default, found.gain))
    return [Rival(name, again, ahead) for name, again, ahead in compared if again and ahead]


def undecided(found: Confirmation) -> str:
    """Returns the sentence that the first two, of which one may be the default, cannot be told apart; else empty.

    It has the command that trains as many seeds as would tell them apart if the difference stays as it is.
    """
    return next((rival.doubt(_first(found), partial(_quoted, found)) for rival in nearest(rivals(found))), "")


def decides(found: Confirmation) -> str:
    """Returns the command of `undecided`; empty where the first two are told apart, or no command may do it."""
    first = next(iter(nearest(rivals(found))), None)
    seeds = first and undecided(found) and seeds_needed(first.lead)
    return _more_seeds(found, seeds) if seeds and not found.by_fold else ""


def beaten(found: Confirmation) -> bool:
    """Returns whether the default configuration is better than each trial, by the 95 % interval of the difference."""
    return any(rival.wins for rival in rivals(found))


def _first(found: Confirmation) -> str:
    return f"trial {found.rows[0].trial}"


def _more_seeds(found: Confirmation, seeds: int) -> str:
    return confirming(found.study, found.name, Confirm(max(found.top, len(found.rows)), seeds))


def _quoted(found: Confirmation, seeds: int) -> str:
    return MORE_FOLDS if found.by_fold else f"`{_more_seeds(found, seeds)}`"
