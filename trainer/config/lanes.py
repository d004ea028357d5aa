"""`train.lanes`: trials that train as lanes of one model, and what may differ between them. Torch-free."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from trainer.report import Json

LANES = "train.lanes"

# Whatever else is the same for all lanes: it decides what is computed, and these only with which numbers.
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
    """Of a whole configuration, as JSON has it, what trials must have in common to train together; `fields` may differ
    as well as LANE_FIELDS."""
    common = copy.deepcopy(dict(config))
    for path in (*LANE_FIELDS, *fields):
        *parents, last = path.split(".")
        part: Json = common
        for parent in parents:
            part = part.get(parent, {}) if isinstance(part, Mapping) else {}
        if isinstance(part, dict):
            part.pop(last, None)
    return common
