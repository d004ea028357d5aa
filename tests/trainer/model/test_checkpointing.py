"""Activation checkpointing: the same numbers from less memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_runs import Toy, Trial, uninterrupted

from trainer.config import ActivationConfig, TrainConfig
from trainer.errors import ConfigError
from trainer.model import offload
from trainer.model.checkpointing import checkpointed
from trainer.task import Loss


class Layered(Toy):
    """Blocks with dropout and batch norm, in a list within the model."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(6, 12)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Dropout(0.3)) for _ in range(3)
            )
            self.head = nn.Linear(12, 3)
            self.passes: list[int] = []

        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers:
                x = x + layer(x)
            return self.head(x)

    def model(self) -> nn.Module:
        self.net = self.Net()
        return self.net


GIVEN: dict[str, Any] = {"average": {"name": "ema", "decay": 0.5}, "optim": {"wrap": "sam"}}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> str:
    return uninterrupted(tmp_path_factory.mktemp("plain"), task=Layered, **GIVEN).digest()


@pytest.mark.parametrize(
    "activations",
    [
        {"checkpoint": "full"},
        {"checkpoint": "selective"},
        {"checkpoint": "full", "modules": ["layers.1", "layers.1.*"]},
    ],
)
def test_the_numbers_are_the_same_to_the_bit(activations, plain, tmp_path):
    """With dropout, batch norm's statistics, SAM's second pass, accumulation, and an evaluated average."""
    assert uninterrupted(tmp_path, task=Layered, **GIVEN, activations=activations).digest() == plain


@pytest.mark.parametrize("checkpoint", ["none", "full"])
def test_what_waits_on_the_disk_is_the_same_to_the_bit(checkpoint, plain, tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(offload, "SMALL", 1)
    write = offload._File.write
    monkeypatch.setattr(offload._File, "write", lambda file, data: written.append(len(data)) or write(file, data))
    activations = {"offload": "disk", "checkpoint": checkpoint}
    assert uninterrupted(tmp_path, task=Layered, **GIVEN, activations=activations).digest() == plain
    assert written


def off(where: str, device: str = "cpu") -> offload.Offload:
    return offload.Offload(ActivationConfig(offload=where), torch.device(device))


@pytest.mark.parametrize(
    ("where", "device"), [("disk", "cpu"), ("cpu", "cuda")]
)  # of a GPU's, the way through the host
def test_gradients_of_any_layout_are_the_same(where, device, monkeypatch):
    monkeypatch.setattr(offload, "SMALL", 1)
    away = off(where, device)
    kinds = [torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last), torch.randn(9, 7).t(), torch.randn(5, 1)]
    kinds += [torch.randn(6).expand(3, 6), torch.tensor(2.0), torch.zeros(0, 3), torch.randn(8, 8)[::2, 1:]]
    for x in kinds:
        one, other = x.clone(), x.clone()
        for tensor in (one, other):
            tensor.requires_grad_()
        (one.sin() * one).exp().sum().backward()
        with away():
            loss = (other.sin() * other).exp().sum()
        loss.backward()
        assert torch.equal(one.grad, other.grad)
    if where == "disk":
        del loss
        assert away._file.end == 0, "what is no longer waited for has left room"


def test_only_what_is_large_leaves_and_memory_is_free_meanwhile(monkeypatch):
    away, linear = off("disk"), nn.Linear(256, 256)
    packed = []
    monkeypatch.setattr(offload, "_Away", lambda tensor, file: packed.append(tensor.shape) or offload._Here(tensor))
    with away():
        linear(torch.randn(128, 256)).relu().sum().backward()
        linear(torch.randn(2, 256)).relu().sum().backward()
    assert packed and set(packed) == {torch.Size([128, 256])}, "no weight, and nothing small"


def test_a_change_in_place_of_what_is_waited_for_is_an_error_still():
    x = torch.randn(3, requires_grad=True)
    with off("disk")():
        y = x.exp()
        loss = y.sum()
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Counted(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "linear", "gelu"), [("none", 1, 1), ("full", 2, 2), ("selective", 1, 2)])
def test_what_is_computed_twice_is_what_was_asked_for(mode, linear, gelu):
    """By the operators that run: `full` computes a block again, `selective` all of it but its products."""
    net = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)))
    checkpointed(net, ActivationConfig(checkpoint=mode))
    with Counted() as ran:
        net(torch.randn(4, 8)).sum().backward()
    assert (ran.counts["addmm"], ran.counts["gelu"]) == (linear, gelu)


def test_blocks_are_those_that_are_named_or_the_elements_of_lists():
    def wrapped(**given: Any) -> set[str]:
        net = checkpointed(Layered.Net(), ActivationConfig(checkpoint="full", **given))
        return {name for name, module in net.named_modules() if "forward" in vars(module)}

    assert wrapped() == {"layers.0", "layers.1", "layers.2"}
    assert wrapped(modules=("layers.[02]", "head", "layers.0.1")) == {"layers.0", "layers.2", "head"}
    with pytest.raises(ConfigError, match=r"modules='blocks.\*' matches no module; .* head: give a pattern"):
        wrapped(modules=("blocks.*",))
    with pytest.raises(ConfigError, match="ModuleList or Sequential, and finds none"):
        checkpointed(nn.Linear(2, 2), ActivationConfig(checkpoint="full"))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"compile": True}, "compile, which chooses"),
        ({"optim": {"name": "sophia"}}, "optim.name=sophia"),
        ({"gradients": {"penalty": 1.0}}, "gradients.penalty"),
    ],
)
def test_what_differentiates_twice_is_refused(given, named):
    with pytest.raises(ValidationError, match=f"activations.checkpoint does not go with {named}"):
        TrainConfig.model_validate(given | {"activations": {"checkpoint": "full"}})
    with pytest.raises(ValidationError, match=r"is read only with activations\.checkpoint=full or selective"):
        TrainConfig.model_validate({"activations": {"modules": ["a"]}})


def test_memory_that_holds_only_a_checkpointed_step_trains_it(tmp_path):
    """The estimate sees it: what is refused without is trained with it."""

    class Deep(Toy):
        def model(self) -> nn.Module:
            self.net = nn.Sequential(
                nn.Linear(6, 64),
                *[nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Tanh(), nn.Tanh()) for _ in range(8)],
                nn.Linear(64, 3),
            )
            return self.net

        def train_set(self):
            self.samples = 2000
            return super().train_set()

        def loss(self, model, batch):
            x, y = batch
            return Loss(nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y))

    given: dict[str, Any] = {"batch_size": 2000, "micro_batch_size": 2000, "num_epochs": 1, "memory_limit": "10MB"}
    refused = Trial(tmp_path / "a", task=Deep, **given).attempt()
    assert refused is not None and refused.kind == "out_of_memory"
    trained = Trial(tmp_path / "b", task=Deep, **given, activations={"checkpoint": "full"}).attempt()
    assert trained is not None and trained.kind == "complete"
