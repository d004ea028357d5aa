"""Plots of studies without extent, and of what a library cannot draw: the others are drawn all the same."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from hpo.analysis.plots import figures, stopped


@pytest.fixture
def equal() -> figures.Subject:
    """Four trials with one value; a parameter has one value too."""
    kinds = {
        "lr": FloatDistribution(1e-3, 1e-1, log=True),
        "hidden": IntDistribution(8, 8),
        "dropout": CategoricalDistribution([0.0, 0.1]),
    }
    study = optuna.create_study(study_name="equal")
    for i in range(4):
        params = {"lr": 10.0 ** (-1 - i / 2), "hidden": 8, "dropout": 0.1 * (i % 2)}
        study.add_trial(create_trial(value=1.0, params=params, distributions=kinds, intermediate_values={1: 1.0}))
    study.set_user_attr("metrics", ["val/loss"])
    return figures.subject(study, None)


def test_trials_with_one_value_are_drawn(equal, tmp_path):
    kinds = [kind for kind in ("history", "contour", "parallel", "slice") if not figures.lacking(kind, equal)]
    files, failed = figures.draw(equal, kinds, tmp_path)
    assert not failed and list(files) == [*(f"{kind}.png" for kind in kinds), "plots.html"]
    assert all(path.stat().st_size > 1000 for path in files.values())


def test_a_picture_that_fails_takes_no_other_along(equal, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise NotImplementedError("cannot remove artist")

    monkeypatch.setattr(optuna.visualization.matplotlib, "plot_edf", fails)
    files, failed = figures.draw(equal, ["edf", "history"], tmp_path)
    assert failed == {"edf": "NotImplementedError: cannot remove artist while it was drawn"}
    assert sorted(files) == ["history.png", "plots.html"]
    page = files["plots.html"].read_text()
    assert "<h2>history</h2>" in page and "<h2>edf</h2>" not in page and "Plotly.newPlot" in page


KINDS = {
    "lr": FloatDistribution(1e-5, 1e-1, log=True),
    "layers": IntDistribution(1, 9),
    "act": CategoricalDistribution(["relu", "gelu", "tanh"]),
    "momentum": FloatDistribution(0.0, 1.0),
}


@pytest.fixture
def early() -> figures.Subject:
    """Eight complete trials and three stopped ones, whose parameters and values lie beyond those of the others."""
    study = optuna.create_study(study_name="early")
    for i in range(8):
        params = {"lr": 1e-3 * 1.3**i, "layers": 3 + i % 3, "act": ("relu", "gelu")[i % 2]}
        study.add_trial(
            create_trial(value=1.0 + 0.1 * i + (i % 3) / 7, params=params, distributions=_of(params), **_curve(9))
        )
    for params in (
        {"lr": 1e-5, "layers": 9, "act": "tanh"},
        {"lr": 1e-1, "layers": 1, "act": "relu"},
        {"lr": 2e-3, "layers": 4, "momentum": 0.5},  # without `act`
    ):
        study.add_trial(
            create_trial(state=TrialState.PRUNED, params=params, distributions=_of(params), **_curve(1, value=50.0))
        )
    study.set_user_attr("metrics", ["val/loss"])
    return figures.subject(study, None)


def _of(params):
    return {name: KINDS[name] for name in params}


def _curve(epochs, value=1.0):
    return {"intermediate_values": dict.fromkeys(range(1, epochs + 1), value)}


MARKED = {"history": 3, "slice": 3 + 3 + 2, "contour": 3 + 2 + 2, "rank": 3 + 3 + 2 + 3 + 2 + 2, "edf": 3}


@pytest.mark.parametrize("kind", [*MARKED, "parallel"])
def test_the_page_marks_every_stopped_trial(early, kind):
    drawn = figures.figure(early, kind)
    marks = [trace for trace in drawn.data if trace.name == stopped.NAME]
    assert [trace.showlegend for trace in marks] == [True, *[False] * (len(marks) - 1)]
    if kind == "parallel":
        assert [trace.hovertemplate[:8] for trace in marks] == ["trial 8,", "trial 9,", "trial 10"]
        assert {trace.line.dash for trace in drawn.data[3:11]} == {"solid"}
        return
    crosses = [text for trace in marks for text in trace.hovertext]
    factor = 2 if kind in stopped.PAIRS else 1  # each pair has two panels, rank's diagonal one each
    most = MARKED[kind] * factor - (8 if kind == "rank" else 0)
    assert len(crosses) == most and set(crosses) == {"trial 8", "trial 9", "trial 10"}
    for trace in marks if kind in stopped.PAIRS else ():
        for axis, places in (
            (trace.xaxis.replace("x", "xaxis"), trace.x),
            (trace.yaxis.replace("y", "yaxis"), trace.y),
        ):
            low, high = drawn.layout[axis].range or (-math.inf, math.inf)
            shown = [math.log10(at) if drawn.layout[axis].type == "log" else at for at in places]
            assert all(isinstance(at, str) or low < at < high for at in shown)


@pytest.mark.parametrize("kind", list(MARKED))
def test_the_picture_shows_every_stopped_trial(early, kind, monkeypatch):
    import matplotlib.pyplot as plt

    kept, close = list[Any](), plt.close
    monkeypatch.setattr(plt, "close", lambda drawn: kept.append(drawn))
    figures.png(early, kind)
    [drawn] = kept
    marks = [(a, one) for a in drawn.axes for one in a.collections if one.get_label() == stopped.NAME]
    assert sum(len(one.get_offsets()) for _, one in marks) == sum(
        len(trace.x) for trace in figures.figure(early, kind).data if trace.name == stopped.NAME
    )
    for axes, one in marks:
        low, high = axes.transAxes.inverted().transform(axes.transData.transform(one.get_offsets())).T
        assert low.min() >= 0 and low.max() <= 1 and high.min() >= 0 and high.max() <= 1
    assert [text.get_text() for text in (drawn.legends or [drawn.axes[0].get_legend()])[0].get_texts()][-1:] == [
        stopped.NAME
    ]
    close(drawn)


def test_parallel_lines_of_stopped_trials_are_dotted(early, monkeypatch):
    import matplotlib.pyplot as plt

    kept, close = list[Any](), plt.close
    monkeypatch.setattr(plt, "close", lambda drawn: kept.append(drawn))
    figures.png(early, "parallel")
    complete, dotted = kept[0].axes[0].collections
    assert (len(complete.get_segments()), len(dotted.get_segments())) == (8, 3)
    assert len(complete.get_array()) == 8 and dotted.get_array() is None
    low, high = early.span
    assert {segment[0][1] for segment in dotted.get_segments()} == {high}, "at the end of the axis: 50 lies beyond"
    assert all(low <= segment[0][1] <= high for segment in complete.get_segments())
    close(kept[0])


def test_each_picture_is_drawn_once(early, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn, draw = [], Figure.draw
    monkeypatch.setattr(Figure, "draw", lambda self, renderer: (drawn.append(1), draw(self, renderer)))
    kinds = [kind for kind in figures.KINDS if not figures.lacking(kind, early)]
    figures.draw(early, kinds, tmp_path)
    assert len(drawn) == len(kinds) >= 8


def test_plots_do_without_forests_and_fanova_has_them(process):
    program = """
import sys, optuna
from hpo.analysis.plots import figures
from hpo.analysis.plots.importance import importances
import optuna.visualization, optuna.visualization.matplotlib
assert not {"sklearn", "sklearn.ensemble", "pandas", "torch"} & set(sys.modules), "imported for nothing"
optuna.logging.set_verbosity(optuna.logging.ERROR)
study = optuna.create_study()
study.optimize(lambda t: t.suggest_float("x", 0, 1) + 3 * t.suggest_float("y", 0, 1), 30)
for evaluator in ("fanova", "mdi"):
    assert list(importances(study, evaluator)) == ["y", "x"], evaluator
assert sys.modules["sklearn.ensemble"].RandomForestRegressor.__module__.startswith("sklearn")
"""
    subprocess.run([sys.executable, "-c", program], check=True)
