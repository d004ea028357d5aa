"""Numbers of numpy wherever a task hands numbers over: steps, epochs, metrics, events, states, outcomes, seeds."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from driven import driven
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.driver.request import request_of
from hpo.ledger import Ledger, queries
from hpo.tracking.projection import metric_key
from trainer.report import Outcome, numbers
from trainer.runtime.seeding import derive
from trainer.task import Task, measured

STUDY = """
import numpy as np
from pydantic import BaseModel, ConfigDict
from hpo import Float, Int, Objective, Study
from trainer.config import TrainConfig
from trainer.report import Outcome

class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    lr: float = np.float32(0.5)
    width: int = np.int64(3)
    train: TrainConfig = TrainConfig(num_epochs=np.int64(2), seed=np.int64(7))

class Loop:
    def __init__(self, config):
        self.config = config

    def fit(self, reporter, checkpoints):
        for epoch in np.arange(1, 3):
            step, loss = epoch * np.int32(10), np.float32(self.config.lr) / epoch
            state = {"step": step, "loss": loss, "done": np.bool_(True), "w": [np.float16(1.5)]}
            ref = checkpoints.save(state, step=step, epoch=epoch, metrics={"val/loss": loss})
            reporter.event("seen", step=step, loss=np.float64(loss))
            verdict = reporter.report(step, {"val/loss": loss, "val/n": np.uint8(7)}, epoch=epoch, checkpoint=ref)
            checkpoints.commit(ref, self.config.train.checkpoint)
        assert checkpoints.read(ref) == {"step": 20, "loss": float(loss), "done": True, "w": [1.5]}
        return Outcome("complete", step, epoch)

SPACE = {"lr": Float(np.float64(0.25), 1.0, step=np.float64(0.25)), "width": Int(1, np.int64(4))}
STUDY = Study("numpy", Config(), Loop, SPACE, [Objective("val/loss")], strategy="none")
"""


def test_a_task_may_report_by_numbers_of_numpy(home, tmp_path):
    (tmp_path / "numpy_study.py").write_text(STUDY)
    ledger = Ledger(home.create().storage)
    name, state = driven(ledger, request_of(home, str(tmp_path / "numpy_study.py"), sampler="random"), trials=2)
    with ledger.read() as connection:
        rows = queries.trial_rows(connection, queries.study_row(connection, name).id)
    assert state == "complete" and [row.state for row in rows] == ["complete"] * 2
    assert [(row.step, row.epoch, row.values) for row in rows] == [(20, 2, [row.params["lr"] / 2]) for row in rows]
    ledger.close()
    shown = CliRunner().invoke(app, ["show", "0", "--json", "--home", str(home.root)])
    events = [event["fields"] for event in json.loads(shown.stdout)["events"] if event["kind"] == "seen"]
    assert [event["step"] for event in events] == [10, 20]


def test_a_seed_of_numpy_draws_what_the_seed_draws():
    assert derive(np.int64(7), "shuffle", np.int64(3)) == derive(7, "shuffle", 3)


def test_a_metric_too_large_for_a_float_is_named():
    with pytest.raises(ValueError, match=r"metric 'val/big' is 1000\d+\.\.\. \(401 characters\), which is too large"):
        numbers({"val/loss": 1.0, "val/big": 10**400})

    class Huge(Task):
        def evaluate(self, model):
            return {"val/loss": np.float16(0.5), "val/big": 10**400}

    with pytest.raises(
        Exception, match=r"evaluate\(\) of Huge .* gave 'val/big' the value 1000.*too large for a float"
    ):
        measured(Huge(None), torch.nn.Identity())


def test_counts_of_an_outcome_are_whole_numbers():
    assert Outcome("complete", np.int64(3), np.uint8(1)) == Outcome("complete", 3, 1)
    with pytest.raises(TypeError):
        Outcome("complete", 1.5)


def test_a_name_that_mlflow_takes_is_sent_as_it_is():
    from mlflow.utils.validation import _validate_metric_name

    taken = ["val/größe", "val/精度", "val/αβγ", "val/f1 macro", "a-b.c:d"]
    for name in [*taken, "val//dbl", "../up", "val/f1 (macro)", "val/recall@10", "x" * 300, "a,b=c", "☃"]:
        _validate_metric_name(metric_key(name))
        assert (metric_key(name) == name) == (name in taken)


def test_the_least_and_the_largest_are_of_what_is_finite():
    from hpo.analysis.results.format import sparkline
    from hpo.analysis.results.trial import _curve

    curve = [[0, 0, value] for value in (None, 2.0, math.inf, -1.0, math.nan)]
    assert _curve("m", curve)[2:] == ["last nan", "min -1", "max 2", "3 not finite"]
    assert _curve("m", [[0, 0, None]])[2:] == ["last nan", "", "", "1 not finite"]
    assert _curve("m", [[0, 0, 1.0]])[2:] == ["last 1", "min 1", "max 1", ""]
    assert sparkline([1.7e308, -1.7e308, 1.7e308, 0.0]) == "█▁█▅" and sparkline([1.7e308] * 40, 2) == "▁▁"
