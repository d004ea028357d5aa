"""`train.lanes`: trials that train as lanes of one model, and what may differ between them. Torch-free."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.config import TrainConfig

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
        part: Any = common
        for parent in parents:
            part = part.get(parent, {}) if isinstance(part, Mapping) else {}
        if isinstance(part, dict):
            part.pop(last, None)
    return common


def contradiction(config: TrainConfig) -> str | None:
    """What of the configuration lanes cannot do, as `field=value`."""
    c = config
    alone = {
        f"parallel, {c.parallel.ranks} ranks": c.parallel.ranks > 1,
        f"folds={c.folds}": c.folds > 1,
        "compile=true": c.compile,
        f"precision={c.precision}": c.precision in ("fp16", "fp8"),
        f"num_workers={c.num_workers}": c.num_workers != 0,
        f"num_threads={c.num_threads}": c.num_threads > 1,  # where threads meet depends on the number of lanes
        "batch_growth": bool(c.batch_growth.epochs),
        f"micro_batch_size={c.micro_batch_size}": c.micro_batch_size == "auto",
        "memory_limit": c.memory_limit is not None,
        f"optim.name={c.optim.name}": c.optim.name == "sophia",
        f"optim.wrap={c.optim.wrap}": c.optim.wrap == "sam",
        f"activations.checkpoint={c.activations.checkpoint}": c.activations.checkpoint != "none",
        f"activations.offload={c.activations.offload}": c.activations.offload != "none",
        "gradients.penalty": c.gradients.penalty is not None,
        "gradients.noise_scale": c.gradients.noise_scale,
        "rollback.enabled": c.rollback.enabled,
        "checkpoint.asynchronous": c.checkpoint.asynchronous,
    }
    return next((name for name, found in alone.items() if found), None)
