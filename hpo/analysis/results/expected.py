"""Reads how good the best trial of a study is expected to be on new data, before other seeds have confirmed it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hpo.ledger import answer, queries
from hpo.search import expected as estimates
from hpo.search.ranking import rank
from hpo.space.trial_config import TrialShape
from hpo.text import command

if TYPE_CHECKING:
    from hpo.ledger.rows import Connection, StudyRow

MOST = 50  # trials whose curves are read
_SOURCES = {"epochs": "the last epochs", "folds": "folds", "seeds": "seeds"}


@dataclass(frozen=True)
class RunnerUp:
    """The second-best trial, and by how much it is expected to be behind on new data.

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
    """

    value: float
    noise: float
    source: Literal["epochs", "folds", "seeds"]
    runner_up: RunnerUp

    @classmethod
    def of_json(cls, facts: Mapping[str, Any]) -> OnNewData:
        """Returns the expectation that `asdict` gave these facts of."""
        return cls(**{**facts, "runner_up": RunnerUp(**facts["runner_up"])})

    def described(self) -> str:
        """Returns `about 0.207 ± 0.006 is expected on new data, by the scatter of folds`."""
        by = f"by the scatter of {_SOURCES[self.source]}"
        return f"about {self.value:.4g} ± {self.noise:.2g} is expected on new data, {by}"

    def doubt(self, number: int) -> str:
        """Returns a clause on a runner-up that may be as good as trial `number`; empty where the values tell them
        apart."""
        second = self.runner_up
        if second.seeds == 0:
            return ""
        text = f"trial {number} cannot be told from trial {second.number}, which is expected {second.behind:.2g} behind"
        if second.seeds is None:
            return f"{text}: either will do"
        return f"{text}: {f'`{second.confirm}`' if second.confirm else f'{second.seeds} seeds'} may tell"


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
    sign = -1.0 if objective["direction"] == "maximize" else 1.0
    first, second = estimates.expected([sign * value for value in values.values()], noise)
    seeds = estimates.may_tell(abs(values[order[1]] - values[order[0]]), second - first, noise)
    seeded = "seed" in shape.train and not study.spec.imported
    confirm = command(f"confirm --study {study.name} --top 2 --seeds {seeds}") if seeds and seeded else ""
    source = "epochs" if shape.parts == 1 else "seeds" if shape.seeds > 1 else "folds"
    return OnNewData(sign * first, noise, source, RunnerUp(order[1], second - first, seeds, confirm))
