"""Small runs of the bundled studies, and the study of the recorded home that was interrupted, resumed to its end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import home_asset
from driven import driven
from golden_task import MACHINES

from hpo.declaration import identity
from hpo.driver.request import request_of
from hpo.ledger import Ledger, queries
from hpo.storage.home import Home

LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 256}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.1}

# study -> the trials it runs and what it overrides; PATH is the directory of a tiny language model.
SMALL: dict[str, tuple[int, dict[str, Any]]] = {
    "mlp": (3, {"train.num_epochs": 2, "data.test": True}),
    "convnet": (
        3,
        {
            "data.pictures.num_train": 80,
            "data.pictures.size": 8,
            "data.test": True,
            "train.num_epochs": 2,
        },
    ),
    "atft": (
        2,
        {
            "preset": "none",  # a search of three folds has too few days here
            "data.market.num_days": 220,
            "data.market.num_stocks": 24,
            "data.split.val_days": 20,
            "data.split.test_days": 20,
            "data.split.min_train_days": 20,
            "data.min_stocks": 10,
            "model.num_layers": 1,
            "train.num_epochs": 1,
        },
    ),
    "gpt": (2, {"data.corpus.general": 60, "data.corpus.target": 30, "samples.tokens": 0, "train.num_epochs": 2}),
    "lora": (2, {"model.path": "PATH", "model.tokenizer": "bytes", "data.generated": 60, "train.num_epochs": 2}),
    "dpo": (
        3,
        {
            "model.path": "PATH",
            "model.tokenizer": "bytes",
            "data.generated": 40,
            "evaluation.prompts": 4,
            "evaluation.best_of": 4,
            "train.num_epochs": 1,
        },
    ),
    "online": (
        3,
        {
            "data.prompts": 40,
            "evaluation.prompts": 16,
            "reward.pairs": 40,
            "reward.epochs": 2,
            "rollout.answers": 32,
            "train.batch_size": 16,
            "train.num_epochs": 1,
        },
    ),
    "bert": (2, {"data.corpus.general": 60, "data.corpus.target": 80, "samples": 0, "train.num_epochs": 2}),
    "t5": (2, {"data.corpus.general": 60, "data.corpus.target": 80, "samples": 0, "train.num_epochs": 2}),
}
LONG = ("lora", "dpo", "online")  # importing their libraries takes longer than all that the others do


def studies(ledger: Ledger, home: Home, *, every: bool) -> dict[str, Any]:
    """Returns file name -> digest and trials of a study, None for one that takes long unless `every` one is run; all
    that they write goes into the home."""
    runs = {name: every or name not in LONG for name in SMALL}
    return {
        f"studies/{name}.json": tried(lambda name=name: _run(ledger, home, name)) if wanted else None
        for name, wanted in runs.items()
    }


def tried(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what `run` gives, or how it fails, so that everything else is compared all the same."""
    try:
        return run()
    except Exception as error:
        return {"fails": f"{type(error).__name__}: {error}"}


def _run(ledger: Ledger, home: Home, name: str) -> dict[str, Any]:
    trials, overrides = SMALL[name]
    given = {path: str(_tiny_llama(home)) if value == "PATH" else value for path, value in overrides.items()}
    request = request_of(home, reference=name, sampler="random", overrides=given)
    _, state = driven(ledger, request, trials=trials)
    assert state == "complete", f"study {name} is {state}"
    return told(ledger, name)


def _tiny_llama(home: Home) -> Path:
    """Returns the directory of a language model whose weights are drawn, which is saved there the first time."""
    directory = home.root / "llama"
    if not directory.exists():
        import torch

        from studies._lm import base  # before transformers, whose import it keeps quiet

        assert base
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(vocab_size=257, **LLAMA, **HEADS)).save_pretrained(directory)
    return directory


def told(ledger: Ledger, name: str) -> dict[str, Any]:
    """Returns the digest of a study, and of each trial its state, its parameters and every metric that a task or the
    trainer reports, with all digits."""
    with ledger.read() as connection:
        study = queries.study_row(connection, name)
        rows = queries.trial_rows(connection, study.id)
        trials: list[dict[str, Any]] = [
            {"state": row.state, "params": dict(sorted(row.params.items())), "metrics": {}} for row in rows
        ]
        for number, key, _, _, value in sorted(queries.curves(connection, study.id)):
            if not any(fnmatchcase(key, pattern) for pattern in MACHINES):
                trials[number]["metrics"].setdefault(key, []).append(value)
        return {"digest": queries.digest(connection, study), "trials": trials}


def resumed(place: Path) -> dict[str, Any]:
    """Returns the digest of the interrupted study of the recorded home once it is resumed to its end, in `place`."""
    return tried(lambda: {"digest": _resumed(Home(home_asset.unpacked(place)))})


def _resumed(home: Home) -> str:
    identity._modified = dict  # it is this run that shows whether modified code behaves as was recorded
    with closing(Ledger(home.storage, create=False, upgrade=True)) as ledger:
        name, state = driven(ledger, request_of(home, name=home_asset.INTERRUPTED))
        assert state == "complete", f"study {name} is {state}"
        with ledger.read() as connection:
            return queries.digest(connection, queries.study_row(connection, name))
