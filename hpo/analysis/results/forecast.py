"""Reports how much more trials are expected to improve a study, with their cost and the noise of a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hpo.analysis.results.format import number
from hpo.door import option
from hpo.errors import UserError
from hpo.ledger import answer, queries, removed
from hpo.ledger.views import driver as driver_queries
from hpo.search.forecast import COVERED, FEWEST, FEWEST_COMPLETE, HORIZON, Seen, forecast
from hpo.space.trial_state import TERMINAL_STATES
from hpo.text import command, counted, spelled

if TYPE_CHECKING:
    from hpo.ledger.answer import Best
    from hpo.ledger.rows import Connection, StudyRow


@dataclass(frozen=True)
class StudyForecast:
    """The expected improvement by the next trials of a study.

    metric   the objective
    best     its best value so far, of the trial number `trial`
    trials   the number of further trials
    seconds  their expected duration, at the pace of the ended trials; None if no time is known
    gain     the expected improvement of the best value
    most     the improvement that a share of `covered` of similar studies do not exceed
    """

    study: str
    metric: str
    best: float
    trial: int
    trials: int
    seconds: float | None
    gain: float
    most: float
    covered: float = COVERED

    def described(self) -> str:
        """Returns a line, such as `20 more trials, about 3:06:00: expected gain in loss 0.004, at most 0.011 in 9 of 10
        studies`."""
        time = f", about {spelled(self.seconds)}" if self.seconds is not None else ""
        gain = f"expected gain in {self.metric} {self.gain:.2g}, at most {self.most:.2g} in 9 of 10 studies"
        return f"{counted(self.trials, 'more trial')}{time}: {gain}"


class Valued(Protocol):
    """The columns of a trial's row that a forecast needs."""

    @property
    def state(self) -> str: ...

    @property
    def values(self) -> Sequence[float] | None: ...


def forecast_of(connection: Connection, study: StudyRow, trials: int = HORIZON) -> StudyForecast | None:
    """Returns the forecast of a study with one objective; None for several, or where too few trials have ended."""
    if len(study.spec.objectives) != 1:
        return None
    best = answer.bests(connection, study)[:1]
    if not best:
        return None
    hidden = removed.numbers(connection, study.id)
    rows = [row for row in driver_queries.all_rows(connection, study.id) if row.number not in hidden]
    return expected(study, best[0], rows, trials)


def expected(study: StudyRow, best: Best, rows: Sequence[Valued], trials: int = HORIZON) -> StudyForecast | None:
    """Returns the forecast of a study with one objective and these `rows` of trials; None if they are too few."""
    objective = study.spec.objectives[0]
    sign = 1 if objective["direction"] == "minimize" else -1
    valued = [row for row in rows if row.state in ("complete", "pruned") and row.values is not None]
    more = forecast([Seen(sign * row.values[0], row.state == "complete") for row in valued if row.values], trials)
    if more is None:
        return None
    num_ended = sum(row.state in TERMINAL_STATES for row in rows)
    seconds = study.seconds_used / num_ended * trials if study.seconds_used else None
    return StudyForecast(
        study.name, objective["metric"], best.value, best.number, trials, seconds, more.gain, more.most
    )


def required(connection: Connection, name: str, trials: int) -> StudyForecast:
    """Returns the forecast of a study. Raises UserError if there is none."""
    study = queries.study_row(connection, name)
    if (count := len(study.spec.objectives)) > 1:
        shows = command(f"report {name}")
        raise UserError(
            f"{option('study', name)}: it has {count} objectives, and a forecast is made of one best value: `{shows}` "
            "shows its front."
        )
    more = forecast_of(connection, study, trials)
    if more is None:
        status = queries.status(connection, name)
        valued = status.trials["complete"] + status.trials["pruned"]
        raise UserError(
            f"{option('study', name)}: {counted(valued, 'trial')} with a value, {status.trials['complete']} of them "
            f"complete, are too few to tell what more would bring: a forecast takes {FEWEST} and {FEWEST_COMPLETE}."
        )
    return more


def describe(of: StudyForecast, deviation: float | None) -> str:
    """Returns the forecast as text; `deviation` is that of runs that differ only in their seed, None if unknown."""
    lines = [of.described(), f"the best so far: trial {of.trial}, {of.metric} {number(of.best)}"]
    if deviation is None:
        confirm = command(f"confirm --study {of.study}")
        lines.append(f"the noise of a seed is unknown: `{confirm}` measures it")
    else:
        less = ", more than is expected of them" if deviation > of.gain else ""
        lines.append(f"the noise of a seed is {deviation:.2g}{less}")
    return "\n".join(lines)


def facts(of: StudyForecast, deviation: float | None) -> dict[str, object]:
    """Returns the forecast as JSON values."""
    return {**vars(of), "noise": deviation}
