"""Configures the model of a fine-tuning study, and the source of its records. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from trainer.config import Frozen, Positive, TrainConfig
from trainer.config.fields import Beta, added
from trainer.errors import ConfigError
from trainer.files.paths import expanded

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PACKAGES = ("transformers", "peft", "bitsandbytes")
CONTEXT = 512  # tokens that the tiny model has positions for

PROMPT, RESPONSE = "{prompt}", "{response}"  # placeholders of a template

# The fields that `hpo plan` may change to fit a memory, with values from most to least memory.
PLAN: dict[str, list[Any]] = {
    "model.base": ["fp32", "bf16", "nf4"],
    "data.max_length": [2048, 1024, 512],
    "model.rank": [64, 16],
    "train.activations.checkpoint": ["none", "full"],
    "train.micro_batch_size": [16, 4, 1],
}

# Fields that are read only under a condition: `read_when` of a study.
READ_WHEN = {
    "data.generated": "data.path == ''",
    **dict.fromkeys(["data.split", "data.columns"], "data.path != ''"),
    **dict.fromkeys(["model.tokenizer", "model.layers"], "model.path != ''"),
}


def _names(value: Any) -> Any:
    """Returns names from a list, or from text that separates them by commas: `-o model.modules=q_proj,v_proj`."""
    if isinstance(value, str):
        return tuple(name.strip() for name in value.split(",") if name.strip())
    return tuple(value) if isinstance(value, list) else value


class ModelConfig(Frozen):
    """A causal language model with frozen weights, and LoRA on its linear layers.

    LoRA (Hu et al. 2021, arXiv 2106.09685) computes W x + (alpha / rank) B A dropout(x), of which A [rank, in] and B
    [out, rank] are trained. `path` is a local directory as transformers saves one; empty: a tiny Llama made here.
    `base` is the format of the frozen weights: `nf4` quantises the linear layers to four bits, and the scales of the
    blocks once more (QLoRA: Dettmers et al. 2023, arXiv 2305.14314); all else is then bf16, computation included.
    """

    path: str = ""
    tokenizer: Literal["model", "bytes"] = "model"  # for a model in `path`: its own, or UTF-8 bytes and 256 for the end
    base: Literal["fp32", "bf16", "nf4"] = "fp32"
    rank: Annotated[int, Field(ge=1)] = 8
    alpha: Positive | None = None  # None: twice the rank
    dropout: Beta = 0.05  # of the adapters' inputs
    base_dropout: Beta | None = None  # of the model's own layers; None: as the model has it
    layers: Annotated[int, Field(ge=1)] | None = None  # use only the model's first ones; None: all
    modules: Annotated[tuple[str, ...], BeforeValidator(_names), Field(min_length=1)] = PROJECTIONS

    @model_validator(mode="after")
    def _tokenizer_is_read(self) -> ModelConfig:
        if not self.path and self.tokenizer != "model":
            raise ValueError("tokenizer is read only with path: the tiny model has bytes; leave it out.")
        if not self.path and self.layers is not None:
            raise ValueError("layers is read only with path: the tiny model has two; leave it out.")
        return self


class DataConfig(Frozen):
    """Records of text: those that `path` names, or `generated` ones drawn from `seed`.

    `path` is a JSONL file, another table (any format of trainer.files.tables), a directory or a pattern of such, in a
    bucket too (trainer.files.shards), or a directory of Hugging Face's datasets, of which `split` is read. `columns`
    hold the fields of a record in their order, where they have other names.

    A share of them, drawn from `seed`, is held back for validation. A record is cut after `max_length` tokens.
    `template` surrounds each prompt and response. A special token spelled in the template, such as `<|im_start|>`, is
    that token; one spelled in a record is text.
    """

    path: str = ""
    generated: Annotated[int, Field(ge=20)] = 640
    val_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    max_length: Annotated[int, Field(ge=2)] = 64
    template: str = f"{PROMPT}{RESPONSE}"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    split: str = added("")
    columns: Annotated[tuple[str, ...], BeforeValidator(_names)] = added(())

    @property
    def pieces(self) -> tuple[str, str, str]:
        """Returns the text before the prompt, between it and the response, and after the response."""
        before, _, rest = self.template.partition(PROMPT)
        between, _, after = rest.partition(RESPONSE)
        return before, between, after

    @model_validator(mode="after")
    def _template_has_both(self) -> DataConfig:
        counts = [self.template.count(PROMPT), self.template.count(RESPONSE)]
        if counts != [1, 1] or RESPONSE not in self.template.partition(PROMPT)[2]:
            raise ValueError(f"template={self.template!r} holds not {PROMPT} and then {RESPONSE}, each of them once.")
        return self


def rows_at_once(train: TrainConfig) -> int:
    """Returns how many rows are evaluated at a time: as many as are trained on, 64 at most.

    So what fits a step fits an evaluation. With `micro_batch_size=auto` the number that fits is unknown, so it is one.
    """
    size = 1 if train.micro_batch_size == "auto" else train.micro_batch_size
    return min(size or -(-train.batch_size // train.parallel.data), 64)


def check_packages() -> None:
    """Raises ConfigError, in one sentence, if packages are missing. Imports none of them."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise ConfigError(f"language models need {', '.join(missing)}: pip install 'hpo[llm]'.")


def check_model(model: ModelConfig) -> None:
    """Raises ConfigError, in a sentence, if packages are missing or `path` has no model. Imports none of them."""
    check_packages()
    if model.path:
        directory = expanded(model.path)
        if not directory.is_dir():
            raise ConfigError(
                f"model.path={model.path!r} is not a directory: give that of a model saved by transformers."
            )
        if not (directory / "config.json").is_file():
            raise ConfigError(f"model.path={model.path!r} has no config.json: give the directory of a whole model.")
        depth_of(model)


def depth_of(model: ModelConfig) -> int | None:
    """Returns the number of the model's equal blocks, if its config.json has it."""
    if not model.path:
        return None
    path = expanded(model.path) / "config.json"
    try:
        depth = json.loads(path.read_text(encoding="utf-8")).get("num_hidden_layers")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"model.path={model.path!r} has no config.json that can be read ({error}).") from error
    if not isinstance(depth, int):
        return None
    if model.layers is not None and model.layers > depth:
        raise ConfigError(f"model.layers={model.layers} is more than the model has: give at most {depth}.")
    return model.layers or depth


def check_weights(model: ModelConfig) -> None:
    """Raises ConfigError if a model cannot be trained because weights or a tokenizer are missing."""
    if not model.path:
        return
    directory = expanded(model.path)
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(f"model.path={model.path!r} has no *.safetensors: save the model by save_pretrained.")
    if model.tokenizer == "model" and not any(directory.glob("tokenizer*")):
        raise ConfigError(
            f"model.path={model.path!r} has no tokenizer: save it there too, or set model.tokenizer=bytes for a model "
            "over bytes."
        )


def check_modules(model: ModelConfig) -> None:
    """Raises ConfigError if a name in `modules` does not end like that of a layer of the model.

    The default names, which are Llama's, are refused only if none does.
    """
    layers = _matrices(expanded(model.path)) if model.path else {*PROJECTIONS, "embed_tokens", "lm_head"}
    kinds = set(map(_last, layers))
    unknown = [name for name in model.modules if _last(name) not in kinds]
    if unknown and (model.modules != PROJECTIONS or len(unknown) == len(PROJECTIONS)):
        raise no_such_modules(unknown, layers)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def no_such_modules(given: Iterable[str], layers: Iterable[str]) -> ConfigError:
    """Returns the error for names that match no layer."""
    named, kinds = ",".join(given), ", ".join(sorted(set(map(_last, layers))))
    return ConfigError(f"model.modules={named} names no linear layers of the model: give of {kinds}.")


def _matrices(directory: Path) -> set[str]:
    """Returns a directory's modules with a parameter of two dimensions or more, by its safetensors' headers."""
    from safetensors import SafetensorError, safe_open

    modules = set()
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy") as opened:
                names = [name for name in opened.keys() if len(opened.get_slice(name).get_shape()) > 1]  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file} cannot be read as safetensors ({error}): save the model again.") from error
        modules |= {name.rpartition(".")[0] for name in names}
    return modules
