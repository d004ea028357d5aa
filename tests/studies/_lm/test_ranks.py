"""The studies lora and dpo on two ranks: the losses of one process, also where samples are told from one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lm_ranks
import pytest
import torch
from once import once
from transformers import AutoModelForCausalLM, LlamaConfig

from trainer.config import ParallelConfig
from trainer.data.text import Bytes
from trainer.distributed.launch import launch

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("ranks")]

RUNS: dict[str, dict[str, Any]] = {
    "lora": {"study": "lora"},
    "lora contrastive": {"study": "lora", "loss.contrastive": 0.5},
    # 49 to train on: a rank without a sample of the last window goes along with the other's, no negatives of its own
    "lora contrastive uneven": {"study": "lora", "loss.contrastive": 0.5, "data.generated": 61},
    "dpo": {"study": "dpo", "loss.name": "dpo", "loss.label_smoothing": 0.2},
    "ipo": {"study": "dpo", "loss.name": "ipo"},
    "reward": {"study": "dpo", "preset": "reward"},
}
DEFAULT = (
    "lora",
    "lora contrastive uneven",
    "dpo",
    "reward",
)  # a sample: each study and kind of loss, uneven windows
CASES = [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow) for name in RUNS]


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> dict[str, str]:
    """A tiny Llama over bytes that nothing has been taught: the studies' own takes each process seconds to make."""

    path = tmp_path_factory.mktemp("models") / "tiny"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": Bytes.vocab_size, "bos_token_id": None, "eos_token_id": Bytes.end}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **tokens, initializer_range=0.1)).save_pretrained(path)
    return {"model.path": str(path), "model.tokenizer": "bytes"}


@pytest.fixture(scope="session")
def together(model, tmp_path_factory):
    """Returns what two ranks have of a run; the default ones are one launch, and the others another."""

    def of(name: str) -> Any:
        names = [run for run in RUNS if (run in DEFAULT) == (name in DEFAULT)]

        def make(directory: Path) -> dict[str, Any]:
            runs = {run: RUNS[run] | model | {"train.parallel.data": 2} for run in names}
            return launch(
                "lm_ranks:runs", {"directory": str(directory), "runs": runs}, ParallelConfig(data=2), device="cpu"
            )[0]

        return once(tmp_path_factory, f"lm-ranks-{name in DEFAULT}", make)[name]

    return of


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_have_the_losses_of_one_process(name, model, together, tmp_path):
    """Every term of both epochs. A rank's share of a window is one micro-batch, or none."""
    alone = lm_ranks.run(str(tmp_path), **RUNS[name], **model)
    ranks = together(name)
    assert len(ranks) == len(alone) == 2
    for mine, expected in zip(ranks, alone, strict=True):
        assert mine.keys() == expected.keys() and {"train/loss", "val/loss"} <= mine.keys()
        assert ("train/loss_contrastive" in mine) == ("contrastive" in name)
        for loss in [metric for metric in mine if "loss" in metric]:
            assert mine[loss] == pytest.approx(expected[loss], rel=1e-6), loss
    assert alone[1]["train/loss"] < alone[0]["train/loss"], "nothing was learnt"
