"""Preference alignment of a language model by DPO, IPO or KTO on LoRA adapters, or a reward model for best-of-n."""

from hpo import Choice, Float, Int, Objective, Study
from studies.dpo.config import Config

STUDY = Study(
    name="dpo",
    config=Config(),
    task="studies.dpo.task:DpoTask",
    check="studies.dpo.check:check",
    space={
        "loss.name": Choice(["dpo", "ipo", "kto"]),
        "loss.beta": Float(0.02, 0.5, log=True),
        "train.optim.lr": Float(1e-4, 1e-2, log=True),
        "train.batch_size": Int(8, 32, powers_of_two=True, tier=2),
        "model.rank": Int(4, 64, powers_of_two=True, tier=2),
        "model.dropout": Float(0.0, 0.1, tier=2),
        "loss.label_smoothing": Float(0.0, 0.3, when={"loss.name": "dpo"}, tier=3),
        "train.schedule.warmup_ratio": Float(0.0, 0.2, tier=3),
    },
    objectives=[Objective("val/reward_accuracy", "maximize")],
    presets={
        # Scores answers instead of giving them, and is judged by what it picks: best-of-n.
        "reward": {"loss.name": "reward"},
        # A model of billions of parameters on one GPU.
        "large": {
            "model.base": "nf4",
            "model.rank": 16,
            "data.max_length": 1024,
            "loss.beta": 0.1,
            "train.optim.lr": 5e-7,
            "train.batch_size": 16,
            "train.micro_batch_size": 1,
            "train.num_epochs": 1,
            "train.activations.checkpoint": "full",
            "evaluation.max_new_tokens": 128,
        },
    },
    plan={
        "model.base": ["fp32", "bf16", "nf4"],
        "data.max_length": [2048, 1024, 512],
        "model.rank": [64, 16],
        "train.activations.checkpoint": ["none", "full"],
        "train.micro_batch_size": [16, 4, 1],
    },
    data_paths=("data.path", "model.path"),
)
