"""Races the best trials and the default configuration under other seeds: the phase that confirms a search.

The best of many trials is partly the luckiest. The candidates train again in rounds, one seed a round, and one that is
unlikely to end ahead leaves after a round. Each round may also have its own fold of the data, since other seeds do
not show what was chosen by luck with the validation data. `strategies.paired` runs the same t-race over the folds
of a trial.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from hpo.errors import UserError
from hpo.search.pareto import Losses, front
from hpo.search.strategies.paired import chance_of_less
from hpo.text import counted

NONE = "none"
SEED = "train.seed"  # the field by which a training is repeated
DEFAULT = "default"  # the label of the default configuration
DEFAULT_NAME = "the default configuration"
FOLDS = "folds"
FORM = (
    "give TRIALSxSEEDS, such as 5x3 for the five best trials under three other seeds, each from 1 to 1000, 5x3folds to "
    "train under each seed on another fold of the data, or none"
)
MOST = 1000
THRESHOLD = 0.02  # a candidate leaves if the probability that it ends ahead is below this
FEWEST = 2  # rounds before a candidate may leave
SHARE = 3  # the phase trains at most one epoch of so many
_FORM = re.compile(rf"([1-9]\d{{0,3}})x([1-9]\d{{0,3}})({FOLDS})?")

Row = Sequence[float | None] | None  # the values of one training by objective; None where it came to none
Fits = Mapping[str, Mapping[int, Row]]  # label of a candidate -> seed -> values


@dataclass(frozen=True)
class Confirm:
    """The request to train the `trials` best trials and the default configuration under `seeds` other seeds.

    by_fold  whether they train under each seed on another of the folds that the study declares
    """

    trials: int
    seeds: int
    by_fold: bool = False

    def __str__(self) -> str:
        return f"{self.trials}x{self.seeds}{FOLDS if self.by_fold else ''}"

    def largest(self, affordable: Callable[[Confirm], bool], fewest: int = 1) -> Confirm | None:
        """Returns the largest part of the request that is `affordable`; None where not even one trial is.

        It has fewer trials, but two of them, before it has fewer seeds, and at least the `fewest` seeds.
        """
        for least in (min(2, self.trials), 1):
            for seeds in range(max(self.seeds, fewest), fewest - 1, -1):
                for trials in range(self.trials, least - 1, -1):
                    if affordable(part := replace(self, trials=trials, seeds=seeds)):
                        return part
        return None

    @property
    def fits(self) -> int:
        """Returns the number of trainings if no candidate leaves early."""
        return (self.trials + 1) * self.seeds

    def reserved(self, epochs: int, longest: float, earlier: int) -> int:
        """Returns how many of a study's `epochs` its search leaves to the phase, which has had `earlier` trainings; a
        trial trains up to `longest`."""
        return int(min(epochs // SHARE, (earlier + self.fits) * longest))


def folds_lacking(study: str, wanted: Confirm, folds: int) -> str:
    """Returns a sentence where a study that declares so many folds has too few of them; else an empty text."""
    if not wanted.by_fold or wanted.seeds <= folds:
        return ""
    if not folds:
        return f"study {study!r} declares no folds (`folds=` of hpo.Study): confirm under other seeds alone"
    return f"study {study!r} declares {counted(folds, 'fold')}: ask for no more seeds than that"


def parse(text: str) -> Confirm | None:
    """Returns the request in a text such as `5x3`; None for `none`. Raises UserError for another text."""
    if not is_form(text):
        raise UserError(field="confirm", value=text, fix=FORM)
    match = _FORM.fullmatch(text)
    return Confirm(int(match[1]), int(match[2]), match[3] is not None) if match else None


def is_form(text: object) -> bool:
    """Returns whether `parse` takes this value."""
    if not isinstance(text, str):
        return False
    match = _FORM.fullmatch(text)
    return text == NONE or (match is not None and max(int(match[1]), int(match[2])) <= MOST)


@dataclass(frozen=True)
class Race:
    """The state of a race.

    alive    the candidates that have not left
    round    the number of complete rounds
    missing  (label, seed) of the trainings that the current round lacks; empty once the race is over
    """

    alive: Sequence[str]
    round: int
    missing: Sequence[tuple[str, int]]


def race(objectives: Sequence[Mapping[str, object]], labels: Sequence[str], seeds: Sequence[int], fits: Fits) -> Race:
    """Returns the state of the race of these candidates, replayed from the trainings that have ended."""
    alive = list(labels)
    for place, seed in enumerate(seeds):
        missing = [(label, seed) for label in alive if seed not in fits.get(label, {})]
        if missing:
            return Race(alive, place, missing)
        if FEWEST <= place + 1 < len(seeds):
            rows = {label: [_losses(objectives, fits[label][key]) for key in seeds[: place + 1]] for label in alive}
            alive = survivors(rows, len(seeds))
    return Race(alive, len(seeds), [])


def survivors(rows: Mapping[str, Sequence[Losses | None]], rounds: int) -> list[str]:
    """Returns the candidates that may still end ahead after `rounds` rounds.

    rows  label -> its losses in each complete round; None where a training came to no value

    A candidate leaves if one of the leading ones is better in each objective by a paired t-test over the rounds. Two
    differences that are equal by chance, as those of accuracies often are, say nothing about the deviation. A candidate
    without a value leaves where another one has some.
    """
    labels = list(rows)
    means = {place: mean for place, label in enumerate(labels) if (mean := _mean(rows[label]))}
    leading = front(means)
    beaten = {
        place
        for place in means
        if any(_is_beaten(rows[labels[place]], rows[labels[ahead]], rounds, len(leading)) for ahead in leading)
    }
    return [label for place, label in enumerate(labels) if not means or (place in means and place not in beaten)]


def _is_beaten(rows: Sequence[Losses | None], others: Sequence[Losses | None], rounds: int, leading: int) -> bool:
    pairs = [(a, b) for a, b in zip(rows, others, strict=True) if a is not None and b is not None]
    columns = [[a[k] - b[k] for a, b in pairs] for k in range(len(pairs[0][0]))] if len(pairs) >= FEWEST else []
    if not columns or (len(pairs) == FEWEST and any(math.isclose(*column) for column in columns)):
        return False
    return max(chance_of_less(column, rounds) for column in columns) < THRESHOLD / leading


def _losses(objectives: Sequence[Mapping[str, object]], row: Row) -> Losses | None:
    """Returns the values of a training as losses, lower is better; None where one is missing or not finite."""
    if row is None or any(value is None or not math.isfinite(value) for value in row):
        return None
    signs = [-1.0 if objective["direction"] == "maximize" else 1.0 for objective in objectives]
    return tuple(sign * value for sign, value in zip(signs, row, strict=True) if value is not None)


def _mean(rows: Sequence[Losses | None]) -> Losses | None:
    known = [row for row in rows if row is not None]
    return tuple(map(fmean, zip(*known, strict=True))) if known else None
