"""Reads how good the best trial of a study is expected to be on new data, before other seeds have confirmed it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hpo.ledger import answer, queries
from hpo.search import expected as estimates
from hpo.search.confirming import DEFAULT_NAME
from hpo.search.ranking import rank
from hpo.space.trial_config import TrialShape
from hpo.text import command

if TYPE_CHECKING:
    from hpo.ledger.rows import Connection, StudyRow

MOST = 50  # trials whose curves are read
SEARCHED = 1000  # trials among which the default configuration is looked for
_SOURCES = {"epochs": "the last epochs", "folds": "folds", "seeds": "seeds"}


@dataclass(frozen=True)
class RunnerUp:
    """Another trial than the best one, and by how much it is expected to be behind on new data.

    seeds    the number of seeds that may tell which of the two is better; 0 where the values tell it, None where too
             many would be needed
    confirm  the command that trains both under so many seeds; empty where no seeds are needed or the study has none
    """

    number: int
    behind: float
    seeds: int | None
    confirm: str


@dataclass(frozen=True)
class OnNewData:
    """The value that the best trial is expected to have on new data.

    noise   the standard deviation of a trial's value, which is also the error of the expectation
    source  the scatter that the noise is estimated from
    default  the trial of the default configuration, which may be the best one; None where the study has none
    """

    value: float
    noise: float
    source: Literal["epochs", "folds", "seeds"]
    runner_up: RunnerUp
    default: RunnerUp | None = None

    @classmethod
    def of_json(cls, facts: Mapping[str, Any]) -> OnNewData:
        """Returns the expectation that `asdict` gave these facts of."""
        default = facts["default"] and RunnerUp(**facts["default"])
        return cls(**{**facts, "runner_up": RunnerUp(**facts["runner_up"]), "default": default})

    def described(self) -> str:
        """Returns `about 0.207 ± 0.006 is expected on new data, by the scatter of folds`."""
        by = f"by the scatter of {_SOURCES[self.source]}"
        return f"about {self.value:.4g} ± {self.noise:.2g} is expected on new data, {by}"

    def doubt(self, number: int) -> str:
        """Returns a clause on a runner-up that may be as good as trial `number`; empty where the values tell them
        apart."""
        second = self.runner_up
        if self.default and second.number == self.default.number:
            return ""  # a line on the default says it
        return _doubt(number, f"trial {second.number}", second) if second.seeds != 0 else ""

    def beside_default(self, number: int) -> str:
        """Returns a clause on trial `number` and the default configuration; empty where no trial has that."""
        if self.default is None:
            return ""
        if self.default.number == number:
            return f"trial {number} is {DEFAULT_NAME}: the search has found nothing better"
        name = f"{DEFAULT_NAME}, trial {self.default.number}"
        if self.default.seeds == 0:
            return f"trial {number} is better than {name}, by more than their noise explains"
        return _doubt(number, name, self.default)


def _doubt(number: int, name: str, second: RunnerUp) -> str:
    text = f"trial {number} may be no better than {name}, which is expected {second.behind:.2g} behind"
    if second.seeds is None:
        return f"{text}: either will do"
    return f"{text}: {f'`{second.confirm}`' if second.confirm else f'{second.seeds} seeds'} may tell them apart"


def on_new_data(connection: Connection, study: StudyRow) -> OnNewData | None:
    """Returns the expectation for the best trial by the only objective; None where the noise is unknown or zero.

    The noise is that of the better half of the complete trials, of at most MOST.
    """
    if len(study.spec.objectives) != 1:
        return None
    [objective] = study.spec.objectives
    values = {number: row[0] for number, row in answer.scored(connection, study).items() if math.isfinite(row[0])}
    order = sorted(values, key=lambda number: rank(objective, number, values[number]))
    near = order[: min((len(order) + 1) // 2, MOST)]
    if len(order) < 2:
        return None
    curves: dict[int, list[float]] = {}
    for number, _, _, epoch, value in queries.curves(connection, study.id, [objective["metric"]], near):
        if epoch is not None:
            curves.setdefault(number, []).append(value)
    [best] = queries.numbered(connection, study.id, order[:1])
    shape = TrialShape.of(queries.configs(connection, [best.id])[best.id])
    scatter = estimates.parts_scatter if shape.parts > 1 else estimates.scatter
    noise = scatter(list(curves.values()))
    if not noise:
        return None
    sign, default = -1.0 if objective["direction"] == "maximize" else 1.0, _default(connection, study, sorted(values))
    losses = {number: sign * value for number, value in values.items()}
    first, *behind = estimates.expected([*losses.values()], noise, [] if default is None else [losses[default]])
    seeded = "seed" in shape.train and not study.spec.imported

    def rival(number: int, mean: float, top: int) -> RunnerUp:
        seeds = estimates.may_tell(losses[number] - losses[order[0]], mean - first, noise)
        confirm = command(f"confirm --study {study.name} --top {top} --seeds {seeds}") if seeds and seeded else ""
        return RunnerUp(number, mean - first, seeds, confirm)

    source = "epochs" if shape.parts == 1 else "seeds" if shape.seeds > 1 else "folds"
    beside = None if default is None else rival(default, behind[1], 1)
    return OnNewData(sign * first, noise, source, rival(order[1], behind[0], 2), beside)


def _default(connection: Connection, study: StudyRow, complete: Sequence[int]) -> int | None:
    """Returns the number of the first complete trial of the default configuration; None without one."""
    base = study.identity.get("config")
    if not base:
        return None
    rows = queries.trial_rows(connection, study.id, complete[:SEARCHED])
    return next((row.number for row in rows if all(base.get(path) == row.params[path] for path in row.params)), None)
