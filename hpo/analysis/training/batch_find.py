"""Implements `hpo batch-find`, which measures the batch size beyond which larger ones stop paying, and its memory."""

from __future__ import annotations

from collections.abc import Mapping

from hpo.analysis.training.single_process import for_one_process, stepped
from hpo.declaration.references import load
from hpo.declaration.search_preset import as_new
from hpo.door import option
from trainer.diagnose.batch_size import BatchSizes


def batch_find(reference: str, overrides: Mapping[str, object], steps: int) -> BatchSizes:
    """Trains `steps` windows of the study's configuration under `overrides`, and measures the gradients' noise."""
    from trainer.diagnose.batch_size import find_batch_size

    study = as_new(load(reference), overrides)
    config = for_one_process(study.config)
    task = stepped(study, config, "whose gradients cannot be looked at")
    return find_batch_size(task, config.train, steps)


def describe(found: BatchSizes) -> str:
    """Returns the noise scale during the training, the memory of some batches, and the suggestion."""
    lines = [f"{'steps':>9}  noise scale"]
    lines += [f"{last:>9}  {scale:.4g}" for last, scale in found.noise]
    if found.memory:
        lines += [f"{'batch':>9}  memory of a step"]
        lines += [f"{size:>9}  {peak / 2**20:.1f} MiB" for size, peak in found.memory]
    else:
        lines.append("what batches take of memory cannot be estimated: the loss looks at values, by .item() say.")
    if found.suggestion is None:
        lines.append(
            f"no batch size is suggested: the gradient is lost in its noise; train longer by {option('steps')}."
        )
    else:
        parts = "" if found.micro_batch is None else f" in micro-batches of {found.micro_batch}, which memory holds"
        lines.append(
            f"suggested: train.batch_size={found.suggestion}{parts}; larger ones waste samples, and smaller ones take "
            "more steps. The noise scale grows as the loss falls."
        )
    return "\n".join(lines)
