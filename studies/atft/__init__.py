"""ATFT-GAT-FAN: ranks the stocks of a day by future return, on a synthetic market with a known ceiling or a file."""

from hpo import Choice, Float, Int, Objective, Study
from studies.atft.config import READ_WHEN, Config

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
        "model.temporal": Choice(["convolution", "lstm"], tier=2),
        "model.selection": Choice(["softmax", "sigmoid", "none"], tier=2),
        "train.optim.name": Choice(["adamw", "lion"], tier=2),
        "train.optim.weight_decay": Float(1e-3, 0.3, log=True, tier=2),
        "train.schedule.name": Choice(["cosine", "one_cycle", "wsd"], tier=2),
        "loss.point": Choice(["mse", "huber", "quantile"], tier=3),
        "loss.tau": Float(0.05, 0.5, log=True, tier=3),
        "loss.scale.rank_ic": Float(0.3, 3.0, log=True, tier=3),
        "loss.scale.cs_ic": Float(0.3, 3.0, log=True, tier=3),
        "loss.scale.sharpe": Float(0.1, 10.0, log=True, tier=3),
        "loss.horizon_weights.1": Float(0.1, 3.0, log=True, tier=3),
        "loss.horizon_weights.10": Float(0.1, 3.0, log=True, tier=3),
        "loss.horizon_weights.20": Float(0.1, 3.0, log=True, tier=3),
        "train.schedule.warmup_ratio": Float(0.0, 0.3, tier=3),
        "train.clip.norm": Float(0.3, 3.0, log=True, tier=3),
        "train.average.name": Choice(["none", "ema"], tier=3),
    },
    # The checkpoint of the epoch with the best RankIC is kept, so trials are judged by that epoch.
    objectives=[Objective("val/rank_ic_5d", "maximize", select="best")],
    metrics=("val/oracle_ratio_5d", "train/*", "val/loss", "val/suspected_leaks", "val/*_[0-9]*d", "test/*"),
    presets={
        # Three blocks of 80 days judge a trial, which trains on the 290 days before each: on a third of all days.
        "folds": {"train.folds": 3, "data.split.val_days": 80, "data.split.train_days": 290},
        "small": {
            "data.market.num_days": 460,
            "data.market.num_stocks": 24,
            "data.split.val_days": 60,
            "data.split.test_days": 40,
        },
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
        },
        "phases": {"loss.phase": "schedule", "train.num_epochs": 8},
        "plateau": {
            "train.num_epochs": 20,
            "train.schedule.name": "plateau",
            "train.schedule.plateau.monitor": "val/rank_ic_5d",
            "train.schedule.plateau.mode": "max",
            "train.schedule.plateau.patience": 2,
            "train.early_stopping.monitor": "val/rank_ic_5d",
            "train.early_stopping.mode": "max",
            "train.early_stopping.patience": 6,
        },
    },
    search_preset="folds",
    data_paths=("data.path",),
    hold_out={"data.split.test": True},
    # The last three blocks of validation days select a trial, or the last one does without a preset. By `5x3folds` the
    # first three of six confirm it, which select nothing and have all days before them to train on.
    folds=[
        {"train.folds": 1, "data.split.num_folds": 6, "data.split.fold": fold, "data.split.train_days": 0}
        for fold in range(3)
    ],
    confirm="5x3",
    read_when=READ_WHEN,
    sampler="tpe",
    strategy={"name": "asha", "min_epochs": 1},  # of four epochs
)
