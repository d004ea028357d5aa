"""The memory estimate of several ranks against what real steps take of malloc on them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import memory_ranks
import pytest
import rank_runs
import torch
from memory_ranks import MIB
from torch.distributed.device_mesh import DeviceMesh

from trainer.config import ParallelConfig, TrainConfig
from trainer.distributed.launch import launch
from trainer.errors import ConfigError
from trainer.memory.estimate import estimate

pytestmark = [
    pytest.mark.whole,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]  # torch's own, for zero1

KINDS: dict[str, dict[str, Any]] = {
    "ddp": {"data": 2},
    "fp16": {"data": 2, "compression": "fp16"},
    "powersgd": {"data": 2, "compression": "powersgd"},
    "zero1": {"data": 2, "shard": "zero1"},
    "zero2": {"data": 2, "shard": "zero2"},
    "zero3": {"data": 2, "shard": "zero3"},
    "tensor": {"tensor": 2},
}


def job_of(family: str, width: int, kinds: list[str], micros: tuple[int | None, ...] = (None, 4)) -> dict[str, Any]:
    return {
        f"{kind} {micro}": [family, width, {"parallel": KINDS[kind], "micro_batch_size": micro, "device": "cpu"}]
        for kind in kinds
        for micro in micros
    }


def check(job: dict[str, Any], least: int = 0) -> None:
    """What every rank hears is the estimate of the largest, as a process that is alone has it as well."""
    results = launch("memory_ranks:measure", job, ParallelConfig(data=2, timeout=300), device="cpu")
    for name, (family, width, given) in job.items():
        real = max(result[name]["measured"] for result in results)
        found, other = (result[name]["estimated"] for result in results)
        assert real > least
        assert abs(found["peak"] / real - 1) < 0.15, f"{name}: {found} against {real / MIB:.1f} MiB"
        config = TrainConfig.model_validate({"batch_size": memory_ranks.SIZE, "num_epochs": 9} | given)
        assert found == other == asdict(memory_ranks.estimated(memory_ranks.TASKS[family](width), config)), name


@pytest.mark.usefixtures("ranks")
def test_the_estimate_of_ranks_is_near_the_high_water_mark():
    """Of 100 MB: what the libraries take of malloc for themselves is 6 MB on some processors."""
    check(job_of("perceptron", 2048, ["zero1", "zero3"], (4,)), least=100 * MIB)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # torch's, of views that the encoder gives
@pytest.mark.parametrize(
    ("family", "width", "kinds"),
    [("perceptron", 2048, [*KINDS]), ("encoder", 512, [kind for kind in KINDS if kind != "tensor"])],
)
def test_the_estimate_of_ranks_is_near_the_peak_of_large_states(family, width, kinds):
    check(job_of(family, width, kinds), least=100 * MIB)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # torch's, of views that tensor ranks give
def test_parts_are_a_ranks_own():
    """Of four weights of 256 x 256 and two small ones, divided by two or not."""

    def of(**parallel: Any) -> Any:
        config = TrainConfig.model_validate({"batch_size": memory_ranks.SIZE, "device": "cpu", "parallel": parallel})
        return memory_ranks.estimated(memory_ranks.Perceptron(256), config)

    one, ddp, tensor = of(), of(data=2), of(tensor=2)
    zero1, zero3 = of(data=2, shard="zero1"), of(data=2, shard="zero3")
    both = of(data=2, shard="zero3", tensor=2)
    assert (ddp.parameters, ddp.gradients, ddp.optimizer) == (one.parameters, 2 * one.gradients, one.optimizer)
    assert zero1.optimizer == pytest.approx(one.optimizer / 2, rel=0.02)
    for part in ("parameters", "gradients", "optimizer"):
        for divided in (zero3, tensor):
            assert getattr(divided, part) == pytest.approx(getattr(one, part) / 2, rel=0.02), part
        assert getattr(both, part) == pytest.approx(getattr(one, part) / 4, rel=0.02), part
    assert zero3.activations == pytest.approx(one.activations / 2, rel=0.02)
    assert isinstance(vars(DeviceMesh)["_concatenate"], staticmethod), "torch is as it was"


def test_parts_of_a_sequence_are_estimated_with_dropout_too():
    batch = torch.zeros(12, 6), torch.zeros(12, dtype=torch.long)
    configs = [TrainConfig(batch_size=12, device="cpu", parallel=ParallelConfig(tensor=n)) for n in (1, 2)]
    one, two = (estimate(Dropping(None), config, batch) for config in configs)
    assert two.parameters < one.parameters and two.activations < one.activations


class Dropping(rank_runs.Dropping):
    """Looks at nothing."""

    loss = rank_runs.Smooth.loss


@pytest.mark.parametrize(
    ("kind", "micro"),
    [
        ("ddp", 4),
        ("zero1", 4),
        ("zero3", 4),
        pytest.param("zero2", None, marks=pytest.mark.slow),
        pytest.param("zero3", None, marks=pytest.mark.slow),
    ],
)
def test_a_deep_model_is_carried_on_from_two_shallower_ones(kind, micro):
    given = {"batch_size": memory_ranks.SIZE, "micro_batch_size": micro, "device": "cpu", "parallel": KINDS[kind]}
    task, config = memory_ranks.Deep(256), TrainConfig.model_validate(given)
    whole = memory_ranks.estimated(task, config)
    task.depth = task.blocks
    assert memory_ranks.estimated(task, config) == whole


def test_what_cannot_be_estimated_is_said():
    config = TrainConfig.model_validate({"batch_size": 32, "micro_batch_size": 4, "parallel": {"pipeline": 2}})
    with pytest.raises(ConfigError, match="what a stage needs, which waits for others, cannot be estimated"):
        estimate(memory_ranks.Perceptron(8), config, None)
