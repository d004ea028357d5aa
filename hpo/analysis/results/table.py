"""Formats trials side by side as text: objectives, the parameters that differ, then the first metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from hpo.analysis.results.compare import Comparison, headline
from hpo.analysis.results.format import number
from hpo.door import option
from hpo.ledger.names import machine_dependent
from hpo.space.objective import hold_out_of
from hpo.text import counted, endings
from trainer.quote import visible

_GAP = 2  # blanks between columns


def comparison(found: Comparison, width: int | None, *, every: bool = False) -> Group:
    """Returns the table and notes about what it omits: columns with one value in all rows, and what does not fit
    `width`.

    The columns that distinguish most rows are kept, after the objective values and their held-out metrics. `every`
    shows all columns, in as many tables as `width` requires; None is an unlimited width.
    """
    if not found.rows:
        return Group(Text(f"{found.study} has no trials yet"))
    titles, metrics, held_out = _titles(found.columns), _metrics(found, every), _held_out(found)
    front = ["front"] if "front" in found.columns else []
    earlier = any(row["judged_epoch"] not in (None, row["epoch"]) for row in found.rows)
    epochs = ["epoch", "judged_epoch"] if earlier else ["epoch"]
    leading = ["number", "state", *epochs, *front, *_judged(found), *held_out, "seconds"]
    params = [column for column in found.columns if column.startswith("params.")]
    tags = [column for column in found.columns if column.startswith("tags.")]
    columns = [*leading, *tags, *params, *metrics]
    count = len(found.rows)
    more = (
        [f"the first {count} of {found.total} trials ({option('top', found.total)} shows all)"]
        if count < found.total
        else []
    )
    if every:
        tables = _spaced(_table(found, titles, block) for block in _blocks(found, titles, columns, width))
        return Group(*tables, *map(Text, [*more, *_finished(found)]))
    always = {"number", "front", *_judged(found)}
    varied = [c for c in columns if c in always or len(found.rows) == 1 or _distinct(found, c) > 1]
    by_worth = [column for column in varied if column in always]
    by_worth += [column for column in (*held_out, "state", *epochs, "seconds") if column in varied]
    by_worth += [column for column in varied if column in tags]
    by_worth += sorted(
        (c for c in varied if c in params), key=lambda c: (-_distinct(found, c), _width(found, titles, c))
    )
    by_worth += [column for column in varied if column in metrics]
    kept = _fitting(found, titles, by_worth, width)
    same = [column for column in columns if column not in varied and found.rows[0][column] is not None]
    lines = [f"the same in all: {', '.join(_named(found, column) for column in same)}"] if same else []
    out = [titles[column] for column in varied if column not in kept and column not in metrics]
    shown = {column for column in metrics if column in kept or column in same}
    hidden = [column.removeprefix("metrics.") for column in _metrics(found, every=True) if column not in shown]
    measured = [key for key in hidden if machine_dependent(key)]
    out += [counted(len(hidden) - len(measured), "metric")] if len(hidden) > len(measured) else []
    out += [f"{counted(len(measured), 'metric')} of the machine"] if measured else []
    lines += _finished(found)
    lines += (
        [f"left out: {', '.join(out)} ({option('all')} shows them, {option('to', 'FILE.csv')} writes them)"]
        if out
        else []
    )
    return Group(_table(found, titles, [column for column in columns if column in kept]), *map(Text, [*more, *lines]))


def _finished(found: Comparison) -> list[str]:
    """Returns a line for each stopped trial that was later trained to its end and is shown with the values and epoch of
    that training."""
    ends = [(row, *row["finished"].rpartition("/")[::2]) for row in found.rows if row.get("finished")]
    return [
        f"trial {row['number']} was {row['state']}, and then trained to epoch {row['epoch']} (study {study}, trial "
        f"{trial}), by which it is judged"
        for row, study, trial in ends
    ]


def _judged(found: Comparison) -> list[str]:
    return [column for column in found.columns if column.startswith("values.")]


def _held_out(found: Comparison) -> list[str]:
    """Returns the metrics held out beside the objectives, unless they are objectives themselves."""
    judged = [objective["metric"] for objective in found.objectives]
    beside = [key for key in map(hold_out_of, judged) if key not in judged]
    return [column for key in beside if (column := f"metrics.{key}") in found.columns]


def _metrics(found: Comparison, every: bool) -> list[str]:
    """Returns the columns of the metrics to show, without objectives and the metrics held out beside them."""
    apart = {column.partition(".")[2] for column in (*_judged(found), *_held_out(found))}
    keys = [column.partition(".")[2] for column in found.columns if column.startswith("metrics.")]
    others = [key for key in keys if key not in apart]
    return [f"metrics.{key}" for key in headline(others, (), found.metrics, every=every)]


def _titles(columns: Sequence[str]) -> dict[str, str]:
    """Returns the headings: a parameter's is the shortest distinct end of its path, a metric's its name."""
    named = {column: column.partition(".")[2] or column for column in columns}
    ends = endings([named[column] for column in columns if column.startswith("params.")])
    return {column: visible(ends[name] if column.startswith("params.") else name) for column, name in named.items()}


def _distinct(found: Comparison, column: str) -> int:
    return len({json.dumps(row[column]) for row in found.rows})


def _named(found: Comparison, column: str) -> str:
    """Returns a column that has one value in all rows, such as `train.optim.name adamw`."""
    return f"{column.partition('.')[2] or column} {_cell(found.rows[0][column])}"


def _width(found: Comparison, titles: dict[str, str], column: str) -> int:
    return _GAP + max(len(titles[column]), *(len(_cell(row[column])) for row in found.rows))


def _fitting(found: Comparison, titles: dict[str, str], columns: Sequence[str], width: int | None) -> set[str]:
    """Returns as many of the columns as fit, in order, and the first in any case."""
    kept, used = set(columns[:1]), _width(found, titles, columns[0]) - _GAP
    for column in columns[1:]:
        more = _width(found, titles, column)
        if width is None or used + more <= width:
            kept.add(column)
            used += more
    return kept


def _blocks(found: Comparison, titles: dict[str, str], columns: Sequence[str], width: int | None) -> list[list[str]]:
    """Returns the columns as tables no wider than `width`, each of which begins with the trial's number."""
    first, *rest = columns
    blocks, begins = [[first]], _width(found, titles, first) - _GAP
    used = begins
    for column in rest:
        more = _width(found, titles, column)
        if width is not None and used + more > width and len(blocks[-1]) > 1:
            blocks.append([first])
            used = begins
        blocks[-1].append(column)
        used += more
    return blocks


def _spaced(tables: Iterator[Table]) -> Iterator[Table | Text]:
    for index, table in enumerate(tables):
        if index:
            yield Text()
        yield table


def _table(found: Comparison, titles: dict[str, str], columns: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        numeric = all(isinstance(row[column], int | float | None) for row in found.rows)
        table.add_column(Text(titles[column]), justify="right" if numeric else "left", no_wrap=True)
    for row in found.rows:
        table.add_row(*(Text(_cell(row[column])) for column in columns))
    return table


def _cell(value: object) -> str:
    return "" if value is None else number(value)
