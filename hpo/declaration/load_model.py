"""Loads a model from a checkpoint directory of any origin. Weights are safetensors: nothing is unpickled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from hpo.errors import UserError
from trainer.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn

_CONFIG = "config.json"


def load_model(
    name: str, task_class: Callable[[], type], directory: Path, config: BaseModel | Callable[[Any, str], BaseModel]
) -> nn.Module:
    """Returns the model in `directory` of a study called `name`; see `Study.load_model`.

    `config` is the trial's configuration, or a function that builds it from the stored JSON and its hash.
    """
    task = task_class()
    from trainer.checkpoint import files
    from trainer.checkpoint.manifest import Damaged
    from trainer.task import built

    try:
        weights, manifest = files.read_model(directory)
        made = config if isinstance(config, BaseModel) else config(_stored(directory), manifest.get("config_hash", ""))
    except Damaged as damage:
        raise CheckpointError(f"checkpoint {directory} cannot be used: {damage}.") from damage
    model = built(task(made))
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"checkpoint {directory} holds another model than study {name!r}: {reason}") from error
    return model.eval()


def _stored(directory: Path) -> Any:
    """Returns the configuration beside the weights, as in an MLflow model, or two directories above, as in a run."""
    from trainer.checkpoint.manifest import json_in

    above = [directory.parent.parent] if directory.absolute().parent.name == "checkpoints" else []
    for folder in (directory, *above):
        if (folder / _CONFIG).exists():
            return json_in(folder, _CONFIG)
    raise UserError(f"{directory} has no config.json beside the weights: give load_model the trial's config.")
