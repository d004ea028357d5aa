"""The quickstart: a multilayer perceptron on scikit-learn's digits; a trial takes about a second on one core."""

from hpo import Choice, Float, Int, Objective, Study
from studies.mlp.config import Config

STUDY = Study(
    name="mlp",
    config=Config(),
    task="studies.mlp.task:MlpTask",
    space={
        "train.optim.name": Choice(["adamw", "sgd"]),
        "train.optim.lr": Float(1e-4, 1e-1, log=True),
        "train.optim.momentum": Float(0.0, 0.99, when={"train.optim.name": "sgd"}, tier=2),
        "train.batch_size": Int(16, 256, powers_of_two=True),
        "model.hidden_size": Int(16, 256, powers_of_two=True),
        "model.num_layers": Int(1, 3, tier=2),
        "model.dropout": Float(0.0, 0.5, tier=2),
    },
    objectives=[Objective("val/accuracy", "maximize")],
    metrics=("train/loss", "val/*", "test/*"),
    hold_out={"data.test": True},
    presets={"full": {"train.num_epochs": 50}},
)
