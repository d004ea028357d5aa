"""Exports a whole study, for `hpo export`: to an Optuna storage, or as CSV, Parquet or JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpo.analysis.models.checkpoints import searched
from hpo.analysis.results import compare as tables
from hpo.analysis.study_handle import StudyHandle
from hpo.door import option
from hpo.errors import UserError
from hpo.ledger import Ledger, imports, queries, tags
from hpo.ledger.database.json import plain
from hpo.ledger.database.other_database import names_database
from hpo.ledger.database.sqlite_url import url_of
from hpo.storage.home import Home
from hpo.text import counted
from trainer.files.durable import write_text

FORMATS = ("csv", "parquet", "json", "optuna")


def format_of(to: str, given: str | None) -> str:
    """Returns the format that was given, else the one that the file's ending or the URL implies. Raises UserError."""
    ending = Path(to).suffix.removeprefix(".").lower()
    format = given or ("optuna" if "://" in to else "optuna" if ending in ("db", "sqlite", "sqlite3") else ending)
    if format not in FORMATS:
        flag = option("format", given) if given else option("to", to)
        raise UserError(
            f"{flag}: a study is exported as {', '.join(FORMATS)}, and a trial's model, by its number, as safetensors, "
            f"onnx, torch, gguf or huggingface: give {option('format')}, or a file that ends in .csv, .parquet, .json "
            "or .db."
        )
    return format


_EXPORTED = ("number", "state", "outcome", "error", "params", "values", "violations")


def export_study(ledger: Ledger, home: Home, name: str, to: str, format: str, called: str | None = None) -> str:
    """Writes the study; returns a sentence about what was written. `called` is its name in an Optuna storage.

    Raises UserError if it cannot be written.
    """
    if format == "optuna":
        from hpo.interchange.optuna_storage import write

        url = to if "://" in to else url_of(Path(to).expanduser().absolute())
        count = write(StudyHandle(ledger, name, home).to_optuna(), url, called or name)
        return f"{counted(count, 'trial')} written to {to} as study {called or name!r}."
    path = Path(to).expanduser()
    if format == "json":
        content = document(ledger, name)
        count = len(content["trials"])
        _write(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    else:
        table = dated(ledger, name)
        count = len(table.rows)
        (tables.write_csv if format == "csv" else tables.write_parquet)(table, path)
    return f"{counted(count, 'trial')} written to {path}."


def dated(ledger: Ledger, name: str) -> tables.Comparison:
    """Returns the table of `hpo compare` with every trial in number order, and its start and end times."""
    with ledger.read() as connection:
        table = tables.compare(connection, name)
        rows = queries.trial_rows(connection, queries.study_row(connection, name).id)
    times = {row.number: {"started_at": _time(row.started_at), "ended_at": _time(row.ended_at)} for row in rows}
    trials = [row | times[row["number"]] for row in sorted(table.rows, key=lambda row: row["number"])]
    return replace(table, columns=[*table.columns, "started_at", "ended_at"], rows=trials)


def document(ledger: Ledger, name: str) -> dict[str, Any]:
    """Returns the study as JSON: its objectives, its space, and each trial with all values and their steps.

    Numbers that JSON cannot hold are text: nan, inf, -inf.
    """
    with ledger.read() as connection:
        study = queries.study_row(connection, name)
        space = {path: dimension.describe() for path, dimension in searched(connection, name).space.dimensions.items()}
        rows = queries.trial_rows(connection, study.id)
        records = imports.records_by_id(connection, study.id) if study.spec.imported else {}
        tags_of = tags.given(connection, study.id)
        curves: dict[int, dict[str, list[list[Any]]]] = {}
        for number, key, step, epoch, value in queries.curves(connection, study.id):
            curves.setdefault(number, {}).setdefault(key, []).append([step, epoch, value])
    trials = [
        {
            **{key: getattr(row, key) for key in _EXPORTED},
            "started_at": _time(row.started_at),
            "ended_at": _time(row.ended_at),
            "curves": curves.get(row.number, {}),
            "tags": tags_of.get(row.number, {}),
            "attributes": records.get(row.id, {}).get("attributes", {}),
        }
        for row in rows
    ]
    spec = study.spec
    judged = {"objectives": spec.objectives, "constraints": spec.constraints}
    return plain({"study": name, "tags": tags_of.get(tags.STUDY, {}), **judged, "space": space, "trials": trials})


def _time(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat()


def _write(path: Path, text: str) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise UserError(f"{option('to', path)} cannot be written ({error.strerror}): name another file.") from error


def check(to: str, format: str, called: str | None, *, force: bool) -> None:
    """Raises UserError for a request that cannot be met: a URL that is not a database's, a study name for a file, or
    the replacement of a study in a storage."""
    if "://" in to and format != "optuna":
        raise UserError(f"{option('to', to)}: {format} goes to no URL: name a file.")
    if "://" in to and not names_database(to):
        raise UserError(
            f"{option('to', to)}: export writes to no such URL: name a file that ends in .csv, .parquet, .json or "
            ".db, or a database, such as sqlite:///study.db or postgresql+psycopg://HOST/NAME."
        )
    if force and format == "optuna":
        raise UserError(
            f"{option('force')}: a study in an Optuna storage is never replaced: give another {option('name')} or "
            f"{option('to')}."
        )
    if called is not None and format != "optuna":
        raise UserError(f"{option('name', called)}: a file has no name of its study: leave it out.")
