"""`hpo confirm`: the best trials again under other seeds, judged by held-out values too.

The best of many trials is partly the luckiest: its own value is too good on average. What its configuration is worth
is said by runs that took no part in the choice, and by data that took none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpo.analysis.follow_up.derived_study import SEED, SeedRun, SourceStudy, Spread, not_repeated
from hpo.errors import UserError
from hpo.ledger import Ledger, live_queries, queries
from hpo.search.ranking import best_of, rank
from hpo.space.objective import Objective, hold_out_of
from hpo.text import aligned, counted

MOST_SEEDS = 30  # above it a difference is too small to be worth telling


def listed(of: SourceStudy, top: int, seeds: int) -> list[dict[str, Any]]:
    """The `top` best trials, each under the same `seeds` seeds that the study has not used.

    With several objectives they are those that together cover the front best.
    """
    return [
        {"label": _label(trial["number"]), "params": {**trial["params"], SEED: seed}}
        for trial in of.best(top)
        for seed in of.unused_seeds(seeds)
    ]


def _label(number: int) -> str:
    return f"trial {number}"


def held_out(of: SourceStudy, given: str | None) -> list[str | None]:
    """The metric that no trial is selected by, for each objective: `test/x` of `val/x`, or for the only one that given.

    Raises UserError where one is given for several objectives.
    """
    if given is None:
        return [hold_out_of(one.metric) for one in of.objectives]
    if len(of.objectives) > 1:
        raise UserError(
            f"--hold-out {given}: study {of.name!r} has {len(of.objectives)} objectives, each with a held-out "
            "metric of its own, test/x for val/x: leave it away."
        )
    return [given]


def check_measured(ledger: Ledger, of: SourceStudy, own: str, given: str | None, overrides: Mapping[str, Any]) -> None:
    """Raise UserError, before anything is trained, where the metric that was given by --hold-out is one that no trial
    of either study has reported, and neither `overrides` nor code that has changed since may have the task measure it.
    """
    if given is None or overrides:
        return
    with ledger.read() as connection:
        names = {of.name, own}.intersection(queries.study_names(connection))
        rows = {name: queries.study_row(connection, name) for name in names}
        if any(live_queries.has_reported(connection, row["id"], given) for row in rows.values()):
            return
        if rows[of.name]["identity"].get("code") != of.study.code_sha256():
            return
        error = live_queries.unreported(connection, rows[of.name], given)
    raise UserError(f"--hold-out: {error}")


def check_reported(ledger: Ledger, found: Sequence[Confirmation], given: str | None) -> None:
    """Raise UserError where the metric that was given by --hold-out is one that no run has reported."""
    if given is None or any(row.held_out for one in found for row in one.rows):
        return
    with ledger.read() as connection:
        error = live_queries.unreported(connection, queries.study_row(connection, found[0].name), given)
    raise UserError(f"--hold-out: {error}")


@dataclass(frozen=True)
class Confirmed:
    """One configuration: its value when it was selected, and what it came to under other seeds.

    `changed`: its parameters changed in the middle of training, and here the last ones train it from the beginning.
    """

    trial: int
    changed: bool
    selected: float
    again: Spread | None
    held_out: Spread | None
    failed: int

    @property
    def gap(self) -> float | None:
        """Held out minus selected."""
        return None if self.held_out is None else self.held_out.mean - self.selected


@dataclass(frozen=True)
class Confirmation:
    """By one objective: the configurations, the best under other seeds first.

    `front` are the trials that under other seeds no other is better than in every objective; with one, the best.
    `gap` is held out minus selected, over the trials; `ahead` by how much the first one is better than the second, over
    the seeds.
    """

    study: str
    name: str
    metric: str
    hold_out: str | None
    rows: Sequence[Confirmed]
    front: Sequence[int]
    gap: Spread | None
    ahead: Spread | None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "rows": [{**asdict(row), "gap": row.gap} for row in self.rows]}


def confirmations(
    of: SourceStudy, name: str, hold_outs: Sequence[str | None], found: Mapping[str, Sequence[SeedRun]]
) -> list[Confirmation]:
    """One for each objective."""
    runs = {one["number"]: found[label] for one in of.ranked if (label := _label(one["number"])) in found}
    means = {number: [_mean(own, place) for place in range(len(of.objectives))] for number, own in runs.items()}
    known = {number: own for number, own in means.items() if None not in own}
    front = best_of(of.spec.objectives, known)  # pyright: ignore[reportArgumentType]
    trials = {one["number"]: one for one in of.ranked}
    confirmed = []
    for place, (objective, hold_out) in enumerate(zip(of.objectives, hold_outs, strict=True)):
        rows = [_confirmed(trials[number], own, place) for number, own in runs.items()]
        rows.sort(key=lambda row: rank(objective.to_json(), row.trial, row.again.mean if row.again else None))
        gap = Spread.of([row.gap for row in rows])
        ahead = _ahead(objective, place, *(runs[row.trial] for row in rows[:2])) if len(rows) > 1 else None
        confirmed.append(Confirmation(of.name, name, objective.metric, hold_out, rows, front, gap, ahead))
    return confirmed


def _ahead(objective: Objective, place: int, first: Sequence[SeedRun], second: Sequence[SeedRun]) -> Spread | None:
    """By how much the first is better, under each seed against the second under the same."""
    values, others = ([run.values[place] for run in runs] for runs in (first, second))
    return Spread.of_pairs(values, others, -1.0 if objective.direction == "minimize" else 1.0)


def _mean(runs: Sequence[SeedRun], place: int) -> float | None:
    spread = Spread.of([run.values[place] for run in runs])
    return None if spread is None else spread.mean


def _confirmed(trial: Mapping[str, Any], runs: Sequence[SeedRun], place: int) -> Confirmed:
    values = [run.values[place] for run in runs]
    held = Spread.of([run.held_out[place] for run in runs])
    which = trial["number"], trial["changed"], trial["values"][place]
    return Confirmed(*which, Spread.of(values), held, values.count(None))


def facts(found: Sequence[Confirmation]) -> Any:
    """JSON values: an object, or of several objectives a list of them."""
    rows = [one.as_json() for one in found]
    return rows if len(rows) > 1 else rows[0]


def describe(found: Sequence[Confirmation], given: str | None = None) -> str:
    """A table for each objective, and what they say; `given` by --hold-out."""
    named = given is not None or len(found) > 1
    tables = "\n\n".join(_described(one, named=named) for one in found)
    if len(found) == 1 or not found[0].front:
        return tables
    front = ", ".join(map(str, found[0].front))
    return f"{tables}\n\nunder other seeds no trial is better in every objective than trial {front}"


def _described(found: Confirmation, named: bool) -> str:
    """A line for each configuration, and what they say."""
    known = any(row.held_out for row in found.rows)
    table = [["trial", "selected", f"{found.metric} again", *([str(found.hold_out), "gap"] if known else [])]]
    for row in found.rows:
        cells = [str(row.trial), f"{row.selected:.5g}", str(row.again or "none")]
        if known:
            cells += [str(row.held_out or "none"), "" if row.gap is None else f"{row.gap:+.3g}"]
        table.append(cells)
    return "\n".join([*aligned(table), *notes(found, named)])


def _seedless(found: Confirmation) -> bool:
    """Whether every configuration that has several values has one and the same, but for rounding."""
    several = [row.again for row in found.rows if row.again and row.again.count > 1]
    return bool(several) and all((one.error or 0.0) <= 1e-12 * abs(one.mean) for one in several)


def notes(found: Confirmation, named: bool) -> list[str]:
    """What the table says, a sentence a line; `named`: --hold-out was given, or cannot be, with several objectives."""
    first, known = found.rows[0], any(row.held_out for row in found.rows)
    runs = max((row.again.count for row in found.rows if row.again), default=0)
    mean = f"mean ± standard error over {runs} seeds" if runs > 1 else "of one seed, which says nothing of its spread"
    lines = [f"{mean}; selected: the value in study {found.study}"]
    if _seedless(found):
        lines.append("no value differs between the seeds: the training does not use its seed, so luck is not measured")
    lines += not_repeated([row.trial for row in found.rows if row.changed])
    if known:
        lines.append(f"gap: {found.hold_out} minus the value it was selected by; nothing was chosen by that")
        if found.gap and found.gap.error is not None:
            lines.append(f"mean gap {found.gap.described('trial')}")
    elif found.hold_out:
        other = "have the task measure it" if named else "name a metric by --hold-out, or have the task measure it"
        lines.append(f"no trial has reported {found.hold_out}: {other}")
    if failed := sum(row.failed for row in found.rows):
        lines.append(f"{counted(failed, 'run')} came to no value and {'is' if failed == 1 else 'are'} in no mean")
    if first.again is None:
        return [*lines, "no run came to a value"]
    lines.append(f"best under other seeds: trial {first.trial}")
    if found.ahead:
        lines[-1] += f"; it is better than trial {found.rows[1].trial} by {found.ahead.described('seed')}"
        lines[-1] += ", seed by seed"
        if said := undecided(found):
            lines.append(said)
    return lines


def undecided(found: Confirmation) -> str:
    """That the first two cannot be told apart, and how many seeds might do that, if they differ by as much as they seem
    to; else empty."""
    ahead = found.ahead
    if ahead is None or ahead.error is None or ahead.interval()[0] > 0:
        return ""
    low, high = ahead.interval()
    first, second = (row.trial for row in found.rows[:2])
    said = f"{counted(ahead.count, 'seed')} cannot tell trial {first} from trial {second}: the 95 % interval of the "
    said += f"difference is {low:+.2g} to {high:+.2g}"
    needed = seeds_needed(ahead)
    return said + (f"; --seeds {needed} may tell" if needed else "; either will do")


def seeds_needed(ahead: Spread) -> int | None:
    """The fewest seeds whose interval would leave 0 out, should mean and deviation stay; None above MOST_SEEDS."""
    return next((n for n in range(ahead.count + 1, MOST_SEEDS + 1) if ahead.interval(n)[0] > 0), None)
