"""A configuration that the study's own rules refuse ends its trial, and never the study."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from driven import driven
from sqlalchemy import select
from sqlalchemy.engine import RowMapping
from study_runs import digest

from hpo.driver.failure_streak import MAX_REFUSED
from hpo.driver.loop import Driver
from hpo.driver.request import request_of
from hpo.ledger import Ledger, queries
from hpo.ledger.database.tables import asks, attempts, trials
from hpo.storage.home import Home
from hpo.tracking import projection
from hpo.verify import rules
from hpo.verify.report import Report

KEPT = Path(__file__).parents[2] / "harness" / "kept_study.py"
ORDERED = """
    y: float = 0.5

    @model_validator(mode="after")
    def _ordered(self):
        if not self.x <= self.y + {slack}:
            raise ValueError(f"x {{self.x:.3f}} is above y {{self.y:.3f}}")
        return self
"""


def study_file(home: Home, sampler: str = "random", slack: str = "0.0", strategy: str = '"none"') -> str:
    """The study whose configuration wants x <= y, which its space does not know."""
    text = KEPT.read_text().replace("import BaseModel", "import model_validator, BaseModel")
    text = text.replace("    y: float = 0.5\n", ORDERED.format(slack=slack).lstrip("\n"))
    text = text.replace('sampler="random"', f'sampler="{sampler}", strategy={strategy}')
    file = home.create().root / "kept.py"
    file.write_text(text)
    return str(file)


def found(ledger: Ledger) -> Sequence[RowMapping]:
    query = select(trials, asks.c.params, asks.c.config).join(asks, asks.c.trial_id == trials.c.id)
    return ledger.look(lambda c: c.execute(query.order_by(trials.c.number)).mappings().all())


@pytest.mark.parametrize("sampler", ["random", "tpe", "cmaes"])
def test_a_refused_configuration_is_an_infeasible_trial(home, sampler):
    reference = study_file(home, sampler)
    with closing(Ledger(home.storage)) as ledger:
        _, state = driven(ledger, request_of(home, reference=reference), trials=16)
        rows = found(ledger)
        assert state == "complete" and len(rows) == 16, "what is refused is counted as infeasible trials are"
        for row in rows:
            bad = row["params"]["x"] > row["params"]["y"]
            assert row["state"] == ("infeasible" if bad else "complete"), row["params"]
            assert row["told"] is not None
            if bad:
                said = "x {x:.3f} is above y {y:.3f}".format(**row["params"])
                assert said in row["error"] and (row["outcome"], row["fence"], row["epoch"]) == ("refused", 0, 0)
                assert {key: row["config"][key] for key in "xy"} == row["params"]
        assert {row["state"] for row in rows} == {"infeasible", "complete"}
        made = ledger.look(lambda c: set(c.execute(select(attempts.c.trial_id)).scalars()))
        assert made == {row["id"] for row in rows if row["state"] == "complete"}
        study = ledger.look(lambda c: queries.study_row(c, "kept"))
        report = Report()
        assert rules.check(ledger, study, report) and not report.differences
        with ledger.read() as connection:
            runs = {one.number: one.batch.status for one in projection.everything(connection, study, home)}
        assert runs == {row["number"]: "FAILED" if row["state"] == "infeasible" else "FINISHED" for row in rows}


class Stopping:
    """Ends a driver after so many of its rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def __call__(self, driver: Driver) -> None:
        self.rounds -= 1
        if not self.rounds:
            driver.request_stop()


@pytest.mark.parametrize("sampler", ["tpe", "cmaes"])
def test_interrupted_anywhere_it_is_the_same_study(tmp_path, sampler):
    digests = set()
    for rounds in (0, 3):
        home = Home.at(tmp_path / f"home{rounds}")
        reference = study_file(home, sampler)
        with closing(Ledger(home.storage)) as ledger:
            request = request_of(home, reference=reference)
            for left in range(rounds, 0, -1):
                driven(ledger, request, trials=10, tick=Stopping(left))
            _, state = driven(ledger, request, trials=10)
            assert state == "complete"
        digests.add(digest(home, "kept"))
    assert len(digests) == 1


@pytest.mark.usefixtures("process")
def test_killed_between_ask_and_tell_it_is_the_same_study(tmp_path):
    whole, broken = (Home.at(tmp_path / name) for name in ("whole", "broken"))
    flags = ["--executor", "inline", "--trials", "12", "--home", str(broken.root)]
    command = [sys.executable, "-m", "hpo", "run", "--study", study_file(broken, "tpe"), *flags]
    killed = os.environ | {"HPO_TESTING": "1", "HPO_FAILPOINTS": "driver.after_ask=kill@3"}
    assert subprocess.run(command, env=killed, capture_output=True).returncode == -signal.SIGKILL
    for home in (whole, broken):
        with closing(Ledger(home.create().storage)) as ledger:
            driven(ledger, request_of(home, reference=study_file(home, "tpe")), trials=12)
    assert digest(whole, "kept") == digest(broken, "kept")


def test_a_study_whose_configurations_are_all_refused_stops_and_says_why(home):
    reference = study_file(home)
    file = Path(reference)
    file.write_text(file.read_text().replace("if not self.x <= self.y", "if self.x not in (0.0, 0.5, 1.0) and 1 >= 0"))
    with closing(Ledger(home.storage)) as ledger:
        _, state = driven(ledger, request_of(home, reference=reference), trials=500)
        rows = found(ledger)
        assert state == "stopped" and {row["state"] for row in rows} == {"infeasible"}
        assert MAX_REFUSED <= len(rows) <= MAX_REFUSED + 4
        _, state = driven(ledger, request_of(home, reference=reference), trials=500)
        assert state == "stopped" and MAX_REFUSED <= len(found(ledger)) - len(rows) <= MAX_REFUSED + 4


@pytest.mark.parametrize("strategy", ["pbt", "pb2"])
def test_a_population_goes_on_without_what_was_refused(home, strategy):
    reference = study_file(home, strategy=f'{{"name": "{strategy}", "population": 6, "interval": 3}}')
    with closing(Ledger(home.storage)) as ledger:
        _, state = driven(ledger, request_of(home, reference=reference, seed=4), trials=18)
        rows = found(ledger)
    assert state == "complete" and len(rows) == 18
    refused = {row["number"] for row in rows if row["outcome"] == "refused"}
    assert refused and not refused & {row["parent"] for row in rows}
    assert all(row["params"]["x"] <= row["params"]["y"] for row in rows if row["number"] not in refused)
