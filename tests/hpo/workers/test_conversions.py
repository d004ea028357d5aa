"""Counts the conversions of a configuration on a trial's way: JSON to configuration, and configuration to JSON."""

from __future__ import annotations

import sys
from collections import Counter

from driven import driven

from hpo.declaration.references import load
from hpo.driver.request import request_of
from hpo.ledger import Ledger
from hpo.storage.home import Home

DECLARED = """
from collections import Counter
from pydantic import BaseModel, ConfigDict, model_validator
from hpo import Float, Objective, Study
from trainer.config import TrainConfig
from trainer.report import Outcome

COUNTS = Counter()


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    x: float = 0.5
    shape: tuple[int, ...] = (1, 2)
    sizes: dict[str, float] = {"a": 1.0}
    train: TrainConfig = TrainConfig(num_epochs=1)

    @model_validator(mode="after")
    def _counted(self):
        COUNTS["in"] += 1
        return self

    def model_dump(self, **options):
        COUNTS["out"] += 1
        return super().model_dump(**options)


class Task:
    def __init__(self, config):
        self.config = config

    def fit(self, reporter, checkpoints):
        reporter.report(1, {"loss": self.config.x}, epoch=1)
        return Outcome("complete", 1, 1)


STUDY = Study("counted", Config(), Task, {"x": Float(0.0, 1.0)}, [Objective("loss")], sampler="random")
"""


def conversions(reference: str, home: Home, trials: int) -> Counter[str]:
    counts = sys.modules[type(load(reference).config).__module__].COUNTS
    counts.clear()
    ledger = Ledger(home.create().storage)
    assert driven(ledger, request_of(home, reference), trials=trials)[1] == "complete"
    ledger.close()
    return Counter(counts)


def test_a_configuration_is_read_twice_and_written_once_a_trial(tmp_path):
    """The driver makes it of the parameters and writes it down; the worker reads it."""
    file = tmp_path / "counted.py"
    file.write_text(DECLARED)
    few, many = (conversions(str(file), Home(tmp_path / f"home-{trials}"), trials) for trials in (2, 7))
    many.subtract(few)
    assert many == {"in": 2 * 5, "out": 1 * 5}
