"""Places the ticks on a plot's axes: few and plain, at whole numbers for parameters that take only these."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import TrialState

Whole = Mapping[str, tuple[int, int]]
_MOST = 6  # steps between whole numbers on a plotly axis
_FRACTION = re.compile(r"-?\d*\.\d+")
_CROWDED = 0.35  # inches between two options, below which slanted names would overlap
_FILLED = 0.9  # share of an option's room, beyond which its name would be too close to the next
_GAP = 0.02  # share of a figure's width
_APART = 4  # pixels between two labels on an axis


def whole_numbers(study: optuna.Study) -> dict[str, tuple[int, int]]:
    """Returns the smallest and largest value in complete trials of each parameter of whole numbers.

    Options count if they are whole numbers; logarithmic parameters do not.
    """
    ranges: dict[str, tuple[int, int]] = {}
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        for name, distribution in trial.distributions.items():
            if _whole(distribution):
                low, high = ranges.get(name, (trial.params[name],) * 2)
                ranges[name] = min(low, trial.params[name]), max(high, trial.params[name])
    return ranges


def _whole(distribution: BaseDistribution) -> bool:
    if isinstance(distribution, CategoricalDistribution):
        return all(type(choice) is int for choice in distribution.choices)
    return isinstance(distribution, IntDistribution) and not distribution.log


def tidy(drawn: Any, panels: Any, whole: Whole) -> None:
    """Tidies the ticks, names and title of a picture.

    Ticks are few and plain, long names are turned or folded, only the outer axes have names, and the title is close.
    """
    from matplotlib.category import StrCategoryLocator
    from matplotlib.ticker import FixedLocator

    _whole_ticks(panels, whole)
    logarithmic = [axis for axes in drawn.axes for axis in (axes.xaxis, axes.yaxis) if axis.get_scale() == "log"]
    for axis in logarithmic:
        _few_ticks(axis)
    lay_out(drawn)
    for axis in logarithmic:
        _thin(axis)
    for axes in drawn.axes:
        for axis in (axes.xaxis, axes.yaxis):  # in a history, and on a colour bar
            if axis.get_label_text() == "Trial":
                at_whole_numbers(axis)
        options = isinstance(axes.xaxis.get_major_locator(), FixedLocator | StrCategoryLocator)
        if options and axes.get_xscale() != "log":
            _turn(axes, single=panels.size == 1)
    for panel in panels.flat if panels.size > 1 else ():
        room = panel.get_window_extent()
        for axis, side in ((panel.xaxis, "width"), (panel.yaxis, "height")):
            _fold(axis.label, getattr(room, side), getattr(axis.label.get_window_extent(), side))
    if panels.ndim == 2:
        for panel in panels.flat:
            panel.label_outer()
    if panels.size > 1 and (title := drawn.get_suptitle()):
        top = max(panel.get_position().y1 for panel in panels.flat)
        drawn.suptitle(title, y=top + 0.2 / drawn.get_figheight(), va="bottom")


def lay_out(drawn: Any) -> None:
    """Moves a figure's panels to their final positions without drawing it."""
    if engine := drawn.get_layout_engine():
        engine.execute(drawn)


def _whole_ticks(panels: Any, whole: Whole) -> None:
    """Sets whole ticks on axes labelled with such a parameter, and in the panels above and beside them."""
    grid = np.atleast_2d(panels)
    for column in grid.T:
        if column[-1].get_xlabel() in whole:
            for panel in column:
                at_whole_numbers(panel.xaxis)
    for row in grid:
        if row[0].get_ylabel() in whole:
            for panel in row:
                at_whole_numbers(panel.yaxis)


def at_whole_numbers(axis: Any) -> None:
    """Sets ticks at whole numbers, except on an axis of options, which have ticks of their own."""
    from matplotlib.category import StrCategoryLocator
    from matplotlib.ticker import MaxNLocator

    if not isinstance(axis.get_major_locator(), StrCategoryLocator):
        axis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))


def clock(axis: Any) -> None:
    """Formats times so that no two ticks look alike: fractions of a second if they are close, dates if days differ."""
    from matplotlib.dates import DateFormatter, num2date
    from matplotlib.ticker import FuncFormatter

    low, high = axis.get_view_interval()
    if high - low >= 1:
        axis.set_major_formatter(DateFormatter("%m-%d %H:%M"))
        return
    seconds = [tick * 86400 % 60 for tick in axis.get_majorticklocs()]
    digits = next((d for d in range(6) if all(abs(s * 10**d - round(s * 10**d)) < 0.1 for s in seconds)), 6)
    half = 0.5 / 10**digits / 86400  # half of the last digit, because the rest is cut off
    cut = digits - 6 if digits else -7
    axis.set_major_formatter(FuncFormatter(lambda at, _: f"{num2date(at + half):%H:%M:%S.%f}"[: cut or None]))


def _turn(axes: Any, *, single: bool) -> None:
    """Sets the names of options side by side if they fit, else slanted.

    They are upright beside other panels, and if slanted names would overlap.
    """
    low, high = sorted(axes.get_xlim())
    room = axes.get_window_extent().width / max(high - low, 1.0)
    labels = axes.get_xticklabels()
    if all(label.get_rotation() or label.get_window_extent().width < _FILLED * room for label in labels):
        return
    slanted = single and room / axes.figure.dpi >= _CROWDED
    small = _FILLED * room * 72 / axes.figure.dpi  # points
    axes.tick_params(axis="x", labelrotation=30 if slanted else 90, labelsize=min(labels[0].get_fontsize(), small))
    for label in labels:
        label.set_ha("right" if slanted else "center")


def _fold(label: Any, room: float, long: float) -> None:
    """Breaks the name of a parameter into as many lines as it needs, after dots and underscores."""
    text = label.get_text()
    lines, most = [""], max(1, int(len(text) * room / max(long, 1.0)))
    for part in re.findall(r"[^._]*[._]?", text):
        if len(lines[-1]) + len(part) > most and lines[-1]:
            lines.append("")
        lines[-1] += part
    label.set_text("\n".join(lines))


def clear(bar: Any, axes: Any) -> None:
    """Moves the colour bar away from the labels of the last parallel axis."""
    figure = axes.figure
    ends = [label.get_window_extent().x1 for label in axes.get_yticklabels() if label.get_text()]
    box = bar.get_position()
    over = figure.transFigure.inverted().transform((max(ends, default=0.0), 0.0))[0] + _GAP - box.x0
    if over > 0:
        bar.set_position([box.x0 + over, box.y0, box.width, box.height])


def _few_ticks(axis: Any) -> None:
    """Sets ticks at powers of ten, with 2 and 5 between if they are few; for sizes, from 1 on, at powers of two."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    if low > 0.5 and high / low < 300:
        axis.set_major_locator(LogLocator(base=2, numticks=12))
    else:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 50 else (1,), numticks=4))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _thin(axis: Any) -> None:
    """Keeps every second, third ... tick if the labels would be too close."""
    from matplotlib.ticker import FixedLocator

    low, high = sorted(axis.get_view_interval())
    ticks = [tick for tick in axis.get_majorticklocs() if low <= tick <= high]
    for step in range(1, len(ticks)):
        axis.set_major_locator(FixedLocator(ticks[::step]))
        boxes = [label.get_window_extent() for label in axis.get_ticklabels() if label.get_text()]
        if not any(before.padded(_APART).overlaps(after) for before, after in pairwise(boxes)):
            return


def on_page(figure: Any, whole: Whole) -> None:
    """Sets whole numbers on the axes of a plotly figure; axes that match have one title."""
    for select in (figure.select_xaxes, figure.select_yaxes):
        titles = {_group(axis): axis.title.text for axis in select() if axis.title.text}
        for axis in (candidate for candidate in select() if candidate.type != "category"):
            if bounds := whole.get(titles.get(_group(axis), "")):
                low, high = bounds
                axis.update(tick0=low, dtick=max(1, math.ceil((high - low) / _MOST)))


def _group(axis: Any) -> str:
    return axis.matches or axis.plotly_name.replace("axis", "")


def on_page_parallel(figure: Any, names: Sequence[str], whole: Whole) -> None:
    """Removes labels of fractions, which are annotations, from those parallel axes `names` that count whole numbers."""

    def kept(note: Any) -> bool:
        return names[int(note.x)] not in whole or not _FRACTION.fullmatch(note.text)

    figure.layout.annotations = [note for note in figure.layout.annotations if kept(note)]
