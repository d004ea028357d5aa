"""A study's checkpoints within a number of bytes while it is driven: what goes, what stays, and kills in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from driven import driven
from rounds import rounds
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.driver.request import request_of
from hpo.ledger import Ledger, queries
from hpo.ledger.views import files as file_queries
from hpo.storage.home import Home
from hpo.verify import verify
from trainer.checkpoint.location import Disk
from trainer.checkpoint.store import CheckpointStore

TRIALS = 5
STUDY = """
import torch
from hpo import Float, Objective, Study
from trainer.config import Frozen, TrainConfig
from trainer.report import Outcome

class Config(Frozen):
    x: float = 0.5
    train: TrainConfig = TrainConfig(num_epochs=3)

class Loop:
    def __init__(self, config):
        self.config = config

    def fit(self, reporter, checkpoints):
        for step in (1, 2, 3):
            loss = self.config.x / step
            state = {"model": {"w": torch.full((1000,), float(step))}, "step": step}
            ref = checkpoints.save(state, step=step, epoch=step, metrics={"val/loss": loss})
            reporter.report(step, {"val/loss": loss}, epoch=step, checkpoint=ref)
        return Outcome("complete", 3, 3)

SPACE = {"x": Float(0.0, 1.0)}
STUDY = Study("kept", Config(), Loop, SPACE, [Objective("val/loss")], strategy="none", sampler="random")
"""


@pytest.fixture
def file(tmp_path) -> str:
    (tmp_path / "kept.py").write_text(STUDY)
    return str(tmp_path / "kept.py")


def on_disk(home: Home) -> int:
    files = {
        path.stat().st_ino: path.stat().st_size for path in (home.root / "checkpoints").rglob("*") if path.is_file()
    }
    return sum(files.values())


def run(home: Home, file: str, max_bytes: int | None) -> tuple[str, dict[int, list[int]], int]:
    """(the digest, trial number -> steps of its kept checkpoints, the best trial) of a study of five trials."""
    ledger = Ledger(home.create().storage)
    driven(ledger, request_of(home, file), trials=TRIALS, max_bytes=max_bytes)
    found = seen(ledger)
    ledger.close()
    return found


def seen(ledger: Ledger) -> tuple[str, dict[int, list[int]], int]:
    with ledger.read() as connection:
        row = queries.study_row(connection, "kept")
        steps: dict[int, list[int]] = {}
        for one in file_queries.kept_of_study(connection, row.id):
            steps.setdefault(one.number, []).append(one.step)
        return queries.digest(connection, row), steps, queries.ranked(connection, row)[0]


def test_older_checkpoints_go_worst_first_and_the_last_of_each_stays(tmp_path, file):
    free = run(Home.at(tmp_path / "free"), file, None)
    assert free[1] == {number: [1, 2, 3] for number in range(TRIALS)}
    size = on_disk(Home.at(tmp_path / "free")) // (3 * TRIALS)
    tight = run(Home.at(tmp_path / "tight"), file, 1)
    best = tight[2]
    assert tight[1] == {number: [1, 2, 3] if number == best else [3] for number in range(TRIALS)}
    bounded = run(Home.at(tmp_path / "bounded"), file, 11 * size + size // 2)
    assert on_disk(Home.at(tmp_path / "bounded")) <= 11 * size + size // 2
    assert free[0] == tight[0] == bounded[0]
    assert best == bounded[2] and bounded[1][best] == [1, 2, 3]
    assert sum(map(len, bounded[1].values())) == 11 and all(steps[-1] == 3 for steps in bounded[1].values())
    for name in ("tight", "bounded"):
        home = Home.at(tmp_path / name)
        differences = verify(home, home.storage).differences  # nobody has written metrics.json here
        assert [one for one in differences if "metrics.json is missing" not in one] == []


def test_an_end_has_only_those_trials_looked_at_that_lose_checkpoints(tmp_path, file, monkeypatch):
    """All of them, at each end of thousands, would take longer than many a trial."""
    looked: Counter[Path] = Counter()
    measured: Counter[Path] = Counter()
    sweep, sizes = CheckpointStore.sweep, Disk.sizes

    def counted(store: CheckpointStore, *committed) -> list[Path]:
        looked[store.directory] += 1
        return sweep(store, *committed)

    monkeypatch.setattr(CheckpointStore, "sweep", counted)
    monkeypatch.setattr(Disk, "sizes", lambda disk, path, size: measured.update([path]) or sizes(disk, path, size))
    steps = run(Home.at(tmp_path / "home"), file, 1)[1]
    assert len(looked) >= TRIALS - 1 and max(looked.values()) == 1
    assert len(measured) == 3 * TRIALS and max(measured.values()) == 1
    assert sum(map(len, steps.values())) == TRIALS + 2


@pytest.mark.usefixtures("process")
@rounds("point", ["retention.after_row", "retention.after_files"])
def test_killed_between_the_rows_and_the_files_nothing_is_lost_or_left(tmp_path, file, point):
    home = Home.at(tmp_path / point)
    words = [
        "run",
        "--study",
        file,
        "--trials",
        str(TRIALS),
        "--executor",
        "inline",
        "--max-bytes",
        "1B",
        "--home",
        str(home.root),
    ]
    environment = os.environ | {"HPO_TESTING": "1", "HPO_FAILPOINTS": f"{point}=kill@2"}
    killed = subprocess.run([sys.executable, "-m", "hpo", *words], env=environment, capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = CliRunner().invoke(app, ["resume", "--home", str(home.root)])
    assert resumed.exit_code == 0, resumed.output
    ledger = Ledger(home.storage)
    digest, steps, best = seen(ledger)
    ledger.close()
    assert steps == {number: [1, 2, 3] if number == best else [3] for number in range(TRIALS)}
    assert len(list(Path(home.root, "checkpoints").rglob("step-*/manifest.json"))) == TRIALS + 2
    assert (verify(home, home.storage).differences, digest) == (
        [],
        run(Home.at(tmp_path / f"{point}-free"), file, None)[0],
    )


def test_a_bound_that_is_none_is_refused(home):
    for value, words in [("0", "leaves room for nothing"), ("10XB", "is not a size"), ("-1", "is not a size")]:
        result = CliRunner().invoke(
            app, ["run", "--study", "mlp", "--max-bytes", value, "--trials", "1", "--home", str(home.root)]
        )
        assert result.exit_code == 2 and words in result.stderr and value in result.stderr


@pytest.mark.usefixtures("process")
def test_a_remembered_budget_is_lowered_and_raised_by_naming_another(tmp_path, file):
    home = Home.at(tmp_path / "home")
    tight = run(Home.at(tmp_path / "tight"), file, 1)

    def again(*words: str) -> tuple[int, dict[int, list[int]]]:
        said = CliRunner().invoke(app, [*words, "--executor", "inline", "--home", str(home.root)])
        assert said.exit_code == 0, said.output
        ledger = Ledger(home.storage)
        with ledger.read() as connection:
            remembered = queries.study_row(connection, "kept").environment.get("max_bytes")
        steps = seen(ledger)[1]
        ledger.close()
        return remembered, steps

    begun = ("run", "--study", file, "--trials", str(TRIALS))
    whole = {number: [1, 2, 3] for number in range(TRIALS)}
    assert again(*begun, "--max-bytes", "1GB") == (10**9, whole)
    assert again(*begun, "--max-bytes", "1B") == (1, tight[1]), "of a study that has ended too"
    assert again("resume") == (1, tight[1])
    assert again("resume", "--max-bytes", "2GB") == (2 * 10**9, tight[1])
