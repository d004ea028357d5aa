"""Exports a trial's best model as a file or a directory, for `hpo export` (trainer/model/)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hpo.analysis.models import quantize as quantizing
from hpo.analysis.models.checkpoints import model_of
from hpo.analysis.models.quantize import Quantized
from hpo.door import option
from hpo.errors import HomeError, UserError
from hpo.ledger import Ledger
from hpo.storage.home import Home
from hpo.storage.target import check_free, check_new
from hpo.text import counted, megabytes
from trainer.files.paths import expanded

if TYPE_CHECKING:
    from torch import nn

    from trainer.model.exported import Exported
    from trainer.task import Task


_ENDINGS = {".safetensors": "safetensors", ".onnx": "onnx", ".pt2": "torch", ".gguf": "gguf"}
DIRECTORY = "huggingface"  # the format that is a directory
FORMATS = (*_ENDINGS.values(), DIRECTORY)
LANGUAGE = ("gguf", DIRECTORY)


def format_of(path: Path, given: str | None) -> str:
    """Returns the format that was given, else the one that the file's ending implies. Raises UserError."""
    format = given or _ENDINGS.get(path.suffix.lower())
    if format is None:
        raise UserError(
            f"{option('to', path)}: a trial's model is exported as {', '.join(FORMATS)}: give "
            f"{option('format')}, or a file that ends in {', '.join(_ENDINGS)}."
        )
    if format not in FORMATS:
        raise UserError(f"{option('format', format)} is not known: choose one of {', '.join(FORMATS)}.")
    return format


def check(to: str, format: str | None, quantize: str | None, *, force: bool) -> str:
    """Returns the format in which a model is written to `to`. Raises UserError if it cannot be written there."""
    if quantize is not None:
        quantizing.check(to, format, quantize, force=force)
        return "safetensors"
    wanted = format_of(Path(to), format)
    if wanted == DIRECTORY:
        check_new(to)
    else:
        check_free(to, force=force)
    return wanted


def export_trial(
    ledger: Ledger, home: Home, name: str, number: int, format: str, to: str, quantize: str | None = None
) -> Exported | Quantized:
    """Writes the model of the trial's best kept checkpoint.

    Raises UserError if none is kept, and the errors of `trainer.model.export.export`, `export_language_model` or
    `save_quantized`.
    """
    from trainer.runtime.seeding import derive, seed_all
    from trainer.runtime.threads import limited
    from trainer.task import built

    with ledger.read() as connection:
        study, kept = model_of(connection, home, name, number)
    task, path = kept.task(study), expanded(to)
    config = task.config.train
    about = {"study": name, "trial": str(number), "step": str(kept.step), "config": json.dumps(kept.config)}
    with limited(config.num_threads):
        seed_all(derive(config.seed, "init"))
        model = built(task)
        model.load_state_dict(kept.weights())
        try:
            if quantize is not None:
                return quantizing.export_quantized(study, kept, model.eval(), quantize, path, about)
            return _writer(format)(task, model.eval(), path, about)
        except OSError as error:
            raise HomeError(f"{option('to', path)} cannot be written ({error.strerror}): name another file.") from error


def _writer(format: str) -> Callable[[Task, nn.Module, Path, dict[str, str]], Exported]:
    """Returns a function of the task, its model, the path and what a file's header holds."""
    if format in LANGUAGE:
        from trainer.model.language_model import export_language_model

        return lambda task, model, path, about: export_language_model(task, model, format, path, about)
    from trainer.model.export import export

    return lambda task, model, path, about: export(task, task.config.train, model, format, path, about)


def describe(done: Exported | Quantized) -> str:
    """Returns a sentence about what was written, and one about what to know of it."""
    if isinstance(done, Quantized):
        return quantizing.describe(done)
    if done.format in LANGUAGE:
        written = f"opened by transformers, its logits differ by {done.difference:.3g} at most on random tokens."
    else:
        batch = {None: "weights alone", True: "for any batch size", False: f"for batches of {done.samples} alone"}
        written = (
            f"{batch[done.free]}; loaded again, its outputs differ by {done.difference:.3g} at most on "
            f"{counted(done.samples, 'training sample')}."
        )
    first = f"{done.path}: {done.format}, {megabytes(done.size)}, {written}"
    return f"{first}\n{done.note}" if done.note else first
