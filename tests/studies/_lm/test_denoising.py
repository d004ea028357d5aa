"""BERT and T5 as studies: rows, noise, losses and vocabularies; cut, on two ranks, and written as Hugging Face's."""

from __future__ import annotations

import itertools
import json
import math
from importlib import import_module
from typing import Any

import lm_ranks
import pytest
import torch
from trainer_runs import Trial, killed_at, uninterrupted
from typer.testing import CliRunner

import hpo
from hpo import load
from hpo.cli.main import app
from hpo.space.config import parse_override
from hpo.storage.home import Home
from studies._lm.denoising import special_ids, vocabulary_size
from studies.t5.config import SpanConfig
from trainer.config import ParallelConfig
from trainer.data.augment import CorruptSpans
from trainer.data.text import BPE, Bytes, word_begins
from trainer.distributed.launch import launch
from trainer.errors import DataError
from trainer.model.language_model import export_language_model
from trainer.runtime.seeding import derive, seed_all

TINY: dict[str, Any] = {
    "data.corpus.general": 60, "data.corpus.target": 120, "model.hidden_size": 16, "model.num_heads": 2,
    "model.num_layers": 1, "train.num_epochs": 2, "train.batch_size": 16,
}  # fmt: skip
STUDIES = ("bert", "t5")
both = pytest.mark.parametrize("study", STUDIES)


def task(study: str, **overrides: Any) -> Any:
    declared = load(study).configure(TINY | {key.replace("__", "."): value for key, value in overrides.items()})
    return declared.task_class()(declared.config)


def model_of(denoising: Any) -> torch.nn.Module:
    """Returns a model in which each weight shows."""
    seed_all(0)
    model = denoising.model().double().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


@both
def test_rows_are_the_documents_one_after_another(study):
    denoising = task(study)
    for domain in ("general", "target"):
        file, rows = denoising.tokens.files[domain, "train"], denoising._rows(domain, "train")
        assert torch.cat(list(rows)).tolist() == file[: len(rows) * denoising.data.block_size].tolist()
        assert len(file) - len(rows) * denoising.data.block_size < denoising.data.block_size
    order = denoising.train_set().order(0, 0, 16)
    assert len({*order}) == len(order) == sum(len(denoising._rows(domain, "train")) for domain in ("general", "target"))


def by_hand(study: str, denoising: Any, model: Any) -> tuple[float, float]:
    """Returns the mean loss and the share restored, row by row; T5 reads each prefix of the spans anew."""
    nats, right = [], []
    for number, row in enumerate(denoising._rows("target", "val")):
        noisy = denoising.noise(validates=True)(row, torch.Generator().manual_seed(derive(0, "val", number)))
        if study == "bert":
            labels = noisy["labels"][noisy["labels"] >= 0]
            logits = model(noisy["tokens"][None])[0][noisy["places"][: len(labels)]]
        else:
            labels, read, logits = noisy["labels"], [Bytes.end], []
            for label in labels.tolist():
                logits.append(model(noisy["tokens"][None], None, torch.tensor([read]))[0, -1])
                read.append(label)
            logits = torch.stack(logits)
        p = logits.softmax(-1)
        nats += [-math.log(p[i, label]) for i, label in enumerate(labels.tolist())]
        right += (p.argmax(-1) == labels).tolist()
    return sum(nats) / len(nats), sum(right) / len(right)


@both
@torch.no_grad()
def test_metrics_are_those_of_a_loop_over_rows(study):
    denoising = task(study, data__test=True)
    model = model_of(denoising)
    metrics = denoising.evaluate(model)
    loss, accuracy = by_hand(study, denoising, model)
    assert metrics["val/loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["val/perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert metrics["val/accuracy"] == pytest.approx(accuracy) and metrics["test/loss"] != metrics["val/loss"]


@pytest.mark.parametrize(
    ("study", "settings"),
    [("bert", {"masks__share": 0.4, "masks__unit": "token"}), ("t5", {"spans__share": 0.4, "spans__mean": 1.0})],
)
@torch.no_grad()
def test_trials_are_validated_alike_whatever_they_train_with(study, settings):
    usual, other = task(study), task(study, **settings)
    model = model_of(usual)
    assert usual.evaluate(model) == other.evaluate(model)
    row = usual._rows("target", "train")[0]
    noisy = [each.augment(row, torch.Generator().manual_seed(1)) for each in (usual, other)]
    assert noisy[0]["labels"].shape != noisy[1]["labels"].shape


def test_words_begin_where_the_tokenizer_says():
    text = "a cat, the mat\nend"
    assert [Bytes().decode([i]) for i in Bytes().encode(text) if word_begins(Bytes())[i]] == [" ", " ", " ", "\n"]
    pairs = BPE.train([text] * 4, vocab_size=280)
    begins = word_begins(pairs)
    assert "".join("|" * begins[i] + pairs.decode([i]) for i in pairs.encode(text)) == "a| cat,| the| mat|\nend"
    from tokenizers import Tokenizer, models

    vocabulary = {"[UNK]": 0, "[SEP]": 1, "un": 2, "##able": 3, ",": 4}
    assert word_begins(BPE(Tokenizer(models.WordPiece(vocabulary)), "[SEP]")) == [True, True, True, False, True]


def test_special_tokens_are_the_tokenizers_or_follow_it(tmp_path):
    assert special_ids(Bytes(), ["[MASK]", "x"]) == [257, 258]
    from tokenizers import Tokenizer, models

    vocabulary = {"[MASK]": 0, "[SEP]": 1, "a": 2}
    pieces = BPE(Tokenizer(models.WordPiece(vocabulary)), "[SEP]")
    assert special_ids(pieces, ["[MASK]", "x"]) == [0, 3]
    pieces.save(tmp_path / "tokenizer.json")
    file = {"data__tokenizer": "bpe", "data__vocab_size": 300, "data__end_token": "[SEP]"}
    data = task("bert", **file, data__tokenizer_file=str(tmp_path / "tokenizer.json")).data
    assert vocabulary_size(data, ["[MASK]", "x"]) == 301
    assert vocabulary_size(task("t5").data, ["[MASK]", "x"]) == 259


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
@pytest.mark.parametrize(("study", "kind"), [("bert", "BertForMaskedLM"), ("t5", "T5ForConditionalGeneration")])
@torch.no_grad()
def test_transformers_opens_the_model_and_its_tokenizer(study, kind, tokenizer, transformers, tmp_path):
    """The special tokens that the study adds have there the ids that the model has learnt them by."""
    learnt = {"data__tokenizer": "bpe", "data__vocab_size": 300} if tokenizer == "bpe" else {}
    denoising = task(study, **learnt)
    model = model_of(denoising).float()
    described = denoising.language_model(model)
    described.save(tmp_path)
    theirs = getattr(transformers, kind).from_pretrained(tmp_path).eval()
    tokens = torch.randint(denoising.vocab_size, (2, 20))
    given = {"input_ids": tokens} | ({"decoder_input_ids": tokens} if study == "t5" else {})
    torch.testing.assert_close(theirs(**given).logits, described.logits(tokens), rtol=1e-4, atol=1e-4)
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text, name = "the cat", denoising.names[0]
    ids = denoising.tokens.tokenizer.encode(text)
    assert opened(text + name)["input_ids"][: len(ids) + 1] == [*ids, denoising.special[0]]
    assert study == "t5" or opened.mask_token_id == denoising.special[0]
    # And back: the options that are shown begin a trial.
    pretrained = import_module(f"studies.{study}.pretrained")
    begun = task(study, **dict(map(parse_override, [flag.removeprefix("-o ") for flag in pretrained.flags(tmp_path)])))
    assert begun.special == denoising.special
    for name, weight in begun.model().state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name


@both
def test_a_trial_cut_in_the_middle_goes_on_to_the_bit(study, tmp_path):
    """Killed between two steps of the second epoch; the masks and spans that follow are those of the whole run."""
    base = task(study)

    class Cut(type(base)):
        def __init__(self, _: object) -> None:
            super().__init__(base.config)

        def model(self):
            self.net = super().model()
            return self.net

    settings = {"task": Cut, "batch_size": 16, "optim": {"name": "adamw", "lr": 3e-3}}
    whole = uninterrupted(tmp_path / "whole", **settings)
    cut = Trial(tmp_path / "cut", **settings)
    assert cut.attempt(killed_at(whole.reporter.committed[0].step - 2)) is None
    assert cut.attempt() is not None
    assert cut.digest() == whole.digest()


RANKS = {
    f"{study} {kind}": {"study": study, **TINY, f"train.parallel.{kind}": 2}
    for study in STUDIES
    for kind in ("data", "tensor")
}


@pytest.mark.whole
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("kind", ["data", "tensor"])
def test_two_ranks_have_the_losses_of_one_process(kind, tmp_path):
    """Each rank's share of a batch is noisy as it is alone; heads and their relative positions are divided."""
    runs = {name: run for name, run in RANKS.items() if name.endswith(kind)}
    job = {"directory": str(tmp_path), "runs": runs}
    parallel = ParallelConfig.model_validate({kind: 2})
    together: Any = launch("lm_ranks:runs", job, parallel, device="cpu")[0]
    for name, run in runs.items():
        alone = lm_ranks.run(str(tmp_path / f"{name} alone"), **run | {f"train.parallel.{kind}": 1})
        assert len(alone) == 2 and alone[1]["val/loss"] < alone[0]["val/loss"]
        for ours, theirs in zip(together[name], alone, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5), name


@pytest.mark.whole
@both
def test_lanes_of_one_model_have_the_losses_of_trials_one_by_one(study, tmp_path):
    """Dropout of the attention's weights included, and gradients of what T5 adds to the scores."""
    pinned = {"bert": {"masks.share": 0.15, "masks.unit": "word"}, "t5": {"spans.share": 0.15, "spans.mean": 3.0}}
    values = []
    for lanes in (4, 1):
        home = tmp_path / f"{lanes}"
        settings = TINY | pinned[study] | {"model.dropout": 0.1, "train.batch_size": 32, "train.lanes": lanes}
        options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
        flags = ["--trials", "4", "--executor", "inline", "--sampler", "random", "--strategy", "none", "--window", "4"]
        flags += ["--confirm", "none", "--home", str(home)]
        result = CliRunner().invoke(app, ["run", "--study", study, *flags, *options])
        assert result.exit_code == 0 and "one by one" not in result.output, result.output
        values.append(hpo.open(study, home=home).trials()["value"].tolist())
    assert values[0] == pytest.approx(values[1], rel=1e-5) and len({*values[1]}) == 4


@pytest.mark.whole
@both
def test_a_study_shows_what_the_model_fills_in_and_exports_it(study, tmp_path):
    home = Home.at(tmp_path / "home")
    options = [part for name, value in TINY.items() for part in ("-o", f"{name}={value}")]
    flags = ["--trials", "2", "--executor", "inline", "--sampler", "random", "--home", str(home.root)]
    result = CliRunner().invoke(app, ["run", "--study", study, *flags, *options])
    assert result.exit_code == 0, result.output
    texts = [path.read_text() for path in home.artifacts.rglob("samples/epoch-0002.txt")]
    assert len(texts) == 2 and all(text.count("---\n") == 1 for text in texts)
    assert all(("masked:" if study == "bert" else "<0>") in text for text in texts)
    export = ["export", "0", "--study", study, "--home", str(home.root)]
    exported = CliRunner().invoke(app, [*export, "--format", "huggingface", "--to", str(tmp_path / "model")])
    assert exported.exit_code == 0 and "opened by transformers" in exported.output, exported.output
    refused = CliRunner().invoke(app, [*export, "--to", str(tmp_path / "model.gguf")])
    assert refused.exit_code == 2 and "--format gguf is for causal language models" in refused.output


@pytest.mark.parametrize(
    ("study", "overrides", "sentence"),
    [
        ("bert", {"data__block_size": 64}, "data.block_size 64 is more than model.positions 32: raise model.positions"),
        ("bert", {"train__parallel__tensor": 3}, "train.parallel.tensor=3 does not divide model.num_heads 2"),
        (
            "bert",
            {"train__parallel__pipeline": 2, "train__micro_batch_size": 8},
            "train.parallel.pipeline=2 is not for this model: divide it by",
        ),
        ("t5", {"train__parallel__tensor": 3}, "train.parallel.tensor=3 does not divide model.num_heads 2"),
        (
            "t5",
            {"data__block_size": 512, "spans__share": 0.5, "spans__mean": 1.0},
            "has 256 spans by spans.share 0.5 and spans.mean 1.0, and there are 100 sentinels: lower the share",
        ),
        ("t5", {"data__block_size": 2010}, "tokens has 101 spans by spans.share 0.15 and spans.mean 3.0, and there"),
        (
            "t5",
            {"data__block_size": 2048, "spans__share": 0.1},
            "has 102 spans by spans.share 0.15 and spans.mean 3.0, and there are 100 sentinels: trials are validated",
        ),
    ],
)
def test_settings_that_cannot_be_are_one_sentence(study, overrides, sentence):
    with pytest.raises(Exception, match=sentence.replace(".", r"\.")):
        task(study, **overrides)


def test_the_spans_of_a_row_are_counted_as_they_are_drawn():
    for length, share, mean in itertools.product(range(8, 700, 3), (0.1, 0.15, 0.333, 0.5), (1.0, 1.5, 3.0, 8.0)):
        drawn = CorruptSpans(torch.arange(1), 0, share, mean).spans(length)
        assert SpanConfig(share=share, mean=mean).count(length) == drawn


@torch.no_grad()
def test_a_model_of_few_positions_is_exported(transformers, tmp_path):
    denoising = task("bert", data__block_size=8, model__positions=8)
    exported = export_language_model(denoising, model_of(denoising).float(), "huggingface", tmp_path / "model", {})
    assert exported.difference < 1e-3


@both
def test_as_many_rows_are_shown_as_are_asked_for(study):
    denoising = task(study, samples=5, train__micro_batch_size=1)
    [text] = denoising.artifacts(denoising.model().eval()).values()
    assert text.count("masked:" if study == "bert" else "with gaps:") == 5


@torch.no_grad()
def test_text_whose_words_do_not_fit_the_share_is_one_sentence(tmp_path):
    (tmp_path / "text.txt").write_text("中文没有空格" * 300)
    denoising = task("bert", data__path=str(tmp_path / "text.txt"))
    with pytest.raises(DataError, match=r"^no word of the val part .* a row of data\.block_size=32 tokens: raise it"):
        denoising.evaluate(denoising.model().eval())


@both
def test_too_little_text_is_one_sentence(study, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("the cat sat " * 60)
    learnt = {"data__tokenizer": "bpe", "data__vocab_size": 400, "data__path": str(file)}
    with pytest.raises(DataError, match=r"the val part of the target domain has .* tokens, fewer than a row of data"):
        denoising = task(study, **learnt)
        list(denoising.noisy(torch.nn.Linear(1, 1), "val"))


def test_weights_of_other_sizes_are_refused_before_the_study(tmp_path):
    denoising = task("bert")
    denoising.language_model(denoising.model()).save(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"hidden_size": 32}))
    declared = load("bert").configure(TINY | {"model.weights": str(tmp_path)})
    from studies.bert.check import check

    with pytest.raises(DataError, match=r"model\.hidden_size is 16 and model\.weights .* has 32: give the sizes"):
        check(declared.config)
