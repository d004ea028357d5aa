"""Marks the trials that a strategy has stopped, which Optuna's plots leave out: their values are of an early epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

KINDS = ("history", "slice")  # the plots that mark them; curves and the timeline draw them by themselves
NAME = "stopped early"
_GREY = "#888888"


def trials(study: optuna.Study, place: int) -> list[tuple[FrozenTrial, float]]:
    """The stopped trials that have a finite value by the objective at `place`, and that value."""
    found = study.get_trials(deepcopy=False, states=(TrialState.PRUNED,))
    valued = [(trial, value) for trial in found if (value := _value(trial, place)) is not None]
    return [(trial, value) for trial, value in valued if math.isfinite(value)]


def _value(trial: FrozenTrial, place: int) -> float | None:
    if trial.values:
        return trial.values[place]
    return trial.intermediate_values[max(trial.intermediate_values)] if trial.intermediate_values else None


def on_picture(panels: Sequence[Any], kind: str, found: Sequence[tuple[FrozenTrial, float]]) -> None:
    """Crosses on matplotlib's panels, with one legend."""
    at, drawn = _at(kind), []
    for panel in panels if found else ():
        points = [(x, value) for trial, value in found if (x := at(trial, panel.get_xlabel())) is not None]
        if points:
            xs, ys = zip(*points, strict=True)
            named = any(isinstance(x, str | bool | None) for x in xs)
            places = list(map(_category, xs)) if named else xs
            drawn.append(panel.scatter(places, ys, marker="x", s=18, color=_GREY, label=NAME, zorder=1))
    if drawn and len(panels) == 1:
        panels[0].legend(loc="best")
    elif drawn:
        panels[0].figure.legend(handles=drawn[:1], loc="upper left", fontsize="small")


def _category(value: Any) -> str:
    """As Optuna's axis of options has it."""
    return repr(value) if isinstance(value, str) else str(value)


def on_page(figure: Any, kind: str, found: Sequence[tuple[FrozenTrial, float]]) -> None:
    """The same on a figure of plotly's, each cross with its trial's number."""
    at = _at(kind)
    for place, axis in enumerate(figure.select_xaxes() if found else ()):
        points = [(x, v, t.number) for t, v in found if (x := at(t, axis.title.text or "")) is not None]
        if not points:
            continue
        xs, ys, numbers = zip(*points, strict=True)
        figure.add_scatter(
            x=xs,
            y=ys,
            mode="markers",
            marker={"symbol": "x", "size": 6, "color": _GREY},
            name=NAME,
            legendgroup=NAME,
            showlegend=place == 0,
            hovertext=[f"trial {number}" for number in numbers],
            xaxis=axis.plotly_name.replace("axis", ""),
            yaxis=(axis.anchor or "y"),
        )
    if found:
        figure.update_layout(showlegend=True, legend={"orientation": "h", "y": 1.12})


def _at(kind: str) -> Callable[[FrozenTrial, str], Any]:
    """Where a trial lies along the axis of that name; None where it has no such parameter."""
    return (lambda trial, _: trial.number) if kind == "history" else (lambda trial, name: trial.params.get(name))
