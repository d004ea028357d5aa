"""An exported model scores texts by their loss per token, and the cleaner keeps those below a quantile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_model
from torch.nn import functional as F

from studies._lm.clean.__main__ import main
from studies.gpt.config import Config, ModelConfig
from studies.gpt.perplexity import MOST_TOKENS, scorer
from studies.gpt.task import GptTask
from trainer.errors import DataError

CONFIG = Config(model=ModelConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1))


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[torch.nn.Module, Path]:
    torch.manual_seed(0)
    model, path = GptTask(CONFIG).model().eval(), tmp_path_factory.mktemp("model") / "model.safetensors"
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)  # so that losses differ
    save_model(model, str(path), metadata={"config": CONFIG.model_dump_json()})
    return model, path


def plainly(model: torch.nn.Module, text: str) -> float:
    """The mean loss of each token after those of its block."""
    ids = [256, *text.encode()][: MOST_TOKENS + 1]
    length, losses = CONFIG.data.block_size, []
    for place in range(1, len(ids)):
        begin = (place - 1) // length * length
        logits = model(torch.tensor([ids[begin:place]]))[0, -1]
        losses.append(float(F.cross_entropy(logits.double(), torch.tensor(ids[place]))))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("length", [1, 128, 129, 300])
def test_a_score_is_the_mean_loss_of_its_tokens(exported, length):
    model, path = exported
    text = "It is so, and so it \u00e9 goes. " * 20
    with torch.no_grad():
        assert scorer(str(path))(text[:length]) == pytest.approx(plainly(model, text[:length]), rel=1e-5)


def _shards(out: Path) -> list[str]:
    return [line for file in sorted((out / "shards").iterdir()) for line in file.read_text().splitlines()]


def test_documents_above_the_quantile_go(exported, tmp_path):
    _, path = exported
    texts = [letter * 50 for letter in "abcdefghij"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, texts[0]]))
    off = ["--off", "gopher", "--off", "c4"]
    options = ["--perplexity", str(path), "--quantile", "0.5", "--shard-mb", "0.001"]
    assert main([str(tmp_path / "in.jsonl"), str(tmp_path / "out"), *off, *options]) == 0
    kept = [json.loads(line)["text"] for line in _shards(tmp_path / "out")]
    score = scorer(str(path))
    lowest = sorted(texts, key=score)[:5]
    assert kept == [text for text in texts if text in lowest]
    assert json.loads((tmp_path / "out/seconds.json").read_text())["perplexity"] > 0


def test_a_file_of_another_model_is_one_sentence(tmp_path, exported):
    model, _ = exported
    path = tmp_path / "other.safetensors"
    other = CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update={"num_layers": 2})})
    save_model(model, str(path), metadata={"config": other.model_dump_json()})
    with pytest.raises(DataError, match=r"other.safetensors is not a model of the study gpt \(.*\): export one of its"):
        scorer(str(path))
