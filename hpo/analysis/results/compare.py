"""Lists trials in a table, one row per trial, complete ones best first, and writes it as CSV or Parquet.

Column names follow MLflow's `search_runs`: `metrics.<key>`, `params.<path>` and `tags.<key>`. `values.<metric>` is the
trial's objective value, and its metrics are of the same epoch, `judged_epoch`. `epoch` and `step` say how far it was
trained; `seconds` is the time from its start to its end. `finished` names the study and the trial that trained it to
its end after it had been stopped. With several objectives `front` is 0 for a trial that no other surpasses.
"""

from __future__ import annotations

import csv
import errno
import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.errors import UserError
from hpo.ledger import queries, tags
from hpo.ledger.names import machine_dependent
from hpo.ledger.views import finished
from hpo.search.ranking import placed
from hpo.space.objective import hold_out_of
from trainer.files.durable import replacing

if TYPE_CHECKING:
    from hpo.ledger.rows import Connection
    from hpo.ledger.stored_spec import ObjectiveJson

HEADLINES = 8
_FORMULA = (
    "=",
    "+",
    "-",
    "@",
    "\t",
    "\r",
)  # the characters that begin a formula in a spreadsheet (OWASP, CSV injection)


@dataclass(frozen=True)
class Comparison:
    """A table of the first `rows` of `total` trials. Each row has all `columns`, None if a trial lacks the value."""

    study: str
    objectives: list[ObjectiveJson]
    metrics: list[str]  # names and patterns, as the study declares them
    columns: list[str]
    rows: list[dict[str, Any]]
    total: int


def headline(
    keys: Sequence[str], objectives: Sequence[str], declared: Sequence[str] = (), *, every: bool = False
) -> list[str]:
    """Returns the metrics to show first, at most eight, or every one.

    First come objectives, then metrics held out beside them, losses, metrics that the study has `declared` by name
    instead of by a pattern, and validation metrics.
    """
    ranks, held_out = {"val": 0, "train": 1, "test": 2}, [*map(hold_out_of, objectives)]

    def rank(key: str) -> tuple[bool, bool, int, bool, int]:
        source = ranks.get(key.partition("/")[0], 3)
        loss = 0 if key == "val/loss" else 1 if key.endswith("/loss") else 2
        return key not in objectives, key not in held_out, loss, key not in declared, source

    ranked = sorted(keys, key=rank)
    return ranked if every else [key for key in ranked if not machine_dependent(key)][:HEADLINES]


def compare(connection: Connection, name: str, top: int | None = None) -> Comparison:
    """Returns the `top` trials of a study, or all: complete ones first, then the others.

    Both are ordered by the first objective, or by `front` if there are several, then by number.
    """
    study = queries.study_row(connection, name)
    objectives = study.spec.objectives

    trials, fronts = _ordered(finished.trial_rows(connection, study), objectives)
    shown = trials[:top]
    metrics = queries.last_values(connection, [trial.id for trial in shown])
    judged = finished.judged(connection, study, shown)
    for trial_id, at in judged.items():
        metrics[trial_id] |= at.metrics
    tags_of = tags.given(connection, study.id)
    rows = [
        _row(trial, objectives, fronts.get(trial.number), judged.get(trial.id), metrics.get(trial.id, {}))
        | {f"tags.{key}": value for key, value in tags_of.get(trial.number, {}).items()}
        for trial in shown
    ]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    leading = [column for column in columns if not column.startswith(("params.", "metrics.", "tags."))]
    columns = leading + sorted(column for column in columns if column not in leading)
    every = [{column: row.get(column) for column in columns} for row in rows]
    return Comparison(name, objectives, study.spec.metrics, columns, every, len(trials))


def _ordered(
    trials: Sequence[finished.JudgedTrial], objectives: Sequence[ObjectiveJson]
) -> tuple[list[finished.JudgedTrial], dict[int, int]]:
    """Returns (trials, number -> front): first the trials trained to their end, then the others, each part best
    first."""
    ordered: list[finished.JudgedTrial] = []
    fronts: dict[int, int] = {}
    for complete in (True, False):
        part = [trial for trial in trials if trial.is_whole is complete]
        values = {trial.number: trial.values for trial in part if trial.values and None not in trial.values}
        ranks, last = placed(objectives, values), (len(part), 0)
        ordered += sorted(part, key=lambda trial: (ranks.get(trial.number, last), trial.number))
        fronts |= {number: front for number, (front, _) in ranks.items()} if complete else {}
    return ordered, fronts


def _row(
    trial: finished.JudgedTrial,
    objectives: Sequence[ObjectiveJson],
    front: int | None,
    judged: queries.Judged | None,
    metrics: dict[str, float],
) -> dict[str, Any]:
    values = trial.values or [None] * len(objectives)
    return {
        "number": trial.number,
        "state": trial.state,
        "epoch": trial.epoch,
        "step": trial.step,
        "seconds": trial.seconds,
        **({"finished": f"{trial.finished.study}/{trial.finished.number}"} if trial.finished else {}),
        "judged_epoch": judged.epoch if judged else None,
        **({"front": front} if len(objectives) > 1 else {}),
        **{f"values.{objective['metric']}": value for objective, value in zip(objectives, values, strict=True)},
        **{f"metrics.{key}": value for key, value in metrics.items()},
        **{f"params.{path}": value for path, value in trial.params.items()},
    }


def write_csv(comparison: Comparison, path: Path) -> None:
    """Writes the table as UTF-8. An apostrophe precedes a text that a spreadsheet would run as a formula."""
    try:
        with _replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([_inert(column) for column in comparison.columns])
            writer.writerows([_inert(row[column]) for column in comparison.columns] for row in comparison.rows)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): name another file.") from error


def write_parquet(comparison: Comparison, path: Path) -> None:
    """Writes one Parquet column per column; in a column of mixed types each value is its JSON text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({column: _uniform([row[column] for row in comparison.rows]) for column in comparison.columns})
    try:
        with _replacing(path) as temporary, temporary.open("wb") as file:
            pq.write_table(table, file)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}): name another file.") from error


def _replacing(path: Path) -> AbstractContextManager[Path]:
    """Returns a context manager that writes a file as a whole; FileNotFoundError if its directory does not exist."""
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return replacing(path)


def _inert(value: object) -> Any:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value
    return f"'{text}" if isinstance(text, str) and text.startswith(_FORMULA) else text


def _uniform(values: Sequence[object]) -> Sequence[Any]:
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} or (len(kinds) == 1 and not kinds & {list, dict}):
        return values
    return [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
