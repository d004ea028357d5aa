"""Recognizes a data file's format by its first bytes, and refuses a format other than the one its name implies."""

from __future__ import annotations

import json
import re
from pathlib import Path

from trainer.errors import DataError

PARQUET, ARROW, CSV, JSON_LINES, TFRECORD, TAR = "Parquet", "Arrow", "CSV", "JSON Lines", "TFRecord", "tar"
SUFFIXES = {
    PARQUET: (".parquet", ".pq"),
    ARROW: (".arrow", ".feather", ".ipc"),
    JSON_LINES: (".jsonl", ".ndjson"),
    TFRECORD: (".tfrecord", ".tfrecords"),
    TAR: (".tar",),
}
_NUMBERED = re.compile(r"-\d+-of-\d+$")  # of a shard, after its suffix: data.tfrecord-00000-of-00010
BEGINNINGS = {
    b"PAR1": PARQUET,
    b"ARROW1": ARROW,
    b"FEA1": ARROW,
    b"\x1f\x8b": "a gzip archive",
    b"PK\x03\x04": "a zip archive or an Excel workbook",
    b"\xd0\xcf\x11\xe0": "an Excel workbook",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"\x89HDF": "HDF5",
    b"SQLite format 3": "an SQLite database",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
    b"version https://git-lfs": "a Git LFS pointer, not the data",
}
FIXES = {
    "a Git LFS pointer, not the data": "fetch it by `git lfs pull`",
    "UTF-16 text": "save it as UTF-8",
    "one JSON array": "write each of its objects on a line, such as by `jq -c '.[]'`",
    "one JSON object over several lines": "write each object on one line, such as by `jq -c .`",
}
COMMA = "ends in a comma: JSON Lines hold an object on each line and nothing between them; remove it there"
SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}


def of_name(file: Path) -> str:
    """Returns the format that a file's suffix names; CSV if the suffix is unknown."""
    suffix = _NUMBERED.sub("", file.suffix.lower())
    return next((kind for kind, suffixes in SUFFIXES.items() if suffix in suffixes), CSV)


def is_table(file: Path) -> bool:
    """Returns True if a file's suffix names a format of tables."""
    return of_name(file) != CSV or file.suffix.lower() == ".csv"


def refuse_other(file: Path, kind: str) -> None:
    """Raises DataError, with the file's format and the fix, unless it can be of the format `kind`."""
    with file.open("rb") as opened:
        beginning = opened.read(4096)
    holds = next((kind for magic, kind in BEGINNINGS.items() if beginning.startswith(magic)), None)
    text = beginning.removeprefix(b"\xef\xbb\xbf").decode("utf-8", errors="replace").strip()
    if holds is None and text and kind in (CSV, JSON_LINES):
        holds = _text_format(text, kind)
    if holds is not None and holds != kind:
        fix = FIXES.get(holds) or (f"name it *{SUFFIXES[holds][0]}" if holds in SUFFIXES else f"write it as {kind}")
        raise DataError(f"{file} is {holds}, though its name says {kind}: {fix}.")
    if kind == JSON_LINES and text and not text.startswith("{"):
        raise DataError(
            f"{file} begins with {text.splitlines()[0][:40]!r}: JSON Lines hold a JSON object on each line."
        )


def ends_in_comma(line: str) -> bool:
    """Returns True if a line is JSON followed by a comma."""
    text = line.strip()
    if not text.endswith(","):
        return False
    try:
        json.loads(text[:-1])
    except ValueError:
        return False
    return True


def refuse_other_separator(file: Path, columns: list[str], required: tuple[str, ...]) -> None:
    """Raises DataError if a CSV's only column, not one of `required`, is a header with another separator."""
    if len(columns) != 1 or columns[0] in required:
        return
    for separator, words in SEPARATORS.items():
        if separator in columns[0]:
            raise DataError(
                f"{file} is separated by {words}: write it with commas between columns and points in numbers, "
                f'such as by pandas.read_csv(FILE, sep={separator!r}, decimal=",").to_csv(FILE, index=False).'
            )


def _text_format(text: str, kind: str) -> str | None:
    """Returns the format of a text that is not `kind`, if its beginning shows one."""
    if re.match(r"<(!doctype|html|\?xml)", text, re.IGNORECASE):
        return "a page of HTML or XML"
    if re.match(r"\[\s*[{\[\]]", text):
        return "one JSON array"
    if kind == JSON_LINES:
        return "one JSON object over several lines" if re.match(r"\{\s*\n", text) else None
    return JSON_LINES if re.match(r'\{\s*"', text) else None
