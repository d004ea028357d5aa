"""Files as data sets: the same tensors whatever the format, and one sentence with the place where one is broken."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tarfile
import time
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rounds import rounds

from trainer.data import (
    Cached,
    TableDataset,
    TarShards,
    TensorDataset,
    TokenBlocks,
    TokenDocuments,
    TokenFile,
    check,
    write_tokens,
)
from trainer.data.cache import publish
from trainer.errors import DataError
from trainer.files import tables

ROWS = pa.table({"a": [0.5, 1.5, 2.5], "b": [1, -2, 3], "c": [True, False, True], "t": ["x", "y", "z"]})


def write(path, table=ROWS) -> None:
    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path)
    elif path.suffix == ".feather":
        pa.feather.write_feather(table, path)
    elif path.suffix == ".csv":
        pa.csv.write_csv(table, path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


@rounds("name", ["t.parquet", "t.feather", "t.csv", "t.jsonl"])
def test_every_format_gives_the_same_tensors(tmp_path, name):
    write(tmp_path / name)
    data = TableDataset(tmp_path / name, {"x": ["a", "b"], "y": "b", "z": "c"}, {"x": torch.float64})
    batch = data.__getitems__([2, 0])
    assert batch["x"].tolist() == [[2.5, 3.0], [0.5, 1.0]] and batch["x"].dtype == torch.float64
    assert batch["y"].tolist() == [3, 1] and batch["y"].dtype == torch.int64
    assert batch["z"].tolist() == [True, True] and batch["z"].dtype == torch.bool
    assert TableDataset([tmp_path / name] * 2, {"y": "b"}).__getitems__(range(6))["y"].tolist() == [1, -2, 3] * 2
    assert tables.read(tmp_path / name).texts("t") == ["x", "y", "z"]


@rounds(
    ("name", "content", "words"),
    [
        ("none.csv", None, ["is not a file", "Parquet, Arrow, CSV, JSON Lines, TFRecord or tar"]),
        ("t.csv", b"", ["is empty", "header with a, b"]),
        ("t.csv", b"a,b\n", ["a header and no rows"]),
        ("t.csv", b"a,b\n1,2\n3\n", ["row 3 (the header is row 1) is ragged (expected 2 columns, got 1)"]),
        ("t.csv", b"a,b\n1,2\n\xe9,2\n", ["line 3 is not UTF-8 (byte 0xe9 at 0)"]),
        ("t.csv", b"a,c\n1,2\n", ["has no column 'b'", "it has a, c"]),
        ("t.csv", b"a,b,b\n1,2,2\n", ["column 'b' twice"]),
        ("t.csv", b"a,b\n1,2\n,2\n", ["row 3 (the header is row 1), column 'a' is empty"]),
        ("t.csv", b"a,b\n1,2\none,2\n", ["row 3 (the header is row 1), column 'a' is 'one'", "must be a number"]),
        (
            "t.csv",
            b"a,b\n 1.5,2\n1_000,2\n",
            ["row 3 (the header is row 1), column 'a' is '1_000'", "must be a number"],
        ),
        ("t.csv", b"a,b\n1,2\nnan,2\n", ["row 3 (the header is row 1), column 'a'"]),
        ("t.csv", b"a,b\n1,2\ninf,2\n", ["row 3 (the header is row 1), column 'a' is inf"]),
        ("t.jsonl", b" \n", ["is empty", "one JSON object per line"]),
        ("t.jsonl", b'{"a": 1, "b": 2}\n{"a": 1, "b": 2}\n{"a": 1, b\n', ["row 3 cannot be read as JSON Lines"]),
        ("t.jsonl", b'{"a": 1, "b": 2}\n{"a": "x", "b": 2}\n', ["row 2 cannot be read as JSON Lines", "a"]),
        ("t.jsonl", b'{"a": 1, "b": 2}\n{"b": 2}\n', ["row 2, column 'a' is empty"]),
        ("t.jsonl", b'{"a": 1, "b": 2},\n{"a": 1, "b": 2},\n', ["row 1 ends in a comma", "nothing between them"]),
        ("t.jsonl", b'{"a": 1, "b": 2}\n\n{"a": 1, "b": 2},\n', ["row 3 ends in a comma", "remove it there"]),
        ("t.jsonl", b'{"a": 1, "b": "\xff"}\n', ["line 1 is not UTF-8"]),
        ("t.parquet", b"PAR1", ["cannot be read as Parquet"]),
        ("t.arrow", b"ARROW1 no", ["cannot be read as Arrow"]),
    ],
)
def test_a_broken_file_is_refused_in_one_sentence(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        TableDataset(tmp_path / name, {"x": ["a", "b"]})
    sentence = str(caught.value)
    assert all(word in sentence for word in [*words, str(tmp_path / name)]) and "\n" not in sentence


def test_only_an_empty_cell_is_missing_in_a_column_of_text(tmp_path):
    words = ["NA", "NULL", "null", "nan", "N/A", "#N/A", "None", "-nan", " "]
    (tmp_path / "t.csv").write_text("code,x\n" + "".join(f"{word},{i}\n" for i, word in enumerate(words)))
    assert tables.read(tmp_path / "t.csv", texts=["code"]).texts("code") == words
    assert tables.read(tmp_path / "t.csv").texts("code") == words
    (tmp_path / "t.csv").write_text("code,x\nA,NA\n,2\n")
    source = tables.read(tmp_path / "t.csv")
    assert np.isnan(source.floats("x")).tolist() == [True, False]
    with pytest.raises(DataError, match=r"row 3 \(the header is row 1\), column 'code' is empty"):
        source.texts("code")


@rounds("name", ["t.csv", "t.jsonl"])
def test_a_column_declared_as_text_stays_as_it_is_written(tmp_path, name):
    dates = ["2020-01-01", "2020-01-02"]
    write(tmp_path / name, pa.table({"text": dates, "day": dates}))
    source = tables.read(tmp_path / name, ["text"], ["text", "none"] if name == "t.jsonl" else ["text"])
    assert source.texts("text") == dates and source.columns == ["text", "day"]


@rounds(
    ("name", "content", "row"),
    [
        ("t.csv", "x,y\n1,2\n\n\n3,bad\n", "row 5 (the header is row 1), column 'y' is 'bad'"),
        ("t.csv", "\r\n\r\nx,y\r\n1,2\r\n\r\n3,bad\r\n", "row 6 (the header is row 3), column 'y' is 'bad'"),
        ("t.csv", "x,y\n\n1,2\n\n3\n", "row 5 (the header is row 1) is ragged"),
        ("t.csv", 't,x,y\n"a\n\nb",1,2\n\nb,1,bad\n', "row 6 (the header is row 1), column 'y' is 'bad'"),
        ("t.jsonl", '\n{"x": 1, "y": 1}\n  \n{"x": 1}\n', "row 4, column 'y' is empty"),
        ("t.jsonl", '\n{"x": 1, "y": 1}\n\n{"x": "1", "y": 1}\n', "row 4 cannot be read"),
    ],
)
def test_rows_are_those_of_the_file_with_its_empty_lines(tmp_path, name, content, row):
    (tmp_path / name).write_bytes(content.encode())
    with pytest.raises(DataError) as caught:
        TableDataset(tmp_path / name, {"x": ["x", "y"]})
    assert f"{tmp_path / name} {row}" in str(caught.value)


def test_a_cell_with_line_breaks_may_lie_across_blocks_of_a_csv(tmp_path):
    texts = [f"{i}\n" * 50_000 for i in range(12)]  # pyarrow reads a megabyte at a time
    write(tmp_path / "t.csv", pa.table({"text": texts}))
    assert tables.read(tmp_path / "t.csv", texts=["text"]).texts("text") == texts


@rounds(
    ("name", "content", "words"),
    [
        ("t.jsonl", b'[{"x": 1}, {"x": 2}]', ["is one JSON array", "write each of its objects on a line"]),
        ("t.jsonl", b'\xef\xbb\xbf[\n  {"x": 1}\n]', ["is one JSON array"]),
        ("t.jsonl", b'{\n  "x": 1\n}', ["is one JSON object over several lines"]),
        ("t.jsonl", b"x,y\n1,2\n", ["begins with 'x,y'", "a JSON object on each line"]),
        ("t.csv", b"x;y\n1,5;2\n", ["is separated by semicolons", "write it with commas"]),
        ("t.csv", b"x\ty\n1\t2\n", ["is separated by tabs"]),
        ("t.csv", b'{"x": 1, "y": 2}\n', ["is JSON Lines", "name it *.jsonl"]),
        ("t.csv", b"<!DOCTYPE html><html>", ["is a page of HTML or XML"]),
        ("t.csv", b"PAR1....PAR1", ["is Parquet", "name it *.parquet"]),
        ("t.parquet", b"\x1f\x8b....", ["is a gzip archive", "write it as Parquet"]),
        ("t.csv", "x,y".encode("utf-16"), ["is UTF-16 text", "save it as UTF-8"]),
        ("t.parquet", b"version https://git-lfs.github.com/spec/v1", ["is a Git LFS pointer", "git lfs pull"]),
    ],
)
def test_a_file_of_another_format_than_its_name_says_is_named(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        tables.read(tmp_path / name, ["x"])
    sentence = str(caught.value)
    assert all(word in sentence for word in [*words, str(tmp_path / name)]) and "\n" not in sentence


def test_a_csv_of_one_column_may_have_any_name(tmp_path):
    (tmp_path / "t.csv").write_text("a;b\n1\n")
    assert tables.read(tmp_path / "t.csv", ["a;b"]).floats("a;b").tolist() == [1.0]


@rounds(
    ("values", "dtype"),
    [([1, 300], torch.uint8), ([1.0, 2.5], torch.int64), ([1.0, 1e39], torch.float32), ([1, -1], torch.uint8)],
)
def test_a_value_that_a_type_cannot_hold_is_refused_with_its_row(tmp_path, values, dtype):
    write(tmp_path / "t.csv", pa.table({"a": values}))
    with pytest.raises(DataError, match=r"t\.csv row 3 \(the header is row 1\), column 'a' is .* does not fit torch\."):
        TableDataset(tmp_path / "t.csv", {"a": "a"}, {"a": dtype})


def test_the_place_is_in_the_second_file(tmp_path):
    write(tmp_path / "a.parquet")
    write(tmp_path / "b.parquet", pa.table({"a": [1.0, None, 2.0]}))
    with pytest.raises(DataError, match=r"b\.parquet row 2, column 'a' is empty"):
        TableDataset([tmp_path / "a.parquet", tmp_path / "b.parquet"], {"a": "a"})


@given(st.lists(st.lists(st.integers(0, 69_999), max_size=9), min_size=1, max_size=8), st.integers(2, 6))
def test_token_files_give_back_what_was_written(tmp_path_factory, written, length):
    path = tmp_path_factory.mktemp("tokens") / "t.json"
    write_tokens(path, written, 70_000)
    file = TokenFile(path)
    file.verify()
    whole = [token for document in written for token in document]
    assert len(file) == len(whole) and file[: len(whole)].tolist() == whole
    documents = TokenDocuments(file)
    assert [documents[i].tolist() for i in range(len(documents))] == written
    assert documents.lengths.tolist() == list(map(len, written))
    if len(whole) >= length:
        blocks = TokenBlocks(pickle.loads(pickle.dumps(file)), length)
        seen = [blocks[i].tolist() for i in range(len(blocks))]
        assert seen == [whole[i : i + length] for i in range(0, len(whole) - length + 1, length - 1)]
        with pytest.raises(IndexError):
            blocks[len(blocks)]


def test_a_small_vocabulary_takes_two_bytes_a_token(tmp_path):
    write_tokens(tmp_path / "a.json", [[1, 65_535]], 65_536)
    write_tokens(tmp_path / "b.json", [[1, 65_535]], 65_537)
    assert [(tmp_path / name).stat().st_size for name in ("a.bin", "b.bin")] == [4, 8]


def test_damaged_token_files_are_refused(tmp_path):
    path = tmp_path / "t.json"
    with pytest.raises(DataError, match=r"t\.json does not exist"):
        TokenFile(path)
    with pytest.raises(DataError, match="document 1 has token 9 at 2, and the vocabulary has 9"):
        write_tokens(path, [[1, 2], [3, 4, 9]], 9)
    assert not path.exists() and not list(tmp_path.glob("t.bin"))
    write_tokens(path, [[1, 2], [3]], 9)
    with pytest.raises(DataError, match="has 3 tokens, fewer than one block of 4"):
        TokenBlocks(TokenFile(path), 4)
    (tmp_path / "t.bin").write_bytes(b"\1\0\2\0\4\0")
    with pytest.raises(DataError, match=r"t\.bin has another sha256"):
        TokenFile(path).verify()
    (tmp_path / "t.bin").write_bytes(b"\1\0")
    with pytest.raises(DataError, match=r"t\.bin has 2 bytes instead of 6"):
        TokenFile(path)
    path.write_text("[]")
    with pytest.raises(DataError, match="is not the header of a token file"):
        TokenFile(path)


def tar(path, files: dict[str, bytes], mode: str = "w"):
    with tarfile.open(path, mode) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def test_shards_are_read_by_index_and_indexed_once(tmp_path):
    files = {f"d/{i}.{e}": f"{i}".encode() for i in range(4) for e in ("txt", "cls", "seg.bin")}
    shard = tar(tmp_path / "a.tar", files)
    data = TarShards([shard, tar(tmp_path / "b.tar", {"x.txt": b"x", "x.cls": b"7", "x.seg.bin": b""})])
    assert data[2] == {"__key__": "d/2", "txt": "2", "cls": 2, "seg.bin": b"2"}
    assert data[4]["cls"] == 7 and len(data) == 5
    kept = tmp_path / "a.tar.index.json"
    before = kept.stat().st_mtime_ns
    TarShards([shard])
    assert kept.stat().st_mtime_ns == before
    tar(shard, {"new.txt": b"n"})
    assert TarShards([shard], index_directory=tmp_path)[0] == {"__key__": "new", "txt": "n"}


def test_shards_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"a\.tar cannot be read \(No such file"):
        TarShards([tmp_path / "a.tar"])
    with pytest.raises(DataError, match=r"a\.tar cannot be read as an uncompressed tar"):
        TarShards([tar(tmp_path / "a.tar", {"a.txt": b"1"}, "w:gz")])
    with pytest.raises(DataError, match="was given no sample"):
        TarShards([tar(tmp_path / "b.tar", {})])
    odd = TarShards([tar(tmp_path / "c.tar", {"a.cls": b"1", "b.cls": b"one", "c.txt": b"1"})])
    with pytest.raises(DataError, match=r"c\.tar, file b\.cls cannot be decoded \(invalid literal"):
        odd[1]
    with pytest.raises(DataError, match=r"sample 'c' has \['txt'\], and the first has \['cls'\]"):
        odd[2]


class Counted:
    draws = False

    def __init__(self, values) -> None:
        self.values, self.reads = values, []

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index):
        self.reads.append(index)
        return self.values[index]


def test_a_sample_is_made_once_for_each_key(tmp_path):
    source = Counted([{"x": torch.tensor([i]), "name": str(i)} for i in range(4)])
    first, second, other = (Cached(source, tmp_path, key) for key in ("1", "1", "2"))
    assert first.__getitems__([2, 3])["x"].tolist() == [[2], [3]]
    assert second.__getitems__([3, 2])["x"].tolist() == [[3], [2]]
    assert source.reads == [2, 3]
    other[2]
    assert source.reads == [2, 3, 2]


def test_a_damaged_entry_is_made_again_and_what_cannot_be_kept_is_refused(tmp_path):
    source = Counted([torch.arange(5), Counted([])])
    cached = Cached(source, tmp_path, "k")
    cached[0]
    [file] = tmp_path.rglob("0.pt")
    for damage in (file.read_bytes()[:-3], b"", bytes(len(file.read_bytes()))):
        file.write_bytes(damage)
        assert torch.equal(cached[0], torch.arange(5))
    assert source.reads == [0] * 4
    with pytest.raises(DataError, match="sample 1 of Counted cannot be cached"):
        cached[1]
    with pytest.raises(DataError, match="may draw random numbers"):
        Cached([torch.zeros(1)], tmp_path, "k")
    with pytest.raises(DataError, match="needs a key"):
        Cached(source, tmp_path, "")


def _publish_for_ever(path) -> None:
    number = 0
    while True:
        publish(path, bytes([number % 256]) * 1_000_000)
        number += 1


def test_writers_that_are_killed_leave_whole_files(tmp_path):
    target, context = tmp_path / "a" / "0.pt", multiprocessing.get_context("fork")
    writers = [context.Process(target=_publish_for_ever, args=(target,), daemon=True) for _ in range(2)]
    for writer in writers:
        writer.start()
    end, looks = time.monotonic() + 120, 0
    while looks < 100 and time.monotonic() < end:
        if target.exists():
            looks += 1
            data = target.read_bytes()
            assert len(data) == data.count(data[:1]) == 1_000_000
    for writer in writers:
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    assert looks == 100
    assert len(set(target.read_bytes())) == 1
    directory = Cached(Counted([1]), tmp_path, "k").directory
    leftover = directory / "00" / ".0.pt.1.1.tmp"
    leftover.parent.mkdir()
    leftover.write_bytes(b"half")
    os.utime(leftover, (0, 0))
    Cached(Counted([1]), tmp_path, "k")
    assert not leftover.exists()


class Labelled(TensorDataset):
    classes: ClassVar = {"y": 3}


def test_check_names_the_sample_that_will_not_do():
    x, y = torch.zeros(40, 2), torch.zeros(40, dtype=torch.long)
    check(Labelled(x=x, y=y), rows=40)
    check([torch.tensor(1)], rows=40)
    for change, words in [
        (lambda x, y: x.__setitem__((7, 1), float("nan")), r"sample 7 of the training set: x is nan at \[1\]"),
        (lambda x, y: x.__setitem__((8, 0), -float("inf")), r"sample 8 of the training set: x is -inf at \[0\]"),
        (lambda x, y: y.__setitem__(9, 3), "sample 9 of the training set: y has the label 3, of 3 classes"),
        (lambda x, y: y.__setitem__(9, -1), "sample 9 of the training set: y has the label -1, of 3 classes"),
    ]:
        changed = x.clone(), y.clone()
        change(*changed)
        with pytest.raises(DataError, match=words):
            check(Labelled(x=changed[0], y=changed[1]), rows=40)
    check(Labelled(x=x, y=y - 100), rows=40)


@rounds(
    ("odd", "words"),
    [
        (torch.zeros(2, dtype=torch.float64), "is torch.float64, and that of the first sample torch.float32"),
        (torch.zeros(3), r"has shape \(3,\), and that of the first sample \(2,\)"),
        ({"x": torch.zeros(2)}, "sample .* has the tensors x, and the first has"),
    ],
)
def test_check_compares_samples_with_the_first(odd, words):
    samples = [torch.zeros(2) for _ in range(40)]
    samples[5] = odd
    with pytest.raises(DataError, match=words):
        check(samples, rows=40)


def test_arrays_of_numpy_are_samples_too():
    check([np.zeros(2, dtype=np.float32)] * 3)


@pytest.mark.usefixtures("process")
def test_pyarrow_and_tokenizers_are_loaded_only_by_their_readers():
    code = "import sys, trainer.loop, trainer.data.text; assert not {'pyarrow', 'tokenizers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
