"""A model from a checkpoint, wherever the directory came from. Weights are safetensors: nothing is unpickled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from hpo.errors import UserError
from trainer.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn

    from hpo.study import Study

# In a model of MLflow's, and above `checkpoints/step-...` in the artifacts of a run.
_CONFIG = ("config.json", "../../config.json")


def load_model(study: Study, directory: Path, config: BaseModel | None = None) -> nn.Module:
    """See `Study.load_model`."""
    from trainer.checkpoint import files
    from trainer.manifest import Damaged

    try:
        weights, manifest = files.read_model(directory)
    except Damaged as damage:
        raise CheckpointError(f"checkpoint {directory} cannot be used: {damage}.") from damage
    task: Any = study.task_class()(_stored(study, directory, manifest) if config is None else config)
    model = task.model()
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"checkpoint {directory} holds another model than study {study.name!r}: {reason}"
        ) from error
    return model.eval()


def _stored(study: Study, directory: Path, manifest: dict[str, Any]) -> BaseModel:
    for name in _CONFIG:
        if (file := directory / name).is_file():
            return study.rebuild(json.loads(file.read_text(encoding="utf-8")), manifest["config_hash"])
    raise UserError(f"there is no config.json beside the weights in {directory}: give load_model the trial's config.")
