"""What tokens for a new domain are worth: bits per byte of the target domain before and after, at an equal budget.

    python bench/vocabulary.py [--seeds 3] [--tokens 256] [--cells FILE]

The base is trained on the general domain of the generated corpus, by byte pairs learnt there. The target domain has
other words. Each model goes on with its training on the target domain: as it is, or with `--tokens` more tokens whose
rows begin at random, as the mean of their pieces, or so with the blocks frozen for the first tenth of the run. A budget
is the bytes of four passes over the text, or the operations, 6 for each parameter and token, that the model without
new tokens takes for them. Each has the best of three learning rates by its first seed. Figures are means over seeds of
both trainings, with their standard error.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

# Run as a script, this file's own directory comes first, and its trainer.py would be the `trainer` that is imported.
sys.path[0] = str(Path(__file__).parents[1])

from bench.cells import Cells  # noqa: E402
from bench.experts import Kept  # noqa: E402
from bench.machine import machine  # noqa: E402
from studies._lm.corpus_config import CorpusConfig  # noqa: E402
from studies._lm.source import Text, generate  # noqa: E402
from studies.gpt import llama  # noqa: E402
from studies.gpt.budget import parameters  # noqa: E402
from studies.gpt.config import Config  # noqa: E402
from studies.gpt.extend import extend  # noqa: E402
from studies.gpt.task import GptTask  # noqa: E402
from trainer.checkpoint.store import CheckpointStore  # noqa: E402
from trainer.data.text import BPE  # noqa: E402
from trainer.loop import fit  # noqa: E402

CORPUS = CorpusConfig(general=6000, target=3000, num_words=400, successors=6)
BASE_TOKENS, EPOCHS = 600, 4
RATES = (5e-3, 1e-2, 2e-2)
FREEZE = {"patterns": ["blocks.*", "head.norm.*"], "until": 0.1}
KINDS: dict[str, tuple[Literal["mean", "random"] | None, dict[str, Any]]] = {  # -> the new rows, and what is frozen
    "no new tokens": (None, {}),
    "new rows at random": ("random", {}),
    "mean of the pieces": ("mean", {}),
    "mean, first without the blocks": ("mean", FREEZE),
}


@cache
def text_of(domain: str) -> Text:
    """Returns the domain's text, of its own lexicon."""
    return generate(CORPUS, seed=("general", "target").index(domain))[domain]["train"]


def config_of(root: Path, domain: str, model: Path | None, seed: int, lr: float = RATES[0], **train: Any) -> Config:
    """Returns the training on a domain, from the beginning or from a model's directory."""
    given = Config().model_dump(mode="json")
    tokenizer = root / "base.json" if model is None else model / "tokenizer.json"
    size = BPE.load(tokenizer).vocab_size
    given["data"] |= {"path": str(root / f"{domain}.txt"), "separator": "\n", "tokenizer": "bpe", "vocab_size": size}
    given["data"] |= {"tokenizer_file": str(tokenizer), "cache": str(root)}
    given["model"] |= {"weights": "" if model is None else str(model), "mlp_size": 176}
    given["samples"]["tokens"] = 0
    given["train"] |= {"seed": seed, "num_epochs": EPOCHS, **train}
    given["train"]["optim"]["lr"] = lr
    return Config.model_validate(given)


def trained(config: Config, save: Path | None = None) -> float:
    """Returns the best bits per byte of a training, and saves its last model."""
    reporter, task = Kept(), GptTask(config)
    with tempfile.TemporaryDirectory() as directory:
        store = CheckpointStore(Path(directory), fence=1)
        fit(task, config.train, reporter, store)
        if save is not None:
            latest = store.load_latest()
            assert latest is not None
            llama.save_with_tokenizer(latest[0]["model"], config, save)
    return min(epoch["val/bits_per_byte"] for epoch in reporter.epochs)


@torch.no_grad()
def untrained(config: Config) -> float:
    task = GptTask(config)
    return task.evaluate(task.model().eval())["val/bits_per_byte"]


def same_operations(config: Config, plain: Config) -> Config:
    """Returns `config` for as many tokens as take the operations of `plain`."""
    tokens = len(GptTask(plain).rows) * EPOCHS * plain.data.block_size
    size, before = (parameters(each.model, each.data.vocab_size) for each in (config, plain))
    data = config.data.model_copy(update={"tokens_per_parameter": tokens * before / size**2})
    return config.model_copy(update={"data": data})


class Bench:
    """The models of the seeds and kinds in a directory, each made when it is first asked for."""

    def __init__(self, root: Path, tokens: int, seeds: int, cells: Cells) -> None:
        self.root, self.tokens, self.seeds, self.cells = root, tokens, seeds, cells
        for domain in ("general", "target"):
            (root / f"{domain}.txt").write_bytes(b"\n".join(text_of(domain).documents))
        BPE.train((text.decode() for text in text_of("general").documents), BASE_TOKENS).save(root / "base.json")

    def base(self, seed: int) -> Path:
        if not (path := self.root / f"base-{seed}").exists():
            trained(config_of(self.root, "general", None, seed), path)
        return path

    def config(self, kind: str, seed: int, lr: float, *, operations: bool = False) -> Config:
        """Returns the training on the target domain, for a budget of bytes or of operations."""
        rows, freeze = KINDS[kind]
        base, model = self.base(seed), self.root / f"{rows}-{seed}"
        plain = config_of(self.root, "target", base, seed, lr)
        if rows is None:
            return plain
        if not model.exists():
            extend(str(base), str(model), plain.data, self.tokens, rows)
        config = config_of(self.root, "target", model, seed, lr, freeze=freeze)
        return same_operations(config, plain) if operations else config

    def after(self, kind: str, *, operations: bool) -> str:
        def figure(seed: int, lr: float) -> float:
            key = f"{kind} {self.tokens} {operations} {seed} {lr}"
            return self.cells.get(key, lambda: [trained(self.config(kind, seed, lr, operations=operations))])[0]

        best = min(RATES, key=lambda lr: figure(0, lr))
        return f"{shown([figure(seed, best) for seed in range(self.seeds)])} | {best:g}"

    def row(self, kind: str) -> str:
        tokens = GptTask(self.config(kind, 0, RATES[0])).tokens
        file = tokens.files["target", "train"]
        density = tokens.bytes["target", "train"] / (len(file) - 2 * file.num_documents)
        before = shown([untrained(self.config(kind, seed, RATES[0])) for seed in range(self.seeds)])
        budgets = (False,) if KINDS[kind][0] is None else (False, True)
        after = " | ".join(self.after(kind, operations=operations) for operations in budgets)
        return f"| {kind} | {density:.2f} | {before} | {after} |"


def shown(values: list[float]) -> str:
    error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else math.nan
    return f"{np.mean(values):.3f} ± {error:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--cells", type=Path, help="keeps each training's figures, so that a stopped bench goes on")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory), options.tokens, options.seeds, Cells(options.cells))
        text = text_of("target")
        assert text.nats is not None
        print(f"the source itself: {text.nats / math.log(2) / text.bytes:.3f} bits per byte")
        print("| model | bytes per token | before | after, equal bytes | rate | after, equal operations | rate |")
        print("|---|---|---|---|---|---|---|")
        for kind in KINDS:
            print(bench.row(kind), flush=True)


if __name__ == "__main__":
    main()
