"""The mlp on two ranks that divide its layers: what one process computes."""

from __future__ import annotations

import mlp_ranks
import pytest

from trainer.config import ParallelConfig
from trainer.distributed.launch import launch

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("ranks")]

RUNS = {f"{kind}, {layers} layers": ({kind: 2}, layers) for kind in ("tensor", "pipeline") for layers in (1, 2)}


def test_two_ranks_compute_what_one_process_does(tmp_path):
    """With as many linear layers as come out even, and one more."""
    given = {name: {"parallel": kind, "num_layers": layers} for name, (kind, layers) in RUNS.items()}
    job = {"directory": str(tmp_path), "runs": given}
    ran = launch("mlp_ranks:runs", job, ParallelConfig(data=2), device="cpu")[0]
    alone = {layers: mlp_ranks.run(str(tmp_path / str(layers)), {}, layers) for layers in (1, 2)}
    for name, (_, layers) in RUNS.items():
        found, expected = ran[name], alone[layers]
        assert found["kind"] == expected["kind"] == "complete"
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-6) and len(found["metrics"]) == 4
        assert found["weights"].keys() == expected["weights"].keys()
        for key, weights in found["weights"].items():
            assert weights == pytest.approx(expected["weights"][key], rel=1e-5, abs=1e-6), (name, key)
