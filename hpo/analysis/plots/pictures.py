"""Adjusts the scales, axes and legends of matplotlib's pictures of a study."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpo.analysis.plots import ticks
from hpo.text import endings

MOST_NAMED = 15  # curves that a legend names
LIGHTEST = 0.8  # lightness of a line's colour, where 1 is white


def curves(panel: Any, metric: str) -> None:
    """Names the axes of learning curves, and distinguishes many curves by shade."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    panel.set(title="Learning curves", xlabel="epoch", ylabel=metric)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(panel.lines) > MOST_NAMED:  # too many for the colours
        panel.get_legend().remove()
        panel.set_title("Learning curves, later trials darker")
        for share, line in zip(np.linspace(0.25, 1.0, len(panel.lines)), panel.lines, strict=True):
            is_point = len(line.get_xdata()) == 1  # a single point draws no line
            line.set(color=plt.get_cmap("Blues")(share), marker="." if is_point else "", alpha=1.0)


def contour(panels: Any, metric: str, span: tuple[float, float]) -> None:
    """Gives all panels a common scale, because Optuna gives each its own but shows only the first one's bar."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.contour import ContourSet

    drawn = [
        area for panel in panels.flat for area in panel.collections if isinstance(area, ContourSet) and area.filled
    ]
    if not drawn or span[0] == span[1]:  # the scale would have no extent
        return
    scale, bar = Normalize(*span), drawn[0].figure.axes[-1]
    for area in drawn:
        area.set_norm(scale)
    bar.clear()
    bar.figure.colorbar(ScalarMappable(scale, drawn[0].cmap), cax=bar, label=metric)


def parallel(panel: Any, names: Sequence[str], whole: ticks.Whole) -> None:
    """Names the axes in full, with figures that are readable over the lines."""
    from matplotlib.colors import ListedColormap
    from matplotlib.ticker import FixedLocator

    panel.set_xticks(range(len(names)), list(endings(names).values()), rotation=30, ha="right")
    for name, axes in zip(names[1:], panel.figure.axes[2:], strict=False):  # the second is the colour bar
        if name in whole and not isinstance(axes.yaxis.get_major_locator(), FixedLocator):
            ticks.at_whole_numbers(axes.yaxis)
    for lines in panel.collections:  # white lines would be invisible
        colours = lines.get_cmap()(np.linspace(0.0, 1.0, 256))
        lines.set_cmap(ListedColormap(colours[colours[:, :3].mean(1) < LIGHTEST]))
    for axes in panel.figure.axes[1:]:
        axes.grid(visible=False)
        for label in axes.get_yticklabels(which="both"):
            label.set_bbox({"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.5})
    if len(panel.figure.axes) > 2:
        ticks.clear(panel.figure.axes[1], panel.figure.axes[-1])
