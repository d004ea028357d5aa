"""Goes on from a study of a lower tier: `--tier 2` after `--tier 1` begins with the best of that one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpo.declaration.spec import StudySpec
from hpo.declaration.study import Study
from hpo.driver.request import RunRequest
from hpo.driver.warm_start import place
from hpo.ledger import Ledger, queries
from hpo.text import command


@dataclass(frozen=True)
class Below:
    """The study of a lower tier, and the name of the one that goes on from it."""

    name: str
    spec: StudySpec
    best: int | None  # its best trial
    config: Mapping[str, Any]  # of that trial

    def entry(self, study: Study) -> dict[str, Any] | None:
        """The best trial as parameters of a study that searches more, the new ones as they were configured; None where
        the space does not hold it."""
        found = place(study.space, self.config) if self.best is not None else None
        return None if found is None else study.space.decode(found)

    def notice(self, began: bool) -> str:
        first = f"begins with trial {self.best} of {self.spec.name}, its best" if began else "begins anew"
        shown = command(f"status --study {self.name}")
        return (
            f"tier {self.spec.tier} was searched as study {self.spec.name}: this one is {self.name} (`{shown}`) and "
            f"{first}; --enqueue, --warm-start and --name say otherwise."
        )


def below(request: RunRequest, study: Study | None, ledger: Ledger | None) -> Below | None:
    """The study of the declaration's own name where it has searched a lower tier than is asked for now and the request
    does not say by what name, or with what, to begin."""
    if study is None or ledger is None or request.tier is None or request.name is not None:
        return None
    with ledger.read() as connection:
        if study.name not in queries.study_names(connection):
            return None
        row = queries.study_row(connection, study.name)
        spec = StudySpec.from_json(row["spec"])
        if spec.tier is None or spec.tier >= request.tier:
            return None
        best = queries.bests(connection, row)
        numbers = {one["number"]: one["id"] for one in queries.trial_rows(connection, row["id"])}
        config = queries.configs(connection, [numbers[best[0].number]])[numbers[best[0].number]] if best else {}
    return Below(f"{study.name}-tier{request.tier}", spec, best[0].number if best else None, config)
