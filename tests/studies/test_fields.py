"""Every field of every bundled study, away from its default, changes a trial, is refused, or is listed.

The section `train` is probed in tests/trainer/config/test_idle.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from trainer_runs import MemoryReporter

from hpo import load
from hpo.declaration import preflight
from hpo.declaration.bundled import BUNDLED
from hpo.driver.request import request_of
from hpo.driver.resolve import declare
from hpo.errors import HpoError
from hpo.space.config import as_json, flatten
from hpo.storage.home import Home
from trainer.checkpoint.store import CheckpointStore
from trainer.errors import TrainerError
from trainer.loop import fit

pytestmark = pytest.mark.whole

# What makes a trial small, and a value of each field away from that, of a trial that would show it.
SMALL: dict[str, dict[str, Any]] = {
    "mlp": {"train.num_epochs": 1, "model.hidden_size": 8},
    "convnet": {
        "data.pictures.num_train": 32, "data.pictures.size": 8, "data.num_val": 20, "model.width": 8,
        "train.num_epochs": 1, "train.batch_size": 16,
    },
    "gpt": {
        "data.corpus.general": 60, "data.corpus.target": 30, "model.hidden_size": 16, "model.num_heads": 2,
        "model.num_kv_heads": 2, "model.num_layers": 1, "train.num_epochs": 1, "samples.tokens": 8,
    },
    **{
        name: {
            "data.corpus.general": 60, "data.corpus.target": 80, "model.hidden_size": 16, "model.num_heads": 2,
            "model.num_layers": 1, "train.num_epochs": 1,
        }
        for name in ("bert", "t5")
    },
    "lora": {"data.generated": 40, "train.num_epochs": 1, "model.rank": 2},
    "dpo": {
        "data.generated": 40, "train.num_epochs": 1, "model.rank": 2, "evaluation.prompts": 4,
        "evaluation.max_new_tokens": 4,
    },
    "online": {
        "data.prompts": 40, "evaluation.prompts": 8, "reward.pairs": 40, "reward.epochs": 2, "rollout.answers": 32,
        "train.batch_size": 16, "train.num_epochs": 1,
    },
    "atft": {
        "data.market.num_days": 280, "data.market.num_stocks": 24, "data.market.snr": 0.6, "data.split.val_days": 40,
        "data.split.test_days": 20, "data.split.min_train_days": 40, "data.min_stocks": 10, "model.hidden_size": 8,
        "model.num_heads": 2, "train.num_epochs": 1,
    },
}  # fmt: skip
_RECORDS = {
    "data.path": "/nonexistent", "data.generated": 50, "data.val_share": 0.3, "data.max_length": 17,
    "data.template": "{prompt} {response}", "data.seed": 1, "data.split": "train", "model.path": "/nonexistent",
    "model.tokenizer": "bytes", "model.base": "bf16", "model.rank": 4, "model.alpha": 1.0, "model.dropout": 0.5,
    "model.base_dropout": 0.5, "model.layers": 1, "model.modules": ("q_proj",),
}  # fmt: skip
_TEXTS = {
    "data.path": "/nonexistent", "data.general_path": "/nonexistent", "data.column": "body", "data.separator": "\n",
    "data.tokenizer": "bpe", "data.vocab_size": 300, "data.tokenizer_file": "/nonexistent", "data.end_token": "</s>",
    "data.block_size": 24, "data.held_out": 0.1, "data.test": True, "data.seed": 1, "data.corpus.general": 70,
    "data.corpus.target": 90, "data.corpus.num_words": 12, "data.corpus.successors": 3, "data.cache": "elsewhere",
    "data.corpus.words": 9, "data.corpus.keys": 2, "data.split": "train", "data.tiktoken_pattern": "gpt2",
}  # fmt: skip
PROBES: dict[str, dict[str, Any]] = {
    "mlp": {
        "data.split_seed": 1, "data.test": True, "model.hidden_size": 16, "model.num_layers": 2, "model.dropout": 0.5
    },
    "convnet": {
        "data.path": "/nonexistent", "data.image_size": 16, "data.pictures.num_train": 48, "data.pictures.size": 9,
        "data.pictures.noise": 0.5, "data.pictures.mislabelled": 0.5, "data.num_val": 30, "data.limit": 10,
        "data.seed": 1, "data.test": True, "model.width": 12, "model.num_blocks": 2, "model.dropout": 0.5,
        "model.channels_last": False, "loss.name": "focal", "loss.label_smoothing": 0.1, "loss.gamma": 3.0,
        "augment.flip": False, "augment.crop": 0, "augment.erase": 0.5, "augment.mixup": 0.5,
    },
    "gpt": {
        "data.path": "/nonexistent", "data.general_path": "/nonexistent", "data.column": "body",
        "data.separator": "\n", "data.tokenizer": "bpe", "data.vocab_size": 300, "data.tokenizer_file": "/nonexistent",
        "data.end_token": "</s>", "data.block_size": 160, "data.phases": [{"start": 0.0, "target": 0.9}],
        "data.tokens_per_parameter": 0.5, "data.held_out": 0.1, "data.test": True, "data.seed": 1,
        "data.corpus.general": 70, "data.corpus.target": 40, "data.corpus.num_words": 12,
        "data.corpus.successors": 3, "data.cache": "elsewhere", "model.hidden_size": 32, "model.num_layers": 2,
        "model.num_heads": 4, "model.num_kv_heads": 1, "model.mlp_size": 16, "model.rope_theta": 10.0,
        "model.norm_eps": 0.1, "model.tie": False, "model.weights": "/nonexistent", "samples.prompts": ("a",),
        "samples.tokens": 4, "samples.temperature": 0.0, "model.moe.experts": 4, "model.moe.top_k": 1,
        "model.moe.capacity": 0.5, "model.moe.shared": 1, "model.moe.balance": 1.0, "model.moe.z_loss": 1.0,
        "model.position.kind": "alibi", "model.position.scaling": "ntk", "model.position.trained": 64,
        "model.position.window": 3, "model.position.sinks": 2, "model.activation": "geglu", "data.by_position": True,
        "data.corpus.words": 9, "data.corpus.keys": 2, "data.split": "train", "data.tiktoken_pattern": "gpt2",
    },
    "bert": {
        **_TEXTS, "masks.share": 0.4, "masks.unit": "token", "model.hidden_size": 32, "model.num_layers": 2,
        "model.num_heads": 4, "model.mlp_size": 16, "model.positions": 40, "model.norm_eps": 0.1, "model.dropout": 0.5,
        "model.weights": "/nonexistent", "samples": 1,
    },
    "t5": {
        **_TEXTS, "spans.share": 0.4, "spans.mean": 1.0, "model.hidden_size": 32, "model.num_layers": 2,
        "model.num_heads": 4, "model.head_size": 4, "model.mlp_size": 16, "model.activation": "relu",
        "model.norm_eps": 0.1, "model.dropout": 0.5, "model.tie": False, "model.weights": "/nonexistent", "samples": 1,
    },
    "lora": {**_RECORDS, "data.columns": ("a", "b"), "loss.contrastive": 0.5, "loss.temperature": 0.9},
    "dpo": {
        **_RECORDS, "data.max_length": 9, "data.columns": ("a", "b", "c"),
        "loss.name": "ipo", "loss.beta": 0.5, "loss.label_smoothing": 0.2, "evaluation.prompts": 2,
        "evaluation.max_new_tokens": 2, "evaluation.best_of": 4, "evaluation.beta": 0.9, "evaluation.most_kl": 1.0,
    },
    "online": {
        "method": "grpo", "data.prompts": 30, "data.seed": 1, "model.rank": 4, "model.alpha": 1.0, "reward.pairs": 50,
        "reward.members": 2, "reward.combine": "min", "reward.caution": 2.0, "reward.hidden_size": 8,
        "reward.epochs": 3, "reward.lr": 0.1, "rollout.answers": 48, "rollout.steps": 1, "rollout.group_size": 2,
        "rollout.max_new_tokens": 4, "rollout.temperature": 0.5, "loss.beta": 0.5, "loss.target_kl": 0.1,
        "loss.clip": 1e-6, "loss.value_weight": 1.0, "loss.value_clip": 1e-6, "loss.discount": 0.5, "loss.trace": 0.5,
        "evaluation.prompts": 10,
    },
    "atft": {
        "data.path": "/nonexistent", "data.features": ("flow",), "data.seed": 1, "data.market.num_days": 300,
        "data.market.num_stocks": 30, "data.market.snr": 0.3, "data.graph.window": 50,
        "data.graph.min_observations": 20, "data.graph.min_correlation": 0.6, "data.graph.top_k": 3,
        "data.graph.refresh": 9, "data.split.val_days": 30, "data.split.test_days": 25, "data.split.purge": 25,
        "data.split.embargo": 20, "data.split.num_folds": 2, "data.split.fold": 0, "data.split.min_train_days": 500,
        "data.split.test": True, "data.lookback": 12, "data.horizons": (1, 5), "data.target": "rank_normal",
        "data.winsor": 0.1, "data.max_stocks": 12, "data.min_stocks": 12, "data.block_days": 8,
        "data.control": "shuffled", "model.hidden_size": 16, "model.num_heads": 4, "model.num_layers": 1,
        "model.dropout": 0.6, "model.num_frequencies": 1, "model.num_filters": 2, "model.main_layers": 2,
        "model.graph": False, "model.temporal": "lstm", "model.selection": "none", "model.attention": False,
        "loss.phase": "2", "loss.scale.mse": 0.5, "loss.scale.rank_ic": 0.5, "loss.scale.cs_ic": 0.5,
        "loss.scale.sharpe": 0.5, "loss.point": "huber", "loss.tau": 0.9, "loss.horizon_weights": {"1": 0.1},
        **{
            f"phases.{name}.{field}": value
            for name in "1234"
            for field, value in {
                "epochs": 2.0, "lr": 0.5, "graph": name == "1", "fan": name in "12", "weights.mse": 0.3,
                "weights.rank_ic": 0.7, "weights.cs_ic": 0.7, "weights.sharpe": 0.7,
            }.items()
        },
        "evaluation.cost": 0.1, "evaluation.max_undefined": 0.0,
    },
}  # fmt: skip
# Fields that change how a trial goes, or when it fails, and none of its numbers.
UNSEEN = {
    "convnet": {"model.channels_last": "how images lie in memory: the same numbers but for rounding"},
    **{name: {"data.cache": "where tokens lie"} for name in ("bert", "gpt", "t5")},
    "lora": {},
    "dpo": {},
    "online": {},
    "mlp": {},
    "atft": {
        "data.split.embargo": "less than the purge, which is longer",
        "data.split.num_folds": "the folds before the last one; `fold` says which is trained",
        "data.split.fold": "0 is the only fold",
        "evaluation.max_undefined": "fails a trial of which too little can be judged",
    },
}
HEAVY = ("gpt", "bert", "t5", "lora", "dpo", "online", "atft")


def studies(names: tuple[str, ...] | list[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in HEAVY else name for name in names]


def record(name: str, directory: Path, change: Mapping[str, Any]) -> str:
    """The digest of whatever a trial leaves: its values but for clocks, what it writes, and its weights."""
    study = load(name).configure({**SMALL[name], **change})
    study.check_data()
    task, reporter = study.task_class()(study.config), MemoryReporter()
    fit(task, study.config.train, reporter, CheckpointStore(directory, fence=1))
    timed = ("time/", "system/")
    values = [
        item for item in reporter.values.items() if not item[0][1].startswith(timed) and "per_sec" not in item[0][1]
    ]
    weights = sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in directory.rglob("*.safetensors"))
    return repr((sorted(values), reporter.artifacts, weights))


def fields(name: str) -> list[str]:
    config = load(name).config
    return [path for path in flatten(as_json(config)) if not path.startswith("train.")]


@pytest.mark.parametrize("name", BUNDLED)
def test_every_field_is_probed(name):
    probed = {*PROBES[name]}
    assert {path for path in fields(name) if path not in probed} == set()
    assert UNSEEN[name].keys() <= probed


@pytest.mark.parametrize("name", studies([*BUNDLED]))
def test_no_field_is_ignored_in_silence(name, tmp_path):
    default = record(name, tmp_path / "default", {})
    assert record(name, tmp_path / "again", {}) == default, "else each field would seem to be read"
    silent: list[str] = []
    for place, (path, value) in enumerate(PROBES[name].items()):
        if path in UNSEEN[name]:
            continue
        study = load(name)
        try:
            configured = study.configure({**SMALL[name], path: value})
            values = flatten(as_json(configured.config))
            named = bool(preflight.unread([path], values, study.read_when))
            seen = record(name, tmp_path / str(place), {path: value}) != default
        except (HpoError, TrainerError):
            continue  # one sentence
        if seen == named:
            silent.append(f"{path} is {'said not to be read, and it is' if seen else 'ignored in silence'}")
    assert silent == []


def refused(name: str, overrides: Mapping[str, Any], home: Path) -> str:
    """The sentence by which `-o` of these is refused before a study is written; empty where it is not."""
    resolved = declare(request_of(Home(home), reference=name, overrides=overrides, one_by_one=[*overrides]), None, 1)
    try:
        preflight.check(resolved, options=[*overrides])
        resolved.study.check_data()
    except (HpoError, TrainerError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "overrides", "sentence"),
    [
        (
            "convnet", {"data.limit": 5},
            "data.limit=5 is read only with data.path != None, and data.path is None here: change that, or leave "
            "data.limit out.",
        ),
        ("gpt", {"data.column": "body"}, "data.column='body' is read only with data.path != ''"),
        ("gpt", {"data.end_token": "</s>"}, "data.end_token='</s>' is read only with data.tokenizer_file != ''"),
        ("gpt", {"data.separator": "\n"}, "data.separator='\\n' is read only with data.path != ''"),
        ("gpt", {"data.held_out": 0.1}, "data.held_out=0.1 is read only with data.path != ''"),
        (
            "lora", {"loss.contrastive": 0.0},
            "the search varies loss.temperature, which is read only with loss.contrastive > 0, and loss.contrastive is "
            "0.0 here: change that, or pin it by -o loss.temperature=0.1.",
        ),
        ("lora", {"model.modules": "q_proj,k_porj"}, "model.modules=k_porj names no linear layers of the model"),
        ("dpo", {"evaluation.best_of": 4}, "evaluation.best_of=4 is read only with loss.name == 'reward'"),
        ("dpo", {"loss.name": "reward", "evaluation.beta": 0.3}, "evaluation.beta=0.3 is read only with loss.name !="),
        ("atft", {"model.num_frequencies": 0, "model.main_layers": 2}, "model.main_layers=2 is read only with"),
        ("atft", {"model.graph": False, "data.graph.top_k": 3},
            "data.graph.top_k=3 is not read with model.graph=False"),
        ("atft", {"phases.1.lr": 0.5}, "phases.1.lr=0.5 is read only with loss.phase in ('1', 'schedule'), and"),
        ("atft", {"loss.phase": "1"}, "the search varies loss.scale.cs_ic, which is not read with loss.phase='1': "
            "change that, or pin it by -o loss.scale.cs_ic=1.0."),
    ],
)  # fmt: skip
def test_an_option_or_dimension_that_nothing_reads_is_refused(name, overrides, sentence, tmp_path):
    assert refused(name, overrides, tmp_path).startswith(sentence)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        (
            "atft",
            {"loss.phase": "1", "loss.tau": 0.2}
            | dict.fromkeys(["loss.scale.rank_ic", "loss.scale.cs_ic", "loss.scale.sharpe"], 1.0),
        ),
        ("lora", {"loss.contrastive": 0.0, "loss.temperature": 0.1}),
        ("atft", {"model.main_layers": 2}),  # num_frequencies is searched, from 0
        ("dpo", {"preset": "reward"}),
        ("convnet", {"preset": "cifar"}),
    ],
)  # fmt: skip
def test_what_a_trial_reads_and_what_is_pinned_is_not_refused(name, overrides, tmp_path):
    assert refused(name, overrides, tmp_path) == ""
