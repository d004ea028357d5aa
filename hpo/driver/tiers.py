"""Continues from a study of a lower tier: `--tier 2` after `--tier 1` begins with that study's best trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpo.declaration.spec import StudySpec
from hpo.declaration.study import Study
from hpo.door import option
from hpo.driver.request import RunRequest
from hpo.driver.warm_start import encoded
from hpo.ledger import answer, queries
from hpo.ledger.rows import Connection
from hpo.text import command


@dataclass(frozen=True)
class Below:
    """A study of a lower tier, and the name of the study that continues from it."""

    name: str
    spec: StudySpec
    best: int | None  # number of its best trial
    config: Mapping[str, Any]  # configuration of that trial

    def entry(self, study: Study) -> dict[str, Any] | None:
        """Returns the best trial as parameters of a study that searches more dimensions, or None.

        The added parameters have the values that they were configured with. Returns None if the space does not contain
        it.
        """
        coordinates = encoded(study.space, self.config) if self.best is not None else None
        return None if coordinates is None else study.space.decode(coordinates)

    def notice(self, began: bool) -> str:
        first = f"begins with trial {self.best} of {self.spec.name}, its best" if began else "begins anew"
        shown = command(f"status --study {self.name}")
        return (
            f"tier {self.spec.tier} was searched as study {self.spec.name}: this one is {self.name} (`{shown}`) and "
            f"{first}; {option('enqueue')}, {option('learn_from')} and {option('name')} say otherwise."
        )


def below(connection: Connection, request: RunRequest, study: Study) -> Below | None:
    """Returns the study with the declaration's own name if it has searched a lower tier than this request.

    Returns None if the request names no tier, or names the study.
    """
    tier = request.study.tier
    if tier is None or request.study.name is not None:
        return None
    row = queries.find_study(connection, study.name)
    if row is None:
        return None
    spec = StudySpec.from_json(row.spec.json)
    if spec.tier is None or spec.tier >= tier:
        return None
    best = answer.bests(connection, row)
    numbers = {trial.number: trial.id for trial in queries.trial_rows(connection, row.id)}
    config = queries.configs(connection, [numbers[best[0].number]])[numbers[best[0].number]] if best else {}
    return Below(f"{study.name}-tier{tier}", spec, best[0].number if best else None, config)
