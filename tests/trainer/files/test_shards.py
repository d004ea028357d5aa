"""Files that a path names, whatever their format and place: the same rows, and one sentence where they are broken."""

from __future__ import annotations

import multiprocessing
import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import written_shards
from rounds import rounds
from written_shards import example, framed, masked, put, write

import trainer.files.s3
from trainer.data import TableDataset
from trainer.errors import ConfigError, DataError
from trainer.files import fetched, hub, outage, tables, tfrecord
from trainer.files.s3 import Away, Bucket
from trainer.files.shards import digest, listed

ROWS = [{"text": f"row {number} é", "n": number * 70_000} for number in range(8)]
NAMES = ["t.parquet", "t.feather", "t.arrow", "t.csv", "t.jsonl", "t.tfrecord", "t.tfrecord-00000-of-00001", "t.tar"]
CHANGED = "has changed or is gone since it was listed"


@rounds("name", NAMES)
def test_every_format_of_shards_gives_the_same_rows(tmp_path, name):
    source = tables.read(write(tmp_path / name, ROWS), ["text", "n"], ["text"])
    assert source.texts("text") == [row["text"] for row in ROWS]
    assert source.numbers("n").tolist() == [row["n"] for row in ROWS]
    assert TableDataset(tmp_path / name, {"n": "n"})[3]["n"] == ROWS[3]["n"]


def test_a_record_by_hand_has_the_checksums_of_the_format(tmp_path):
    """The check value of CRC32C, from the catalogue of its parameters, rotated and masked by hand."""
    assert written_shards.crc32c(b"123456789") == 0xE3069283
    assert tfrecord.checksum(b"123456789") == (0x2507C60D + 0xA282EAD8) & 0xFFFFFFFF == 0xC78AB0E5
    file = tmp_path / "hand.tfrecord"
    file.write_bytes(struct.pack("<Q", 9) + masked(struct.pack("<Q", 9)) + b"123456789" + bytes.fromhex("e5b08ac7"))
    with open(file, "rb") as opened:
        assert tfrecord.record(opened, 1, tfrecord.scan(file)[0]) == b"123456789"


def test_records_of_tensorboards_writer_are_read(tmp_path):
    """An independent writer of the same framing, whose records hold any bytes."""
    writer = pytest.importorskip(
        "tensorboard.summary.writer.record_writer", reason="runs with pip install -e '.[tensorboard]'"
    )
    datas = [os.urandom(size) for size in (0, 1, 9, 1000, 70_000)]
    with open(tmp_path / "a.tfrecord", "wb") as file:
        for data in datas:
            writer.RecordWriter(file).write(data)
    with open(tmp_path / "a.tfrecord", "rb") as opened:
        places = tfrecord.scan(tmp_path / "a.tfrecord")
        assert [tfrecord.record(opened, number, place) for number, place in enumerate(places, 1)] == datas


def test_features_are_values_or_lists_and_may_be_missing(tmp_path):
    rows = [{"a": 0.5, "b": [1.0, 2.0], "c": b"\xff"}, {"a": 1.5, "b": [3.0], "d": 7}]
    (tmp_path / "t.tfrecord").write_bytes(b"".join(framed(example(row)) for row in rows))
    assert tables.read(tmp_path / "t.tfrecord").table.to_pylist() == [
        {"a": 0.5, "b": [1.0, 2.0], "c": b"\xff", "d": None},
        {"a": 1.5, "b": [3.0], "c": None, "d": 7},
    ]


def _damaged(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


FIRST, SECOND = framed(example(ROWS[0])), framed(example(ROWS[1]))


@rounds(
    ("content", "sentence"),
    [
        (FIRST + SECOND[:-7], "record 2 is cut off after .* bytes: copy or write the file anew"),
        (FIRST + SECOND[:5], "record 2 is cut off after 5 of 12 bytes of its head"),
        (FIRST + _damaged(SECOND, 20), "record 2 has another checksum than the file says"),
        (FIRST + _damaged(SECOND, 1), "record 2 has another checksum of its length"),
        (FIRST + framed(b"\x07\x07"), r"record 2 cannot be parsed as a tf\.train\.Example"),
        (FIRST + framed(example({"text": b"\xff"})), "record 2, feature 'text' is not UTF-8"),
        (FIRST + framed(example({"text": 3})), "feature 'text' is int and str in different records"),
        (FIRST + framed(example({"n": 3})), r"row 2, column 'text' is empty"),
        (framed(example({"n": 3})), "has no column 'text': it needs text; it has n"),
        (b"", "holds no record: write one at least, or leave the file out"),
    ],
)
def test_broken_records_are_refused_by_their_number(tmp_path, content, sentence):
    (tmp_path / "t.tfrecord").write_bytes(content)
    with pytest.raises(DataError, match=rf"t\.tfrecord.*{sentence}"):
        tables.read(tmp_path / "t.tfrecord", ["text"], ["text"]).texts("text")


@rounds(
    ("files", "sentence"),
    [
        ({}, "holds no sample"),
        ({"a.json": b'{"text": '}, r"file a\.json cannot be decoded"),
        ({"a.text": b"\xff"}, r"file a\.text cannot be decoded"),
        ({"a.text": b"x", "b.cls": b"one"}, r"file b\.cls cannot be decoded"),
        ({"a.text": b"x", "b.cls": b"1"}, "row 2, column 'text' is empty"),
    ],
)
def test_broken_samples_of_tar_shards_are_refused(tmp_path, files, sentence):
    written_shards.write_tar(tmp_path / "t.tar", files)
    with pytest.raises(DataError, match=rf"t\.tar.*{sentence}"):
        tables.read(tmp_path / "t.tar", ["text"], ["text"]).texts("text")


def test_broken_archives_and_streams_are_refused(tmp_path):
    for name, sentence in (("t.tar", "cannot be read as an uncompressed tar"), ("t.arrow", "cannot be read as Arrow")):
        whole = write(tmp_path / name, ROWS).read_bytes()
        (tmp_path / name).write_bytes(whole[:700])
        with pytest.raises(DataError, match=sentence):
            tables.read(tmp_path / name)


def test_a_path_names_files_in_the_order_of_their_names(tmp_path, monkeypatch):
    files = [write(tmp_path / name, ROWS) for name in ("a b.jsonl", "d/1.jsonl", "d/2.jsonl", "d/e/3.parquet")]

    def names(path: str) -> list[str]:
        return [shard.name for shard in listed(path)]

    assert names(str(tmp_path / "d")) == [str(file) for file in files[1:]]
    assert names(f"{tmp_path}/d/*.jsonl") == [str(file) for file in files[1:3]]
    assert names(f"{tmp_path}/**/*.parquet") == [str(files[3])]
    assert (
        names(f"file://{tmp_path}/a%20b.jsonl") == names(f"file://localhost{tmp_path}/a%20b.jsonl") == [str(files[0])]
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names("~/a b.jsonl") == [str(files[0])]
    (tmp_path / "odd[1].jsonl").write_text("{}")
    assert names(f"{tmp_path}/odd[1].jsonl") == [f"{tmp_path}/odd[1].jsonl"]
    (tmp_path / "none").mkdir()
    for path in (f"{tmp_path}/*.tar", f"{tmp_path}/none"):
        with pytest.raises(DataError, match="names no file: give a file, a directory with files, or a pattern"):
            listed(path)
    with pytest.raises(ConfigError, match="names no file of this host"):
        listed("file://elsewhere/a.jsonl")
    with pytest.raises(ConfigError, match="is not a directory of datasets, and split is 'train'"):
        listed(str(files[0]), "train")
    before = digest(f"{tmp_path}/d/*.jsonl")
    write(files[1], ROWS[:3])
    assert digest(f"{tmp_path}/d/*.jsonl") != before


# --- Directories of Hugging Face's datasets


@pytest.fixture
def datasets() -> Any:
    library = pytest.importorskip("datasets", reason="runs where make test has installed datasets")
    library.disable_progress_bars()
    return library


def rows_of(path: Path, split: str = "") -> list[dict]:
    return [row for shard in listed(str(path), split) for row in tables.read(shard.name).table.to_pylist()]


def test_saved_datasets_have_the_rows_that_their_library_reads(tmp_path, datasets):
    whole = datasets.Dataset.from_list(ROWS)
    mixed = whole.shuffle(seed=3).select(range(5))
    mixed.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict(train=whole, test=mixed).save_to_disk(tmp_path / "two")
    assert rows_of(tmp_path / "one") == datasets.load_from_disk(str(tmp_path / "one")).to_list() == mixed.to_list()
    assert rows_of(tmp_path / "two", "train") == ROWS and rows_of(tmp_path / "two", "test") == mixed.to_list()
    with pytest.raises(DataError, match=r"two has the splits train, test: name one of them as the split"):
        listed(str(tmp_path / "two"))
    with pytest.raises(DataError, match=r"two has no split 'val': it has train, test"):
        listed(str(tmp_path / "two"), "val")
    (tmp_path / "one" / "state.json").write_text("{")
    with pytest.raises(DataError, match=r"one cannot be read as a directory of datasets \(.*\): save it again"):
        listed(str(tmp_path / "one"))


def test_directories_as_on_the_hub_have_the_files_of_a_split(tmp_path, datasets):
    write(tmp_path / "a" / "data" / "train-00000-of-00002.parquet", ROWS[:3])
    write(tmp_path / "a" / "data" / "train-00001-of-00002.parquet", ROWS[3:])
    write(tmp_path / "a" / "data" / "test-00000-of-00001.parquet", ROWS[:1])
    (tmp_path / "a" / "README.md").write_text("# A table")
    for name in ("train", "validation"):
        write(tmp_path / "b" / f"{name}.jsonl", ROWS[: len(name)])
    (tmp_path / "b" / "README.md").write_text("---\nlicense: mit\n---\n# B")
    for place, split, wanted in (("a", "train", ROWS), ("a", "test", ROWS[:1]), ("b", "validation", ROWS)):
        assert rows_of(tmp_path / place, split) == wanted
        read = datasets.load_dataset(str(tmp_path / place), split=split, cache_dir=str(tmp_path / "cache"))
        assert read.to_list() == wanted
        with pytest.raises(DataError, match="has the splits train, "):
            listed(str(tmp_path / place))
    parts = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("train", "validation"))
    (tmp_path / "b" / "README.md").write_text(f"---\nconfigs:\n{parts}---")
    with pytest.raises(DataError, match=r"b holds several configurations of data: give the files of one, by a pattern"):
        listed(str(tmp_path / "b"), "train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty cannot be read as a directory of datasets"):
        listed(str(tmp_path / "empty"), "train")


def test_missing_packages_are_named_with_their_extra(tmp_path, monkeypatch):
    write(tmp_path / "t.tfrecord", ROWS)
    write(tmp_path / "train-00000-of-00001.parquet", ROWS)
    for package in ("google_crc32c", "datasets"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(hub, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"need google-crc32c and protobuf: pip install 'hpo\[tfrecord\]'"):
        tables.read(tmp_path / "t.tfrecord")
    with pytest.raises(ConfigError, match=r"is a directory of Hugging Face's datasets: pip install 'hpo\[datasets\]'"):
        listed(str(tmp_path))


# --- Buckets


def test_objects_are_listed_and_copied_as_they_are(tmp_path, bucket):
    files = [write(tmp_path / name, ROWS) for name in NAMES]
    put(bucket, *files)
    put(f"{bucket}/more=1", files[0], write(tmp_path / "_SUCCESS.jsonl", ROWS))
    names = [shard.name for shard in listed(bucket)]
    assert names == sorted([f"{bucket}/{name}" for name in NAMES] + [f"{bucket}/more=1/t.parquet"])
    assert [shard.name for shard in listed(f"{bucket}/*.parquet")] == [f"{bucket}/t.parquet"]
    assert len(listed(f"{bucket}/**/*.parquet")) == 1 and len(listed(f"{bucket}/**.parquet")) == 2
    for name in NAMES:
        [shard] = listed(f"{bucket}/{name}")
        with shard.opened(fetched.Cache(tmp_path / "cache")) as copy:
            assert copy.read_bytes() == (tmp_path / name).read_bytes() and copy.parent == tmp_path / "cache"
    before = digest(bucket)
    put(bucket, write(tmp_path / "t.jsonl", ROWS[:2]))
    assert digest(bucket) != before


def test_a_broken_object_is_named_by_its_url(tmp_path, bucket):
    (tmp_path / "t.tfrecord").write_bytes(FIRST + _damaged(SECOND, 20))
    [shard] = listed(f"{put(bucket, tmp_path / 't.tfrecord')}/t.tfrecord")
    with (
        pytest.raises(DataError, match=rf"^{bucket}/t\.tfrecord, record 2 has another checksum"),
        shard.opened(fetched.Cache(tmp_path / "cache")) as copy,
    ):
        tables.read(copy)


@rounds(
    ("path", "sentence"),
    [
        ("s3://UPPER/x", "does not name a place in a bucket: give s3://BUCKET/KEY"),
        ("{}/none", "names no object: give an object, a prefix with objects, or a pattern"),
        ("{}/*.csv", "names no object"),
        (
            "{}",
            r"is a directory of Hugging Face's datasets in a bucket: name the files of a split, such as .*/\*\.arrow",
        ),
        ("s3://nowhere-at-all/x", "cannot be used: the bucket does not exist at AWS_ENDPOINT_URL"),
    ],
)
def test_places_in_a_bucket_that_cannot_be_read_are_refused(tmp_path, bucket, path, sentence):
    (tmp_path / "state.json").write_text("{}")
    put(bucket, tmp_path / "state.json")
    with pytest.raises((ConfigError, DataError, OSError), match=sentence):
        listed(path.format(bucket))
    with pytest.raises(ConfigError, match="is in a bucket, where no split is read"):
        listed(bucket, "train")


def test_an_object_that_changes_while_it_is_read_is_refused(tmp_path, bucket):
    [shard] = listed(f"{put(bucket, write(tmp_path / 't.jsonl', ROWS))}/t.jsonl")
    cache = fetched.Cache(tmp_path / "cache")
    put(bucket, write(tmp_path / "t.jsonl", ROWS[:3]))
    with pytest.raises(DataError, match=CHANGED), shard.opened(cache):
        pass
    Bucket(bucket).delete("t.jsonl")
    with pytest.raises(DataError, match=CHANGED), shard.opened(cache):
        pass
    assert [file.name for file in cache.directory.iterdir()] == [".lock"]


def test_a_bucket_that_does_not_answer_is_waited_for_and_then_left(tmp_path, bucket, monkeypatch):
    [shard] = listed(f"{put(bucket, write(tmp_path / 't.jsonl', ROWS))}/t.jsonl")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    trainer.files.s3._client.cache_clear()
    begun = time.monotonic()
    for call in (lambda: listed(bucket), lambda: shard.opened(fetched.Cache(tmp_path / "cache")).__enter__()):
        with outage.waiting(0.4), pytest.raises(Away, match=r"cannot be reached \(no connection to its endpoint"):
            call()
    assert time.monotonic() - begun > 0.35 and Away.exit_code == 75
    trainer.files.s3._client.cache_clear()


def test_copies_stay_below_the_bound_and_the_longest_unused_goes(tmp_path, bucket):
    for number in range(4):
        (tmp_path / f"{number}.txt").write_bytes(bytes([number]) * 1000)
    shards = listed(put(bucket, *(tmp_path / f"{number}.txt" for number in range(4))))
    cache = fetched.Cache(tmp_path / "cache", 2500)

    def kept() -> set[int]:
        return {file.read_bytes()[0] for file in cache.directory.glob("*.txt")}

    for number in (0, 1, 0, 2):
        with shards[number].opened(cache) as copy:
            assert copy.read_bytes() == bytes([number]) * 1000
        time.sleep(0.01)
    assert kept() == {0, 2}
    with shards[0].opened(cache), shards[2].opened(cache):
        assert not cache._fetch(shards[3].name, 1000, shards[3].tag, cache.directory / "new.txt"), "both are read"
    (cache.directory / ".killed.txt.part").write_bytes(bytes(1000))
    with shards[3].opened(cache):
        assert sum(file.stat().st_size for file in cache.directory.iterdir()) <= 2500
    with pytest.raises(ConfigError, match=r"has 1000 bytes, and the cache of copies in .* holds 999"):
        shards[0].opened(fetched.Cache(tmp_path / "cache", 999)).__enter__()


def _read_for_ever(shards, cache, number, bad) -> None:
    for turn in range(60):
        shard = shards[(turn * (number + 1)) % len(shards)]
        with shard.opened(cache) as copy:
            if copy.read_bytes() != bytes([int(shard.name[-5])]) * 1000:
                bad.set()


def test_processes_share_copies_that_are_whole(tmp_path, bucket):
    for number in range(6):
        (tmp_path / f"{number}.txt").write_bytes(bytes([number]) * 1000)
    shards = listed(put(bucket, *(tmp_path / f"{number}.txt" for number in range(6))))
    context, cache = multiprocessing.get_context("fork"), fetched.Cache(tmp_path / "cache", 3000)
    bad = context.Event()
    readers = [context.Process(target=_read_for_ever, args=(shards, cache, number, bad)) for number in range(3)]
    for reader in readers:
        reader.start()
    while any(reader.is_alive() for reader in readers):
        sizes = []
        for file in cache.directory.glob("*") if cache.directory.is_dir() else ():
            try:
                sizes.append(file.stat().st_size)
            except FileNotFoundError:
                continue
        assert sum(sizes) <= 3000 + 1000, "a copy may be renamed between two looks"
        time.sleep(0.01)
    assert [reader.exitcode for reader in readers] == [0] * 3 and not bad.is_set()
