"""Draws pictures without a display. matplotlib is the extra `plots`, imported when one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.errors import ConfigError
from trainer.runtime.epochs import Epochs


def figure(title: str, *, width: float = 8.0, height: float = 4.5) -> tuple[Any, Any]:
    """Returns a matplotlib figure with one pair of axes; `width` and `height` in inches."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("a picture needs matplotlib: pip install 'hpo[plots]'.") from error
    drawn = Figure(figsize=(width, height), dpi=120, layout="constrained")
    axes = drawn.subplots()
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return drawn, axes


def save(drawn: Any, path: str | Path) -> None:
    """Writes a figure in the format of the path's suffix. Raises ConfigError if that is not possible."""
    known = drawn.canvas.get_supported_filetypes()
    if (suffix := Path(path).suffix[1:].lower()) not in known:
        raise ConfigError(f"{path}: pictures end in one of {', '.join(sorted(known))}, such as .png.")
    try:
        drawn.savefig(path, format=suffix)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error


def learning_rates(title: str, rates: Sequence[float], lengths: Epochs) -> Any:
    """Draws the learning rate over the steps of a run, the epochs along the top; `rates[s]` is that of update s."""
    drawn, axes = figure(title)
    axes.plot(range(len(rates)), rates, drawstyle="steps-post" if len(rates) < 50 else "default", linewidth=2)
    axes.set(xlabel="step", ylabel="learning rate", xlim=(0, max(len(rates) - 1, 1)))
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:.3g}")
    epochs = axes.secondary_xaxis("top", functions=(np.vectorize(lengths.epoch), np.vectorize(lengths.step)))
    epochs.set_xlabel("epoch")
    return drawn
