"""Plots of studies without extent, and of what a library cannot draw: the others are drawn all the same."""

from __future__ import annotations

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import create_trial

from hpo.analysis.plots import figures


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
