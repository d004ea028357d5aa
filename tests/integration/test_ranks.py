"""A trial of several ranks trains as one process would, resumes to the bit, and loses no rank unnoticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import rank_runs
import torch

from trainer.config import ParallelConfig, TrainConfig
from trainer.config.optim import OPTIMIZERS
from trainer.errors import ConfigError
from trainer.launch import RankFailed, RankLost, launch
from trainer.loop import fit
from trainer.parallel.split import _plan

HERE = str(Path(__file__).parent)
KINDS: dict[int, dict[str, Any]] = {  # train.parallel by the number of ranks it takes
    2: {"ddp": {"data": 2}, "fp16": {"data": 2, "compression": "fp16"}, "buckets": {"data": 2, "bucket_mb": 0.001}}
    | {shard: {"data": 2, "shard": shard} for shard in ("zero1", "zero2", "zero3")}
    | {"tensor": {"tensor": 2}},
    4: {"ddp": {"data": 4}, "zero3": {"data": 4, "shard": "zero3"}, "tensor": {"data": 2, "tensor": 2}},
}
TWO_PASSES = {  # train.optim of those that look at a window more than once
    "sam": {"name": "sgd", "lr": 0.1, "wrap": "sam", "sam": {"rho": 0.2}},
    "sophia": {"name": "sophia", "lr": 1e-3, "update_every": 2},
}
WAYS = ("none", "zero1", "zero3", "tensor")
JUMPING = {"task": "Jumping", "rollback": {"enabled": True, "min_history": 8, "cooldown": 4}}
RESUMED = {"task": "Wide", "micro_batch_size": 3, "num_epochs": 3, "checkpoint": {"every_steps": 1}}


@pytest.fixture(scope="module")
def solo(tmp_path_factory):
    """The oracle: one process."""
    return {task: rank_runs.run(str(tmp_path_factory.mktemp(task)), task) for task in ("Smooth", "Ragged")}


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """A run whose rank 1 gets SIGTERM in the sixth window: its directory, and what each rank gave back."""
    directory = tmp_path_factory.mktemp("left") / "run"
    return directory, strike("SIGTERM", directory)


@pytest.fixture(scope="module")
def ran(tmp_path_factory, left):
    """All runs of 2 and of 4 ranks, a launch for each: rank -> name -> result."""
    results: dict[int, Any] = {}

    def of(ranks: int) -> Any:
        if ranks not in results:
            ddp = {"data": ranks, "bucket_mb": 0.005}
            runs = {name: {"parallel": kind} for name, kind in KINDS[ranks].items()}
            runs |= {"ragged": {"task": "Ragged", "parallel": ddp}}
            for way in WAYS:
                kind = ddp if way == "none" else KINDS[ranks].get(way) or {"data": ranks, "shard": way}
                runs |= {f"whole {way}": RESUMED | {"parallel": kind}}
                runs |= {f"cut {way}": RESUMED | {"parallel": kind, "cut": 6}}
                runs |= {f"stopped {way}": {"parallel": kind, "stop": 2}}
            if ranks == 2:
                runs |= {name: {"parallel": ddp, "optim": optim} for name, optim in TWO_PASSES.items()}
                runs |= {"workers": RESUMED | {"parallel": ddp, "num_workers": 1}}
                runs |= {"resumed": RESUMED | {"parallel": ddp, "directory": str(left[0])}}
                runs |= {f"nan {shard}": {"task": "Bad", "parallel": {"data": 2, "shard": shard}} for shard in WAYS[:3]}
                runs |= {f"jump {way}": JUMPING | {"parallel": KINDS[2].get(way, ddp)} for way in WAYS}
                begun = tmp_path_factory.mktemp("begun")
                runs |= {"resharded": {"parallel": {"data": 2, "shard": "zero3"}, "directory": str(begun)}}
            job = {"directory": str(tmp_path_factory.mktemp("ranks")), "runs": runs}
            if ranks == 2:
                job["alone"] = rank_runs.run(str(begun), stop=2)
            results[ranks] = job, launched("runs", job, ranks)
        return results[ranks]

    return of


def launched(entry: str, job: dict[str, Any], ranks: int, timeout: float = 120.0, **kwargs: Any) -> list[Any]:
    parallel = ParallelConfig(data=ranks, timeout=timeout)
    return launch(f"rank_runs:{entry}", job, parallel, device="cpu", **kwargs)


def assert_equal(result: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    torch.testing.assert_close(rank_runs.losses_of(result), rank_runs.losses_of(expected), rtol=tolerance, atol=0)
    assert result["weights"].keys() == expected["weights"].keys()
    for name, values in expected["weights"].items():
        reference = torch.tensor(values)
        error = (torch.tensor(result["weights"][name]) - reference).norm() / reference.norm()
        assert error <= tolerance, (name, error)


@pytest.mark.parametrize(("ranks", "kind"), [(ranks, kind) for ranks, kinds in KINDS.items() for kind in kinds])
def test_every_kind_computes_what_one_process_does(ranks, kind, ran, solo):
    """20 windows with clipping and accumulation, every fourth ragged."""
    _, results = ran(ranks)
    result = results[0][kind]
    assert len(result["losses"]) == 20
    assert_equal(result, solo["Smooth"], 1e-2 if kind == "fp16" else 1e-6)
    assert all(other[kind]["losses"] == result["losses"] for other in results), "all ranks decide by the same numbers"


@pytest.mark.parametrize("name", TWO_PASSES)
def test_an_optimizer_of_two_passes_sees_all_ranks_gradients_in_both(name, ran, tmp_path):
    assert_equal(ran(2)[1][0][name], rank_runs.run(str(tmp_path), optim=TWO_PASSES[name]), 1e-5)


def test_optimizers_that_take_sharded_parameters_step_as_on_whole_ones():
    names = [name for name, known in OPTIMIZERS.items() if known.sharded]
    results = launched("sharded", {"names": names}, 2)[0]
    assert list(results) == names
    for name, result in results.items():
        assert result["error"] < 1e-4 * result["moved"], name


@pytest.mark.parametrize("ranks", KINDS)
def test_a_window_of_fewer_samples_than_ranks(ranks, ran, solo):
    assert_equal(ran(ranks)[1][0]["ragged"], solo["Ragged"], 1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", KINDS)
def test_resumed_inside_an_epoch_it_ends_bit_equal(ranks, way, ran):
    """With batch norm, dropout and several buckets, whose layout would otherwise differ after the cut."""
    whole, cut = (ran(ranks)[1][0][f"{name} {way}"] for name in ("whole", "cut"))
    assert cut["losses"] == [*whole["losses"][:6], *whole["losses"][5:]]
    assert cut["weights"] == whole["weights"]


def test_loader_workers_change_nothing_on_any_rank(ran):
    for result in ran(2)[1]:
        assert [result["workers"][name] for name in ("losses", "weights")] == [
            result["whole none"][name] for name in ("losses", "weights")
        ]


@pytest.mark.parametrize("way", WAYS)
def test_it_goes_on_with_another_number_of_ranks(way, ran, solo):
    """From the checkpoint that four ranks left at a stop at epoch 2 of 5, by one process."""
    job, results = ran(4)
    name = f"stopped {way}"
    alone = rank_runs.run(f"{job['directory']}/{name}")
    assert len(alone["losses"]) == 12
    assert_equal(alone | {"losses": results[0][name]["losses"] + alone["losses"]}, solo["Smooth"], 1e-6)
    [(_, fields)] = [event for event in alone["events"] if event[0] == "ranks_changed"]
    before = {"data": 2, "tensor": 2} if way == "tensor" else {"data": 4, "shard": way}
    before = {key: value for key, value in before.items() if value != "none"}
    assert fields == {"step": 8, "before": before, "now": {}}


def test_parts_of_a_checkpoint_that_one_process_left(ran, solo):
    alone, result = ran(2)[0]["alone"], ran(2)[1][0]["resharded"]
    assert_equal(result | {"losses": alone["losses"] + result["losses"]}, solo["Smooth"], 1e-6)


@pytest.mark.parametrize("ranks", KINDS)
def test_a_verdict_reaches_all_ranks_at_its_step(ranks, ran):
    for result in ran(ranks)[1]:
        for way in WAYS:
            outcome = result[f"stopped {way}"]["outcome"]
            assert (outcome["kind"], outcome["step"]) == ("pruned", 8)


def test_what_is_not_finite_on_one_rank_is_skipped_by_all(ran):
    """Rank 1's share of every window has a NaN from window 4 on; ten in a row end the fit."""
    for result in ran(2)[1]:
        for shard in WAYS[:3]:
            outcome = result[f"nan {shard}"]["outcome"]
            assert (outcome["kind"], outcome["step"]) == ("nonfinite", 13)
            assert "10 steps in a row" in outcome["error"]
            assert "module" not in outcome["error"] or "no module of this process" in outcome["error"]


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_that_jumps_is_reported_by_all_ranks_as_by_one(way, ran, tmp_path):
    [[name, text]] = rank_runs.run(str(tmp_path), **JUMPING)["artifacts"]
    expected, (result, *others) = json.loads(text), [one[f"jump {way}"] for one in ran(2)[1]]
    assert all(other["artifacts"] == [] for other in others), "rank 0 speaks for all"
    [[found, text]] = result["artifacts"]
    report = json.loads(text)
    assert (found, expected["step"]) == (name, 10)
    for key in ("step", "epoch", "window", "samples", "action"):
        assert report[key] == expected[key], key
    for key in ("loss", "grad_norm", "recent_losses"):
        assert report[key] == pytest.approx(expected[key], rel=1e-4), key
    shares = [{one["module"]: one["share"] for one in of["largest_gradients"]} for of in (report, expected)]
    assert shares[0] == pytest.approx(shares[1], rel=1e-4)


def strike(fate: str, directory: Path, timeout: float = 120.0, **config: Any) -> list[Any]:
    job = {"rank": 1, "window": 6, "fate": fate, "directory": str(directory)}
    return launched(
        "struck", job | {"config": RESUMED | {"parallel": {"data": 2, "bucket_mb": 0.005}} | config}, 2, timeout
    )


def assert_nothing_left() -> None:
    assert not [p for p in psutil.Process().children(recursive=True) if "trainer.rank" in p.cmdline()]


def test_a_killed_rank_is_named_and_the_rest_ended(tmp_path):
    with pytest.raises(RankLost, match=r"^rank 1 \(pid \d+\) was killed by SIGKILL\.$"):
        strike("SIGKILL", tmp_path)
    assert_nothing_left()


def test_a_stopped_rank_is_named_within_the_timeout(tmp_path):
    timeout = 8.0
    with pytest.raises(RankLost, match=r"^rank 1 \(pid \d+\) has been stopped for \d+ s \(SIGSTOP\)\.$"):
        strike("SIGSTOP", tmp_path, timeout)
    assert_nothing_left()


def test_an_error_on_one_rank_ends_all_with_its_traceback(tmp_path):
    with pytest.raises(RankFailed, match=r"^rank 1: ValueError: a bug of the user's$") as caught:
        strike("error", tmp_path)
    assert 'raise ValueError("a bug of the user' in caught.value.report["traceback"]
    assert_nothing_left()


def test_asked_to_leave_all_ranks_do_so_at_one_step_and_go_on_bit_equal(left, ran):
    _, results = left
    ended = [(one["outcome"]["kind"], one["outcome"]["step"]) for one in results]
    assert ended[0][0] == "preempted"
    assert ended[0] == ended[1]
    assert 6 <= ended[0][1] <= 8
    whole, resumed = (ran(2)[1][0][name] for name in ("whole none", "resumed"))
    assert results[0]["losses"] + resumed["losses"] == whole["losses"]
    assert resumed["weights"] == whole["weights"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"batch_size": 1, "parallel": {"data": 2}}, "give every rank at least one sample"),
        ({"parallel": {"shard": "zero1"}}, "data is 1: set data to 2"),
        ({"parallel": {"data": 2, "shard": "zero3", "tensor": 2}}, "exclude each other"),
        ({"parallel": {"tensor": 2}, "average": {"name": "ema"}}, "average.name need whole"),
        ({"parallel": {"data": 2, "shard": "zero3", "bucket_mb": 1.0}}, "bucket_mb belong to replicas of whole models"),
        ({"parallel": {"data": 2, "shard": "zero2"}, "clip": {"adaptive": 0.1}}, "clip.adaptive need whole"),
        (
            {"parallel": {"data": 2}, "gradients": {"noise_scale": True}, "micro_batch_size": 4},
            "measured by one process",
        ),
        ({"parallel": {"data": 2, "static_graph": True, "find_unused": True}}, "exclude each other"),
    ],
)
def test_what_cannot_be_is_refused_by_the_configuration(config, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig.model_validate(config)


def test_ranks_that_nobody_started_are_refused(tmp_path):
    config = TrainConfig.model_validate({"parallel": {"data": 2}})
    with pytest.raises(ConfigError, match=r"asks for 2 ranks and this process is alone"):
        fit(rank_runs.Smooth(None), config, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({}, "has no parallel_plan"),
        ({"0": "diagonal"}, "give a pattern of module names"),
        ({"9": "colwise"}, "give a pattern of module names"),
        ({"1": "rowwise"}, "names '1', which is no nn.Linear"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused(plan, message):
    task = rank_runs.Smooth(None)
    task.parallel_plan = lambda model: plan  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=message):
        _plan(task.model(), task, 2)
