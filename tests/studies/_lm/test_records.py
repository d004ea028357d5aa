"""Records of a fine-tuning study: the same ones whatever holds them, and one sentence where they are not text."""

from __future__ import annotations

from pathlib import Path

import pytest
from rounds import rounds
from written_shards import put, write, write_tar

from hpo import load
from studies._lm.config import DataConfig
from studies._lm.records import read_records
from studies.dpo.config import FIELDS as PAIR
from studies.dpo.config import records as preferences
from studies.lora.config import FIELDS, records
from trainer.errors import ConfigError, DataError

RECORDS = [{"prompt": f"ask {number}", "response": f"tell {number} é"} for number in range(6)]
PAIRS = [{"prompt": f"ask {number}", "chosen": "yes", "rejected": f"no {number}"} for number in range(6)]


def data(path: Path | str, **given) -> DataConfig:
    return DataConfig.model_validate({"path": str(path), **given})


@rounds("kind", ["parquet", "feather", "arrow", "csv", "jsonl", "tfrecord", "tar"])
def test_records_are_the_same_in_every_format(tmp_path, kind):
    for number, half in enumerate((RECORDS[:2], RECORDS[2:])):
        write(tmp_path / kind / f"{number}.{kind}", [record | {"more": "z"} for record in half])
    for path in (tmp_path / kind, tmp_path / kind / f"*.{kind}"):
        assert records(data(path)) == RECORDS
    assert preferences(data(write(tmp_path / f"pairs.{kind}", PAIRS))) == PAIRS


def test_records_of_a_bucket_of_datasets_and_of_other_columns_are_read(tmp_path, bucket):
    datasets = pytest.importorskip("datasets", reason="runs where make test has installed datasets")
    datasets.disable_progress_bars()
    url = put(f"{bucket}/a", write(tmp_path / "0.parquet", RECORDS[:2]), write(tmp_path / "1.jsonl", RECORDS[2:]))
    assert records(data(url)) == RECORDS and records(data(f"{url}/*.jsonl")) == RECORDS[2:]
    renamed = [{"q": record["prompt"], "a": record["response"]} for record in RECORDS]
    saved = datasets.DatasetDict(
        train=datasets.Dataset.from_list(renamed), test=datasets.Dataset.from_list(renamed[:2])
    )
    saved.save_to_disk(tmp_path / "saved")
    settings = {"data.path": str(tmp_path / "saved"), "data.split": "test", "data.columns": "q,a"}
    assert records(load("lora").configure(settings).config.data) == RECORDS[:2]
    with pytest.raises(DataError, match="has the splits train, test: name one of them as the split"):
        records(data(tmp_path / "saved", columns=["q", "a"]))


def test_files_of_a_webdataset_are_the_fields(tmp_path):
    files = {f"{n}.{field}": record[field].encode() for n, record in enumerate(RECORDS) for field in FIELDS}
    write_tar(tmp_path / "a.tar", files)
    assert records(data(tmp_path / "a.tar")) == RECORDS


@rounds(
    ("name", "rows", "given", "sentence"),
    [
        (
            "a.parquet",
            [{"prompt": "a"}] * 2,
            {},
            r"a\.parquet has no column 'response': it needs prompt, response; it has",
        ),
        (
            "a.parquet",
            [*RECORDS, {"prompt": "a", "response": ""}],
            {},
            r"a\.parquet row 7.*: response is ''; give text",
        ),
        ("a.tfrecord", [*RECORDS, {"prompt": "a"}], {}, r"a\.tfrecord row 7, column 'response' is empty"),
        ("a.csv", RECORDS[:1], {}, r"a\.csv' holds one record: give at least 2"),
        ("a.jsonl", RECORDS, {"columns": ["a"]}, r"data\.columns=a are not 2 columns: name those of prompt, response"),
        ("a.jsonl", RECORDS, {"columns": ["a", "a"]}, r"data\.columns=a,a are not 2 columns"),
        ("a.jsonl", RECORDS, {"columns": ["q", "a"]}, r"a\.jsonl, line 1 lacks the field 'q': it has prompt, response"),
        ("a.jsonl", RECORDS, {"split": "train"}, "is not a directory of datasets, and split is 'train'"),
    ],
)
def test_records_that_are_not_text_are_refused(tmp_path, name, rows, given, sentence):
    with pytest.raises((DataError, ConfigError), match=sentence):
        read_records(data(write(tmp_path / name, rows), **given), FIELDS)


def test_a_pair_of_a_table_prefers_something(tmp_path):
    with pytest.raises(DataError, match="record 2: chosen and rejected are both 'yes'"):
        preferences(data(write(tmp_path / "a.parquet", [PAIRS[0], PAIRS[1] | {"rejected": "yes"}])))
    assert PAIR == ("prompt", "chosen", "rejected")
