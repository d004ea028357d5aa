"""Holds `train.lanes`: trials that train as lanes of one model, and the fields in which they may differ. Torch-free."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from trainer.report import Json

LANES = "train.lanes"

# All other fields are the same for all lanes: they decide what is computed, and these only the numbers in it.
LANE_FIELDS = (
    "train.seed",
    "train.num_epochs",
    "train.optim.lr",
    "train.optim.weight_decay",
    "train.optim.momentum",
    "train.optim.betas",
    "train.optim.beta1",
    "train.optim.beta2",
    "train.optim.eps",
    "train.optim.layer_decay",
    "train.schedule",
    "train.clip.norm",
    "train.clip.value",
    "train.early_stopping",
)


def shared(config: Mapping[str, Any], fields: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns the part of a whole JSON configuration that trials must have in common to train together.

    They may differ in `fields` as well as in LANE_FIELDS.
    """
    common = copy.deepcopy(dict(config))
    for path in (*LANE_FIELDS, *fields):
        *parents, last = path.split(".")
        part: Json = common
        for parent in parents:
            part = part.get(parent, {}) if isinstance(part, Mapping) else {}
        if isinstance(part, dict):
            part.pop(last, None)
    return common
