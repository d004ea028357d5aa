"""Reads from a trial's configuration how it is trained: its last epoch, its folds, its lanes and its ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.config import ParallelConfig
from trainer.report import Json


@dataclass(frozen=True)
class TrialShape:
    """How a trial is trained, by the section `train` of its whole configuration in JSON, or by that of its study.

    `changes`, path -> value, go before the configuration.
    """

    train: Mapping[str, Any]
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, config: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> TrialShape:
        train: Json = config.get("train")
        return cls(train if isinstance(train, Mapping) else {}, changes or {})

    @property
    def epochs(self) -> float:
        """The epoch at which the trial ends at last; infinity where its configuration does not say. Of a trial that
        trains several times, for folds or for seeds, each time counts as an epoch."""
        if self.parts != 1:
            return self.parts
        found = self.changes.get("train.num_epochs", self.train.get("num_epochs"))
        return found if isinstance(found, int) else math.inf

    @property
    def folds(self) -> int:
        return self.train.get("folds", 1)

    @property
    def seeds(self) -> int:
        return self.train.get("seeds", 1)

    @property
    def parts(self) -> int:
        """How often the trial trains from the beginning."""
        return self.folds * self.seeds

    @property
    def lanes(self) -> int:
        """Of a study that has not settled its number, one."""
        lanes = self.train.get("lanes", 1)
        return lanes if isinstance(lanes, int) else 1

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig.model_validate(self.train.get("parallel", {}))

    @property
    def ranks(self) -> int:
        return self.parallel.ranks
