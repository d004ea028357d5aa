"""Reads the trials that `hpo extend` has trained on; `hpo best` and the report show them beside the originals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpo.ledger import queries, removed
from hpo.ledger.finished import original

if TYPE_CHECKING:
    from hpo.ledger.rows import Connection


def is_extension(labels: Sequence[str]) -> bool:
    """Returns True for the labels of a study that `hpo extend` has made."""
    return any(original(label) is not None for label in labels)


@dataclass(frozen=True)
class Extension:
    """A complete trial, `number` of the derived `study`, that continues `trial` of another study."""

    trial: int
    study: str
    values: Mapping[str, float]
    number: int
    epoch: int

    def described(self) -> str:
        """Returns text such as `extended: trial 7 to epoch 50, val/loss 0.12 (study s-extend, trial 0)`."""
        values = ", ".join(f"{metric} {value:.6g}" for metric, value in self.values.items())
        return f"extended: trial {self.trial} to epoch {self.epoch}, {values} (study {self.study}, trial {self.number})"


def extended(connection: Connection, name: str) -> list[Extension]:
    """Returns the complete trials that continue a trial of study `name`, sorted by that trial and by epoch; removed
    trials are left out."""
    extensions: list[Extension] = []
    hidden = removed.numbers(connection, queries.study_row(connection, name).id)
    for derived, source in queries.derived(connection).items():
        study = queries.study_row(connection, derived)
        listed = study.spec.listed
        if source != name or not is_extension([entry["label"] for entry in listed]):
            continue
        metrics = [objective["metric"] for objective in study.spec.objectives]
        for trial in queries.trial_rows(connection, study.id):
            number = original(listed[trial.number]["label"])
            if number is not None and number not in hidden and trial.state == "complete" and trial.values:
                values = dict(zip(metrics, trial.values, strict=True))
                extensions.append(Extension(number, derived, values, trial.number, trial.epoch))
    return sorted(extensions, key=lambda extension: (extension.trial, extension.epoch))
