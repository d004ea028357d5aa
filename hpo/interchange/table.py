"""Reads trials from a table, one per row: files of `hpo export`, exports of other tools, and tables that people write.

Columns of known tools are recognized by their prefixes and names; --param and --metric name those of other tables.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from hpo.door import option
from hpo.errors import UserError
from hpo.interchange.record import ImportedStudy, ImportedTrial, Point, State, judged_by
from hpo.interchange.rows import MAX_STEP
from hpo.interchange.texts import as_json, as_number, as_time, loads
from hpo.text import counted
from trainer.files import formats, tables
from trainer.quote import quoted

_PARAM = ("params.", "params_", "param_", "config/", "config.")  # param_: scikit-learn's cv_results_
_VALUE = ("values.", "values_")
_METRIC = ("metrics.", "metrics_")
_NOTE = ("user_attrs_", "tags.", "tags_")
_KEY = ("number", "trial_id", "run_id", "id", "name", "run")
_STATE, _ERROR = ("state", "status"), ("error", "reason")
_STARTED = ("started_at", "datetime_start", "start_time", "created")
_ENDED = ("ended_at", "datetime_complete", "end_time")
_STEP = ("epoch", "training_iteration", "step", "_step")
_OF_SEARCH = re.compile(r"(mean|std|split\d+)_(test|train)_\w+|(mean|std)_(fit|score)_time")  # metrics of cv_results_
# Other known columns, which are not imported.
_UNUSED = ("front", "judged_epoch", "seconds", "duration", "checkpoint", "study", "experiment_id", "artifact_uri")
_UNUSED = (*_UNUSED, "", "_runtime", "_timestamp", "_wandb", "params")
_UNUSED = (*_UNUSED, "user", "runtime", "sweep", "notes", "tags", "hostname", "timestamp", "date", "time_total_s")
_NAMED = (*_KEY, *_STATE, *_ERROR, *_STARTED, *_ENDED, *_STEP, *_UNUSED)
MAX_STATE = 40  # characters of a state that a message quotes
STATES: dict[str, State | None] = {  # of several tools, in lower case; None for trials that may still end
    **dict.fromkeys(("complete", "completed", "finished", "terminated", "done", "success"), "complete"),
    **dict.fromkeys(("pruned", "stopped", "killed", "early_stopped"), "pruned"),
    **dict.fromkeys(("fail", "failed", "error", "crashed"), "failed"),
    "infeasible": "infeasible",
    **dict.fromkeys(("running", "waiting", "paused", "pending", "scheduled", "queued"), None),
    **dict.fromkeys(("preempted", "preempting"), None),
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
    """Returns the trials of a table. Raises UserError, or DataError with the row and the column."""
    source = tables.read(Path(file).expanduser())
    source.refuse_repeated(source.columns)
    table = _Table(source, metrics, params)
    objectives = judged_by(table.judged, directions, table.metrics, file, table.columns)
    guessed = list(table.guessed)
    if not directions:
        guessed.append(f"{', '.join(table.judged)} is minimized ({option('direction', 'maximize')} says otherwise)")
    trials = list(table.trials([objective.metric for objective in objectives]))
    left = [f"{counted(count, 'row')} in state {state}, {table.why(state)}" for state, count in table.left.items()]
    left += [f"the column {name}" for name in table.unused]
    return ImportedStudy(tool, study or Path(file).stem, file, tuple(objectives), trials, {}, left, guessed)


class _Table:
    """Holds a table and the roles of its columns: `params`, `values`, `metrics` and `notes` map names to columns."""

    def __init__(self, source: tables.Source, metrics: Sequence[str], params: Sequence[str]) -> None:
        self._source, self.columns = source, source.columns
        self.guessed: list[str] = []
        self.left: Counter[str] = Counter()  # by state, the rows without an ended trial
        self.values = self._prefixed(_VALUE) or {name: name for name in ("value",) if name in self.columns}
        self.metrics = self.values | self._prefixed(_METRIC)
        if any(name.startswith("param_") for name in self.columns):
            self.metrics |= {name: name for name in self.columns if _OF_SEARCH.fullmatch(name)}
        self.notes = self._prefixed(_NOTE)
        self._check(metrics, params)
        self.metrics |= {name: name for name in metrics if name not in self.metrics}
        self.judged = list(metrics) or list(self.values)
        self.params = self._params(params)
        used = {*self.params.values(), *self.metrics.values(), *self.values.values(), *self.notes.values()}
        self.unused = [
            name
            for name in self.columns
            if name not in used and name.lower() not in _NAMED and not name.startswith("rank_test_")
        ]

    def _check(self, metrics: Sequence[str], params: Sequence[str]) -> None:
        for flag, names in (
            ("param", params),
            ("metric", [name for name in metrics if name not in self.metrics]),
        ):
            for name in names:
                if name not in self.columns:
                    raise UserError(
                        f"{option(flag, name)}: {self._source.path} has no such column; it has "
                        f"{', '.join(self.columns)}."
                    )

    def _prefixed(self, prefixes: Sequence[str]) -> dict[str, str]:
        """Returns name -> column for the columns that begin with one of the prefixes."""
        pairs = ((prefix, column) for column in self.columns for prefix in prefixes if column.startswith(prefix))
        return {column.removeprefix(prefix): column for prefix, column in pairs if column != prefix}

    def _params(self, given: Sequence[str]) -> dict[str, str]:
        if given:
            return {name: name for name in given}
        if known := self._prefixed(_PARAM):
            return known
        if not self.judged:
            return {}
        taken = {*self.metrics.values(), *self.values.values(), *self.notes.values()}
        rest = [name for name in self.columns if name not in taken and name.lower() not in _NAMED and name]
        self.guessed.append(f"the parameters are {', '.join(rest) or 'none'} ({option('param')} names them)")
        return {name: name for name in rest}

    def _first(self, names: Sequence[str]) -> str | None:
        """Returns the first column that has one of these names, ignoring case."""
        return next((column for name in names for column in self.columns if column.lower() == name), None)

    def _cells(self, column: str | None) -> list[Any]:
        """Returns a column's values; None for each row if `column` is None."""
        if column is None:
            return [None] * self._source.table.num_rows
        cells = _read(self._source.values(column), self._source.kind)
        return [self._json(cell, row, column) for row, cell in enumerate(cells)]

    def _json(self, cell: object, row: int, column: str) -> Any:
        try:
            return as_json(cell)
        except ValueError as error:
            raise UserError(f"{self._source.cell(row, column)}: {error}: make it flat, or leave it out.") from error

    def _numbers(self, column: str) -> np.ndarray:
        """Returns a column of numbers [rows], NaN for empty cells; infinities stay."""
        self._source.floats(column)  # raises for texts, with their place
        return self._source.as_floats(column)

    def trials(self, judged: Sequence[str]) -> Iterator[ImportedTrial]:
        """Yields the trial of each row that has ended."""
        numbers = {name: self._numbers(column) for name, column in self.metrics.items()}
        ends = [self._numbers(self.values.get(metric, self.metrics[metric])) for metric in judged]
        objective_cells = [self._cells(self.values.get(metric, self.metrics[metric])) for metric in judged]
        params = {name: self._cells(column) for name, column in self.params.items()}
        notes = {name: self._cells(column) for name, column in self.notes.items()}
        key, state, error = (self._first(names) for names in (_KEY, _STATE, _ERROR))
        keys, states, errors = (self._cells(column) for column in (key, state, error))
        started, ended = self._first(_STARTED), self._first(_ENDED)
        times = {column: self._cells(column) for column in (started, ended) if column}
        step_column = self._first(_STEP)
        steps = self._cells(step_column)
        numbered = key and key.lower() == "number" and all(isinstance(number, int) for number in keys)
        rows = range(self._source.table.num_rows)
        for row in sorted(rows, key=keys.__getitem__) if numbered else rows:
            values = [float(column[row]) for column in ends]
            whole = all(cells[row] is not None for cells in objective_cells)
            outcome = self._state(states[row], whole, row, state)
            if outcome is None:
                continue
            step = self._step(steps[row], row, step_column)
            yield ImportedTrial(
                key=str(row if keys[row] is None else keys[row]),
                state=outcome,
                params={name: cells[row] for name, cells in params.items() if cells[row] is not None},
                values=values if whole else None,
                curves={
                    name: [Point(step, float(column[row]))]
                    for name, column in numbers.items()
                    if not math.isnan(column[row])
                },
                started=self._time(started, times, row),
                ended=self._time(ended, times, row),
                error=str(errors[row] or ("" if whole or outcome != "failed" else f"it has no {' and '.join(judged)}")),
                attributes={name: cells[row] for name, cells in notes.items() if cells[row] is not None},
            )

    def _state(self, said: object, whole: bool, row: int, column: str | None) -> State | None:
        """Returns how the row's trial ended; None if it has not. A complete trial without its values has failed."""
        text = str(said or ("complete" if whole else "failed"))
        state = STATES.get(text.lower())
        self.left.update([text[:MAX_STATE]] if state is None else [])
        if self.left.total() == self._source.table.num_rows and text.lower() not in STATES:
            known = ", ".join(STATES)
            raise UserError(f"{self._source.cell(row, column or '')} is {quoted(text)}: a state is one of {known}.")
        return "failed" if state == "complete" and not whole else state

    @staticmethod
    def why(state: str) -> str:
        """Returns the reason why rows in this state are not imported."""
        return "which may end yet" if state.lower() in STATES else "which is none that is known here"

    def _step(self, value: object, row: int, column: str | None) -> int:
        """Returns the step of the row's values; 0 if it has none. Raises UserError for a step that is too large."""
        number = as_number(value)
        if number is None or math.isnan(number) or number < 0:
            return 0
        if number >= MAX_STEP:
            cell = self._source.cell(row, column or "")
            raise UserError(f"{cell} is {quoted(value)}: an epoch is a whole number below {MAX_STEP}.")
        return int(number)

    def _time(self, column: str | None, times: Mapping[str, Sequence[object]], row: int) -> float | None:
        if column is None or (value := times[column][row]) is None or value != value:
            return None
        try:
            return seconds(value)
        except ValueError as error:
            raise UserError(
                f"{self._source.cell(row, column)} is {quoted(value, 40)}: write a time as 2026-01-31T12:00:00+00:00."
            ) from error


def seconds(value: object) -> float:
    """Returns a time as seconds since the epoch: a date, its text, seconds or, beyond the year 5000, milliseconds.

    A time without a zone is in this machine's zone. Raises ValueError.
    """
    number = as_number(value)
    try:
        at = datetime.fromisoformat(str(value)).timestamp() if number is None else number
    except OverflowError as error:
        raise ValueError("it is out of range") from error
    at = as_time(at if number is None or at <= 1e11 else at / 1000)
    if at is None:
        raise ValueError("it is out of range")
    return at


def _read(cells: Sequence[object], kind: str) -> list[Any]:
    """Returns cells as JSON values: JSON text of `hpo export` is parsed, and quotes against formulas are removed.

    Such a quote keeps a spreadsheet from running a text.
    """
    texts = [cell for cell in cells if isinstance(cell, str)]
    if not texts:
        return list(cells)
    if kind == formats.CSV:
        return [_json(cell, "[{") if isinstance(cell, str) else cell for cell in map(_unquoted, cells)]
    marked = all(_is_json(cell) for cell in texts) and any(cell.startswith(('"', "[", "{")) for cell in texts)
    return [loads(cell) if isinstance(cell, str) and marked else cell for cell in cells]


def _unquoted(cell: Any) -> Any:
    inert = isinstance(cell, str) and cell.startswith(("'=", "'+", "'-", "'@", "'\t", "'\r"))
    return cell[1:] if inert else cell


def _json(cell: str, begins: str) -> Any:
    return loads(cell) if cell[:1] in begins and cell and _is_json(cell) else cell


def _is_json(cell: str) -> bool:
    try:
        loads(cell)
    except ValueError:
        return False
    return True
