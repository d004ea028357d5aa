"""Reads records of text from JSON lines and other tables, and splits them into training and validation. Torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from studies._lm.config import DataConfig, ModelConfig, check_model, check_modules, check_weights
from trainer.errors import ConfigError, DataError
from trainer.files import formats
from trainer.files.paths import expanded
from trainer.files.shards import Shard, listed

Record = dict[str, str]
T = TypeVar("T")


def check_inputs(model: ModelConfig, data: DataConfig, records_of: Callable[[DataConfig], Sequence[Record]]) -> None:
    """Raises ConfigError or DataError, in one sentence, for missing packages, model, layers or records, and for prompts
    that fill a whole record."""
    check_model(model)
    check_weights(model)
    check_modules(model)
    records = records_of(data)
    if (length := _lengths(model, data)) is not None:
        for number, record in enumerate(records, 1):
            if (count := length(record["prompt"])) >= data.max_length:
                where = f"data.path={str(data.path)!r}, record {number}: " if data.path else ""
                raise too_long(record["prompt"], count, data.max_length, where)


def too_long(prompt: str, count: int, most: int, where: str = "") -> DataError:
    """Returns the error for a prompt of `count` tokens."""
    return DataError(
        f"{where}the prompt {prompt[:40]!r} has {count} tokens and data.max_length is {most}, so nothing of its "
        "response is left: raise data.max_length, or shorten it."
    )


def _lengths(model: ModelConfig, data: DataConfig) -> Callable[[str], int] | None:
    """Returns a function that counts the tokens of a prompt within the template.

    None if the directory has no tokenizer.json: trials then report it.
    """
    before, between, _ = data.pieces
    if not model.path or model.tokenizer == "bytes":
        return lambda text: len(f"{before}{text}{between}".encode())
    directory = expanded(model.path)
    if not (directory / "tokenizer.json").is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        about = directory / "tokenizer_config.json"
        begin = json.loads(about.read_text(encoding="utf-8")).get("bos_token") if about.is_file() else None
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(f"the tokenizer in {str(directory)!r} cannot be read: {error}") from error
    tokenizer.no_truncation()

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    begin = begin["content"] if isinstance(begin, dict) else begin
    template_length = count(before) + count(between) + bool(begin and not before.startswith(begin))
    tokenizer.encode_special_tokens = True  # in a record they are text
    return lambda text: template_length + count(text)


def read_records(data: DataConfig, fields: Sequence[str]) -> list[Record]:
    """Returns the records that `data.path` names; each has all `fields`, as non-empty text, from `data.columns`.

    Raises DataError with the file and the line or row.
    """
    columns = data.columns or tuple(fields)
    if len(set(columns)) != len(fields) or len(columns) != len(fields):
        raise ConfigError(
            f"data.columns={','.join(columns)} are not {len(fields)} columns: name those of {', '.join(fields)}."
        )
    rows = [row for shard in listed(data.path, data.split) for row in _rows(shard, columns)]
    if len(rows) < 2:
        raise DataError(
            f"data.path={str(data.path)!r} holds {'one record' if rows else 'no records'}: give at least 2, one of "
            "them to validate."
        )
    return [dict(zip(fields, row.values(), strict=True)) for row in rows]


def _rows(shard: Shard, columns: Sequence[str]) -> list[Record]:
    """Returns the columns of each row of a table; a file that is none by its name holds JSON lines."""
    with shard.opened() as file:
        if not formats.is_table(file) or formats.of_name(file) == formats.JSON_LINES:
            return _read_jsonl(file, columns)
        from trainer.files import tables  # only here: pyarrow takes a quarter of a second to import

        source = tables.read(file, columns, columns)
        texts = {name: source.texts(name) for name in columns}
        for name, values in texts.items():
            for row, value in enumerate(values):
                _check_text(source.cell(row, name), name, value)
        return [dict(zip(texts, row, strict=True)) for row in zip(*texts.values(), strict=True)]


def _read_jsonl(file: Path, fields: Sequence[str]) -> list[Record]:
    """Returns the records of a file with one JSON object a line. Blank lines are skipped."""
    try:
        formats.refuse_other(file, formats.JSON_LINES)
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"data.path={str(file)!r} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"data.path={str(file)!r} is not UTF-8 at byte {error.start}: save it as UTF-8.") from error
    return [_record(f"{file}, line {n}", line, fields) for n, line in enumerate(text.split("\n"), 1) if line.strip()]


def _record(where: str, line: str, fields: Sequence[str]) -> Record:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        if formats.ends_in_comma(line):
            raise DataError(f"{where} {formats.COMMA}.") from error
        raise DataError(f"{where} is not JSON ({error.msg} at column {error.colno}).") from error
    if not isinstance(value, dict):
        raise DataError(f"{where} holds {type(value).__name__}: give an object with {' and '.join(fields)}.")
    for field in fields:
        if field not in value:
            raise DataError(f"{where} lacks the field {field!r}: it has {', '.join(value) or 'none'}.")
        _check_text(where, field, value[field])
    return {field: value[field] for field in fields}


def _check_text(where: str, field: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise DataError(f"{where}: {field} is {value!r}; give text that is not empty.")
    if (half := re.search("[\ud800-\udfff]", value)) is not None:
        raise DataError(
            f"{where}: {field} holds \\u{ord(half[0]):04x}, one half of a surrogate pair: "
            "write both halves, or leave it out."
        )


def split(records: Sequence[T], share: float, seed: int) -> tuple[list[T], list[T]]:
    """Returns (training, validation) records, at least one of each.

    Validation has a `share` of all, drawn from `seed`.
    """
    order = np.random.default_rng(seed).permutation(len(records))
    count = min(max(round(share * len(records)), 1), len(records) - 1)
    return [records[i] for i in sorted(order[count:])], [records[i] for i in sorted(order[:count])]
