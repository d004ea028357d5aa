"""Reads the promotions of a study's trials to versions of registered models (hpo/analysis/models/promote.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpo.door import option
from hpo.errors import UserError
from hpo.ledger.views import report as report_queries
from hpo.text import command

if TYPE_CHECKING:
    from hpo.ledger.rows import Connection

EVENT = "promotion"


@dataclass(frozen=True)
class Promotion:
    """The promotion of a trial's checkpoint to a version of a registered model.

    Trial `trial`, by its checkpoint of `step`, is `version` of the model `name` at `tracker`. Its `alias` named the
    version `before`; `told` is a note for the user.
    """

    trial: int
    step: int
    epoch: int
    name: str
    alias: str
    version: str | None
    before: str | None
    run_id: str
    model: str
    tracker: str
    told: str = ""

    @property
    def uri(self) -> str:
        return f"models:/{self.name}@{self.alias}"

    @property
    def target(self) -> tuple[str, str, str]:
        return self.tracker, self.name, self.alias

    @property
    def label(self) -> str:
        return f"{self.uri}, version {self.version}"


def standing(connection: Connection, study_id: int) -> list[Promotion]:
    """Returns the promotions of a study that were not undone, oldest first."""
    promotions: list[Promotion] = []
    for row in report_queries.study_events(connection, study_id, [EVENT]):
        fields = dict(row.fields)
        undone, promotion = fields.pop("undone"), Promotion(**fields)
        same = (*promotion.target, promotion.version)
        promotions = [earlier for earlier in promotions if (*earlier.target, earlier.version) != same] + (
            [] if undone else [promotion]
        )
    return promotions


def check_none(found: Sequence[Promotion], study: str) -> None:
    """Raises UserError if deleting the study would remove the runs of promoted model versions."""
    if found:
        labels = ", ".join(dict.fromkeys(promotion.label for promotion in found))
        raise UserError(
            f"study {study!r} has promoted {labels}, which would be left without a run: take it back by "
            f"`{command(f'promote --undo --study {study}')}`, or leave MLflow as it is by {option('leave_mlflow')}."
        )
