"""The pictures of a diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.diagnose.flow import LARGE_UPDATE, SMALL_UPDATE, Layer
from trainer.diagnose.landscape import Landscape
from trainer.diagnose.range_test import RangeTest
from trainer.plots import figure


def range_test(title: str, found: RangeTest) -> Any:
    """The smoothed loss over the learning rate, with what is suggested."""
    drawn, axes = figure(title)
    axes.semilogx(found.lrs, found.losses, linewidth=2)
    low, first = min(found.losses), found.losses[0]
    axes.set_ylim(low - 0.1 * abs(first - low), first + 0.6 * abs(first - low))
    for lr, name, style in ((found.suggestion, "steepest", "--"), (found.cautious, "least loss / 10", ":")):
        if lr is not None:
            axes.axvline(lr, color="black", linestyle=style, label=f"{name}: {lr:.2g}")
    if found.suggestion is not None:
        axes.legend(frameon=False)
    axes.set(xlabel="learning rate", ylabel="loss, smoothed")
    return drawn


def flow(title: str, layers: Sequence[Layer]) -> Any:
    """Gradient and update ratio of each layer, first layer on top; layers with dead units say so."""
    drawn, axes = figure(title, height=max(2.5, 1.2 + 0.28 * len(layers)))
    at = np.arange(len(layers))[::-1]
    axes.plot([max(layer.gradient, 1e-12) for layer in layers], at, "o-", label="gradient (rms)")
    axes.plot([max(layer.update_ratio, 1e-12) for layer in layers], at, "s-", label="update / weight")
    axes.axvspan(SMALL_UPDATE, LARGE_UPDATE, color="tab:orange", alpha=0.08, label="usual updates")
    names = [layer.name + (f"  ({layer.dead:.0%} dead)" if layer.dead else "") for layer in layers]
    axes.set_yticks(at, names, fontsize=8)
    axes.set_xscale("log")
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)
    return drawn


def landscape(title: str, found: Landscape) -> Any:
    """A curve for one direction, level lines for two; the cross is the model."""
    drawn, axes = figure(title, width=8.0 if not isinstance(found.losses[0], list) else 6.0)
    if not isinstance(found.losses[0], list):
        axes.plot(found.offsets, found.losses, linewidth=2)
        axes.plot(0, found.losses[len(found.losses) // 2], "x", color="black")
        axes.set(xlabel="offset along a filter-normalised direction", ylabel="loss")
        return drawn
    losses = np.log10(np.maximum(np.asarray(found.losses).T, 1e-12))
    lines = axes.contour(found.offsets, found.offsets, losses, levels=15, cmap="viridis")
    axes.plot(0, 0, "x", color="black")
    axes.set(xlabel="first direction", ylabel="second direction", aspect="equal")
    drawn.colorbar(lines, ax=axes, label="log10 loss")
    return drawn


def curves(title: str, epochs: Sequence[int], train: Sequence[float], validation: Sequence[float], best: int) -> Any:
    """Training and validation loss over the epochs, the best one marked."""
    drawn, axes = figure(title)
    axes.plot(epochs, train, linewidth=2, label="training")
    axes.plot(epochs, validation, linewidth=2, label="validation")
    if best:
        axes.axvline(best, color="black", linestyle=":", label=f"best: epoch {best}")
    axes.legend(frameon=False)
    axes.set(xlabel="epoch", ylabel="loss")
    return drawn
