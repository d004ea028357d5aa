"""Exports a trained language model: as a directory of Hugging Face's, or as a GGUF file. Both are loaded again."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.files.durable import on_disk, replacing, sync
from trainer.model import gguf_file
from trainer.model.exported import Exported, compared
from trainer.runtime.quiet_imports import quiet_torchao
from trainer.task import LanguageModel, Task

ROWS = 4  # of the random tokens whose logits are compared
ABOUT = "hpo.json"  # the file with the trial and its configuration
OPENED = {  # kind of model -> transformers' class that opens it, and its arguments that are tokens
    "causal": ("AutoModelForCausalLM", ["input_ids"]),
    "masked": ("AutoModelForMaskedLM", ["input_ids"]),
    "seq2seq": ("AutoModelForSeq2SeqLM", ["input_ids", "decoder_input_ids"]),
}
EXTRAS = {"huggingface": ("llm", ["transformers"]), "gguf": ("gguf", ["gguf", "transformers", "accelerate"])}


def export_language_model(task: Task, model: nn.Module, format: str, path: Path, about: dict[str, str]) -> Exported:
    """Writes a language model, in eval mode on the CPU, to `path`, and compares its logits with the model's.

    Raises ConfigError if a package is missing, for a task of other models, or if the format cannot hold the model,
    and TrainerError if the logits differ, which leaves no file.
    """
    _check_packages(format)
    described = task.language_model(model)
    if described is None:
        raise ConfigError(
            f"--format {format}: {type(task).__name__} trains no language model: choose safetensors, onnx or torch."
        )
    if format == "gguf" and described.kind != "causal":
        raise ConfigError(
            f"--format gguf is for causal language models, and that of {type(task).__name__} is {described.kind}: "
            "choose huggingface, safetensors, onnx or torch."
        )
    tokens = torch.randint(described.vocab_size, (ROWS, described.length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), _without_bars():
        expected = described.logits(tokens).float()
        difference, note = WRITERS[format](described, tokens, expected, path, about)
    size = sum(on_disk(path).values()) if path.is_dir() else path.stat().st_size
    return Exported(path, format, size, ROWS, difference, None, note)


def _check_packages(format: str) -> None:
    extra, packages = EXTRAS[format]
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ConfigError(f"--format {format} needs {', '.join(missing)}: pip install 'hpo[{extra}]'.")


def _huggingface(
    described: LanguageModel, tokens: Tensor, expected: Tensor, path: Path, about: dict[str, str]
) -> tuple[float, str]:
    with _new_directory(path) as directory:
        described.save(directory)
        (directory / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        difference = _compared(described, tokens, expected, "huggingface", directory)
        for file in directory.iterdir():
            sync(file)
        sync(directory)
    has_tokenizer = any(path.glob("tokenizer*"))
    return difference, "" if has_tokenizer else "The model's tokenizer has no form there: the directory has none."


def _gguf(
    described: LanguageModel, tokens: Tensor, expected: Tensor, path: Path, about: dict[str, str]
) -> tuple[float, str]:
    with tempfile.TemporaryDirectory() as scratch, replacing(path) as temporary:
        described.save(Path(scratch))
        note = gguf_file.write(Path(scratch), temporary, f"{about['study']} {about['trial']}", about)
        difference = _compared(
            described, tokens, expected, "gguf", temporary.absolute().parent, gguf_file=temporary.name
        )
        sync(temporary)
    return difference, note


Writer = Callable[[LanguageModel, Tensor, Tensor, Path, dict[str, str]], tuple[float, str]]
WRITERS: dict[str, Writer] = {"huggingface": _huggingface, "gguf": _gguf}


def _compared(
    described: LanguageModel, tokens: Tensor, expected: Tensor, format: str, directory: Path, **where: str
) -> float:
    """Returns the largest difference of the logits of the model that transformers opens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        import transformers

        name, inputs = OPENED[described.kind]
        opened: Any = getattr(transformers, name).from_pretrained(
            directory, dtype=torch.float32, local_files_only=True, **where
        )
        logits = opened.eval()(**dict.fromkeys(inputs, tokens)).logits
    return compared([expected], [logits], format, described.tolerance)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hides the bars that transformers shows while it writes or loads a model."""
    quiet_torchao()
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _new_directory(path: Path) -> Iterator[Path]:
    """Yields an empty directory that becomes `path`, which is absent or empty, at the end of the block.

    It is removed if the block raises.
    """
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.absolute().parent) as scratch:
        directory = Path(scratch) / "new"
        directory.mkdir()
        yield directory
        directory.rename(path)
    sync(path.absolute().parent)
