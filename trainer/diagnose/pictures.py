"""Draws the pictures of a diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.diagnose.figures import figure
from trainer.diagnose.flow import LARGE_UPDATE, SMALL_UPDATE, Layer
from trainer.diagnose.landscape import Landscape
from trainer.diagnose.landscape import lines as landscape_lines
from trainer.diagnose.range_test import RangeTest


def range_test(title: str, found: RangeTest) -> Any:
    """Draws the smoothed loss over the learning rate, with the suggestions."""
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
    """Draws gradient and update ratio of each layer, first layer on top; layers with dead units are labelled."""
    drawn, axes = figure(title, height=max(2.5, 1.2 + 0.28 * len(layers)))
    rows = np.arange(len(layers))[::-1]
    axes.plot([max(layer.gradient, 1e-12) for layer in layers], rows, "o-", label="gradient (rms)")
    axes.plot([max(layer.update_ratio, 1e-12) for layer in layers], rows, "s-", label="update / weight")
    axes.axvspan(SMALL_UPDATE, LARGE_UPDATE, color="tab:orange", alpha=0.08, label="usual updates / weight")
    names = [layer.name + (f"  ({layer.dead:.0%} dead)" if layer.dead else "") for layer in layers]
    axes.set_yticks(rows, names, fontsize=8)
    axes.set_xscale("log")
    drawn.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=3)
    return drawn


def lines(title: str, found: Landscape) -> Any:
    """Draws the loss along each of the two directions; the cross is the model."""
    drawn, axes = figure(title)
    for name, losses in zip(("first direction", "second direction"), landscape_lines(found), strict=True):
        axes.plot(found.offsets, losses, "o-", markersize=4, linewidth=2, label=name)
    axes.plot(0, landscape_lines(found)[0][len(found.offsets) // 2], "x", color="black", zorder=3, markersize=10)
    axes.legend(frameon=False)
    axes.set(xlabel="offset, in norms of the filters", ylabel="loss")
    return drawn


def landscape(title: str, found: Landscape) -> Any:
    """Draws level lines of a 2-D landscape where it is finite; the cross is the model."""
    from matplotlib.colors import LogNorm

    drawn, axes = figure(title, width=6.5, height=5.0)
    losses = np.ma.masked_invalid(np.asarray(found.losses).T)
    low, high = float(losses.min()), float(losses.max())
    positive = low > 0
    levels = (np.geomspace if positive else np.linspace)(low, high + 1e-6 * abs(high) + 1e-12, 21)
    filled = axes.contourf(
        found.offsets, found.offsets, losses, levels, cmap="viridis", norm=LogNorm() if positive else None
    )
    axes.contour(
        found.offsets, found.offsets, losses, levels, colors="white", linewidths=0.4, alpha=0.6, linestyles="-"
    )
    axes.plot(0, 0, "x", color="white", markersize=10, markeredgewidth=2)
    axes.set(xlabel="first direction, in norms of the filters", ylabel="second direction", aspect="equal")
    axes.grid(visible=False)
    bar = drawn.colorbar(filled, ax=axes, label="loss", ticks=levels[::4])
    bar.ax.set_yticklabels([f"{level:.3g}" for level in levels[::4]])
    bar.ax.minorticks_off()
    return drawn


def curves(title: str, epochs: Sequence[int], train: Sequence[float], validation: Sequence[float], best: int) -> Any:
    """Draws training and validation loss over the epochs, with the best one marked."""
    drawn, axes = figure(title)
    axes.plot(epochs, train, linewidth=2, label="training")
    axes.plot(epochs, validation, linewidth=2, label="validation")
    if best:
        axes.axvline(best, color="black", linestyle=":", label=f"least validation loss: epoch {best}")
    axes.legend(frameon=False)
    axes.set(xlabel="epoch", ylabel="loss")
    return drawn
