"""Reads files of `hpo export`, and saves adapters from them in peft's format. Torch-free until called.

hpo export 3 --study lora --to best.safetensors
python -m studies._lm.exported best.safetensors adapter
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from studies._lm.config import ModelConfig
from trainer.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor


def exported(file: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns (the configuration of the trial, the weights) of a file of `--format safetensors`. Raises DataError."""
    try:
        with safe_open(file, framework="pt") as opened:
            about = opened.metadata() or {}
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DataError(f"{file} cannot be read as safetensors ({error}).") from error
    if "config" not in about:
        raise DataError(f"{file} has no configuration: write it by `hpo export --format safetensors`.")
    return json.loads(about["config"]), weights


def vacant(directory: str) -> Path:
    """Returns a directory to write a model into.

    Raises DataError if it is not empty, since it may hold the model that was trained from.
    """
    path = Path(directory)
    if path.exists() and not path.is_dir():
        raise DataError(f"{directory} is a file: name a new directory.")
    if path.is_dir() and any(path.iterdir()):
        raise DataError(f"{directory} is not empty, and nothing in it is overwritten: name a new directory.")
    return path


def save_adapter(file: str, directory: str) -> None:
    """Writes the adapters of an exported model, as `PeftModel.from_pretrained` reads them, into a new directory."""
    from studies._lm.adapter import BASE, adapted

    config, weights = exported(file)
    if "rank" not in config.get("model", {}):
        raise DataError(f"{file} holds no adapters: export a trial of the study lora, dpo or online.")
    if config.get("loss", {}).get("name") == "reward":
        raise DataError(
            f"{file} is a reward model, whose head peft does not know: open it by hpo.load(...).load_model."
        )
    model: Any = adapted(ModelConfig.model_validate(config["model"]))
    if "method" in config:  # the study online: its model has the policy, and what trains that
        weights = {name: tensor for name, tensor in weights.items() if name.startswith(("policy.", BASE))}
    model.load_state_dict({name.removeprefix("policy."): tensor for name, tensor in weights.items()})
    model.save_pretrained(vacant(directory))


if __name__ == "__main__":
    try:
        if len(sys.argv) != 3:
            raise ConfigError("give FILE, which `hpo export` wrote, and the DIRECTORY to write to.")
        save_adapter(*sys.argv[1:])
        print(f"wrote {sys.argv[2]}")
    except (ConfigError, DataError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
