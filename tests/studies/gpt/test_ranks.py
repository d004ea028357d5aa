"""The gpt on several ranks, of every kind that the trainer has: what one process computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpt_ranks
import pytest
from gpt_ranks import MIXED
from once import once

from trainer.config import ParallelConfig
from trainer.distributed.launch import launch

pytestmark = pytest.mark.whole

KINDS: dict[int, dict[str, dict[str, Any]]] = {
    2: {"ddp": {"data": 2}, "tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}}
    | {shard: {"data": 2, "shard": shard} for shard in ("zero1", "zero2", "zero3")},
    4: {"data tensor": {"data": 2, "tensor": 2}, "zero3 tensor": {"data": 2, "shard": "zero3", "tensor": 2}}
    | {"data pipeline": {"data": 2, "pipeline": 2}, "pipeline tensor": {"pipeline": 2, "tensor": 2}},
}
BLOCKS = " in blocks"  # of 50 tokens, whose loss the model computes itself
KINDS[2] |= {name + BLOCKS: KINDS[2][name] for name in ("ddp", "zero3", "tensor", "pipeline")}
OF_ITS_PLANS = ("tensor", "pipeline", *(name for name in KINDS[2] if name.endswith(BLOCKS)))  # the model's own doing
CASES = [
    pytest.param(ranks, kind, marks=() if kind in OF_ITS_PLANS else pytest.mark.slow)
    for ranks in KINDS
    for kind in KINDS[ranks]
]


@pytest.fixture(scope="session")
def alone(tmp_path_factory) -> dict[str, Any]:
    return gpt_ranks.run(str(tmp_path_factory.mktemp("alone")), {})


@pytest.fixture(scope="session")
def together(tmp_path_factory):
    """Returns what came of a kind of ranks; the default kinds are one launch, the others of as many ranks another."""

    def of(ranks: int, kind: str) -> dict[str, Any]:
        kinds = [name for name in KINDS[ranks] if (name in OF_ITS_PLANS) == (kind in OF_ITS_PLANS)]

        def make(directory: Path) -> dict[str, Any]:
            blocks = {name: {"block": 50} if name.endswith(BLOCKS) else {} for name in kinds}
            runs = {name: {"parallel": KINDS[ranks][name], **blocks[name]} for name in kinds}
            job = {"directory": str(directory), "runs": runs}
            return launch("gpt_ranks:runs", job, ParallelConfig(data=ranks), device="cpu")[0]

        return once(tmp_path_factory, f"gpt-{ranks}-ranks-{kinds[0].replace(' ', '-')}", make)[kind]

    return of


@pytest.mark.parametrize(("ranks", "kind"), CASES)
def test_ranks_compute_what_one_process_does(ranks, kind, alone, together):
    """Both epochs' losses and perplexities of both domains, the text that is drawn, and the weights."""
    ran = together(ranks, kind)
    assert ran["kind"] == alone["kind"] == "complete" and len(ran["metrics"]) == 2
    for mine, expected in zip(ran["metrics"], alone["metrics"], strict=True):
        assert mine == pytest.approx(expected, rel=1e-6)
    assert ran["written"] == alone["written"] and len(ran["written"]) == 2
    assert ran["weights"].keys() == alone["weights"].keys()
    for name, weights in ran["weights"].items():
        assert weights == pytest.approx(alone["weights"][name], rel=1e-6, abs=1e-6), name


EXPERTS = {name: KINDS[2][name] for name in ("ddp", "zero3")} | {"expert": {"data": 2, "expert": 2}}


@pytest.fixture(scope="session")
def mixed(tmp_path_factory, ranks) -> dict[str, Any]:
    """Returns what comes of experts in one process, as replicas and in parts."""
    alone = gpt_ranks.run(str(tmp_path_factory.mktemp("mixed")), {}, **MIXED)

    def make(directory: Path) -> dict[str, Any]:
        runs = {kind: {"parallel": parallel, **MIXED} for kind, parallel in EXPERTS.items()}
        job = {"directory": str(directory), "runs": runs}
        return launch("gpt_ranks:runs", job, ParallelConfig(data=2), device="cpu")[0]

    return {"alone": alone, **once(tmp_path_factory, "gpt-experts", make)}


@pytest.mark.parametrize("kind", EXPERTS)
def test_ranks_with_experts_compute_what_one_process_does(kind, mixed):
    """Each rank balances and fills the rows that it has, which are the group of both."""
    ran, alone = mixed[kind], mixed["alone"]
    assert ran["kind"] == alone["kind"] == "complete" and len(ran["metrics"]) == 2
    for epoch, expected in zip(ran["metrics"], alone["metrics"], strict=True):
        assert expected["val/dropped_tokens"] > 0 and "train/loss_balance" in expected
        assert epoch == pytest.approx(expected, rel=1e-6)
    assert ran["written"] == alone["written"]
    for name, weights in alone["weights"].items():
        assert ran["weights"][name] == pytest.approx(weights, rel=1e-6, abs=1e-6), name


FROZEN: dict[str, Any] = {"freeze": {"patterns": ["blocks.*", "head.norm.*"], "until": 0.5}}
DIVIDED = ("ddp", "zero1", "zero3", "tensor")


@pytest.fixture(scope="session")
def frozen(tmp_path_factory, ranks) -> dict[str, Any]:
    """Returns what comes of two phases, first of the embedding and the head alone, in one process and on two ranks."""

    def make(directory: Path) -> dict[str, Any]:
        runs = {kind: {"parallel": KINDS[2][kind], **FROZEN} for kind in DIVIDED}
        job = {"directory": str(directory), "runs": runs}
        return launch("gpt_ranks:runs", job, ParallelConfig(data=2), device="cpu")[0]

    alone = gpt_ranks.run(str(tmp_path_factory.mktemp("frozen")), {}, **FROZEN)
    return {"alone": alone, **once(tmp_path_factory, "gpt-frozen", make)}


@pytest.mark.parametrize("kind", DIVIDED)
def test_ranks_with_frozen_parts_compute_what_one_process_does(kind, frozen, alone):
    ran, expected = frozen[kind], frozen["alone"]
    assert ran["kind"] == "complete" and expected["metrics"] != alone["metrics"]
    for epoch, values in zip(ran["metrics"], expected["metrics"], strict=True):
        assert epoch == pytest.approx(values, rel=1e-6)
    for name, weights in expected["weights"].items():
        assert ran["weights"][name] == pytest.approx(weights, rel=1e-6, abs=1e-6), name
