"""Experts that ranks share: what one process computes, and checkpoints that any number of ranks goes on from."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import expert_ranks
import gpt_ranks
import numpy as np
import pytest
from gpt_ranks import MIXED
from once import once

from studies.gpt.config import Config
from studies.gpt.task import GptTask
from trainer.config import ParallelConfig, TrainConfig
from trainer.data.view import collate
from trainer.distributed.launch import launch
from trainer.memory.estimate import estimate

pytestmark = pytest.mark.whole

SHARED, FOUR = {"data": 2, "expert": 2}, {"data": 4, "expert": 4}
CASES: list[tuple[int | None, dict[str, Any]]] = [
    (None, {}),
    (None, {"slots": 3}),
    (None, {"shared": 1}),
    (0, {}),  # every token is of the experts of one rank, so that the others get none
    (2, {"slots": 2}),
]


@pytest.mark.parametrize("parallel", [SHARED, {"data": 4, "expert": 2}, FOUR], ids=str)
def test_a_layer_whose_experts_are_shared_computes_that_of_one_process(parallel, ranks):
    expected = expert_ranks.layers({"parallel": {}, "cases": CASES})
    job = {"parallel": parallel, "cases": CASES}
    parts = launch("expert_ranks:layers", job, ParallelConfig(**parallel), device="cpu")
    for case, whole in enumerate(expected):
        for name in ("out", "rows"):
            of_all = np.concatenate([part[case][name] for part in parts])
            np.testing.assert_allclose(of_all, whole[name], rtol=1e-12, atol=1e-12)
        squares = sum(np.square(gradient).sum() for gradient in whole["gradients"].values())
        for part in parts:
            assert part[case]["norm"] == pytest.approx(np.sqrt(squares), rel=1e-12)
            for name, gradient in whole["gradients"].items():
                np.testing.assert_allclose(part[case]["gradients"][name], gradient, rtol=1e-12, atol=1e-12)


@pytest.fixture(scope="module")
def left(tmp_path_factory, ranks) -> dict[str, Any]:
    """Returns the run of two ranks that share experts, and homes in which it was left in its second epoch."""

    def make(directory: Path) -> dict[str, Any]:
        runs = {name: {"parallel": SHARED, "leave": True, **MIXED} for name in ("same", "replicas", "alone", "four")}
        job = {"directory": str(directory), "runs": runs | {"whole": {"parallel": SHARED, **MIXED}}}
        ran = launch("gpt_ranks:runs", job, ParallelConfig(data=2), device="cpu")[0]
        return {"whole": ran["whole"], "kinds": [ran[name]["kind"] for name in runs], "directory": str(directory)}

    return once(tmp_path_factory, "gpt-expert-ranks", make)


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("same", SHARED),
        ("replicas", {"data": 2}),
        ("alone", {}),
        pytest.param("four", FOUR, marks=pytest.mark.slow),
    ],
)
def test_any_number_of_ranks_goes_on(name, parallel, left):
    assert set(left["kinds"]) == {"preempted"}
    job = {"directory": left["directory"], "runs": {name: {"parallel": parallel, **MIXED}}}
    several = ParallelConfig(**parallel)
    ran = launch("gpt_ranks:runs", job, several, device="cpu")[0] if several.ranks > 1 else gpt_ranks.runs(job)
    ended, whole = ran[name], left["whole"]
    near = partial(pytest.approx, rel=0.0, abs=0.0) if name == "same" else partial(pytest.approx, rel=1e-6, abs=1e-6)
    assert ended["kind"] == "complete"
    assert ended["metrics"][-1] == near(whole["metrics"][-1])
    for weight, values in whole["weights"].items():
        assert ended["weights"][weight] == near(values), weight


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"parallel": {"data": 3, "expert": 2}}, "expert=2 replicas share the experts, and data is 3: set data to a"),
        ({"parallel": SHARED | {"shard": "zero3"}}, "expert=2 and shard=zero3 exclude each other: leave one of them"),
        ({"parallel": SHARED | {"tensor": 2}}, "expert=2 and tensor=2 exclude each other"),
        ({"parallel": SHARED | {"bucket_mb": 1.0}}, "bucket_mb belong to replicas of whole models"),
        ({"parallel": SHARED, "compile": True}, "compile is for one process and for replicas of whole models"),
        ({"parallel": SHARED, "average": {"name": "ema"}}, "average.name=ema needs whole parameters"),
        ({"parallel": SHARED, "optim": {"name": "sophia"}}, "which needs whole parameters, and parallel gives each"),
    ],
)
def test_what_ranks_that_share_experts_cannot_do_is_one_sentence(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        TrainConfig(num_epochs=1, batch_size=12, **settings)


def test_ranks_hold_as_many_experts():
    with pytest.raises(ValueError, match=r"train\.parallel\.expert=2 does not divide model\.moe\.experts 3: give each"):
        Config.model_validate({"model": {"moe": {"experts": 3}}, "train": {"parallel": SHARED}})


def test_the_estimate_counts_the_experts_that_a_rank_holds():
    def parameters(**parallel: int) -> int:
        config = Config.model_validate({"model": MIXED, "train": {"device": "cpu", "parallel": parallel}})
        task = GptTask(config)
        rows = task.train_set()
        return estimate(task, config.train, collate(rows)([rows[0], rows[1]])).parameters

    expert = 3 * 64 * Config().model.mlp * 4  # bytes: gate, up and down of a block
    assert parameters(data=2) - parameters(**SHARED) == pytest.approx(Config().model.num_layers * 2 * expert, rel=1e-4)
