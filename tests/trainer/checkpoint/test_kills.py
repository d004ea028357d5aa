"""A fit that SIGKILL ends at any point of a save or of its clean-up goes on as if nothing had been."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from cut_runs import Journal
from trainer_runs import Toy, Trial, uninterrupted

from trainer.checkpoint import files
from trainer.checkpoint.store import load
from trainer.runtime import failpoint

pytestmark = pytest.mark.whole


class Adapted(Toy):
    """Its first layer is frozen, so its checkpoints share a file."""

    def model(self):
        net = super().model()
        net[0].requires_grad_(False)
        return net


@pytest.fixture(autouse=True)
def small_files_count(monkeypatch):
    monkeypatch.setattr(files, "SMALL", 0)


def trial_in(directory: Path, asynchronous: bool) -> Trial:
    saves = {"every_steps": 1, "keep_last": 2, "asynchronous": asynchronous}
    trial = Trial(directory / "checkpoints", Adapted, checkpoint=saves)
    trial.reporter = Journal()
    trial.reporter.path = directory / "rows"
    trial.reporter.read()
    return trial


@pytest.fixture(scope="module")
def oracle(tmp_path_factory) -> str:
    return uninterrupted(tmp_path_factory.mktemp("oracle"), task=Adapted).digest()


def _attempt_and_die(directory: Path, points: str, asynchronous: bool) -> None:
    """In a forked child: it must not come back, or there would be two of this test run."""
    code = 1
    try:
        failpoint._TESTING, failpoint._POINTS, failpoint._passed = True, failpoint._parse(points), {}
        trial_in(directory, asynchronous).attempt()
        code = 0
    finally:
        os._exit(code)


POINTS = [name for name in failpoint.NAMES if name.startswith(("checkpoint.", "retention."))]
ASYNCHRONOUS = ("checkpoint.after_copy", "checkpoint.before_commit")  # which other saves do not pass


@pytest.mark.parametrize("hit", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("point", "asynchronous"),
    [(point, way) for point in POINTS for way in (False, True) if way or point not in ASYNCHRONOUS],
)
def test_sigkill_in_a_save_and_again_in_the_next_attempt(point, asynchronous, hit, tmp_path, oracle):
    for attempt in (1, 2):
        child = os.fork()
        if child == 0:
            _attempt_and_die(tmp_path, f"{point}=kill@{hit}", asynchronous)
        _, status = os.waitpid(child, 0)
        # The second attempt may have too little left to come to the point again.
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL or (attempt == 2 and status == 0)
    trial = trial_in(tmp_path, asynchronous)
    assert trial.attempt().kind == "complete"
    assert trial.digest() == oracle
    assert not trial.reporter.events
    committed = [ref.path for ref in trial.reporter.committed]
    assert {path.name for path in trial.directory.iterdir()} == {path.name for path in committed}
    newest, before = (path / "model-frozen.safetensors" for path in committed)
    assert newest.samefile(before)
    assert all("0.weight" in load(path)["model"] for path in committed)
