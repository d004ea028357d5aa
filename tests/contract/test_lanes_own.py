"""What a lane has of its own while it trains with others: its batches, its errors, its events, its place in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lane_runs import CUTS, EPOCH, OneOf, Small, alone, assert_close, solo, together
from torch import Tensor, nn

from trainer.lanes import stacked_model
from trainer.lanes.fused_optimizers import Rows
from trainer.lanes.lane import Lane
from trainer.task import Loss


class Normed(Small):
    """With statistics that a pass over a window moves."""

    def layers(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 13), nn.BatchNorm1d(13), nn.Tanh(), nn.Linear(13, 3))


BESIDE: dict[str, Any] = {"task": Normed, "num_epochs": 3, "optim": {"name": "sgd", "lr": 0.1}}


# --- Batches


class Hardening:
    """The first half of a run has its samples in order, the second the other way round. `read` counts them."""

    def __init__(self, x: Tensor, num_epochs: int, read: Counter[int]) -> None:
        self.x, self.num_epochs, self.read = x, num_epochs, read

    def __len__(self) -> int:
        return len(self.x)

    def order(self, seed: int, epoch: int, batch_size: int) -> Sequence[int]:
        indices = range(len(self))
        return indices if 2 * epoch < self.num_epochs else indices[::-1]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read[self.num_epochs] += 1
        return self.x[index], index % 3


def test_lanes_share_batches_of_the_same_seed_length_and_epoch(tmp_path):
    """In the second epoch of two a lane reads otherwise than in that of four; the last lane is an epoch behind."""
    read: Counter[int] = Counter()

    class Hardened(Normed):
        def train_set(self) -> Any:
            return Hardening(torch.randn(100, 6, dtype=self.dtype), self.config.train.num_epochs, read)

    runs = [{"seed": seed, "num_epochs": epochs} for seed, epochs in ((0, 2), (0, 4), (0, 2), (1, 4), (0, 4))]
    *lanes, behind = (OneOf(tmp_path / f"lane{i}", Hardened, **own) for i, own in enumerate(runs))
    together(*lanes, later={1: [behind]})
    counted = dict(read)
    for i, (lane, own) in enumerate(zip([*lanes[:2], lanes[3]], [*runs[:2], runs[3]], strict=True)):
        assert_close(lane, solo(tmp_path / f"solo{i}", Hardened, **own))
    assert lanes[0].bits() == lanes[2].bits() and lanes[1].bits() == behind.bits()
    first = lanes[2].config.batch_size  # window, by which the third is held against what it shares
    assert counted == {2: 2 * 100 + first, 4: 3 * 4 * 100}, "the first and the third read once"


# --- Errors


class Tabled(Normed):
    """A factor from a table of forty, in which `weight` says how far a step goes."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss, table = super().loss(model, batch), torch.linspace(1, 2, 40, dtype=self.dtype)
        at = torch.as_tensor(self.config.weight * self.step).long().reshape(1)
        return Loss(loss.sum * table.index_select(0, at).sum(), loss.count)


class Phased(Normed):
    """Of one trial the learning rate has no second half."""

    def lr_scale(self, progress: float) -> float:
        if self.config.hidden == 13.0 and progress > 0.5:
            raise ValueError("thirteen")
        return 1.0 - progress / 2


LATE = {"loss": (Tabled, {"weight": 10.0}, 4), "lr_scale": (Phased, {"hidden": 13.0}, 5)}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("where", LATE)
def test_a_lane_that_raises_in_the_middle_ends_alone(where, place, tmp_path):
    """The others have the numbers that they have without it, also where it was its task that stood for theirs."""
    task, odd, step = LATE[where]
    config: dict[str, Any] = BESIDE | {"task": task}
    others = [OneOf(tmp_path / str(seed), seed=seed, **config) for seed in (0, 1)]
    lane = OneOf(tmp_path / "lane", of=odd, **config)
    together(*others[:place], lane, *others[place:])
    assert EPOCH < step < 2 * EPOCH
    oracle = OneOf(tmp_path / "solo", of=odd, **config)
    with pytest.raises((IndexError, ValueError)) as raised:
        oracle.attempt()
    assert (type(lane.outcome), str(lane.outcome)) == (raised.type, str(raised.value))
    assert (lane.reporter.reads, sorted(lane.reporter.epochs)) == (oracle.reporter.reads, [EPOCH])
    assert lane.reporter.reads == step + 1
    assert lane.numbers() == pytest.approx(oracle.numbers(), rel=1e-9)
    for seed, trial in enumerate(others):
        bits = alone(tmp_path / f"alone{seed}", seed=seed, **config).bits()
        assert (trial.kind(), trial.bits()) == ("complete", bits)


def test_a_lane_that_raises_as_another_joins_is_not_taken_for_that(tmp_path):
    config: dict[str, Any] = BESIDE | {"task": Tabled}
    ahead, odd, joining = (
        OneOf(tmp_path / str(i), of={"weight": weight}, seed=i, **config) for i, weight in enumerate((1.0, 13.5, 0.5))
    )
    together(ahead, odd, later={1: [joining]})
    assert isinstance(odd.outcome, IndexError) and odd.reporter.reads == EPOCH + 1
    for i, (trial, weight) in enumerate(((ahead, 1.0), (joining, 0.5))):
        oracle = alone(tmp_path / f"alone{i}", of={"weight": weight}, seed=2 * i, **config)
        assert (trial.kind(), trial.bits()) == ("complete", oracle.bits())


# --- Events


class Spoilt(Normed):
    """The last two of every `weight` steps have a loss that is not finite."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss, every = super().loss(model, batch), torch.as_tensor(self.config.weight)
        spoilt = torch.as_tensor(self.step) % every >= every - 2
        return Loss(loss.sum * torch.where(spoilt, torch.nan, 1.0), loss.count)


def test_steps_that_are_skipped_are_told_by_their_lane_at_their_step(tmp_path):
    """Once for each run of them, as `fit` tells it: also where good steps of the epoch lie between two."""
    weights = {4.0: [2, 6, 10, 14], 1000.0: [], 7.0: [5, 12]}
    config: dict[str, Any] = BESIDE | {"task": Spoilt, "num_epochs": 5}
    lanes = {weight: OneOf(tmp_path / f"lane{weight}", of={"weight": weight}, **config) for weight in weights}
    together(*lanes.values())
    for weight, lane in lanes.items():
        assert [kind for kind, _ in lane.reporter.events] == ["skipped_step"] * len(weights[weight])
        assert [fields["step"] for _, fields in lane.reporter.events] == weights[weight]
        oracle = solo(tmp_path / f"solo{weight}", of={"weight": weight}, **config)
        assert lane.reporter.events == oracle.reporter.events
        assert_close(lane, oracle)


# --- Memory


def test_half_the_lanes_make_way_where_optimizer_memory_is_short(tmp_path, monkeypatch):
    """The rows of optimizers are made anew as a lane leaves, after the pass over its window, and then do not fit."""

    class Greedy(Rows):
        def __init__(self, lanes: Sequence[Lane], *given: Any) -> None:
            super().__init__(lanes, *given)
            if len(lanes) > 2 and lanes[0].state.step >= 3:
                raise torch.OutOfMemoryError("what a GPU would say")

    trials = [OneOf(tmp_path / str(i), seed=i % 3, **CUTS) for i in range(5)]
    with monkeypatch.context() as patched:
        patched.setattr(stacked_model, "Rows", Greedy)
        together(*trials, cuts={trials[4]: lambda read: read == 4})
    assert [trial.kind() for trial in trials] == ["complete"] * 2 + ["preempted"] * 3
    assert [trial.reporter.committed[0].step for trial in trials[2:]] == [3] * 3
    said = [fields for kind, fields in trials[0].reporter.events if kind == "out_of_memory"]
    assert said == [{"step": 3, "lanes": 2}]
    together(*trials[2:])
    oracle = [alone(tmp_path / f"alone{seed}", seed=seed, **CUTS).bits() for seed in range(3)]
    assert [trial.bits() for trial in trials] == [oracle[i % 3] for i in range(5)]
