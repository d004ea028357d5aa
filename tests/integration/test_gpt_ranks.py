"""The gpt on several ranks, of every kind that the trainer has: what one process computes."""

from __future__ import annotations

from typing import Any

import gpt_ranks
import pytest

from trainer.config import ParallelConfig
from trainer.launch import launch

KINDS: dict[int, dict[str, dict[str, Any]]] = {
    2: {"ddp": {"data": 2}, "tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}}
    | {shard: {"data": 2, "shard": shard} for shard in ("zero1", "zero2", "zero3")},
    4: {"data tensor": {"data": 2, "tensor": 2}, "zero3 tensor": {"data": 2, "shard": "zero3", "tensor": 2}}
    | {"data pipeline": {"data": 2, "pipeline": 2}, "pipeline tensor": {"pipeline": 2, "tensor": 2}},
}
CASES = [
    pytest.param(ranks, kind, marks=pytest.mark.slow if ranks == 4 else ()) for ranks in KINDS for kind in KINDS[ranks]
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, Any]:
    return gpt_ranks.run(str(tmp_path_factory.mktemp("alone")), {})


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Ranks -> kind -> what came of it; all kinds of as many ranks in one launch."""
    found: dict[int, dict[str, Any]] = {}

    def of(ranks: int) -> dict[str, Any]:
        if ranks not in found:
            runs = {name: {"parallel": kind} for name, kind in KINDS[ranks].items()}
            job = {"directory": str(tmp_path_factory.mktemp("together")), "runs": runs}
            found[ranks] = launch("gpt_ranks:runs", job, ParallelConfig(data=ranks), device="cpu")[0]
        return found[ranks]

    return of


@pytest.mark.parametrize(("ranks", "kind"), CASES)
def test_ranks_compute_what_one_process_does(ranks, kind, alone, together):
    """Both epochs' losses and perplexities of both domains, the text that is drawn, and the weights."""
    ran = together(ranks)[kind]
    assert ran["kind"] == alone["kind"] == "complete" and len(ran["metrics"]) == 2
    for mine, expected in zip(ran["metrics"], alone["metrics"], strict=True):
        assert mine == pytest.approx(expected, rel=1e-6)
    assert ran["written"] == alone["written"] and len(ran["written"]) == 2
    assert ran["weights"].keys() == alone["weights"].keys()
    for name, weights in ran["weights"].items():
        assert weights == pytest.approx(alone["weights"][name], rel=1e-6, abs=1e-6), name
