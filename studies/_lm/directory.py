"""Reads and writes models in Hugging Face's format, config.json and *.safetensors, without transformers.

Torch-free until weights are touched.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from safetensors import SafetensorError

from trainer.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor, nn


@contextmanager
def fields_of(directory: str | Path, kind: str, name: str = "config.json") -> Iterator[dict[str, Any]]:
    """Yields the fields of a file of JSON.

    Raises DataError if it cannot be read, or if the block finds that it is not the configuration of `kind`, such as
    "a Llama", by the lack of a field or by its value.
    """
    file = Path(directory) / name
    try:
        yield json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}): give a directory of Hugging Face's.") from error
    except ValidationError as error:
        reasons = "; ".join(
            ": ".join([*map(str, at["loc"]), at["msg"].removeprefix("Value error, ")]) for at in error.errors()
        )
        raise DataError(f"{file} is not the configuration of {kind} ({reasons}).") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DataError(f"{file} is not the configuration of {kind} ({error!r}).") from error


def compare(ours: Mapping[str, Any], theirs: Mapping[str, Any], directory: str, module: str) -> None:
    """Raises DataError for the first setting that differs between a run's and those of a directory.

    `python -m MODULE show DIRECTORY` prints the directory's.
    """
    for name, value in ours.items():
        if value != theirs[name]:
            raise DataError(
                f"{name} is {value} and model.weights ({directory}) has {theirs[name]}: {_remedy(directory, module)}"
            )


def settings(sizes: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Returns what weights must agree in with a model of `sizes`, by its path in the configuration."""
    agreed = {f"model.{name}": value for name, value in sizes.items() if name != "dropout"}
    return agreed | {"data.vocab_size": vocab_size}


def start_options(directory: str | Path, settings: Mapping[str, Any]) -> list[str]:
    """Returns `-o NAME=VALUE` for settings, for the weights in a directory and for its tokenizer."""
    return options({**settings, "model.weights": str(directory), **tokenizer_settings(directory)})


def options(settings: Mapping[str, Any]) -> list[str]:
    """Returns `-o NAME=VALUE` for each setting."""
    return [f"-o {name}={json.dumps(value) if isinstance(value, bool) else value}" for name, value in settings.items()]


def tokenizer_settings(directory: str | Path) -> dict[str, str]:
    """Returns the settings of `data` with which texts become tokens by the directory's tokenizer, if it has one."""
    file, about = Path(directory) / "tokenizer.json", Path(directory) / "tokenizer_config.json"
    if not file.is_file():
        return {}
    settings = {"data.tokenizer": "bpe", "data.tokenizer_file": str(file)}
    if about.is_file():
        with fields_of(directory, "a tokenizer", about.name) as roles:
            if end := roles.get("eos_token") or roles.get("sep_token"):
                settings["data.end_token"] = end["content"] if isinstance(end, dict) else end
    return settings


def tensors(directory: str | Path) -> dict[str, Tensor]:
    """Returns the tensors of a directory, by name, from one file or several."""
    from safetensors.torch import load_file

    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise DataError(f"{directory} has no *.safetensors: give a directory of Hugging Face's, saved as safetensors.")
    try:
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    except SafetensorError as error:
        raise DataError(f"{directory}: its safetensors cannot be read ({error}).") from error


def unlike(directory: str | Path, wrong: str, network: str, kind: str) -> DataError:
    """Returns the error for a model with a setting that the file `network` does not compute; a `kind` is wanted."""
    file = Path(directory) / "config.json"
    return DataError(f"{file} has {wrong}, which {network} does not compute: give a plain {kind}.")


def refuse_surplus(
    stored: Mapping[str, Tensor], names: Collection[str], copies: Mapping[str, str], directory: str, kind: str
) -> None:
    """Raises DataError for a stored tensor that is not among `names`, unless it equals the one that it may copy."""
    for name in sorted(stored.keys() - {*names}):
        original = copies.get(name)
        if original is None or original not in stored:
            raise DataError(
                f"model.weights: {directory} has {name}, and the model has no such tensor: give a directory that "
                f"{kind} has saved."
            )
        if not stored[name].equal(stored[original]):
            raise DataError(
                f"model.weights: {directory} has other values for {name} than for {original}, and in the model they "
                "are a single tensor: give a directory whose config.json and tensors tell alike whether they are tied."
            )


def fill(
    model: nn.Module, stored: Mapping[str, Tensor], names: Mapping[str, str], directory: str | Path, module: str
) -> None:
    """Copies stored tensors into a model, whose parameters have `names` there.

    Raises DataError if one is missing or of another shape.
    """
    import torch

    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            theirs = names[name]
            if theirs not in stored or stored[theirs].shape != tensor.shape:
                has = tuple(stored[theirs].shape) if theirs in stored else "none"
                raise DataError(
                    f"model.weights: {directory} has {has} for {theirs}, and the model has {tuple(tensor.shape)}: "
                    f"{_remedy(directory, module)}"
                )
            tensor.copy_(stored[theirs])


def write(directory: str | Path, fields: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Writes config.json, and model.safetensors in float32."""
    from safetensors.torch import save_file

    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.float().contiguous() for name, tensor in weights.items()},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )
    text = json.dumps({**fields, "torch_dtype": "float32"}, indent=2)
    (path / "config.json").write_text(text + "\n", encoding="utf-8")


def _remedy(directory: str | Path, module: str) -> str:
    return f"give the sizes that `python -m {module} show {directory}` prints."


def show(arguments: list[str], flags: Callable[[str], list[str]], study: str) -> None:
    """Runs `python -m studies.STUDY.pretrained show DIR`, which prints the options of `flags` for a directory."""
    try:
        if len(arguments) != 2 or arguments[0] != "show":
            raise ConfigError(f"give `show DIR`: see studies/{study}/README.md.")
        print(" ".join(flags(arguments[1])))
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
