"""Marks the trials that a strategy has stopped, which Optuna's plots omit because their values are of early epochs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpo.search.samplers.optuna_sampler import quiet_study

PAIRS = ("contour", "rank")  # a row of panels for each parameter
KINDS = ("history", "slice", *PAIRS, "edf")  # crosses mark them; lines in parallel; curves and timeline include them
NAME = "pruned"
_GREY = "#888888"
_MARGIN = 0.05  # share of an axis that Optuna leaves around the points

Stopped = Sequence[tuple[FrozenTrial, float]]  # stopped trials, each with its last reported value


def trials(study: optuna.Study, index: int) -> Stopped:
    """Returns the stopped trials that have a finite value for the objective at `index`, with that value."""
    pruned = study.get_trials(deepcopy=False, states=(TrialState.PRUNED,))
    valued = [(trial, value) for trial in pruned if (value := _value(trial, index)) is not None]
    return [(trial, value) for trial, value in valued if math.isfinite(value)]


def _value(trial: FrozenTrial, index: int) -> float | None:
    if trial.values:
        return trial.values[index]
    return trial.intermediate_values[max(trial.intermediate_values)] if trial.intermediate_values else None


def within(value: float, span: tuple[float, float]) -> float:
    """Returns the value clipped to the span, because one outlier would leave the others no room."""
    return min(max(value, span[0]), span[1])


def with_values(study: optuna.Study, found: Stopped, span: tuple[float, float]) -> optuna.Study:
    """Returns the study with stopped trials first, as complete trials with their last values, for parallel lines."""
    minimized = [direction is StudyDirection.MINIMIZE for direction in study.directions]
    copy = quiet_study(["minimize" if low else "maximize" for low in minimized], name=study.study_name)
    for trial, value in found:
        values = [within(value, span)] * len(study.directions)
        copy.add_trial(create_trial(values=values, params=trial.params, distributions=trial.distributions))
    copy.add_trials(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))
    return copy


def on_picture(panels: np.ndarray, kind: str, found: Stopped, names: Sequence[str], span: tuple[float, float]) -> None:
    """Draws crosses on matplotlib's panels, with one legend; `names` are the parameters of a plot of pairs."""
    drawn = list[Any]()
    for panel, x_name, y_name in _panels(panels.flat, kind, names) if found else ():
        for axis, name in ((panel.xaxis, x_name), (panel.yaxis, y_name)):
            _positions(axis, _params(found, name), kind)  # to match the panels beside it, which may show other trials
        if points := _points(kind, found, x_name or panel.get_xlabel(), y_name, span):
            xs, ys, _ = zip(*points, strict=True)
            xs, ys = _positions(panel.xaxis, xs, kind), _positions(panel.yaxis, ys, kind)
            drawn.append(
                panel.scatter(xs, ys, marker="x", s=18, color=_GREY, label=NAME, zorder=1, clip_on=kind != "edf")
            )
    if drawn and panels.size == 1:
        panels.flat[0].legend(loc="best")
    elif drawn:
        _legend_above(panels.flat[0], drawn[0])


def lines_on_picture(panel: Any, count: int) -> None:
    """Redraws the first `count` parallel lines in the style of stopped trials."""
    from matplotlib.collections import LineCollection

    lines = panel.collections[0]
    segments, styles = lines.get_segments(), lines.get_linestyle()
    lines.set(segments=segments[count:], array=lines.get_array()[count:])
    if len(styles) == len(segments):
        lines.set_linestyle(styles[count:])
    drawn = LineCollection(segments[:count], colors=_GREY, linestyles="dotted", linewidths=0.8, label=NAME, zorder=1)
    panel.add_collection(drawn)
    _legend_above(panel, drawn)


def _legend_above(panel: Any, drawn: Any) -> None:
    corner = panel.get_position()
    anchor = (corner.x0, corner.y1)
    panel.figure.legend(handles=[drawn], loc="lower left", bbox_to_anchor=anchor, frameon=False, fontsize="small")


def _panels(panels: Iterable[object], kind: str, names: Sequence[str]) -> list[tuple[Any, str, str]]:
    """Returns each panel with the parameters of its axes if it shows a pair, row by row as Optuna does."""
    if kind not in PAIRS:
        return [(panel, "", "") for panel in panels]
    pairs = [(x, y) for y in names for x in names] if len(names) > 2 else [(names[0], names[1])]
    return [(panel, x, y) for panel, (x, y) in zip(panels, pairs, strict=True)]


def _points(
    kind: str, found: Stopped, x_name: str, y_name: str, span: tuple[float, float]
) -> list[tuple[Any, Any, int]]:
    """Returns the positions of the trials that have a panel's parameters, each with its number."""
    if kind == "history":
        return [(trial.number, value, trial.number) for trial, value in found]
    if kind == "edf":
        return [(within(value, span), 0.0, trial.number) for trial, value in found]
    active = [(trial, value) for trial, value in found if x_name in trial.params]
    if kind == "slice":
        return [(trial.params[x_name], value, trial.number) for trial, value in active]
    both = [trial for trial, _ in active if y_name in trial.params and (kind, x_name) != ("contour", y_name)]
    return [(trial.params[x_name], trial.params[y_name], trial.number) for trial in both]


def _params(found: Stopped, name: str) -> list[Any]:
    return [trial.params[name] for trial, _ in found if name in trial.params]


def _positions(axis: Any, values: Sequence[Any], kind: str) -> Any:
    """Returns the positions of values on a matplotlib axis, which is extended for values that no complete trial has."""
    from matplotlib.category import StrCategoryLocator
    from matplotlib.ticker import FixedLocator

    limits, locator, end = axis.get_view_interval(), axis.get_major_locator(), f"{axis.axis_name}lim"
    if isinstance(locator, FixedLocator | StrCategoryLocator):  # options, in order of position
        options = axis.get_major_formatter().format_ticks(axis.get_majorticklocs())
        names = [repr(value) if kind == "slice" and isinstance(value, str) else str(value) for value in values]
        more = sorted(set(names) - set(options))
        axis.axes.set(**{end: (limits[0], limits[1] + len(more))})
        if isinstance(locator, StrCategoryLocator):
            return names
        axis.set_ticks(range(len(options + more)), options + more)
        return [(options + more).index(name) for name in names]
    scale, numbers = axis.get_transform(), np.asarray(values, dtype=float)
    if values and not getattr(axis.axes, f"get_autoscale{axis.axis_name}_on")():
        low, high = scale.transform(limits)
        wider = _wider(low, high, scale.transform(numbers))
        axis.axes.set(**{end: scale.inverted().transform(np.asarray(wider))})
    return numbers


def _wider(low: float, high: float, values: np.ndarray) -> tuple[float, float]:
    """Returns bounds of an axis that include the values, with a margin at each end that moves."""
    margin = _MARGIN * (max(high, values.max()) - min(low, values.min()))
    return (
        low if values.min() >= low else values.min() - margin,
        high if values.max() <= high else values.max() + margin,
    )


def on_page(figure: Any, kind: str, found: Stopped, names: Sequence[str], span: tuple[float, float]) -> None:
    """Draws crosses on a plotly figure, each with its trial's number."""
    shown = False
    for axis, x_name, y_name in _panels(figure.select_xaxes(), kind, names) if found else ():
        across = figure.layout[(axis.anchor or "y").replace("y", "yaxis", 1)]
        if kind in PAIRS:
            _make_room_on_page(axis, _params(found, x_name))
            _make_room_on_page(across, _params(found, y_name))
        points = _points(kind, found, x_name or axis.title.text or "", y_name, span)
        if not points:
            continue
        xs, ys, numbers = zip(*points, strict=True)
        figure.add_scatter(
            x=[str(x) for x in xs] if axis.type == "category" else xs,
            y=[str(y) for y in ys] if across.type == "category" else ys,
            mode="markers",
            marker={"symbol": "x", "size": 6, "color": _GREY},
            name=NAME,
            legendgroup=NAME,
            showlegend=not shown,
            hovertext=[f"trial {number}" for number in numbers],
            xaxis=axis.plotly_name.replace("axis", ""),
            yaxis=(axis.anchor or "y"),
        )
        shown = True
    if found:
        _legend(figure)


def lines_on_page(figure: Any, found: Stopped) -> None:
    """Restyles the first parallel lines of a plotly figure, which are those of the stopped trials."""
    for index, (line, (trial, value)) in enumerate(zip(figure.data, found, strict=False)):
        line.line = {"color": _GREY, "dash": "dot", "width": 0.8}
        line.hovertemplate = f"trial {trial.number}, {NAME} at {value:g}<extra></extra>"
        line.update(name=NAME, legendgroup=NAME, showlegend=index == 0)
    _legend(figure)


def _legend(figure: Any) -> None:
    figure.update_layout(showlegend=True, legend={"orientation": "h", "x": 0, "xanchor": "left", "y": 1.12})


def _make_room_on_page(axis: Any, values: Sequence[Any]) -> None:
    """Extends a plotly axis, whose range counts positions for options and powers of ten for logarithms."""
    if axis.type == "category":
        axis.range = None
    elif values and axis.range:
        numbers = np.asarray(values, dtype=float)
        low, high = axis.range
        axis.range = _wider(low, high, np.log10(numbers) if axis.type == "log" else numbers)
