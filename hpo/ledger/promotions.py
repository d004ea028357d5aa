"""Reads the promotions of a study's trials to versions of registered models (hpo/analysis/models/promote.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpo.errors import UserError
from hpo.ledger import report_queries
from hpo.text import command

if TYPE_CHECKING:
    from hpo.ledger.rows import Connection

EVENT = "promotion"


@dataclass(frozen=True)
class Promotion:
    """Trial `trial`, by its checkpoint of `step`, is `version` of the registered model `name` at `tracker`, found under
    `alias`, which stood for the version `before`; `told` says what a user should know of it."""

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
    """The promotions of a study that were not taken back, oldest first."""
    found: list[Promotion] = []
    for row in report_queries.study_events(connection, study_id, [EVENT]):
        fields = dict(row["fields"])
        undone, promotion = fields.pop("undone"), Promotion(**fields)
        same = (*promotion.target, promotion.version)
        found = [one for one in found if (*one.target, one.version) != same] + ([] if undone else [promotion])
    return found


def check_none(found: Sequence[Promotion], study: str) -> None:
    """Raises UserError where versions of models stand whose runs would go with the study."""
    if found:
        labels = ", ".join(dict.fromkeys(one.label for one in found))
        raise UserError(
            f"study {study!r} has promoted {labels}, which would be left without a run: take it back by "
            f"`{command(f'promote --undo --study {study}')}`, or leave MLflow as it is by --leave-mlflow."
        )
