"""LoRA and QLoRA fine-tuning of a causal language model to instructions, with an optional contrastive loss."""

from hpo import Float, Int, Objective, Study
from studies._lm.config import PLAN, READ_WHEN
from studies.lora.config import Config

STUDY = Study(
    name="lora",
    config=Config(),
    task="studies.lora.task:LoraTask",
    check="studies.lora.config:check",
    space={
        "train.optim.lr": Float(1e-4, 1e-2, log=True),
        "train.batch_size": Int(8, 32, powers_of_two=True),
        "model.rank": Int(4, 64, powers_of_two=True),
        "model.dropout": Float(0.0, 0.1, tier=2),
        "loss.contrastive": Float(0.0, 0.5, tier=3),
        "loss.temperature": Float(0.05, 0.5, log=True, tier=3),
        "train.schedule.warmup_ratio": Float(0.0, 0.2, tier=3),
    },
    objectives=[Objective("val/loss", "minimize")],
    presets={
        # A model of billions of parameters on one GPU.
        "qlora": {
            "model.base": "nf4",
            "model.rank": 16,
            "data.max_length": 1024,
            "train.batch_size": 16,
            "train.micro_batch_size": 1,
            "train.optim.lr": 2e-4,
            "train.num_epochs": 3,
            "train.activations.checkpoint": "full",
        }
    },
    plan=PLAN,
    data_paths=("data.path", "model.path"),
    read_when={**READ_WHEN, "loss.temperature": "loss.contrastive > 0"},
)
