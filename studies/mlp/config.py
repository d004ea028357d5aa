"""Configures the mlp study. Torch-free."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainer.config import CheckpointConfig, Frozen, TrainConfig


class DataConfig(Frozen):
    """scikit-learn's digits: 1797 images of 8 x 8 pixels, ten classes.

    `split_seed` draws the split, see `data.py`; `test` also measures test/..., by which nothing may be selected.
    """

    split_seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    test: bool = False


class ModelConfig(Frozen):
    """A model of `num_layers` hidden layers of `hidden_size` units."""

    hidden_size: Annotated[int, Field(ge=1)] = 64
    num_layers: Annotated[int, Field(ge=1)] = 1
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1


class Config(Frozen):
    """The whole configuration of the study."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig(checkpoint=CheckpointConfig(monitor="val/accuracy", mode="max"))
