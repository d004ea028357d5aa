"""Whole studies of commands: secrets, equal failures, restarts of a population, what is left in the home."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import func, select
from study_runs import drive, query

from hpo.ledger.database.tables import studies, trials
from hpo.ledger.rows import StudyRow
from hpo.storage.home import Home
from hpo.storage.removal import remove_study

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("process")]

SPACE = {"lr": {"type": "float", "low": 0.1, "high": 0.9}}
REPORT = (
    'echo "{\\"epoch\\": $epoch, \\"metrics\\": {\\"loss\\": $lr}, \\"checkpoint\\": \\"kept\\"}" >> "$HPO_REPORTS"'
)
WAIT = 'while [ "$(wc -l < "$HPO_ANSWERS")" -lt $((epoch - begun)) ]; do sleep 0.01; done'


def write(place: Path, script: str, **changes: Any) -> str:
    document = {"command": ["sh", "-c", script], "space": SPACE, "minimize": "loss", "name": "mine"} | changes
    (place / "mine.yaml").write_text(yaml.safe_dump(document))
    return str(place / "mine.yaml")


def test_equal_failures_stop_a_study_whatever_they_print_last(tmp_path):
    home = Home(tmp_path / "home")
    _, status, state, reason = drive(home, trials=9, reference=write(tmp_path, "echo $HPO_PARAM_lr; exit 3"))
    assert state == "stopped" and status.trials["failed"] == 3, status.trials
    assert "3 trials in a row failed in the same way:\nsh ended with exit code 3; last: 0." in reason
    assert "; run as: sh -c 'echo $HPO_PARAM_lr; exit 3' (its whole output" in reason, "of the last of them"
    [study] = query(home, select(studies))
    left = home.output("mine") / "00000" / "output.f1.log"
    left.parent.mkdir(parents=True, exist_ok=True)
    left.touch()  # as a worker that was killed leaves it
    remove_study(home, StudyRow.of(study._mapping))
    assert not left.exists()


def test_no_variable_of_the_environment_enters_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN_OF_WORKER", "canary-of-the-worker")
    script = (
        'echo "{\\"epoch\\": 1, \\"metrics\\": {\\"loss\\": 1}}" >> "$HPO_REPORTS"; test -n "$TOKEN$TOKEN_OF_WORKER"'
    )
    home = Home(tmp_path / "home")
    reference = write(tmp_path, script, environment={"TOKEN": "canary-of-the-file"})
    _, status, state, _ = drive(home, trials=2, reference=reference)
    assert (state, status.trials["complete"]) == ("complete", 2)
    for file in home.root.rglob("*"):
        assert not file.is_file() or b"canary" not in file.read_bytes(), file


def test_a_population_restarts_programs_from_each_others_checkpoints(tmp_path):
    script = "\n".join(
        (
            "begun=$HPO_EPOCH; cat $HPO_CHECKPOINT/kept > kept 2>/dev/null; lr=$HPO_PARAM_lr",
            "for epoch in $(seq $((begun + 1)) 6); do",
            "echo $HPO_NUMBER:$epoch >> kept",
            REPORT,
            WAIT,
            'tail -n 1 "$HPO_ANSWERS" | grep -q \'"stop": true\' && exit 0',
            "done; exit 0",
        )
    )
    home = Home(tmp_path / "home")
    pbt = {"name": "pbt", "population": 4, "interval": 2}
    reference = write(tmp_path, script, num_epochs=6, strategy=pbt, sampler="random")
    _, _, state, reason = drive(home, trials=12, reference=reference)
    assert state == "complete", reason
    [(begun,)] = query(home, select(func.count()).select_from(trials).where(trials.c.from_epoch > 0))
    assert begun > 0, "some trial goes on from another one's checkpoint"
