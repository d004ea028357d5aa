"""Texts of the gpt wherever they lie: the same tokens, and a study that is cut and resumed from a bucket."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rounds import rounds
from trainer_runs import Trial, killed_at
from typer.testing import CliRunner
from written_shards import put, write

from hpo import load
from hpo.cli.main import app
from studies._lm.corpus import prepare
from studies._lm.token_files import Tokens
from studies.gpt.task import GptTask

ROWS = [{"text": f"row {number} has words é"} for number in range(400)]
TINY = {
    "data.block_size": 16, "model.hidden_size": 16, "model.num_heads": 2, "model.num_kv_heads": 2,
    "model.num_layers": 1, "samples.tokens": 0, "train.num_epochs": 2, "data.tokens_per_parameter": 0.3,
}  # fmt: skip


def configured(path: Path | str, **given: object):
    return load("gpt").configure({**TINY, "data.path": str(path), **given}).config


def halves(directory: Path, kind: str) -> list[Path]:
    return [write(directory / f"{n}.{kind}", half) for n, half in enumerate((ROWS[:150], ROWS[150:]))]


@rounds("kind", ["parquet", "arrow", "jsonl", "tfrecord", "tar"])
def test_texts_are_the_same_in_every_format_and_place(tmp_path, bucket, kind):
    files = halves(tmp_path / kind, kind)
    want = [row["text"].encode() for row in ROWS]
    url = put(f"{bucket}/{kind}", *files)
    keys = set()
    for path in (tmp_path / kind, f"{tmp_path}/{kind}/*.{kind}", url, f"{url}/*.{kind}"):
        config = configured(path)
        parts = prepare(config.data)["target"]
        documents = b"".join(document for part in ("train", "val", "test") for document in parts[part].documents)
        assert documents == b"".join(want)
        keys.add(Tokens(config.data, tmp_path / "shared").files["target", "train"].path.parent)
    assert len(keys) == 2, "files are known by their sha256, objects by their entity tag"


def test_a_split_of_datasets_and_a_plain_general_domain_go_together(tmp_path):
    datasets = pytest.importorskip("datasets", reason="runs where make test has installed datasets")
    datasets.disable_progress_bars()
    whole = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=whole, test=whole.select(range(9))).save_to_disk(tmp_path / "saved")
    (tmp_path / "general.txt").write_text("general words " * 200)
    config = configured(
        tmp_path / "saved", **{"data.split": "train", "data.general_path": str(tmp_path / "general.txt")}
    )
    assert len(prepare(config.data)["target"]["train"].documents) == pytest.approx(360, abs=2)
    tokens = Tokens(config.data, tmp_path / "shared")
    assert tokens.domains == ("general", "target")


@pytest.mark.whole
def test_a_trial_from_a_bucket_goes_on_to_the_bit(tmp_path, bucket):
    """Cut within an epoch, with workers and without; the oracle reads files of this host and is not cut."""
    files = halves(tmp_path / "texts", "tfrecord")
    digests = []
    for path, cuts in ((tmp_path / "texts", ()), (put(f"{bucket}/texts", *files), ((3, 2), (2, 1)))):
        config = configured(path)

        class Task(GptTask):
            def __init__(self, _: object, config=config) -> None:
                super().__init__(config)
                self.shared = tmp_path / "shared"

            def model(self):
                self.net = super().model()
                return self.net

        trial = Trial(tmp_path / f"trial-{len(digests)}", Task, batch_size=12, optim={"name": "adamw", "lr": 3e-3})
        for step, num_workers in cuts:
            assert trial.attempt(killed_at(step), num_workers=num_workers) is None
        assert trial.attempt().kind == "complete"
        digests.append(trial.digest())
    assert digests[0] == digests[1]


FLAGS = ("--study", "gpt", "--executor", "inline", "--sampler", "random", "--tier", "1")


def hpo(*arguments: str, home: Path):
    return CliRunner().invoke(app, [*arguments, "--home", str(home)])


@pytest.mark.whole
def test_a_study_of_a_bucket_knows_its_content(tmp_path, bucket):
    url = put(f"{bucket}/texts", *halves(tmp_path / "texts", "jsonl"))
    options = [word for path, value in TINY.items() for word in ("-o", f"{path}={json.dumps(value)}")]
    options += ["-o", f"data.path={url}"]
    ran = hpo("run", *FLAGS, *options, "--trials", "1", home=tmp_path / "home")
    assert ran.exit_code == 0, ran.output
    put(f"{bucket}/texts", write(tmp_path / "texts" / "0.jsonl", ROWS[:99]))
    again = hpo("resume", "--study", "gpt", "--trials", "2", home=tmp_path / "home")
    assert again.exit_code == 2 and "the content of data.path changed" in again.stderr


@rounds(
    ("path", "sentence"),
    [
        ("{}/none", "names no object: give an object"),
        ("s3://nowhere-at-all/x", "the bucket does not exist at AWS_ENDPOINT_URL"),
        ("s3://UPPER/x", "does not name a place in a bucket"),
        ("{}/t/*.txt", "names no object"),
    ],
)
def test_a_bucket_that_cannot_be_read_is_one_sentence(tmp_path, bucket, path, sentence):
    refused = hpo("run", *FLAGS, "-o", f"data.path={path.format(bucket)}", "--trials", "1", home=tmp_path / "home")
    assert refused.exit_code == 2, refused.output
    assert sentence in " ".join(refused.stderr.split()) and refused.stderr.count("error:") == 1
    assert "Traceback" not in refused.output and not (tmp_path / "home" / "ledger.db").exists()
