"""Reports how much more trials are expected to improve a study, with their cost and the noise of a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hpo.analysis.results.format import number
from hpo.door import flag, option
from hpo.errors import UserError
from hpo.ledger import answer, queries, removed
from hpo.ledger.views import driver as driver_queries
from hpo.search.forecast import COVERED, FEWEST, FEWEST_COMPLETE, HORIZON, Seen, forecast
from hpo.space.trial_state import TERMINAL_STATES
from hpo.text import command, counted, roughly

if TYPE_CHECKING:
    from hpo.ledger.answer import Best
    from hpo.ledger.rows import Connection, StudyRow


@dataclass(frozen=True)
class StudyForecast:
    """The expected improvement by the next trials of a study.

    metric   the objective
    best     the best value of its search so far, of the trial number `trial`; other seeds have no part in it
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
        """Returns a line, such as `20 more trials, about 3h6m: expected gain in loss 0.004, at most 0.011 in 9 of 10
        studies`."""
        time = f", about {roughly(self.seconds)}" if self.seconds is not None else ""
        gain = f"expected gain in {self.metric} {self.gain:.2g}, at most {self.most:.2g} in 9 of 10 studies"
        return f"{counted(self.trials, 'more trial')}{time}: {gain}"


class Valued(Protocol):
    """The columns of a trial's row that a forecast needs."""

    @property
    def state(self) -> str: ...

    @property
    def values(self) -> Sequence[float] | None: ...


def forecast_of(connection: Connection, study: StudyRow, trials: int = HORIZON) -> StudyForecast | None:
    """Returns the forecast of a search with one objective; None for several, or where too few trials have ended."""
    if len(study.spec.objectives) != 1 or study.spec.listed:
        return None
    best = answer.selected(connection, study)[:1]
    if not best:
        return None
    return expected(study, best[0], _shown(connection, study), trials)


def expected(study: StudyRow, best: Best, rows: Sequence[Valued], trials: int = HORIZON) -> StudyForecast | None:
    """Returns the forecast of a study with one objective and these `rows` of trials; None if they are too few."""
    objective = study.spec.objectives[0]
    sign = 1 if objective["direction"] == "minimize" else -1
    seen = [Seen(sign * row.values[0], row.state == "complete") for row in _valued(rows) if row.values]
    more = forecast(seen, trials)
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
    if first := study.spec.listed_of:
        source = queries.find_study(connection, first)
        there = source is not None and source.id < study.id
        raise UserError(
            f"{option('study', name)}: it has trained trials of study {first!r} again, and a forecast is made of a "
            f"search: give {option('study', first) if there else 'another study'}."
        )
    more = forecast_of(connection, study, trials)
    if more is None:
        raise UserError(_too_few(connection, study))
    return more


def _too_few(connection: Connection, study: StudyRow) -> str:
    from hpo.driver import end_reason

    rows = _shown(connection, study)
    valued, complete = len(_valued(rows)), sum(row.state == "complete" for row in rows)
    needs = f"a forecast needs {FEWEST} trials with a value, {FEWEST_COMPLETE} of them complete"
    needs = f"{option('study', study.name)}: {needs}, and"
    missing = max(FEWEST - valued, FEWEST_COMPLETE - complete)
    if rows and not valued and all(row.state in TERMINAL_STATES for row in rows):
        outcomes, again = driver_queries.outcomes(connection, study.id), "correct that and search again."
        return f"{needs} {end_reason.nothing_scored(study.name, len(rows), again, outcomes)}"
    return f"{needs} the study has {valued}, {complete} of them complete{_more(connection, study, missing)}."


def _more(connection: Connection, study: StudyRow, missing: int) -> str:
    """Returns what brings a study the `missing` trials, after a colon; empty for an imported study."""
    if study.spec.imported:
        return ""
    if queries.study_state(connection, study) == "running":
        return ": it still runs"
    total = len(driver_queries.all_rows(connection, study.id)) + missing
    plain, raised = (command(f"resume --study {study.name}{words}") for words in ("", f" {flag('trials')} {total}"))
    return f": `{plain if study.requested >= total else raised}` goes on"


def _shown(connection: Connection, study: StudyRow) -> list[Valued]:
    hidden = removed.numbers(connection, study.id)
    return [row for row in driver_queries.all_rows(connection, study.id) if row.number not in hidden]


def _valued(rows: Sequence[Valued]) -> list[Valued]:
    return [row for row in rows if row.state in ("complete", "pruned") and row.values]


def describe(of: StudyForecast, deviation: float | None) -> str:
    """Returns the forecast as text; `deviation` is that of runs that differ only in their seed, None if unknown."""
    lines = [of.described(), f"the best so far: trial {of.trial}, {of.metric} {number(of.best)}"]
    if deviation is None:
        confirm = command(f"confirm --study {of.study}")
        lines.append(f"the noise of a seed is unknown: `{confirm}` measures it")
    else:
        less = ", more than the expected gain" if deviation > of.gain else ""
        lines.append(f"the noise of a seed is {deviation:.2g}{less}")
    return "\n".join(lines)


def facts(of: StudyForecast, deviation: float | None) -> dict[str, object]:
    """Returns the forecast as JSON values."""
    return {**vars(of), "noise": deviation}
