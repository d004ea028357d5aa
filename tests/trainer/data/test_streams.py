"""Shards as a stream: every row once an epoch, few shards at a time, and a run that is cut reads on where it was."""

from __future__ import annotations

import os
from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch
import written_shards
from rounds import rounds
from torch import nn
from torch.nn.functional import cross_entropy
from trainer_runs import Toy, Trial, killed_at
from written_shards import put, write

from trainer.config import TrainConfig
from trainer.data import Loader, Padded, Shards
from trainer.errors import ConfigError, DataError
from trainer.task import Loss, Task

FORMATS = ["parquet", "feather", "arrow", "csv", "jsonl", "tfrecord", "tar"]
COUNTS = (7, 5, 1, 8, 4)
TOTAL = sum(COUNTS)


def shards(directory: Path, kind: str) -> list[Path]:
    """Five shards with rows numbered through."""
    starts = [sum(COUNTS[:number]) for number in range(len(COUNTS))]
    return [
        write(directory / f"{number}.{kind}", [{"n": start + i, "text": f"é{start + i}"} for i in range(count)])
        for number, (start, count) in enumerate(zip(starts, COUNTS, strict=True))
    ]


def number_of(row: dict) -> int:
    return row["json"]["n"] if "json" in row else row["n"]


def stream(path: object, tmp_path: Path, **given) -> Shards:
    return Shards(str(path), directory=tmp_path / "copies", **{"make": number_of} | given)


@rounds("kind", FORMATS)
def test_rows_are_those_of_the_files_in_any_order(tmp_path, kind):
    shards(tmp_path / "data", kind)
    data = stream(tmp_path / "data", tmp_path, window=2)
    assert [data[index] for index in range(len(data))] == [*range(TOTAL)]
    for epoch in range(3):
        order = data.order(5, epoch, 4).tolist()
        assert sorted(order) == [*range(TOTAL)] and [data[index] for index in order] == order
    assert (
        order != data.order(5, 0, 4).tolist() == stream(tmp_path / "data", tmp_path, window=2).order(5, 0, 9).tolist()
    )
    with pytest.raises(IndexError):
        data[TOTAL]


def test_an_order_is_the_same_in_every_release(tmp_path):
    shards(tmp_path / "data", "jsonl")
    first, second = [15, 17, 20, 19, 13, 16, 12, 14, 18], [1, 23, 6, 4, 2, 22, 3, 0, 24, 21, 5]
    order = stream(tmp_path / "data", tmp_path, window=2).order(5, 1, 4).tolist()
    assert order == [*first, *second, 7, 10, 8, 11, 9]


def test_a_window_holds_neighbouring_blocks_alone(tmp_path):
    """Each run of rows within a window is of as many shards; over many epochs any shards are neighbours."""
    shards(tmp_path / "data", "jsonl")
    data, pairs = stream(tmp_path / "data", tmp_path, window=2), set()
    owner = [number for number, count in enumerate(COUNTS) for _ in range(count)]
    for epoch in range(60):
        seen = list(dict.fromkeys(owner[index] for index in data.order(0, epoch, 4).tolist()))
        first = set(seen[:2])
        pairs.add(frozenset(first))
        rows = [owner[index] for index in data.order(0, epoch, 4).tolist()]
        assert {*rows[: sum(COUNTS[number] for number in first)]} == first
    assert len(pairs) == 10
    single = stream(tmp_path / "data", tmp_path, window=1).order(0, 0, 4).tolist()
    assert len([1 for a, b in pairwise(single) if owner[a] != owner[b]]) == len(COUNTS) - 1


def test_a_parquet_file_is_read_by_its_row_groups(tmp_path):
    write(tmp_path / "a.parquet", [{"n": number, "text": "x"} for number in range(30)])
    data = stream(tmp_path / "a.parquet", tmp_path, window=1, columns=["n"])
    order = data.order(0, 0, 4).tolist()
    assert order != [*range(30)] and all(len({index // 3 for index in order[i : i + 3]}) == 1 for i in range(0, 30, 3))
    [data[index] for index in order]
    assert len(data._tables) == 1 and next(iter(data._tables.values())).num_rows == 3


def test_columns_lists_and_bytes_become_samples(tmp_path):
    rows = [
        {"x": [1.0, 2.0], "n": 3, "name": b"\xff", "more": "z"},
        {"x": [0.5, 4.0], "n": 4, "name": b"", "more": "z"},
    ]
    framed = b"".join(written_shards.framed(written_shards.example(row)) for row in rows)
    (tmp_path / "a.tfrecord").write_bytes(framed)
    data = Shards(tmp_path / "a.tfrecord", columns=["x", "n", "name"], directory=tmp_path / "copies")
    assert data[0]["x"].tolist() == [1.0, 2.0] and data[1]["n"] == 4 and list(data[0]) == ["x", "n", "name"]
    batch = next(loader(data, "none").epoch(0, 0))[0]
    assert batch["x"].dtype == torch.float32 and batch["n"].tolist() in ([3, 4], [4, 3]) and b"\xff" in batch["name"]


def test_an_index_is_made_once_and_again_for_another_content(tmp_path):
    [first, *_] = shards(tmp_path / "data", "jsonl")
    stamps = {}
    for _ in range(2):
        stream(tmp_path / "data", tmp_path)
        now = {file: file.stat().st_mtime_ns for file in (tmp_path / "copies" / "index").iterdir()}
        assert stamps in ({}, now) and len(now) == len(COUNTS)
        stamps = now
    write(first, [{"n": 90}])
    assert len(stream(tmp_path / "data", tmp_path)) == TOTAL - COUNTS[0] + 1


def loader(data, num_workers, share: int = 0, shares: int = 1) -> Loader:
    task = Task(None)
    task.train_set = lambda: data
    config = TrainConfig(batch_size=4, micro_batch_size=2, seed=5, num_workers=num_workers)
    return Loader(task, config, torch.device("cpu"), share, shares)


def windows(data, epoch: int, position: int, num_workers="none", share: int = 0, shares: int = 1) -> list[list[list]]:
    reading = loader(data, num_workers, share, shares)
    read = [[part.tolist() for part in window if hasattr(part, "tolist")] for window in reading.epoch(epoch, position)]
    reading.close()
    return read


@rounds("kind", ["parquet", "tar"])
def test_a_bucket_is_streamed_from_any_position_within_a_bound(tmp_path, bucket, kind):
    """By no worker or two, by one rank or two, each of which sees its share."""
    place = tmp_path / kind
    files = shards(place, kind)
    url = put(f"{bucket}/{kind}", *files)
    bound = sum(sorted(file.stat().st_size for file in files)[-2:])
    data = Shards(url, directory=place / "copies", most_bytes=bound, window=2, make=number_of)
    local = stream(f"{place}/*.{kind}", place, window=2)
    for epoch in (0, 1):
        whole = windows(local, epoch, 0)
        for position in range(0, len(whole), 2):
            assert windows(data, epoch, position, 2 * (position % 4 == 0) or "none") == whole[position:]
            halves = [windows(data, epoch, position, "none", share, 2) for share in range(2)]
            together = [[*chain(*chain(*both))] for both in zip(*halves, strict=True)]
            assert together == [[*chain(*window)] for window in whole[position:]]
        assert sum(file.stat().st_size for file in (place / "copies").iterdir() if file.is_file()) <= bound


class Streamed(Toy):
    """Learns a class from bytes of text that it streams."""

    path = ""
    directory = Path()

    def model(self) -> nn.Module:
        self.net = nn.Sequential(nn.EmbeddingBag(256, 8), nn.Dropout(0.3), nn.Linear(8, 3))
        return self.net

    def train_set(self) -> Padded:
        rows = Shards(self.path, make=self.sample, window=2, directory=self.directory, most_bytes=2000)
        return Padded(rows, {"tokens": 0})

    @staticmethod
    def sample(row: dict) -> dict[str, torch.Tensor]:
        return {"tokens": torch.tensor([*row["text"].encode()]), "y": torch.tensor(row["n"] % 3)}

    def augment(self, sample, generator):
        return sample | {"tokens": (sample["tokens"] + torch.randint(2, (1,), generator=generator)).clamp(max=255)}

    def loss(self, model, batch):
        out = model(batch["tokens"])
        return Loss(
            cross_entropy(out, batch["y"], reduction="sum"), len(out), {"right": (out.argmax(1) == batch["y"]).sum()}
        )

    def evaluate(self, model):
        return {"val/loss": float(model(torch.arange(256).view(8, 32)).square().mean())}


@pytest.mark.whole
def test_a_run_that_is_cut_within_an_epoch_ends_with_the_same_bits(tmp_path, bucket, monkeypatch):
    """The oracle reads files of this host, and the run that is cut reads a bucket, with workers and without."""
    url = put(f"{bucket}/text", *shards(tmp_path / "data", "jsonl"))
    monkeypatch.setattr(Streamed, "directory", tmp_path / "copies")
    monkeypatch.setattr(Streamed, "path", f"{tmp_path}/data/*.jsonl")
    settings = {"batch_size": 4, "micro_batch_size": 3, "num_epochs": 2}
    whole = Trial(tmp_path / "whole", Streamed, **settings)
    assert whole.attempt().kind == "complete"
    monkeypatch.setattr(Streamed, "path", url)
    cut = Trial(tmp_path / "cut", Streamed, **settings)
    for step, num_workers in ((3, 0), (2, 2), (4, 1)):
        assert cut.attempt(killed_at(step), num_workers=num_workers) is None
    assert cut.attempt(num_workers=2).kind == "complete"
    assert cut.digest() == whole.digest()


def refused(tmp_path: Path, name: str, content: bytes, **given) -> Shards:
    (tmp_path / name).write_bytes(content)
    return Shards(tmp_path / name, directory=tmp_path / "copies", **given)


@rounds(
    ("name", "content", "given", "sentence"),
    [
        ("a.jsonl", b"", {}, r"a\.jsonl holds no record: leave it out, or write it anew"),
        ("a.jsonl", b'{"n": 1}\n\n{"n"\n', {}, r"a\.jsonl, line 3 is not JSON"),
        ("a.jsonl", b'{"n": 1}\n[1]\n', {}, r"a\.jsonl begins|a\.jsonl, line 2 holds list"),
        ("a.jsonl", b'{"n": 1}\n', {"columns": ["x"]}, r"a\.jsonl, record 1 has no column 'x': it has n"),
        ("a.jsonl", b'{"n": 1}\n{"n": null}\n', {}, r"a\.jsonl, record 2, column 'n' is empty: fill it"),
        ("a.jsonl", b'{"n": 1}\n', {"window": 0}, "has window 0: give 1 or more blocks"),
        ("a.parquet", b"PAR1", {}, r"a\.parquet cannot be read as Parquet"),
        ("a.tar", bytes(600), {}, r"a\.tar cannot be read as an uncompressed tar|a\.tar holds no record"),
        ("a.txt", b"text\nword\n", {"columns": ["x"]}, r"a\.txt has no column 'x': it needs x; it has text"),
    ],
)
def test_shards_of_a_stream_that_cannot_be_used_are_refused(tmp_path, name, content, given, sentence):
    with pytest.raises((DataError, ConfigError), match=sentence):
        [*map(refused(tmp_path, name, content, **given).__getitem__, range(2))]


def test_columns_and_damage_are_refused_where_they_lie(tmp_path, bucket):
    write(tmp_path / "a.parquet", [{"n": 1}])
    with pytest.raises(DataError, match=r"a\.parquet has no column 'x': it needs x; it has n"):
        stream(tmp_path / "a.parquet", tmp_path, columns=["x"])
    with pytest.raises(DataError, match=r"none\.tar cannot be read \(No such file"):
        stream(tmp_path / "none.tar", tmp_path)
    file = write(tmp_path / "a.tfrecord", [{"n": 1}, {"n": 2}])
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    data = stream(f"{put(bucket, file)}/a.tfrecord", tmp_path)
    with pytest.raises(DataError, match=rf"^{bucket}/a\.tfrecord, record 2 has another checksum"):
        data[1]
    size = os.path.getsize(file)
    with pytest.raises(ConfigError, match=rf"may have {size} bytes, and most_bytes is 10: lower window, or raise"):
        stream(f"{bucket}/a.tfrecord", tmp_path, most_bytes=10)
