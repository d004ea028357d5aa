"""The device of a fit: picked, refused where it is not there, and known by its number."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from trainer_runs import Toy, Trial

from trainer.config import TrainConfig
from trainer.errors import ConfigError
from trainer.memory.bound import memory_limit
from trainer.runtime.device import pick_device
from trainer.settings import runtime

pytestmark = pytest.mark.gpu
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs where torch finds a GPU, by make test-gpu")


@pytest.fixture
def two_gpus(monkeypatch) -> list[torch.device]:
    """As torch tells of a machine with two, of which this process uses the second; those that it was switched to."""
    for name, told in (("is_available", True), ("device_count", 2), ("current_device", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda told=told: told)
    switched: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(switched.append(device)))
    return switched


@pytest.mark.parametrize(("asked", "index"), [("auto", 1), ("cuda", 1), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_fit_knows_the_number_of_its_gpu_and_is_on_it(asked, index, two_gpus):
    """Which torch.cuda.get_per_process_memory_fraction asks for; what seeds and waits concern the current one."""
    with runtime(TrainConfig(device=asked, precision="fp32")) as device:
        assert device == torch.device("cuda", index) and two_gpus == [device]


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"train\.device is 'cuda:2', but the last GPU .* is cuda:1: set that"):
        pick_device("cuda:2")


@on_a_gpu
def test_the_bound_of_memory_is_the_share_of_the_process():
    total = torch.cuda.get_device_properties(0).total_memory
    with runtime(TrainConfig()) as device:
        try:
            for share in (1.0, 0.25):
                torch.cuda.set_per_process_memory_fraction(share)
                assert memory_limit(TrainConfig(), device) == int(share * total)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)


@on_a_gpu
def test_a_gpu_whose_memory_is_full_halves_the_micro_batch(tmp_path):
    """Where the estimate did not see what it takes."""
    each = 2**30

    class Hungry(Toy):
        def loss(self, model, batch):
            x, y = batch
            if not isinstance(x, FakeTensor):
                torch.empty(each * len(y), dtype=torch.uint8, device=x.device)
            return super().loss(model, batch)

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(5 * each / total)
    try:
        trial = Trial(tmp_path, task=Hungry, micro_batch_size=12)
        outcome = trial.attempt()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert outcome is not None and outcome.kind == "complete"
    assert [fields["micro_batch_size"] for kind, fields in trial.reporter.events if kind == "out_of_memory"] == [6, 3]
