"""Reads the shape of a trial from its configuration: its last epoch, its folds, its lanes and its ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.config import ParallelConfig
from trainer.report import Json


@dataclass(frozen=True)
class TrialShape:
    """The shape of a trial by the section `train` of its whole configuration in JSON, or of its study's.

    `changes`, path -> value, take precedence over the configuration.
    """

    train: Mapping[str, Any]
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, config: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> TrialShape:
        train: Json = config.get("train")
        return cls(train if isinstance(train, Mapping) else {}, changes or {})

    @property
    def epochs(self) -> float:
        """Returns the last epoch of the trial, or infinity if its configuration does not set one.

        For a trial that trains several times, for folds or for seeds, each time counts as an epoch.
        """
        if self.parts != 1:
            return self.parts
        epochs = self.changes.get("train.num_epochs", self.train.get("num_epochs"))
        return epochs if isinstance(epochs, int) else math.inf

    @property
    def folds(self) -> int:
        return self.train.get("folds", 1)

    @property
    def seeds(self) -> int:
        return self.train.get("seeds", 1)

    @property
    def parts(self) -> int:
        """Returns how many times the trial trains from the beginning."""
        return self.folds * self.seeds

    @property
    def lanes(self) -> int:
        """Returns the number of lanes, 1 for a study that has not decided it."""
        lanes = self.train.get("lanes", 1)
        return lanes if isinstance(lanes, int) else 1

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig.model_validate(self.train.get("parallel", {}))

    @property
    def ranks(self) -> int:
        return self.parallel.ranks
