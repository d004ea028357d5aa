"""A residual net on small images: generated ones whose class is a shape and its stripes, or CIFAR in a directory."""

from hpo import Choice, Float, Int, Objective, Study
from studies.convnet.config import Config

STUDY = Study(
    name="convnet",
    config=Config(),
    task="studies.convnet.task:ConvnetTask",
    check="studies.convnet.source:check",
    space={
        "train.optim.name": Choice(["sgd", "adamw"]),
        "train.optim.lr": Float(1e-3, 1.0, log=True),
        "train.optim.weight_decay": Float(1e-5, 1e-1, log=True),
        "train.schedule.name": Choice(["one_cycle", "cosine"]),
        "augment.mixup": Float(0.0, 1.0, tier=2),
        "loss.name": Choice(["cross_entropy", "focal"], tier=2),
        "loss.label_smoothing": Float(0.0, 0.2, when={"loss.name": "cross_entropy"}, tier=2),
        "train.optim.wrap": Choice(["none", "sam"], tier=2),
        "train.batch_size": Int(16, 128, powers_of_two=True, tier=2),
        "train.optim.sam.rho": Float(0.01, 0.5, log=True, when={"train.optim.wrap": "sam"}, tier=3),
        "train.optim.momentum": Float(0.8, 0.98, when={"train.optim.name": "sgd"}, tier=3),
        "loss.gamma": Float(0.5, 4.0, when={"loss.name": "focal"}, tier=3),
        "augment.erase": Float(0.0, 0.5, tier=3),
        "model.dropout": Float(0.0, 0.4, tier=3),
        "model.width": Choice([8, 12, 16], tier=3),
    },
    # The checkpoint of the epoch with the best accuracy is kept, so trials are judged by that epoch.
    objectives=[Objective("val/accuracy", "maximize", select="best")],
    metrics=("train/loss", "val/*", "test/*"),
    presets={
        "cifar": {
            "model.width": 16,
            "model.num_blocks": 3,
            "augment.crop": 4,
            "data.num_val": 5000,
            "train.num_epochs": 30,
            "train.batch_size": 128,
        }
    },
    data_paths=("data.path",),
    hold_out={"data.test": True},
    read_when={
        "data.pictures.*": "data.path == None",
        "data.limit": "data.path != None",
        "data.image_size": "data.path != None",
        "loss.gamma": "loss.name == 'focal'",
        "loss.label_smoothing": "loss.name == 'cross_entropy'",
    },
    enqueue=[
        {  # the defaults, so that the best trial is never worse
            "train.optim.name": "sgd",
            "train.optim.lr": 0.1,
            "train.optim.weight_decay": 5e-4,
            "train.schedule.name": "one_cycle",
            "augment.mixup": 0.0,
            "loss.name": "cross_entropy",
            "loss.label_smoothing": 0.0,
            "train.optim.wrap": "none",
            "train.batch_size": 32,
            "train.optim.momentum": 0.9,
            "augment.erase": 0.0,
            "model.dropout": 0.0,
            "model.width": 8,
        }
    ],
)
