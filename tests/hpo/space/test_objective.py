"""A constraint on a number that a task's `evaluate` returns, here how many parameters its model has."""

from __future__ import annotations

import json

import pytest
from places import HARNESS
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.ledger import Ledger, queries
from hpo.storage.home import Home

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("process")]

STUDY = """
from dataclasses import replace

import tiny_study
from hpo import Constraint, Int

MOST = 100


def __getattr__(name):  # the driver must not import torch
    if name != "Counted":
        raise AttributeError(name)

    class Counted(tiny_study.TinyTask):
        def evaluate(self, model):
            return super().evaluate(model) | {"model/parameters": float(sum(p.numel() for p in model.parameters()))}

    return Counted


STUDY = replace(
    tiny_study.STUDY,
    name="counted",
    task=":Counted",
    space={"model.hidden_size": Int(4, 16, powers_of_two=True)},
    constraints=[Constraint("model/parameters", upper=MOST)],
    sampler="grid",
    strategy="none",
)
"""


def parameters(hidden: int) -> int:
    """6 -> h -> 1 with biases, and a norm's weights and biases between."""
    return (6 * hidden + hidden) + 2 * hidden + (hidden + 1)


def test_more_parameters_than_the_bound_are_infeasible_and_never_best(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(HARNESS)
    file, home = tmp_path / "counted.py", Home(tmp_path / "home")
    file.write_text(STUDY)
    flags = ["--trials", "3", "--executor", "inline", "-o", "train.num_epochs=1", "-o", "pause=0"]
    result = CliRunner().invoke(app, ["run", "--study", str(file), *flags, "--home", str(home.root)])
    assert result.exit_code == 0, (result.output, result.stderr)
    with Ledger(home.storage).read() as connection:
        rows = {row.params["model.hidden_size"]: row for row in queries.trial_rows(connection, 1)}
    assert rows.keys() == {4, 8, 16}
    for hidden, row in rows.items():
        count = parameters(hidden)
        assert row.state == ("infeasible" if count > 100 else "complete")
        assert row.violations == [pytest.approx((count - 100) / 100)] and len(row.values) == 1
    assert rows[16].error == "model/parameters 161 is above 100."
    best = json.loads(CliRunner().invoke(app, ["best", "--json", "--home", str(home.root)]).stdout)
    assert best["params"]["model.hidden_size"] in (4, 8)
