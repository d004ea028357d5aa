"""The shapes that a model is compiled for are bounded, counted, and the same after a resume."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from trainer_runs import Toy, Trial, killed_at

from trainer.model import compiled
from trainer.model.compiled import MOST, Compiled
from trainer.task import Task

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # inductor's own


@pytest.fixture
def untranslated(monkeypatch):
    """Torch's compiler up to the graphs that it would give to inductor, which takes seconds for each."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()


class Seen(nn.Module):
    """Knows by what it is computed."""

    def __init__(self):
        super().__init__()
        self.linear, self.by_hand = nn.Linear(3, 2), []

    def forward(self, x):
        if not torch.compiler.is_compiling():
            self.by_hand.append(len(x))
        return self.linear(x)


@pytest.mark.usefixtures("untranslated")
def test_the_first_shapes_of_a_run_are_compiled_and_the_rest_are_not():
    events = []
    net = Seen()
    with compiled.unlimited():
        it = Compiled(net, lambda kind, **fields: events.append((kind, fields)))
        for size in (*range(1, MOST + 4), 3, MOST + 2):
            it.module(torch.ones(size, 3))
    assert net.by_hand == [MOST + 1, MOST + 2, MOST + 3, MOST + 2]
    assert len(it.shapes) == MOST
    [(kind, fields)] = events
    assert kind == "compiled_shapes" and f"more than {MOST} shapes" in fields["reason"]


@pytest.mark.usefixtures("untranslated")
def test_a_resumed_run_compiles_the_shapes_that_the_run_met_first():
    sizes, net = range(1, MOST + 4), Seen()
    with compiled.unlimited():
        first = Compiled(net, lambda kind, **fields: None)
        for size in sizes:
            first.module(torch.ones(size, 3))
        resumed, net.by_hand = Compiled(net, lambda kind, **fields: None), []
        resumed.load(first.shapes)
        for size in reversed(sizes):
            resumed.module(torch.ones(size, 3))
    assert net.by_hand == [MOST + 3, MOST + 2, MOST + 1]
    assert resumed.shapes == first.shapes


@pytest.mark.usefixtures("untranslated")
def test_earlier_trials_of_the_process_use_up_nothing():
    for _ in range(3):
        net = Seen()
        with compiled.unlimited():
            it = Compiled(net, lambda kind, **fields: None)
            for size in range(1, MOST + 1):
                it.module(torch.ones(size, 3))
        assert net.by_hand == []


@pytest.mark.usefixtures("untranslated")
def test_a_model_that_is_compiled_again_and_again_is_not_for_ever(monkeypatch):
    class Counting(Seen):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * self.calls

    monkeypatch.setattr(compiled, "_AGAIN", 5)
    events, net = [], Counting()
    with compiled.unlimited():
        it = Compiled(net, lambda kind, **fields: events.append((kind, fields)))
        for _ in range(10):
            it.module(torch.ones(2, 3))
    assert len(net.by_hand) == 4
    [(kind, fields)] = events
    assert kind == "compiled_again" and "a resumed run may differ" in fields["reason"]


class Few(Toy):
    """Batches of three shapes, of which no two follow each other."""

    def model(self):
        self.net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
        return self.net

    def train_set(self):
        class Sized:
            def __len__(self):
                return 9

            def __getitems__(self, indices):
                size = 3 + 4 * (indices[0] % 3)
                generator = torch.Generator().manual_seed(indices[0])
                return torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator)

        return Sized()

    augment = Task.augment


@pytest.mark.slow
def test_a_fit_of_more_shapes_than_are_compiled_resumes_exactly(tmp_path, monkeypatch):
    """One shape is compiled; a resumed run meets another one first."""
    monkeypatch.setattr(compiled, "MOST", 1)
    settings = {"task": Few, "num_epochs": 1, "batch_size": 1, "micro_batch_size": 1, "compile": True}
    whole, digests = Trial(tmp_path / "whole", **settings), {}
    whole.attempt()
    for omitted in ("", "compiled"):
        parts = Trial(tmp_path / f"parts{omitted}", **settings)
        parts.attempt(killed_at(3))
        monkeypatch.setenv("HPO_TESTING", "1")
        monkeypatch.setenv("HPO_OMIT_STATE", omitted)
        parts.attempt()
        digests[omitted] = parts.digest()
    assert digests[""] == whole.digest() != digests["compiled"]
