"""Lays trials side by side: one row per trial, complete ones best first; as text, JSON, CSV or Parquet.

Column names follow MLflow's `search_runs`: `metrics.<key>`, `params.<path>` and `tags.<key>`, and `values.<metric>` for
what the trial was judged by, at the end of epoch `judged_epoch`, of which its metrics are, too; `epoch` and `step` are
how far it was trained, `seconds` how long it took from its start to its end. With several objectives `front` is 0 for
what no other trial is better than.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.errors import UserError
from hpo.ledger import queries, tags
from hpo.ledger.names import machine_dependent
from hpo.search.ranking import placed
from hpo.space.objective import hold_out_of

if TYPE_CHECKING:
    from hpo.ledger.rows import Connection

HEADLINES = 8
_FORMULA = (
    "=",
    "+",
    "-",
    "@",
    "\t",
    "\r",
)  # what a spreadsheet takes for the start of a formula (OWASP, CSV injection)


@dataclass(frozen=True)
class Comparison:
    """`rows` are flat: each holds every one of `columns`, None where the trial has no such value. They are the
    first of `total` trials."""

    study: str
    objectives: list[dict[str, Any]]
    metrics: list[str]  # names and patterns, as the study declares them
    columns: list[str]
    rows: list[dict[str, Any]]
    total: int


def headline(
    keys: Sequence[str], objectives: Sequence[str], declared: Sequence[str] = (), *, every: bool = False
) -> list[str]:
    """The metrics to show first: objectives, what is held out beside them, losses, those that the study has `declared`
    by name instead of by a pattern, then what comes of validation, eight at most; or every one."""
    ranks, held_out = {"val": 0, "train": 1, "test": 2}, [*map(hold_out_of, objectives)]

    def rank(key: str) -> tuple[bool, bool, int, bool, int]:
        source = ranks.get(key.partition("/")[0], 3)
        loss = 0 if key == "val/loss" else 1 if key.endswith("/loss") else 2
        return key not in objectives, key not in held_out, loss, key not in declared, source

    ranked = sorted(keys, key=rank)
    return ranked if every else [key for key in ranked if not machine_dependent(key)][:HEADLINES]


def compare(connection: Connection, name: str, top: int | None = None) -> Comparison:
    """The `top` trials of a study, or all: complete ones first, then those that were not, each by the first
    objective, or by `front` where there are several, then by number."""
    study = queries.study_row(connection, name)
    objectives = study["spec"]["objectives"]

    trials, fronts = _ordered(queries.trial_rows(connection, study["id"]), objectives)
    shown = trials[:top]
    metrics = queries.last_values(connection, [trial["id"] for trial in shown])
    judged = queries.judged(connection, study, shown)
    for trial_id, at in judged.items():
        metrics[trial_id] |= at.metrics
    given = tags.given(connection, study["id"])
    rows = [
        _row(trial, objectives, fronts.get(trial["number"]), judged.get(trial["id"]), metrics.get(trial["id"], {}))
        | {f"tags.{key}": value for key, value in given.get(trial["number"], {}).items()}
        for trial in shown
    ]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    leading = [column for column in columns if not column.startswith(("params.", "metrics.", "tags."))]
    columns = leading + sorted(column for column in columns if column not in leading)
    every = [{column: row.get(column) for column in columns} for row in rows]
    return Comparison(name, objectives, study["spec"]["metrics"], columns, every, len(trials))


def _ordered(
    trials: Sequence[dict[str, Any]], objectives: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """The trials, complete ones first, both best first; and the front of each complete one, by number."""
    ordered: list[dict[str, Any]] = []
    fronts: dict[int, int] = {}
    for complete in (True, False):
        some = [trial for trial in trials if (trial["state"] == "complete") is complete]
        values = {one["number"]: one["values"] for one in some if one["values"] and None not in one["values"]}
        places, last = placed(objectives, values), (len(some), 0)
        ordered += sorted(some, key=lambda one: (places.get(one["number"], last), one["number"]))
        fronts |= {number: front for number, (front, _) in places.items()} if complete else {}
    return ordered, fronts


def _row(
    trial: dict[str, Any],
    objectives: Sequence[dict[str, Any]],
    front: int | None,
    judged: queries.Judged | None,
    metrics: dict[str, float],
) -> dict[str, Any]:
    values = trial["values"] or [None] * len(objectives)
    return {
        "number": trial["number"],
        "state": trial["state"],
        "epoch": trial["epoch"],
        "step": trial["step"],
        "seconds": None
        if None in (trial["started_at"], trial["ended_at"])
        else trial["ended_at"] - trial["started_at"],
        "judged_epoch": judged.epoch if judged else None,
        **({"front": front} if len(objectives) > 1 else {}),
        **{f"values.{objective['metric']}": value for objective, value in zip(objectives, values, strict=True)},
        **{f"metrics.{key}": value for key, value in metrics.items()},
        **{f"params.{path}": value for path, value in trial["params"].items()},
    }


def write_csv(comparison: Comparison, path: Path) -> None:
    """UTF-8. A text that a spreadsheet would run as a formula is preceded by an apostrophe."""
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([_inert(column) for column in comparison.columns])
            writer.writerows([_inert(row[column]) for column in comparison.columns] for row in comparison.rows)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): name another file.") from error


def write_parquet(comparison: Comparison, path: Path) -> None:
    """One Parquet column per column; where a column mixes types, each value is its JSON text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({column: _uniform([row[column] for row in comparison.rows]) for column in comparison.columns})
    try:
        with path.open("wb") as file:
            pq.write_table(table, file)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}): name another file.") from error


def _inert(value: Any) -> Any:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value
    return f"'{text}" if isinstance(text, str) and text.startswith(_FORMULA) else text


def _uniform(values: Sequence[Any]) -> Sequence[Any]:
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} or (len(kinds) == 1 and not kinds & {list, dict}):
        return values
    return [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
