"""`hpo export` of a whole study: to an Optuna storage, or as CSV, Parquet or JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpo.analysis.models.checkpoints import searched
from hpo.analysis.results import compare as tables
from hpo.analysis.study_handle import StudyHandle
from hpo.errors import UserError
from hpo.ledger import Ledger, imports, queries, tags
from hpo.ledger.json import plain
from hpo.ledger.sqlite_url import url_of
from hpo.storage.home import Home
from hpo.text import counted
from trainer.files.durable import write_text

FORMATS = ("csv", "parquet", "json", "optuna")


def format_of(to: str, given: str | None) -> str:
    """The format that was given, else what the ending of the file, or the URL, says. Raises UserError."""
    ending = Path(to).suffix.removeprefix(".").lower()
    found = given or ("optuna" if "://" in to else "optuna" if ending in ("db", "sqlite", "sqlite3") else ending)
    if found not in FORMATS:
        what = f"--format {given}" if given else f"--to {to}"
        raise UserError(
            f"{what}: a study is exported as {', '.join(FORMATS)}, and a trial's model, by its number, as safetensors, "
            "onnx or torch: give --format, or a file that ends in .csv, .parquet, .json or .db."
        )
    return found


def export_study(ledger: Ledger, home: Home, name: str, to: str, format: str, called: str | None = None) -> str:
    """Write the study; what was written, in a sentence. `called` is its name in an Optuna storage.

    Raises UserError where it cannot be written.
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
    """The table of `hpo compare` with every trial, by number, and when each began and ended."""
    with ledger.read() as connection:
        found = tables.compare(connection, name)
        rows = queries.trial_rows(connection, queries.study_row(connection, name)["id"])
    times = {row["number"]: {key: _time(row[key]) for key in ("started_at", "ended_at")} for row in rows}
    trials = [row | times[row["number"]] for row in sorted(found.rows, key=lambda row: row["number"])]
    return replace(found, columns=[*found.columns, "started_at", "ended_at"], rows=trials)


def document(ledger: Ledger, name: str) -> dict[str, Any]:
    """The study as JSON: how it was judged, what it searched, and of each trial all values with their steps.

    Numbers that JSON cannot hold are text: nan, inf, -inf.
    """
    with ledger.read() as connection:
        study = queries.study_row(connection, name)
        space = {path: one.describe() for path, one in searched(connection, name).space.dimensions.items()}
        rows = queries.trial_rows(connection, study["id"])
        records = imports.records_by_id(connection, study["id"]) if study["spec"].get("imported") else {}
        given = tags.given(connection, study["id"])
        curves: dict[int, dict[str, list[list[Any]]]] = {}
        for number, key, step, epoch, value in queries.curves(connection, study["id"]):
            curves.setdefault(number, {}).setdefault(key, []).append([step, epoch, value])
    trials = [
        {
            **{key: row[key] for key in ("number", "state", "outcome", "error", "params", "values", "violations")},
            **{key: _time(row[key]) for key in ("started_at", "ended_at")},
            "curves": curves.get(row["number"], {}),
            "tags": given.get(row["number"], {}),
            "attributes": records.get(row["id"], {}).get("attributes", {}),
        }
        for row in rows
    ]
    spec = study["spec"]
    judged = {"objectives": spec["objectives"], "constraints": spec.get("constraints", [])}
    return plain({"study": name, "tags": given.get(tags.STUDY, {}), **judged, "space": space, "trials": trials})


def _time(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat()


def _write(path: Path, text: str) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise UserError(f"--to {path} cannot be written ({error.strerror}): name another file.") from error


def check(format: str, called: str | None, *, force: bool) -> None:
    """Raises UserError where a name is given to a file, which has none, or a study in a storage is to be replaced."""
    if force and format == "optuna":
        raise UserError("--force: a study in an Optuna storage is never replaced: give another --name or --to.")
    if called is not None and format != "optuna":
        raise UserError(f"--name {called}: a file has no name of its study: leave it out.")
