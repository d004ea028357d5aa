"""Plans the rounds in which the best trials and the default configuration train again under other seeds.

    while not (step := planned(ledger, of, name, wanted, driven)).over:
        run(step.request)

The next round is a function of the ledger, so an interrupted race continues where it was, with any number of workers.
The list of the derived study grows at its end: a training that is there already is not repeated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, Any

from hpo.analysis.follow_up import finish
from hpo.analysis.follow_up.derived_study import RunDefaults, SourceStudy, found, request
from hpo.declaration.folds import unfit
from hpo.door import option
from hpo.driver.end_reason import time_used_up
from hpo.errors import HpoError, UserError
from hpo.ledger import Ledger, queries
from hpo.ledger.answer import confirms, has_folds, label
from hpo.ledger.finished import confirmed_in
from hpo.search.confirming import (
    DEFAULT,
    DEFAULT_NAME,
    NONE,
    SEED,
    SHARE,
    Confirm,
    Fits,
    Race,
    Row,
    folds_lacking,
    parse,
    race,
)
from hpo.space.trial_config import TrialShape
from hpo.space.trial_state import TERMINAL_STATES
from hpo.text import command, counted

if TYPE_CHECKING:
    from hpo.declaration.study import Study
    from hpo.driver.request import RunRequest
    from hpo.ledger.rows import Connection

    Entry = Mapping[str, Any]  # {"label", "params"}; "fold" where the seed has one, with its settings
    Repeats = Mapping[int, Mapping[str, object]]  # seed -> the settings of its fold; none where it has no fold


@dataclass(frozen=True)
class Round:
    """The trainings that the race needs next, and the request that runs them; `line` describes both.

    over    whether nothing is left to train; the request then changes nothing
    notice  a sentence where the race is smaller than was asked for
    """

    line: str
    request: RunRequest
    over: bool
    notice: str = ""


@dataclass(frozen=True)
class Confirmed:
    """The trainings of a study that confirms another: its list, and place -> values of a training that has ended."""

    listed: Sequence[Entry]
    ended: Mapping[int, Row]

    @classmethod
    def of(cls, connection: Connection, source: str, name: str) -> Confirmed:
        """Reads study `name`. Raises HpoError where it is of another kind or confirms an earlier study."""
        row = queries.find_study(connection, name)
        if row is None:
            return cls((), {})
        listed = row.spec.listed
        if not listed or not confirms(listed):
            raise UserError(
                f"study {name!r} is there already and has trained others: name a new one by {option('name')}."
            )
        if row.id < queries.study_row(connection, source).id:
            deletes = command(f"rm --study {name}")
            raise HpoError(f"study {name!r} belongs to an earlier study {source!r}, which was deleted: `{deletes}`.")
        trials = queries.trial_rows(connection, row.id, removed=True)
        ended = [trial for trial in trials if trial.state in TERMINAL_STATES]
        return cls(listed, {trial.number: trial.values if trial.state == "complete" else None for trial in ended})

    @property
    def seeds(self) -> list[int]:
        """Returns the seeds, in the order in which they were first used."""
        return list(dict.fromkeys(entry["params"][SEED] for entry in self.listed))

    @property
    def by_fold(self) -> bool:
        """Returns whether each seed has a fold of its own."""
        return has_folds(self.listed)

    @property
    def rounds(self) -> int:
        """Returns the largest number of seeds that a candidate has trained under."""
        return max(Counter(entry["label"] for entry in self.listed).values(), default=0)

    def fits(self, candidates: Mapping[str, Mapping[str, object]], repeats: Repeats) -> Fits:
        """Returns the values of the candidates' trainings that have ended."""
        places = {place: self.listed[place] for place in self.ended}
        return {
            name: {
                seed: self.ended[place]
                for seed in repeats
                for place, listed in places.items()
                if listed == _entry(name, params, seed, repeats[seed])
            }
            for name, params in candidates.items()
        }


def planned(
    ledger: Ledger, of: SourceStudy, name: str, wanted: Confirm, driven: RunDefaults, leaves: str = ""
) -> Round:
    """Returns the next round of the race of `wanted` in study `name`. Raises HpoError where that study is another one.

    A study that has trained candidates under more seeds keeps to these, so that every candidate is compared alike.
    Raises UserError where the study declares too few folds, or folds that cannot confirm it.

    leaves  the option that leaves the phase out; empty for a command of its own
    """
    before = ledger.look(lambda connection: Confirmed.of(connection, of.name, name))
    if before.listed and before.by_fold != wanted.by_fold:
        raise UserError(
            f"study {name!r} has trained {'with' if before.by_fold else 'without'} folds: name a new one by "
            f"{option('name')}."
        )
    rounds = max(wanted.seeds, before.rounds)
    if lacking := folds_lacking(of.name, replace(wanted, seeds=rounds), len(of.study.folds)):
        raise UserError(f"{lacking}.")
    if wanted.by_fold and not (leaves or before.listed) and (reason := unfit(of.study)):
        raise UserError(f"{reason} Confirm without {option('folds')}, under other seeds alone.")
    candidates, repeats, state = _raced(of, before, replace(wanted, seeds=rounds))
    needed = [_entry(missing, candidates[missing], seed, repeats[seed]) for missing, seed in state.missing]
    new = [entry for entry in needed if entry not in before.listed]
    where = "under another seed, on another fold," if wanted.by_fold else "under another seed"
    line = f"round {state.round + 1} of {rounds}: {_named(state.alive)} train {where} in study {name}"
    if gone := [candidate for candidate in candidates if candidate not in state.alive]:
        line += f"; {_named(gone)} left the race"
    if not state.missing:
        line = f"what an earlier race has begun is trained to its end in study {name}"
    over = not state.missing and len(before.ended) == len(before.listed)
    run_request = request(of, name, [*before.listed, *new], driven, NONE if leaves else str(wanted))
    return Round(line + (f" ({leaves} skips this)" if leaves else ""), run_request, over)


def phase(ledger: Ledger, asked: RunRequest, name: str) -> Round | None:
    """Returns the next round of a study's confirming phase; None where it has ended. Raises HpoError where it cannot
    be trained, or where the time or the epochs of the study are used up."""
    of = found(ledger, name)
    wanted = parse(of.spec.confirm)
    if wanted is None:
        return None
    derived = confirmed_in(name, by_fold=wanted.by_fold)
    affordable, problem = ledger.look(lambda connection: _afforded(connection, of, wanted, derived))
    if affordable is None:
        raise HpoError(problem)
    notify = asked.notify
    driven = RunDefaults(
        asked.home, asked.placement, asked.storage.storage, notify.tracking_uri, overrides=of.study.hold_out
    )
    step = planned(ledger, of, derived, affordable, driven, option("confirm", "none"))
    if step.over:
        return None
    seconds = ledger.look(lambda connection: _seconds_left(connection, name, derived))
    made = step.request
    made = replace(
        made,
        study=replace(made.study, allow_drift=asked.study.allow_drift),
        budget=replace(made.budget, seconds=seconds),
        storage=replace(made.storage, lease_timeout=asked.storage.lease_timeout),
        notify=replace(made.notify, trackers=notify.trackers, alerts=notify.alerts),
    )
    return replace(step, request=made, notice=problem)


def _candidates(of: SourceStudy, top: int) -> dict[str, Mapping[str, object]]:
    """Returns label -> parameters of the `top` best trials and, where none of them is that, the default."""
    best = of.best(top)
    candidates: dict[str, Mapping[str, object]] = {label(trial["number"]): trial["params"] for trial in best}
    default = _seedless(of.base)
    return candidates | ({} if any(_seedless(trial["config"]) == default for trial in best) else {DEFAULT: {}})


def _seedless(config: Mapping[str, object]) -> dict[str, object]:
    return {path: value for path, value in config.items() if path != SEED}


def _entry(name: str, params: Mapping[str, object], seed: int, fold: Mapping[str, object]) -> dict[str, object]:
    entry: dict[str, object] = {"label": name, "params": {**params, SEED: seed, **fold}}
    return {**entry, "fold": dict(fold)} if fold else entry


def _seeds(of: SourceStudy, before: Confirmed, rounds: int) -> list[int]:
    """Returns the seeds of so many rounds: those of earlier ones, then higher ones, by which nothing was selected."""
    used = before.seeds
    first = max([of.unused_seeds(1)[0], *(seed + 1 for seed in used)])
    return [*used, *range(first, first + rounds)][:rounds]


def _named(labels: Sequence[str]) -> str:
    """Returns `trials 3, 7 and the default configuration`."""
    numbers = [name.removeprefix(label("")) for name in labels if name != DEFAULT]
    trials = f"trial{'' if len(numbers) == 1 else 's'} {', '.join(numbers)}" if numbers else ""
    return " and ".join(filter(None, [trials, DEFAULT_NAME if DEFAULT in labels else ""]))


def _raced(
    of: SourceStudy, before: Confirmed, wanted: Confirm
) -> tuple[dict[str, Mapping[str, object]], Repeats, Race]:
    """Returns the candidates of `wanted`, its seeds with their folds, and the state of its race."""
    candidates, seeds = _candidates(of, wanted.trials), _seeds(of, before, wanted.seeds)
    repeats = dict(zip(seeds, of.study.folds if wanted.by_fold else repeat({}), strict=False))
    return candidates, repeats, race(of.spec.objectives, [*candidates], seeds, before.fits(candidates, repeats))


def _afforded(connection: Connection, of: SourceStudy, wanted: Confirm, derived: str) -> tuple[Confirm | None, str]:
    """Returns the part of `wanted` that the complete trials and the epochs allow, and a sentence if that is less."""
    study, before = queries.study_row(connection, of.name), Confirmed.of(connection, of.name, derived)
    rows = queries.trial_rows(connection, study.id, removed=True)
    trained = sum(row.epoch - row.from_epoch for row in rows) + finish.spent(connection, study)
    share = trained // (SHARE - 1)  # the phase's own epochs count among all
    left = share if study.max_epochs is None else min(share, study.max_epochs - trained)
    longest = max((row.epoch for row in rows if row.state == "complete"), default=1)
    fold = of.study.folds[0] if wanted.by_fold else {}
    each = max(_epochs(of.study, {**trial["config"], **fold}, longest) for trial in of.best(wanted.trials))
    spare = int(left / each) - len(before.listed)
    fewest = max(before.rounds, 1)  # new candidates train under as many seeds as earlier ones
    affordable = wanted.largest(_within(of, before, spare), fewest)
    shown = option("confirm", str(wanted))
    if affordable is None:
        least = _unlisted(of, before, replace(wanted, trials=1, seeds=fewest))
        needed, there = int((len(before.listed) + least) * each), int(len(before.listed) * each)
        fix = f"search for {counted(max((SHARE - 1) * needed - trained, 0), 'epoch')} more"
        if study.max_epochs is not None:  # the search leaves the phase a third of them
            fix = f"give {option('epochs', max(trained + needed, SHARE * needed))}"
        epochs = max(left - there, 0)
        short = f"{counted(epochs, 'epoch')} {'is' if epochs == 1 else 'are'} left"
        short += " of a third of all" if left == share else ""
        return None, f"{short}, and two configurations of {shown} need {needed - there}; {fix}."
    if affordable != replace(wanted, seeds=max(wanted.seeds, fewest)):
        less = option("confirm", affordable)
        return affordable, f"{shown} would take more than a third of all epochs: {less} instead"
    complete = counted(len(of.ranked), "complete trial")
    return affordable, f"{shown}: the study has only {complete}" if len(of.ranked) < wanted.trials else ""


def _within(of: SourceStudy, before: Confirmed, spare: int) -> Callable[[Confirm], bool]:
    """Returns whether a part of a request is affordable: it needs no new training, or at most `spare`."""
    listed = {entry["label"] for entry in before.listed}
    new = [label(trial["number"]) not in listed for trial in of.best(len(of.ranked))]
    unseen = [0, *accumulate(new)]  # of the best trials, how many were no candidates before

    def affordable(part: Confirm) -> bool:
        if unseen[min(part.trials, len(new))] * part.seeds > max(spare, 0):
            return False
        missing = _unlisted(of, before, part)
        return missing == 0 or missing <= spare

    return affordable


def _unlisted(of: SourceStudy, before: Confirmed, wanted: Confirm) -> int:
    """Returns how many trainings that are not listed the race still needs if no candidate leaves from now on."""
    _, repeats, state = _raced(of, before, wanted)
    later = [*repeats][state.round + 1 :]
    needed = {*state.missing, *((name, seed) for name in state.alive for seed in later)}
    return len(needed - {(entry["label"], entry["params"][SEED]) for entry in before.listed})


def _epochs(study: Study, config: Mapping[str, object], longest: int) -> float:
    """Returns the epochs that a training counts as in a study whose longest trial has trained so many.

    Where the trials of the search train several times, each time is an epoch of theirs, and so is a training here.
    """
    prefix = "train."
    train = {path.removeprefix(prefix): value for path, value in config.items() if path.startswith(prefix)}
    shape = TrialShape(train)
    epochs = shape.parts if study.shape.parts > 1 else shape.epochs
    return max(epochs if epochs < math.inf else longest, 1)


def _seconds_left(connection: Connection, name: str, derived: str) -> float | None:
    """Returns the time that search and end phase have left; None for no bound. Raises HpoError where it is used up."""
    study, rows = queries.study_row(connection, name), queries.find_study(connection, derived)
    if study.max_seconds is None:
        return None
    left = study.max_seconds - study.seconds_used - finish.seconds(connection, study)
    if left <= (rows.seconds_used if rows else 0.0):
        raise HpoError(time_used_up(name, study.max_seconds, study.max_seconds))
    return left
