"""What `hpo export` wrote, read again; and adapters from it as plain peft loads them. Torch-free until called.

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
    """(the configuration of the trial, the weights) in a file of `--format safetensors`. Raises DataError."""
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
    """A directory to write a model into. Raises DataError where something lies there, which may be what was trained
    from."""
    place = Path(directory)
    if place.is_dir() and any(place.iterdir()):
        raise DataError(f"{directory} is not empty, and nothing in it is overwritten: name a new directory.")
    return place


def save_adapter(file: str, directory: str) -> None:
    """Write the adapters of an exported model, as `PeftModel.from_pretrained` reads them, into a new directory."""
    from studies._lm.adapter import adapted

    config, weights = exported(file)
    if "rank" not in config.get("model", {}):
        raise DataError(f"{file} holds no adapters: export a trial of the study lora or dpo.")
    if config.get("loss", {}).get("name") == "reward":
        raise DataError(
            f"{file} is a reward model, whose head peft does not know: open it by hpo.load(...).load_model."
        )
    model: Any = adapted(ModelConfig.model_validate(config["model"]))
    model.load_state_dict(weights)
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
