"""ATFT-GAT-FAN: ranks the stocks of a day by future return, on a synthetic market with a known ceiling or a file."""

from hpo import Choice, Float, Int, Objective, Study
from studies.atft.config import Config

STUDY = Study(
    name="atft",
    config=Config(),
    task="studies.atft.task:AtftTask",
    check="studies.atft.panel:check",
    space={
        "train.optim.lr": Float(2e-4, 1e-2, log=True),
        "train.batch_size": Int(1, 4, powers_of_two=True),
        "model.hidden_size": Int(16, 64, powers_of_two=True),
        "model.dropout": Float(0.0, 0.5, tier=2),
        "model.num_heads": Choice([1, 2, 4], tier=2),
        "model.num_layers": Int(1, 3, tier=2),
        "model.num_frequencies": Int(0, 5, tier=2),
        "loss.scale.rank_ic": Float(0.3, 3.0, log=True, tier=3),
        "loss.scale.cs_ic": Float(0.3, 3.0, log=True, tier=3),
        "loss.scale.sharpe": Float(0.3, 3.0, log=True, tier=3),
        "train.schedule.warmup_ratio": Float(0.0, 0.3, tier=3),
        "train.clip.norm": Float(0.3, 3.0, log=True, tier=3),
    },
    # The epoch with the best RankIC is the one whose checkpoint is kept, so it is the one a trial is judged by.
    objectives=[Objective("val/rank_ic_5d", "maximize", select="best")],
    metrics=("train/*", "val/*", "test/*"),
    presets={
        "full": {
            "data.market.num_days": 1500,
            "data.market.num_stocks": 300,
            "data.max_stocks": 0,
            "data.split.val_days": 250,
            "data.split.test_days": 150,
            "model.hidden_size": 256,
            "model.num_heads": 8,
            "model.num_layers": 3,
            "train.num_epochs": 30,
            "train.early_stopping.monitor": "val/rank_ic_5d",
            "train.early_stopping.mode": "max",
            "train.early_stopping.patience": 8,
        }
    },
    data_paths=("data.path",),
    hold_out={"data.split.test": True},
    sampler="tpe",
    strategy="asha",
)
