"""The atft on two ranks: every parameter has a gradient, and the two compute what one process does."""

from __future__ import annotations

from typing import Any

import atft_ranks
import pytest

from trainer.config import ParallelConfig
from trainer.distributed.launch import launch

pytestmark = pytest.mark.whole

MODELS: dict[str, dict[str, Any]] = {"default": {}, "bare": {"selection": "none", "graph": False, "num_frequencies": 0}}


@pytest.fixture(scope="module")
def together(tmp_path_factory, ranks) -> dict[str, Any]:
    runs = {name: {"parallel": {"data": 2}} | model for name, model in MODELS.items()}
    job = {"directory": str(tmp_path_factory.mktemp("together")), "runs": runs}
    return launch("atft_ranks:runs", job, ParallelConfig(data=2), device="cpu")[0]


@pytest.mark.parametrize("model", MODELS)
def test_two_replicas_compute_what_one_process_does(model, together, tmp_path):
    alone = atft_ranks.run(str(tmp_path), {}, **MODELS[model])
    assert alone.keys() == together[model].keys() and "val/rank_ic_5d" in alone
    for name in ("train/loss", "val/loss"):
        assert together[model][name] == pytest.approx(alone[name], rel=1e-5), name
    assert together[model]["val/rank_ic_5d"] == pytest.approx(alone["val/rank_ic_5d"], abs=1e-3)
