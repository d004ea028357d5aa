"""Streams the rows of many shards, on this host or in a bucket, in an order that any position of an epoch resumes.

A stream's position would be a state to save. Here the records of each shard are counted once, so that the order is a
function of (seed, epoch, index) as that of any data set: the shards in a random order, and the rows of a few
neighbouring blocks at a time in a random order. A block is a row group of a Parquet file, and any other shard as a
whole. So an epoch reads each shard about once, and needs few of them at any time.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.data.cache import publish
from trainer.data.shards import DECODERS, Decoder, read_sample
from trainer.errors import ConfigError, DataError
from trainer.files import fetched, formats, tar_shards, tfrecord
from trainer.files.shards import Shard, listed
from trainer.runtime.seeding import derive

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = 1  # of a stored index
Row = dict[str, Any]
Place = Sequence[Any]  # of a record in its file, or a block's number of rows


class Shards:
    """The rows of the shards that `path` names (trainer.files.shards): Parquet, Arrow, CSV, JSON Lines, TFRecord, tar.

    A row is a dict of its `columns`, all if there are none given; `make` turns it into a sample, and draws no random
    number. `window` is the number of blocks whose rows are shuffled together. Objects of a bucket are copied to
    `directory`, in which copies have `most_bytes` together at most; the default is one in TMPDIR for all runs of a
    user. The records' places, too, are kept there. `decoders` are those of TarShards.
    """

    draws = False

    def __init__(
        self,
        path: str | Path,
        *,
        split: str = "",
        columns: Sequence[str] = (),
        make: Callable[[Row], Any] | None = None,
        window: int = 4,
        directory: str | Path | None = None,
        most_bytes: int = fetched.MOST_BYTES,
        decoders: Mapping[str, Decoder] | None = None,
    ) -> None:
        if window < 1:
            raise ConfigError(f"Shards has window {window}: give 1 or more blocks.")
        self.shards, self.columns, self.make, self.window = listed(str(path), split), tuple(columns), make, window
        self.decoders = DECODERS | dict(decoders or {})
        self._cache = fetched.Cache(directory or fetched.default().directory, most_bytes)
        self._check_room()
        self._places = [self._indexed(shard) for shard in self.shards]
        # The number of the shard and the block in it, for each block, and where its rows end.
        sizes = [_sizes(shard, places) for shard, places in zip(self.shards, self._places, strict=True)]
        self._blocks = [(shard, block) for shard, blocks in enumerate(sizes) for block in range(len(blocks))]
        self._ends = list(accumulate(size for blocks in sizes for size in blocks))
        self._tables: OrderedDict[int, pa.Table] = OrderedDict()
        self._row(0)  # fails now if a column is not there

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        row = self._row(index)
        return row if self.make is None else self.make(row)

    def order(self, seed: int, epoch: int, batch_size: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive(seed, "shards", epoch))
        blocks: list[list[Tensor]] = [[] for _ in self.shards]
        for (shard, _), end, start in zip(self._blocks, self._ends, [0, *self._ends], strict=False):
            blocks[shard].append(torch.arange(start, end))
        shuffled: list[Tensor] = []
        for shard in torch.randperm(len(blocks), generator=generator).tolist():
            mixed = torch.randperm(len(blocks[shard]), generator=generator).tolist()
            shuffled += [blocks[shard][number] for number in mixed]
        rows = [torch.cat(shuffled[start : start + self.window]) for start in range(0, len(shuffled), self.window)]
        return torch.cat([part[torch.randperm(len(part), generator=generator)] for part in rows])

    def _check_room(self) -> None:
        sizes = sorted((shard.size for shard in self.shards if not shard.is_local), reverse=True)
        if (needed := sum(sizes[: self.window])) > self._cache.most_bytes:
            raise ConfigError(
                f"the copies of {min(self.window, len(sizes))} shards, such as {self.shards[0].name}, may have "
                f"{needed} bytes, and most_bytes is {self._cache.most_bytes}: lower window, or raise most_bytes."
            )

    def _indexed(self, shard: Shard) -> Place:
        """Returns the places of a shard's records, from the stored index if the shard is unchanged."""
        try:
            changed = Path(shard.name).stat().st_mtime_ns if shard.is_local else 0
            name = str(Path(shard.name).absolute()) if shard.is_local else shard.name
            key = json.dumps([FORMAT, name, shard.size, shard.tag, changed]).encode()
            stored = self._cache.directory / "index" / f"{blake2b(key, digest_size=16).hexdigest()}.json"
            if stored.is_file():
                return json.loads(stored.read_text())
            with shard.opened(self._cache) as file:
                places = _scan(file)
        except FileNotFoundError as error:
            raise DataError(f"{shard.name} cannot be read ({error.strerror}).") from error
        if not sum(_sizes(shard, places)):
            raise DataError(f"{shard.name} holds no record: leave it out, or write it anew.")
        publish(stored, json.dumps(places).encode())
        return places

    def _row(self, index: int) -> Row:
        number = bisect_right(self._ends, index)
        shard, block = self._blocks[number]
        place = index - (self._ends[number - 1] if number else 0)
        row = self._read(number, self.shards[shard], self._places[shard], block, place)
        where = f"{self.shards[shard].name}, record {self._number(shard, index)}"
        if missing := [name for name in self.columns if name not in row]:
            raise DataError(f"{where} has no column {', '.join(map(repr, missing))}: it has {', '.join(row)}.")
        row = {name: row[name] for name in self.columns} if self.columns else row
        if self.make is None and (empty := [name for name, value in row.items() if value is None]):
            raise DataError(f"{where}, column {empty[0]!r} is empty: fill it, or give a function `make` that does.")
        return row

    def _number(self, shard: int, index: int) -> int:
        """Returns the number of a row in its shard, from 1."""
        first = next(number for number, (of, _) in enumerate(self._blocks) if of == shard)
        return index - (self._ends[first - 1] if first else 0) + 1

    def _read(self, number: int, shard: Shard, places: Place, block: int, place: int) -> Row:
        kind = formats.of_name(Path(shard.name))
        if kind in _TABLES:
            if number not in self._tables:
                while len(self._tables) >= self.window:
                    self._tables.popitem(last=False)
                with shard.opened(self._cache) as file:
                    self._tables[number] = _table(file, kind, block, self.columns)
            self._tables.move_to_end(number)
            [row] = self._tables[number].slice(place, 1).to_pylist()
            return {name: _value(value) for name, value in row.items()}
        with shard.opened(self._cache) as file:
            if kind == formats.TAR:
                return read_sample(file, places[place], self.decoders)
            with open(file, "rb") as opened:
                if kind == formats.TFRECORD:
                    data = tfrecord.record(opened, place + 1, places[place])
                    features = tfrecord.example(data, f"{file}, record {place + 1}")
                    return {name: _value(value[0] if len(value) == 1 else value) for name, value in features.items()}
                start, size, line = places[place]
                opened.seek(start)
                return {name: _value(value) for name, value in _object(file, line, opened.read(size)).items()}


_TABLES = (formats.PARQUET, formats.ARROW, formats.CSV)


def _scan(file: Path) -> Place:
    """Returns the place of each record, or the rows of each block of a table."""
    from trainer.files import tables  # only here: pyarrow takes a quarter of a second to import

    kind = formats.of_name(file)
    if kind == formats.TAR:
        return tar_shards.scan(file)
    if kind == formats.TFRECORD:
        return tfrecord.scan(file)
    if kind == formats.JSON_LINES:
        formats.refuse_other(file, kind)
        return list(_lines(file))
    if kind == formats.PARQUET:
        return tables.row_groups(file)
    return [tables.read(file).table.num_rows]


def _sizes(shard: Shard, places: Place) -> list[int]:
    """Returns the rows of each block of a shard."""
    return list(places) if formats.of_name(Path(shard.name)) in _TABLES else [len(places)]


def _lines(file: Path) -> Iterator[tuple[int, int, int]]:
    """Yields place, size and number of each line that is not empty."""
    start = 0
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield start, len(line), number
            start += len(line)


def _object(file: Path, line: int, data: bytes) -> Row:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise DataError(f"{file}, line {line} is not JSON ({error}): repair it, or leave it out.") from error
    if not isinstance(value, dict):
        raise DataError(
            f"{file}, line {line} holds {type(value).__name__}: give an object with a value of each column."
        )
    return value


def _table(file: Path, kind: str, block: int, columns: Sequence[str]) -> pa.Table:
    from trainer.files import tables

    if kind == formats.PARQUET:
        return tables.row_group(file, block, columns)
    table = tables.read(file, columns).table
    return table.select(list(columns)) if columns else table


def _value(value: Any) -> Any:
    """Returns numbers in a list as a tensor, and other values as they are."""
    is_numbers = isinstance(value, list) and value and all(type(part) in (int, float) for part in value)
    return torch.tensor(value) if is_numbers else value
