"""Reads trials from a table, a row for each: what `hpo export` writes, what other tools export, and what people write.

The columns of known tools are known by their prefixes and names; --param and --metric name those of any other table.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from hpo.errors import UserError
from hpo.interchange.record import ImportedStudy, ImportedTrial, Point, State, judged_by
from hpo.text import counted
from trainer.files import formats, tables

_PARAM = ("params.", "params_", "config/", "config.")
_VALUE = ("values.", "values_")
_METRIC = ("metrics.", "metrics_")
_NOTE = ("user_attrs_", "tags.", "tags_")
_KEY = ("number", "trial_id", "run_id", "id", "name", "run")
_STATE, _ERROR = ("state", "status"), ("error", "reason")
_STARTED = ("started_at", "datetime_start", "start_time", "created")
_ENDED = ("ended_at", "datetime_complete", "end_time")
_STEP = ("epoch", "training_iteration", "step")
# What is known besides and is of no use here.
_UNUSED = ("front", "judged_epoch", "seconds", "duration", "checkpoint", "study", "experiment_id", "artifact_uri")
_UNUSED = (*_UNUSED, "user", "runtime", "sweep", "notes", "tags", "hostname", "timestamp", "date", "time_total_s")
_NAMED = (*_KEY, *_STATE, *_ERROR, *_STARTED, *_ENDED, *_STEP, *_UNUSED)
STATES: dict[str, State | None] = {  # of several tools, in small letters; None of what may end yet
    **dict.fromkeys(("complete", "completed", "finished", "terminated", "done", "success"), "complete"),
    **dict.fromkeys(("pruned", "stopped", "killed", "early_stopped"), "pruned"),
    **dict.fromkeys(("fail", "failed", "error", "crashed"), "failed"),
    "infeasible": "infeasible",
    **dict.fromkeys(("running", "waiting", "paused", "pending", "scheduled", "queued"), None),
}


def read(
    file: str,
    study: str | None = None,
    metrics: Sequence[str] = (),
    directions: Sequence[str] = (),
    *,
    params: Sequence[str] = (),
    tool: str = "csv",
) -> ImportedStudy:
    """The trials of a table. Raises UserError, or DataError with the row and the column."""
    source = tables.read(Path(file).expanduser())
    source.refuse_repeated(source.columns)
    table = _Table(source, metrics, params)
    objectives = judged_by(table.judged, directions, table.metrics, file, table.columns)
    guessed = list(table.guessed)
    if not directions:
        guessed.append(f"{', '.join(table.judged)} is minimized (--direction maximize says otherwise)")
    trials = list(table.trials([one.metric for one in objectives]))
    left = [f"{counted(count, 'row')} in state {state}, which may end yet" for state, count in table.open.items()]
    left += [f"the column {name}" for name in table.unused]
    return ImportedStudy(tool, study or Path(file).stem, file, tuple(objectives), trials, {}, left, guessed)


class _Table:
    """A table and what its columns are: `params`, `values`, `metrics` and `notes` map names to columns."""

    def __init__(self, source: tables.Source, metrics: Sequence[str], params: Sequence[str]) -> None:
        self._source, self.columns = source, source.columns
        self.guessed: list[str] = []
        self.open: Counter[str] = Counter()
        self.values = self._prefixed(_VALUE) or {one: one for one in ("value",) if one in self.columns}
        self.metrics = self.values | self._prefixed(_METRIC)
        self.notes = self._prefixed(_NOTE)
        self._check(metrics, params)
        self.metrics |= {one: one for one in metrics if one not in self.metrics}
        self.judged = list(metrics) or list(self.values)
        self.params = self._params(params)
        used = {*self.params.values(), *self.metrics.values(), *self.values.values(), *self.notes.values()}
        self.unused = [one for one in self.columns if one not in used and one.lower() not in _NAMED]

    def _check(self, metrics: Sequence[str], params: Sequence[str]) -> None:
        for flag, names in (("--param", params), ("--metric", [one for one in metrics if one not in self.metrics])):
            for name in names:
                if name not in self.columns:
                    raise UserError(
                        f"{flag} {name}: {self._source.path} has no such column; it has {', '.join(self.columns)}."
                    )

    def _prefixed(self, prefixes: Sequence[str]) -> dict[str, str]:
        """Name -> column of those that begin with one of the prefixes."""
        found = ((prefix, one) for one in self.columns for prefix in prefixes if one.startswith(prefix))
        return {one.removeprefix(prefix): one for prefix, one in found if one != prefix}

    def _params(self, given: Sequence[str]) -> dict[str, str]:
        if given:
            return {one: one for one in given}
        if known := self._prefixed(_PARAM):
            return known
        if not self.judged:
            return {}
        taken = {*self.metrics.values(), *self.values.values(), *self.notes.values()}
        rest = [one for one in self.columns if one not in taken and one.lower() not in _NAMED and one]
        self.guessed.append(f"the parameters are {', '.join(rest) or 'none'} (--param names them)")
        return {one: one for one in rest}

    def _first(self, names: Sequence[str]) -> str | None:
        """The first column of one of these names, however it is written."""
        return next((one for name in names for one in self.columns if one.lower() == name), None)

    def _cells(self, column: str | None) -> list[Any]:
        """A column's values, None where there is none."""
        if column is None:
            return [None] * self._source.table.num_rows
        return _read(self._source.table[column].to_pylist(), self._source.kind)

    def _numbers(self, column: str) -> np.ndarray:
        """A column of numbers [rows], NaN where there is none; infinities stay."""
        finite = self._source.floats(column)  # which refuses texts, with their place
        return np.asarray(self._source.table[column].cast("float64", safe=False)) if len(finite) else finite

    def trials(self, judged: Sequence[str]) -> Iterator[ImportedTrial]:
        """Each row that has ended."""
        numbers = {name: self._numbers(column) for name, column in self.metrics.items()}
        ends = [self._numbers(self.values.get(metric, self.metrics[metric])) for metric in judged]
        said = [self._cells(self.values.get(metric, self.metrics[metric])) for metric in judged]
        params = {name: self._cells(column) for name, column in self.params.items()}
        notes = {name: self._cells(column) for name, column in self.notes.items()}
        key, state, error = (self._first(names) for names in (_KEY, _STATE, _ERROR))
        keys, states, errors = (self._cells(column) for column in (key, state, error))
        started, ended = self._first(_STARTED), self._first(_ENDED)
        times = {column: self._cells(column) for column in (started, ended) if column}
        steps = self._cells(self._first(_STEP))
        numbered = key and key.lower() == "number" and all(isinstance(one, int) for one in keys)
        rows = range(self._source.table.num_rows)
        for row in sorted(rows, key=keys.__getitem__) if numbered else rows:
            values = [float(column[row]) for column in ends]
            whole = all(given[row] is not None for given in said)
            how = self._state(states[row], whole, row, state)
            if how is None:
                continue
            step = int(steps[row]) if isinstance(steps[row], int | float) and steps[row] >= 0 else 0
            yield ImportedTrial(
                key=str(row if keys[row] is None else keys[row]),
                state=how,
                params={name: cells[row] for name, cells in params.items() if cells[row] is not None},
                values=values if whole else None,
                curves={
                    name: [Point(step, float(column[row]))]
                    for name, column in numbers.items()
                    if not math.isnan(column[row])
                },
                started=self._time(started, times, row),
                ended=self._time(ended, times, row),
                error=str(errors[row] or ("" if whole or how != "failed" else f"it has no {' and '.join(judged)}")),
                attributes={name: cells[row] for name, cells in notes.items() if cells[row] is not None},
            )

    def _state(self, said: Any, whole: bool, row: int, column: str | None) -> State | None:
        """How the row's trial ended; None where it has not. One that is complete without its values has failed."""
        text = str(said or ("complete" if whole else "failed"))
        if text.lower() not in STATES:
            known = ", ".join(STATES)
            raise UserError(f"{self._source.place(row, column or '')} is {text!r}: a state is one of {known}.")
        found = STATES[text.lower()]
        self.open.update([text] if found is None else [])
        return "failed" if found == "complete" and not whole else found

    def _time(self, column: str | None, times: Mapping[str, Sequence[Any]], row: int) -> float | None:
        if column is None or (value := times[column][row]) is None:
            return None
        try:
            return seconds(value)
        except ValueError as error:
            raise UserError(
                f"{self._source.place(row, column)} is {str(value)[:40]!r}: write a time as 2026-01-31T12:00:00+00:00."
            ) from error


def seconds(value: Any) -> float:
    """A time as seconds since the epoch: a date, text of one, seconds or, beyond the year 5000, milliseconds.

    What names no zone is of this machine's. Raises ValueError.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value / 1000 if value > 1e11 else float(value)
    if of_pandas := getattr(value, "to_pydatetime", None):  # to which a time without a zone would be one of UTC
        value = of_pandas(warn=False)
    return (value if isinstance(value, datetime) else datetime.fromisoformat(str(value))).timestamp()


def _read(cells: Sequence[Any], kind: str) -> list[Any]:
    """Cells as JSON values: what `hpo export` has written as JSON is read as such, and no quote is left of those that
    keep a spreadsheet from running a text."""
    texts = [cell for cell in cells if isinstance(cell, str)]
    if not texts:
        return list(cells)
    if kind == formats.CSV:
        return [_json(cell, "[{") if isinstance(cell, str) else cell for cell in map(_unquoted, cells)]
    marked = all(_is_json(cell) for cell in texts) and any(cell.startswith(('"', "[", "{")) for cell in texts)
    return [json.loads(cell) if isinstance(cell, str) and marked else cell for cell in cells]


def _unquoted(cell: Any) -> Any:
    inert = isinstance(cell, str) and cell.startswith(("'=", "'+", "'-", "'@", "'\t", "'\r"))
    return cell[1:] if inert else cell


def _json(cell: str, begins: str) -> Any:
    return json.loads(cell) if cell[:1] in begins and cell and _is_json(cell) else cell


def _is_json(cell: str) -> bool:
    try:
        json.loads(cell)
    except ValueError:
        return False
    return True
