"""The shapes that a model is compiled for are bounded, counted, and the same after a resume."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from small_tasks import NAMES, around_each_step, small, trained
from torch import nn
from torch.nn.functional import cross_entropy
from trainer_runs import Toy, Trial, killed_at, uninterrupted

from trainer import loop, step
from trainer.config import TrainConfig
from trainer.errors import ConfigError
from trainer.model import compiled
from trainer.model.compiled import MOST, Compiled
from trainer.task import Loss, Task

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
@pytest.mark.filterwarnings("ignore:eager backend ignoring extra kwargs")
@pytest.mark.parametrize("graphs", [False, True])
def test_the_first_shapes_of_a_run_are_compiled_and_the_rest_are_not(graphs):
    events = []
    net = Seen()
    with compiled.unlimited():
        it = Compiled(net, lambda kind, **fields: events.append((kind, fields)), graphs)
        for size in (*range(1, MOST + 4), 3, MOST + 2):
            it.module(torch.ones(size, 3))
    assert net.by_hand == [MOST + 1, MOST + 2, MOST + 3, MOST + 2]
    assert len(it.shapes) == MOST
    [(kind, fields)] = events
    assert kind == "compiled_shapes" and f"more than {MOST} shapes" in fields["reason"]


@torch.library.custom_op("tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


class Untraceable(Seen):
    """Calls an operator whose shapes the compiler is not told."""

    def forward(self, x):
        return doubled(super().forward(x))


@pytest.mark.usefixtures("untranslated")
def test_a_model_that_cannot_be_compiled_is_refused_in_a_sentence():
    """It does not train uncompiled in silence, since that rounds differently."""
    net, rows = Untraceable(), torch.ones(1, 3)
    with compiled.unlimited(), pytest.raises(ConfigError, match=r"^train.compile: torch .* fake .* Leave"):
        Compiled(net, lambda kind, **fields: None).module(rows)
    assert net(rows).shape == (1, 2)


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


@pytest.mark.gpu
@pytest.mark.usefixtures("untranslated")
@pytest.mark.parametrize(("name", "begins"), [*((name, False) for name in NAMES), ("gpt", True)])
def test_bundled_models_are_compiled_whole_and_once(name, begins, tmp_path):
    """No graph breaks, and later epochs compile nothing; also where batches say where documents begin, as for a GPU."""
    from torch._dynamo.utils import counters

    counters.clear()
    after: dict[int, int] = {}

    class Counting:
        def __init__(self, fit):
            self.epoch = fit.state.epoch

        def __enter__(self):
            pass

        def __exit__(self, *_):
            after[self.epoch] = counters["stats"]["unique_graphs"]

    task, config = small(name, num_epochs=3, micro_batch_size=5, compile=True)
    vars(task).update({"begins": True} if begins else {})
    with around_each_step(Counting):
        trained(task, config, tmp_path)
    assert dict(counters["graph_break"]) == {}
    assert len(after) == 3 and 1 <= after[0] <= MOST
    assert set(after.values()) == {after[0]}


class Replayed(nn.Module):
    """Computes as a CUDA graph does: every call writes its outputs, and every backward pass its gradients, to the same
    memory, which they share with whatever was taken of it."""

    def __init__(self, model):
        super().__init__()
        self.model, self.memory = model, {}

    def forward(self, *inputs):
        names, params = zip(*self.model.named_parameters(), strict=True)
        return _Replay.apply(self, names, inputs, *params)

    def kept(self, key, tensor):
        memory = self.memory.setdefault((key, tensor.shape), torch.empty_like(tensor))
        memory.copy_(tensor)
        return memory.view(memory.shape)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, replayed, names, inputs, *params):
        ctx.replayed = replayed
        ctx.params = [p.detach().requires_grad_() for p in params]
        with torch.enable_grad():
            ctx.output = torch.func.functional_call(replayed.model, dict(zip(names, ctx.params, strict=True)), inputs)
        return replayed.kept("output", ctx.output.detach())

    @staticmethod
    def backward(ctx, slope):
        slopes = torch.autograd.grad(ctx.output, ctx.params, slope)
        return None, None, None, *(ctx.replayed.kept(i, s) for i, s in enumerate(slopes))


class Whole(Toy):
    """A model that returns its loss."""

    def model(self):
        class Net(nn.Module):
            def __init__(self, net):
                super().__init__()
                self.net = net

            def forward(self, x, y=None):
                return self.net(x) if y is None else cross_entropy(self.net(x), y, reduction="sum")

        self.net = Net(super().model())
        return self.net

    def loss(self, model, batch):
        return Loss(model(*batch), len(batch[1]))


@pytest.mark.parametrize("task", [Toy, Whole])
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch_size": None},
        {"micro_batch_size": 5},
        {"micro_batch_size": 5, "gradients": {"noise_scale": True}},
        {"micro_batch_size": 5, "optim": {"name": "sgd", "wrap": "sam"}},
    ],
)
def test_nothing_is_left_in_memory_that_a_graph_overwrites(settings, deferred, task, tmp_path, monkeypatch):
    monkeypatch.setattr(step, "skips_on_device", lambda optimizer, device: deferred)
    plain = uninterrupted(tmp_path / "plain", task=task, **settings)
    monkeypatch.setattr(torch, "compile", lambda model, **_: Replayed(model))
    monkeypatch.setattr(loop, "records_graphs", lambda config, device: config.compile == "graphs")
    graphs = uninterrupted(tmp_path / "graphs", task=task, compile="graphs", **settings)
    assert graphs.digest() == plain.digest()


@pytest.mark.usefixtures("untranslated")
def test_graphs_on_a_cpu_are_what_true_is_and_that_is_an_event(tmp_path):
    graphs, true = (uninterrupted(tmp_path / str(value), compile=value) for value in ("graphs", True))
    assert graphs.digest() == true.digest()
    told = [fields["reason"] for kind, fields in graphs.reporter.events if kind == "compiled_without_graphs"]
    assert told == ["train.compile=graphs records CUDA graphs and this device is a cpu: here it does what true does."]
    assert not [kind for kind, _ in true.reporter.events if kind == "compiled_without_graphs"]


def test_graphs_are_for_one_process():
    with pytest.raises(ValueError, match="compile=graphs records what one process launches, and parallel has 2"):
        TrainConfig.model_validate({"compile": "graphs", "batch_size": 8, "parallel": {"data": 2}})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs where torch finds a GPU, by make test-gpu")
@pytest.mark.parametrize("task", [Toy, Whole])
def test_graphs_train_as_what_is_compiled_does_and_resume_exactly(task, tmp_path):
    true, graphs = (
        uninterrupted(tmp_path / str(value), task=task, compile=value, num_epochs=4) for value in (True, "graphs")
    )
    losses = [[v for (_, key), v in trial.reporter.values.items() if key == "train/loss"] for trial in (true, graphs)]
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert not [fields for kind, fields in graphs.reporter.events if kind == "graphs_skipped"]
    parts = Trial(tmp_path / "parts", task=task, compile="graphs", num_epochs=4)
    assert parts.attempt(killed_at(6)) is None
    assert parts.attempt().kind == "complete"
    assert parts.digest() == graphs.digest()
