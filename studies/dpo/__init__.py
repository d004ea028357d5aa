"""Preference alignment of a language model by DPO, IPO or KTO on LoRA adapters, or a reward model for best-of-n."""

from hpo import Choice, Constraint, Float, Int, Objective, Study
from studies._lm.config import PLAN, READ_WHEN
from studies.dpo.config import Config

STUDY = Study(
    name="dpo",
    config=Config(),
    task="studies.dpo.task:DpoTask",
    check="studies.dpo.config:check",
    space={
        "loss.name": Choice(["dpo", "ipo", "kto"]),
        "loss.beta": Float(0.02, 0.5, log=True, when={"loss.name": ["dpo", "ipo", "kto"]}),
        "train.optim.lr": Float(1e-4, 1e-2, log=True),
        "train.batch_size": Int(8, 32, powers_of_two=True, tier=2),
        "model.rank": Int(4, 64, powers_of_two=True, tier=2),
        "model.dropout": Float(0.0, 0.1, tier=2),
        "loss.label_smoothing": Float(0.0, 0.3, when={"loss.name": "dpo"}, tier=3),
        "train.schedule.warmup_ratio": Float(0.0, 0.2, tier=3),
    },
    objectives=[Objective("val/loss", "minimize")],
    constraints=[Constraint("val/kl_share", upper=1.0)],
    presets={
        # Scores answers instead of giving them, and is judged by the ones it picks: best-of-n.
        "reward": {"loss.name": "reward"},
        # A model of billions of parameters on one GPU.
        "large": {
            "model.base": "nf4",
            "model.rank": 16,
            "data.max_length": 1024,
            "loss.name": "dpo",  # kto needs larger micro-batches
            "loss.beta": 0.1,
            "train.optim.lr": 5e-7,
            "train.batch_size": 16,
            "train.micro_batch_size": 1,
            "train.num_epochs": 1,
            "train.activations.checkpoint": "full",
            "evaluation.max_new_tokens": 128,
            "evaluation.most_kl": 20.0,
        },
    },
    plan=PLAN,
    data_paths=("data.path", "model.path"),
    read_when={
        **READ_WHEN,
        **dict.fromkeys(["loss.beta", "evaluation.beta"], "loss.name != 'reward'"),
        "loss.label_smoothing": "loss.name == 'dpo'",
        "evaluation.best_of": "loss.name == 'reward'",
    },
)
