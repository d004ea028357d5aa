"""A run that is cut and resumed reports and ends as the run that was not, bit for bit."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from cut_runs import (
    STEPS,
    VARIANTS,
)
from trainer_runs import Killed, Toy, Trial, killed_at, uninterrupted

from trainer.report import ENDS, Verdict
from trainer.state import STATE_ITEMS
from trainer.task import Loss

pytestmark = [pytest.mark.whole, pytest.mark.gpu]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """The digest of each variant's uninterrupted run; saving checkpoints or not must not change it."""
    digests = {}

    def digest(name: str) -> str:
        if name not in digests:
            digests[name] = uninterrupted(
                tmp_path_factory.mktemp("oracle"), **{"checkpoint": {"every_epochs": None}} | VARIANTS[name]
            ).digest()
        return digests[name]

    return digest


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_killed_before_every_step(step, tmp_path, oracle):
    trial = Trial(tmp_path)
    assert trial.attempt(killed_at(step)) is None
    assert trial.attempt().kind == "complete"
    assert trial.digest() == oracle("default")


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in ("default", "compiled")])
@pytest.mark.parametrize("step", [3, pytest.param(5, marks=pytest.mark.slow), pytest.param(6, marks=pytest.mark.slow)])
def test_killed_in_every_variant(variant, step, tmp_path, oracle):
    trial = Trial(tmp_path, **VARIANTS[variant])
    assert trial.attempt(killed_at(step)) is None
    assert trial.attempt().kind == "complete"
    assert trial.digest() == oracle(variant)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("step", [3, 6])
def test_killed_when_compiled(step, tmp_path, oracle):
    trial = Trial(tmp_path, **VARIANTS["compiled"])
    assert trial.attempt(killed_at(step)) is None
    assert trial.attempt().kind == "complete"
    assert trial.digest() == oracle("compiled")


def test_killed_at_every_second_step_until_it_ends(tmp_path, oracle):
    trial = Trial(tmp_path)
    attempts = 0
    while trial.attempt(killed_at(3)) is None:
        attempts += 1
    assert attempts == 3
    assert trial.digest() == oracle("default")


def test_killed_with_checkpoints_of_epochs_only_retrains_the_epoch(tmp_path, oracle):
    trial = Trial(tmp_path, checkpoint={"every_steps": None})
    assert trial.attempt(killed_at(7)) is None
    assert trial.reporter.committed[0].step == 4
    assert trial.attempt().kind == "complete"
    assert trial.reporter.reads == 4
    assert trial.digest() == oracle("default")


@pytest.mark.parametrize("verdict", ["continue", "stop"])
def test_killed_between_an_epochs_report_and_what_follows(verdict, tmp_path, oracle):
    """The verdict was stored and never heard of: the resumed run makes the report again and obeys."""
    trial = Trial(tmp_path, verdict=lambda step, metrics, epoch: Verdict(verdict))

    def die(step: int) -> None:
        if step == 4 and 4 in trial.reporter.epochs:
            raise Killed

    trial.reporter.after_commit = die
    assert trial.attempt() is None
    trial.reporter.after_commit = lambda step: None
    outcome = trial.attempt()
    assert 4 in trial.reporter.replayed
    if verdict == "stop":
        assert (outcome.kind, outcome.step, trial.reporter.reads) == ("pruned", 4, 0)
    else:
        assert trial.digest() == oracle("default")


@pytest.mark.parametrize("variant", ["default", "draws"])
def test_the_number_of_loader_workers_changes_nothing(variant, tmp_path, oracle):
    trial = Trial(tmp_path, **VARIANTS[variant])
    assert trial.attempt(killed_at(3)) is None
    assert trial.attempt(killed_at(4), num_workers=2) is None
    assert trial.attempt(num_workers=3).kind == "complete"
    assert trial.digest() == oracle(variant)


@pytest.mark.parametrize("step", [1, 3, 4, 5, 8])
def test_preempted_leaves_a_committed_checkpoint_of_that_step(step, tmp_path, oracle):
    trial = Trial(tmp_path, checkpoint={"every_steps": None})
    outcome = trial.attempt(lambda read: read == step)
    assert (outcome.kind, outcome.step) == ("preempted", step - 1)
    assert trial.reporter.committed[:1] == [] if step == 1 else trial.reporter.committed[0].step == step - 1
    assert trial.attempt().kind == "complete"
    assert trial.reporter.reads == STEPS - step + 1
    assert trial.digest() == oracle("default")


@pytest.mark.parametrize("step", [4, 6, 7])
def test_preempted_before_a_jump_rolls_back_to_the_scheduled_checkpoint(step, tmp_path, oracle):
    trial = Trial(tmp_path, **VARIANTS["rollback"])
    assert trial.attempt(lambda read: read == step).kind == "preempted"
    assert trial.attempt(lambda read: read == 1).kind == "preempted"
    assert trial.attempt().kind == "complete"
    jumps = [fields["action"] for kind, fields in trial.reporter.events if kind == "loss_jumped"]
    assert len(jumps) == 1 and "back to step 4" in jumps[0]
    assert trial.digest() == oracle("rollback")


def test_little_memory_is_found_out_once(tmp_path, oracle):
    trial = Trial(tmp_path, **VARIANTS["little memory"])
    assert trial.attempt(killed_at(6)) is None
    assert trial.attempt(num_workers=2).kind == "complete"
    sizes = [fields["micro_batch_size"] for kind, fields in trial.reporter.events if kind == "out_of_memory"]
    assert sizes == [3, 2]
    assert trial.digest() == oracle("little memory")


@pytest.mark.parametrize("kind", ["pause", "leave"])
def test_paused_leaves_a_committed_checkpoint_even_where_none_was_due(tmp_path, oracle, kind):
    verdict = lambda step, metrics, epoch: Verdict(kind if epoch == 1 else "continue")  # noqa: E731
    trial = Trial(tmp_path, verdict=verdict, checkpoint={"every_epochs": None})
    assert trial.attempt().kind == ENDS[kind]
    assert [ref.step for ref in trial.reporter.committed] == [4]
    trial.reporter.decisions[4] = Verdict()  # thawed
    assert trial.attempt().kind == "complete"
    assert trial.digest() == oracle("default")


def test_restart_from_and_stop_end_the_fit_at_their_step(tmp_path):
    for kind, ended in (("stop", "pruned"), ("restart_from", "restarted")):
        trial = Trial(tmp_path / kind, verdict=lambda step, metrics, epoch, kind=kind: Verdict(kind))
        outcome = trial.attempt()
        assert (outcome.kind, outcome.step, outcome.epoch) == (ended, 4, 1)


def test_a_stop_at_the_very_end_cuts_nothing_short(tmp_path, oracle):
    def stop_last(step: int, metrics: dict, epoch: int | None) -> Verdict:
        return Verdict("stop" if epoch == trial.config.num_epochs else "continue")

    trial = Trial(tmp_path, verdict=stop_last)
    assert trial.attempt().kind == "complete"
    assert trial.digest() == oracle("default")


def test_a_warm_process_trains_as_a_fresh_one(tmp_path, oracle):
    """What ran before in the process, and the state it left its generators in, changes nothing."""
    Trial(tmp_path / "other", seed=5, precision="bf16", num_threads=2).attempt()
    torch.rand(7), np.random.rand(3), random.random()
    assert uninterrupted(tmp_path / "again").digest() == oracle("default")
    assert uninterrupted(tmp_path / "seed", seed=1).digest() != oracle("default")


# Negative controls: in a run where it is active, each item of the state changes the result when it is left out.


class NeverFinite(Toy):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return Loss(loss.sum * float("nan"), loss.count)


ACTIVE = {
    "early_stopping": {"early_stopping": {"monitor": "val/loss", "patience": 1, "min_delta": 10.0}, "num_epochs": 3},
    "plateau": {
        "schedule": {"name": "plateau", "plateau": {"patience": 0, "factor": 0.1, "threshold": 0.9}},
        "num_epochs": 3,
    },
    "guard": {"task": NeverFinite, "guard": {"max_consecutive": 6}},
    "lookahead": {"optim": {"wrap": "lookahead", "lookahead": {"k": 4}}},
    "average": {"average": {"name": "ema", "decay": 0.9}},
    "loss_scale": VARIANTS["fp16"],
    "spikes": VARIANTS["rollback"],
}


@pytest.mark.parametrize("item", STATE_ITEMS)
def test_leaving_out_an_item_of_the_state_is_noticed(item, tmp_path, monkeypatch):
    active = ACTIVE.get(item, {})
    cut = 4 if item == "guard" else 7  # inside the second epoch, which the guard's run does not reach
    whole = Trial(tmp_path / "whole", **active)
    ended = whole.attempt()
    results = {}
    for name in ("", item):
        trial = Trial(tmp_path / f"without {name}", **active)
        if item == "report":
            trial.reporter.verdict = lambda step, metrics, epoch: Verdict("stop")
            trial.reporter.after_commit = _die_once(trial)
            assert trial.attempt() is None
        else:
            assert trial.attempt(killed_at(cut)) is None
        monkeypatch.setenv("HPO_TESTING", "1")
        monkeypatch.setenv("HPO_OMIT_STATE", name)
        try:
            outcome = trial.attempt()
            results[name] = (outcome.kind, outcome.step, trial.digest())
        except AssertionError as error:  # a replayed report differs, which is noticing it, too
            results[name] = ("differs", str(error), "")
        monkeypatch.delenv("HPO_OMIT_STATE")
    if item != "report":
        assert results[""] == (ended.kind, ended.step, whole.digest())
    assert results[item] != results[""]


def _die_once(trial):
    def die(step: int) -> None:
        if step in trial.reporter.epochs:
            trial.reporter.after_commit = lambda step: None
            raise Killed

    return die
