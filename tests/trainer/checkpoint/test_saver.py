"""Saves in the background: the run is that of saves that are waited for, however slow the disk."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from statistics import median

import pytest
import torch
from cut_runs import STEPS, VARIANTS, Journal
from trainer_runs import Toy, Trial, killed_at, uninterrupted

from trainer.checkpoint import files
from trainer.checkpoint.manifest import check
from trainer.checkpoint.saver import Saver
from trainer.errors import CheckpointError, Fenced
from trainer.report import Verdict
from trainer.runtime import failpoint

pytestmark = pytest.mark.whole

SAVES = {"every_steps": 1, "keep_last": 2, "keep_best": 1, "monitor": "val/loss"}
JUMP = VARIANTS["rollback"]


def background(directory: Path, checkpoint: dict | None = None, **config) -> Trial:
    return Trial(directory, checkpoint=(checkpoint or SAVES) | {"asynchronous": True}, **config)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory) -> Trial:
    return uninterrupted(tmp_path_factory.mktemp("oracle"), checkpoint=SAVES)


@pytest.fixture
def slow_disk(monkeypatch):
    """Every save takes several steps."""
    write = files.write_mine

    def slowly(*args):
        time.sleep(0.05)
        return write(*args)

    monkeypatch.setattr(files, "write_mine", slowly)


def left_lying(trial: Trial) -> set[str]:
    return {path.name for path in trial.directory.iterdir()} - {ref.path.name for ref in trial.reporter.committed}


def best(trial: Trial) -> list[tuple[str, int]]:
    """Every flag that was set or taken away, in its order, by step."""
    return [(name[:13], values["best"]) for name, values in trial.reporter.changes if "best" in values]


def test_ends_with_the_checkpoints_of_saves_that_are_waited_for(tmp_path, oracle, slow_disk):
    trial = background(tmp_path)
    assert trial.attempt().kind == "complete"
    assert trial.digest() == oracle.digest()
    assert best(trial) == best(oracle)
    pairs = list(zip(trial.reporter.committed, oracle.reporter.committed, strict=True))
    assert len(pairs) == 2
    for mine, theirs in pairs:
        assert (mine.step, mine.epoch) == (theirs.step, theirs.epoch)
        ours, expected = (check(ref.path, ref.sha256)["files"] for ref in (mine, theirs))
        assert ours == expected, "the weights as of that step, to the byte"
        assert mine.metrics.get("val/loss") == theirs.metrics.get("val/loss")
    assert not left_lying(trial)


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_killed_before_every_step(step, tmp_path, oracle, slow_disk):
    trial = background(tmp_path)
    assert trial.attempt(killed_at(step)) is None
    assert trial.attempt().kind == "complete"
    assert trial.digest() == oracle.digest()
    assert not left_lying(trial)


def killed_in_a_save(directory) -> bool:
    while not list((directory / "checkpoints").glob("step-*.tmp")):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)
    return True


@pytest.mark.parametrize("step", [4, 6])
def test_sigkill_while_a_save_is_being_written(step, tmp_path, oracle, slow_disk):
    def trial() -> Trial:
        trial = background(tmp_path / "checkpoints", SAVES | {"every_steps": 2})
        trial.reporter = Journal()
        trial.reporter.path = tmp_path / "rows"
        trial.reporter.read()
        return trial

    child = os.fork()
    if child == 0:
        try:
            trial().attempt(lambda read: read == step and killed_in_a_save(tmp_path))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    resumed = trial()
    assert list(resumed.directory.glob("*.tmp")), "a save was under way"
    assert resumed.attempt().kind == "complete"
    assert resumed.digest() == oracle.digest()
    assert not left_lying(resumed)


def test_training_goes_on_while_a_save_is_written(tmp_path, monkeypatch):
    """The first save does not come to its end before the fourth window: if it were waited for, it would fail."""
    write, fourth, under_way = files.write_mine, threading.Event(), threading.Semaphore()

    def held(*args):
        assert under_way.acquire(blocking=False), "two saves at once"
        if not fourth.wait(30):
            raise OSError(errno.EIO, "training does not go on")
        try:
            return write(*args)
        finally:
            under_way.release()

    monkeypatch.setattr(files, "write_mine", held)
    trial = background(tmp_path, {"every_steps": 2, "every_epochs": 1})
    assert trial.attempt(lambda read: read == 4 and fourth.set()).kind == "complete"
    assert [ref.step for ref in trial.reporter.committed] == [8, 6]
    assert trial.reporter.values[8, "time/checkpoint_seconds"] > 0


@pytest.mark.parametrize("verdict", ["pause", "stop", "restart_from"])
def test_what_a_verdict_needs_is_committed_before_it_is_obeyed(verdict, tmp_path, slow_disk):
    trial = background(tmp_path, verdict=lambda step, metrics, epoch: Verdict(verdict if epoch == 1 else "continue"))
    assert trial.attempt().step == 4
    assert [ref.step for ref in trial.reporter.committed] == [4, 3]
    assert trial.reporter.committed[0].metrics["val/loss"] == trial.reporter.values[4, "val/loss"]
    assert not left_lying(trial)


@pytest.mark.parametrize("step", [3, 5])
def test_preempted_leaves_one_committed_checkpoint_of_that_step(step, tmp_path, oracle, slow_disk):
    trial = background(tmp_path)
    assert trial.attempt(lambda read: read == step).kind == "preempted"
    assert [ref.step for ref in trial.reporter.committed][:2] == [step - 1, step - 2]
    assert trial.attempt().kind == "complete"
    assert trial.digest() == oracle.digest()


@pytest.mark.parametrize("cut", [None, 4, 6, 7])
def test_a_jump_goes_back_to_the_same_checkpoint(cut, tmp_path, slow_disk):
    """Step 5 jumps, so the save of step 4 is still being written."""
    expected = uninterrupted(tmp_path / "oracle", **JUMP)
    trial = background(tmp_path / "trial", JUMP["checkpoint"], task=JUMP["task"], rollback=JUMP["rollback"])
    if cut is not None:
        assert trial.attempt(lambda read: read == cut).kind == "preempted"
    assert trial.attempt().kind == "complete"
    assert trial.digest() == expected.digest()
    jumps = [[fields for kind, fields in one.reporter.events if kind == "loss_jumped"] for one in (trial, expected)]
    assert jumps[0] == jumps[1]
    assert "back to step 4" in jumps[0][0]["action"]


@pytest.mark.parametrize("point", ["checkpoint.after_files", "checkpoint.before_rename"])
def test_an_error_of_the_thread_ends_the_attempt(point, tmp_path, oracle, monkeypatch):
    monkeypatch.setattr(failpoint, "_TESTING", True)
    monkeypatch.setattr(failpoint, "_POINTS", failpoint._parse(f"{point}=raise:ENOSPC@3"))
    monkeypatch.setattr(failpoint, "_passed", {})
    trial = background(tmp_path)
    with pytest.raises(CheckpointError, match=r"step 3 could not be written to .*No space left.*intact"):
        trial.attempt()
    assert [ref.step for ref in trial.reporter.committed] == [2, 1]
    assert not left_lying(trial)
    assert trial.attempt().kind == "complete"
    assert trial.digest() == oracle.digest()


class ToyWithABug(Toy):
    def loss(self, model, batch):
        if self.progress >= 3 / STEPS:
            raise ValueError("a bug")
        return super().loss(model, batch)


def test_an_error_of_the_task_leaves_no_save_behind(tmp_path, slow_disk):
    trial = background(tmp_path, task=ToyWithABug)
    with pytest.raises(ValueError, match="a bug"):
        trial.attempt()
    assert not left_lying(trial)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


def test_who_is_fenced_commits_nothing_more(tmp_path, slow_disk):
    trial = background(tmp_path)

    def fence(step: int) -> None:
        if step == 3:
            raise Fenced("another attempt holds the trial")

    trial.reporter.after_commit = fence
    with pytest.raises(Fenced):
        trial.attempt()
    assert {ref.step for ref in trial.reporter.committed} <= {1, 2}
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.slow
def test_training_stands_still_for_a_part_of_the_time_a_save_takes(tmp_path):
    """The claim is a tenth (bench/checkpoint.py); this leaves room for a machine that does other things."""
    state = {"model": {str(i): torch.randn(1024, 1024) for i in range(36)}}
    saver, stalls = Saver(tmp_path, 1, ""), {False: [], True: []}
    saver.reserve(state)
    for _ in range(5):
        for way, seconds in stalls.items():
            before = saver.seconds
            saver.start(state, step=1, epoch=0, metrics={}, background=way)
            while way and not saver.ready:
                time.sleep(0.01)
            ref = saver.finish()
            seconds.append(saver.seconds - before)
            shutil.rmtree(ref.path)
    saver.close()
    assert median(stalls[True]) < 0.4 * median(stalls[False])
