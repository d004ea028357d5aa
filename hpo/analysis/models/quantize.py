"""Exports a trial's best model with quantised weights, and measures what that costs (trainer/model/quantized.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpo.analysis.models.checkpoints import KeptCheckpoint, evaluator
from hpo.analysis.results.compare import headline
from hpo.declaration.study import Study
from hpo.door import option
from hpo.errors import UserError
from hpo.storage.target import check_free
from hpo.text import aligned, counted, megabytes
from trainer.files.durable import write_text

if TYPE_CHECKING:
    from torch import nn

ENDING = ".safetensors"
KINDS = ("int8", "nf4")


@dataclass(frozen=True)
class Quantized:
    """A file with quantised weights.

    `before` and `after` are the metrics of the task's evaluation with the trained weights and with those of the file,
    the study's objectives first. They are also in `quality`, a file of JSON beside it.
    """

    path: Path
    format: str
    quantize: str
    size: int
    layers: int
    before: Mapping[str, float]
    after: Mapping[str, float]
    quality: Path


def quality_of(path: Path) -> Path:
    """Returns the file that has the metrics of a quantised one: best.safetensors -> best.quality.json."""
    return path.with_suffix(".quality.json")


def check(to: str, format: str | None, quantize: str, *, force: bool) -> None:
    """Raises UserError for an unknown kind, for another format than safetensors, and if a file is there already."""
    if quantize not in KINDS:
        raise UserError(f"{option('quantize', quantize)} is not known: choose one of {', '.join(KINDS)}.")
    if format not in (None, "safetensors"):
        raise UserError(f"{option('quantize', quantize)} is written as safetensors: leave {option('format')} out.")
    if format is None and Path(to).suffix.lower() != ENDING:
        raise UserError(
            f"{option('to', to)}: {option('quantize', quantize)} is written as safetensors: name a file that ends in "
            f"{ENDING}."
        )
    for path in (to, str(quality_of(Path(to)))):
        check_free(path, force=force)


def export_quantized(
    study: Study, kept: KeptCheckpoint, model: nn.Module, kind: str, path: Path, about: dict[str, str]
) -> Quantized:
    """Writes the model, and beside it the metrics before and after. Raises the errors of `save_quantized`."""
    from trainer.model.quantized import load_quantized, save_quantized

    evaluate, quality = evaluator(study, kept), quality_of(path)
    before = evaluate(model.state_dict())
    layers = save_quantized(model, kind, path, about)
    after = evaluate(load_quantized(path))
    order = headline(list(before), [objective.metric for objective in study.objectives])
    order += [key for key in before if key not in order]
    before, after = ({key: metrics[key] for key in order} for metrics in (before, after))
    size = path.stat().st_size
    facts = {"study": kept.study, "trial": kept.number, "step": kept.step, "quantize": kind, "layers": layers}
    facts |= {"size": size, "before": before, "after": after}
    write_text(quality, json.dumps(facts, indent=2) + "\n")
    return Quantized(path, "safetensors", kind, size, layers, before, after, quality)


def describe(done: Quantized) -> str:
    """Returns a sentence about the file, and its metrics beside those of the trained weights."""
    first = f"{done.path}: {counted(done.layers, 'linear layer')} in {done.quantize}, {megabytes(done.size)}"
    rows = [["", "trained", done.quantize, "difference"]]
    for key in headline(list(done.before), list(done.before)[:1]):
        before, after = done.before[key], done.after[key]
        rows.append([key, f"{before:.6g}", f"{after:.6g}", f"{after - before:+.3g}"])
    return "\n".join([first, *aligned(rows), f"all metrics are in {done.quality}"])
