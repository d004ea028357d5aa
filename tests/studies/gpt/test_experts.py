"""The mixture of experts against loops over tokens in float64 and formulas of papers, and as part of a trial."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainer_runs import Trial, killed_at, uninterrupted
from typer.testing import CliRunner

import hpo
from hpo.cli.main import app
from hpo.declaration.references import load
from hpo.errors import SpaceError
from hpo.storage.home import Home
from studies.gpt import llama
from studies.gpt.budget import active_parameters, parameters, report, rows
from studies.gpt.config import Config
from studies.gpt.experts import Experts, Load, Route, balance_loss, recorded, slots, z_loss
from studies.gpt.generate import generate
from studies.gpt.model import Llama, forget, remember
from studies.gpt.task import GptTask, sizes
from trainer.errors import ConfigError
from trainer.memory.estimate import estimate
from trainer.metrics.flops import flops as counted_flops

SMALL = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "mlp_size": 16}
CORPUS = {"corpus": {"general": 40, "target": 40}}
MOE = {"experts": 4, "top_k": 2, "capacity": 1.0, "shared": 1}
KINDS = [
    {"experts": 4, "top_k": 1},
    {"experts": 4, "top_k": 2},
    {"experts": 4, "top_k": 1, "slots": 2},
    {"experts": 4, "top_k": 2, "slots": 3},
    {"experts": 5, "top_k": 3, "slots": 4, "shared": 2},
    {"experts": 3, "top_k": 3, "shared": 1},
]


def config_of(moe: dict[str, Any] | None = None, **parts: Any) -> Config:
    model = SMALL | parts.pop("model", {}) | {"moe": MOE if moe is None else moe}
    return Config.model_validate({"data": CORPUS, "model": model} | parts)


def layer_of(kind: dict[str, Any]) -> Experts:
    torch.manual_seed(0)
    return Experts(6, 10, **kind).double()


def by_loop(layer: Experts, x: Tensor) -> tuple[Tensor, int]:
    """Returns the output, token by token, and how many choices found no slot."""
    rows_of_output, dropped = [], 0
    for row in x:
        taken = [0] * layer.experts
        for token in row:
            p = (layer.router.weight @ token).exp()
            p = p / p.sum()
            best = sorted(range(layer.experts), key=lambda expert: -float(p[expert].detach()))[: layer.top_k]
            share = sum(p[expert] for expert in best) if layer.top_k > 1 else 1.0
            output = torch.zeros_like(token) if layer.shared is None else layer.shared(token)
            for expert in best:
                if layer.slots is not None and taken[expert] == layer.slots:
                    dropped += 1
                    continue
                taken[expert] += 1
                gate, up = token @ layer.gate[expert], token @ layer.up[expert]
                output = output + p[expert] / share * ((gate * gate.sigmoid() * up) @ layer.down[expert])
            rows_of_output.append(output)
    return torch.stack(rows_of_output).view_as(x), dropped


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_a_loop_over_tokens(kind):
    layer, x = layer_of(kind), torch.randn(3, 9, 6, dtype=torch.float64)
    leaves = [x.requires_grad_(), *layer.parameters()]
    expected, dropped = by_loop(layer, x)
    with recorded() as routes:
        output = layer(x)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(output)
    slopes, by_hand = (torch.autograd.grad((y * weights).sum(), leaves) for y in (output, expected))
    for slope, oracle in zip(slopes, by_hand, strict=True):
        torch.testing.assert_close(slope, oracle, rtol=1e-10, atol=1e-12)
    [route] = routes
    assert (route.kept is None) == (layer.slots is None)
    assert dropped == (0 if route.kept is None else int((~route.kept).sum()))
    assert (dropped > 0) == ("slots" in kind), "else nothing would be shown of capacity"


def test_a_router_learns_from_the_loss_of_its_only_expert():
    """A gate over its own sum would be 1, and would have no gradient."""
    layer = layer_of({"experts": 4, "top_k": 1})
    layer(torch.randn(2, 5, 6, dtype=torch.float64)).square().sum().backward()
    assert layer.router.weight.grad is not None and layer.router.weight.grad.abs().max() > 0


def test_an_expert_without_tokens_has_a_gradient_of_zero():
    layer = layer_of({"experts": 4, "top_k": 1})
    with torch.no_grad():
        layer.router.weight[1:] = 0.0
        layer.router.weight[0] = 1.0
    layer(torch.ones(1, 5, 6, dtype=torch.float64)).sum().backward()
    assert layer.gate.grad is not None and layer.gate.grad[0].abs().max() > 0
    assert not layer.gate.grad[1:].any()


def test_router_logits_are_float32_under_autocast():
    layer = Experts(8, 8, experts=4, top_k=2)
    x = torch.randn(2, 5, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16), recorded() as routes:
        output = layer(x.bfloat16())
    assert routes[0].logits.dtype == torch.float32 and output.dtype == torch.bfloat16
    expected = x.bfloat16().float() @ layer.router.weight.T
    torch.testing.assert_close(routes[0].logits, expected, rtol=1e-6, atol=1e-6)


def random_route(top_k: int) -> tuple[Route, Tensor]:
    torch.manual_seed(1)
    logits = 2 * torch.randn(3, 7, 5, dtype=torch.float64)
    counted = torch.rand(3, 7) < 0.7
    counted[2] = False  # a row of padding
    return Route(logits, logits.topk(top_k).indices, None), counted


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_balance_is_the_switch_transformers(top_k):
    """N sum_i f_i P_i of each row (Fedus et al. 2022, eqs. 4 to 6), once for each token that counts."""
    route, counted = random_route(top_k)
    expected = 0.0
    for logits, chosen, marks in zip(route.logits, route.chosen, counted, strict=True):
        tokens = [t for t in range(7) if marks[t]]
        for expert in range(5):
            f = sum(float(expert in chosen[t].tolist()) for t in tokens) / max(len(tokens) * top_k, 1)
            p = sum(math.exp(logits[t, expert]) / sum(map(math.exp, logits[t].tolist())) for t in tokens)
            expected += 5 * f * p  # P_i times the number of tokens
    assert float(balance_loss(route, counted)) == pytest.approx(expected, rel=1e-12)


def test_the_balance_of_even_loads_is_one_and_of_one_expert_their_number():
    counted = torch.ones(1, 4, dtype=torch.bool)
    even = Route(torch.zeros(1, 4, 4), torch.arange(4).view(1, 4, 1), None)
    assert float(balance_loss(even, counted)) / 4 == pytest.approx(1.0)
    sure = torch.tensor([100.0, 0.0, 0.0, 0.0]).expand(1, 4, 4)
    assert float(balance_loss(Route(sure, torch.zeros(1, 4, 1, dtype=torch.long), None), counted)) / 4 == 4.0


def test_the_balance_is_learnt_by_the_probabilities():
    """Its gradient lowers the ratings of the experts with the largest loads."""
    logits = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 0.5]]], dtype=torch.float64, requires_grad=True)
    route = Route(logits, logits.topk(1).indices, None)
    balance_loss(route, torch.ones(1, 3, dtype=torch.bool)).backward()
    assert logits.grad is not None and (logits.grad[..., 0] > 0).all() and (logits.grad[..., 1] < 0).all()


def test_the_z_loss_is_st_moes():
    """(log sum_i exp x_i)^2 of each token that counts (Zoph et al. 2022, eq. 5)."""
    route, counted = random_route(1)
    tokens = route.logits[counted].tolist()
    expected = sum(math.log(sum(map(math.exp, token))) ** 2 for token in tokens)
    assert float(z_loss(route, counted)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("capacity", "expected"), [(None, None), (1.0, 64), (1.25, 80), (0.1, 7), (1e-9, 1)])
def test_slots_are_a_factor_times_an_even_share_rounded_up(capacity, expected):
    """Of 128 tokens with two choices among 4 experts 64 are an even share."""
    assert slots(capacity, top_k=2, experts=4, length=128) == expected


def mixed_llama(**kind: Any) -> Llama:
    torch.manual_seed(0)
    model = Llama(50, **SMALL, feed=partial(Experts, **({"experts": 4, "top_k": 2, "slots": 4, "shared": 1} | kind)))
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("slots", [None, 4])
def test_a_later_token_changes_nothing_before_it_whatever_room_it_takes(slots):
    model, tokens = mixed_llama(slots=slots), torch.randint(50, (2, 12))
    before = model(tokens)
    for place in range(12):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % 50
        torch.testing.assert_close(model(changed)[:, :place], before[:, :place], rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("cuts", [(7, *range(8, 13)), (4, 5, 9, 12)])
def test_what_experts_took_before_is_kept_with_keys_and_values(cuts):
    model, tokens = mixed_llama(), torch.randint(50, (2, 12))
    with recorded() as routes:
        whole = model(tokens)
    assert all(route.kept is not None and not route.kept.all() for route in routes)
    for _ in range(2):
        remember(model)
        pieces = [model(tokens[:, start:stop]) for start, stop in zip((0, *cuts), cuts, strict=False)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-5, atol=1e-5)
    forget(model)
    torch.testing.assert_close(model(tokens), whole)
    written = generate(model, [3, 1, 4], 8, length=12, temperature=0)
    tokens_of = [3, 1, 4]
    for _ in range(8):
        tokens_of.append(int(model(torch.tensor([tokens_of]))[0, -1].argmax()))
    assert written == tokens_of[3:]


def gradients(
    task: GptTask, model: nn.Module, batches: list[dict[str, Tensor]]
) -> tuple[list[Tensor], dict[str, float]]:
    """Returns the gradient of the mean loss of a window, and the means of the loss and its terms."""
    model.zero_grad()
    sums: dict[str, float] = {}
    count = 0.0
    for batch in batches:
        loss = task.loss(model, batch)
        loss.sum.backward()
        count += float(loss.count)
        for name, term in {"loss": loss.sum, **loss.terms}.items():
            sums[name] = sums.get(name, 0.0) + float(term.detach())
    found = [p.grad / count for p in model.parameters() if p.grad is not None]
    return found, {name: total / count for name, total in sums.items()}


@pytest.mark.parametrize("moe", [MOE, {"experts": 4, "top_k": 1, "balance": 0.1, "z_loss": 0.1}])
def test_accumulated_micro_batches_are_one_batch(moe):
    task = GptTask(config_of(moe))
    torch.manual_seed(0)
    model = task.model().double()
    batch = task.train_set().__getitems__([*range(6)])
    parts = [{name: tensor[start:stop] for name, tensor in batch.items()} for start, stop in ((0, 1), (1, 4), (4, 6))]
    whole, means = gradients(task, model, [batch])
    accumulated, same = gradients(task, model, parts)
    assert len(whole) == len([*model.parameters()])
    for expected, gradient in zip(whole, accumulated, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)
    assert same == pytest.approx(means, rel=1e-9)
    expected = means["loss_tokens"] + moe.get("balance", 0.01) * means["loss_balance"]
    assert means["loss"] == pytest.approx(expected + moe.get("z_loss", 0.001) * means["loss_z"], rel=1e-9)
    assert means["loss_balance"] >= 2 * 0.9, "about one for each of two blocks"


@torch.no_grad()
def test_loads_do_not_depend_on_how_many_rows_are_at_once():
    found = []
    for micro_batch_size in (1, 3, 50):
        task = GptTask(config_of(train={"batch_size": 50, "micro_batch_size": micro_batch_size}))
        torch.manual_seed(0)
        found.append(task.evaluate(task.model().eval()))
    names = [name for name in found[0] if name.startswith("val/")]
    assert {"val/expert_load_max", "val/expert_load_min", "val/dead_experts", "val/dropped_tokens"} <= {*names}
    assert found[0]["val/dropped_tokens"] > 0
    for other in found[1:]:
        assert [other[name] for name in names] == pytest.approx([found[0][name] for name in names], rel=1e-5)


def test_loads_are_counted_by_hand():
    """Two blocks of three experts; the last token does not count."""
    chosen = torch.tensor([[[0, 1], [0, 2], [1, 2]]]), torch.tensor([[[0, 1], [1, 0], [2, 0]]])
    kept = torch.tensor([[[True, True], [True, False], [False, False]]])
    load, counted = Load(), torch.tensor([[True, True, False]])
    for _ in range(2):
        load.add([Route(torch.zeros(1, 3, 3), chosen[0], kept), Route(torch.zeros(1, 3, 3), chosen[1], None)], counted)
    assert load.chosen.tolist() == [[4, 2, 2], [4, 4, 0]] and load.dead == [(1, 2)]
    assert load.metrics() == {
        "expert_load_max": 1.5,
        "expert_load_min": 0.0,
        "dead_experts": 1.0,
        "dropped_tokens": 2 / 16,
    }


@torch.no_grad()
def test_experts_that_no_token_chooses_are_named():
    task = GptTask(config_of({"experts": 4, "top_k": 1}))
    torch.manual_seed(0)
    model: Any = task.model().eval()
    [healthy] = task.findings(model)
    assert (healthy.verdict, healthy.value, healthy.advice) == ("healthy", 0.0, "")
    model.blocks[1].mlp.router.weight[2] = 0.0
    others = model.blocks[1].mlp.router.weight[[0, 1, 3]]
    model.blocks[1].mlp.router.weight[[0, 1, 3]] = others.abs().max() * torch.stack(
        [others[0].sign(), -others[0].sign(), others[2].sign()]
    )
    [dead] = task.findings(model)
    assert (dead.check, dead.verdict, dead.value) == ("dead experts", "dead", 1.0)
    assert dead.advice.startswith("expert 2 of block 1: ") and "1 of 8 experts" in dead.figure
    assert GptTask(config_of({"experts": 1})).findings(model) == ()


@pytest.mark.parametrize("moe", [{"experts": 8, "top_k": 1}, MOE, {"experts": 4, "top_k": 3, "shared": 2}])
def test_active_parameters_are_those_that_a_token_meets(moe):
    """Against the model's own, and the operations of a step."""
    config = config_of(moe)
    task = GptTask(config)
    model = task.model()
    of_experts = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 3)
    size = sum(p.numel() for p in model.parameters())
    active = size - of_experts + of_experts // moe["experts"] * moe["top_k"]
    assert parameters(config.model, 257) == size and active_parameters(config.model, 257) == active
    batch = task.train_set().__getitems__([0, 1, 2])
    norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    attention = 2 * 3 * 2 * (3 * 2 * 2 * 128 * 128 * 8)  # layers, passes, products; rows, heads, of width 8
    assert counted_flops(task, batch) == 6 * (active - norms) * 3 * 128 + attention
    facts = report(config)
    assert facts["active_parameters"] == active and facts["compute_optimal_tokens"] == 20 * active
    sized = config.model_copy(update={"data": config.data.model_copy(update={"tokens_per_parameter": 2.0})})
    assert rows(sized) == round(2 * active / 128 / sized.train.num_epochs)


def test_memory_is_estimated_without_values():
    config = config_of({"experts": 4, "top_k": 2})
    task = GptTask(config)
    made = estimate(task, config.train, task.train_set().__getitems__([0, 1]))
    assert made.parameters == 4 * parameters(config.model, 257) and made.activations > 0


def test_one_expert_is_the_plain_model_to_the_bit():
    states = []
    for moe in ({}, {"experts": 1, "top_k": 3, "capacity": 0.5, "shared": 2, "balance": 1.0}):
        torch.manual_seed(0)
        task = GptTask(config_of(moe))
        model = task.model()
        loss = task.loss(model, task.train_set().__getitems__([0, 1]))
        states.append((model.state_dict(), float(loss.sum.detach()), dict(loss.terms), torch.get_rng_state()))
    (plain, loss, terms, drawn), (other, same, none, as_many) = states
    assert plain.keys() == other.keys() and all(torch.equal(plain[name], other[name]) for name in plain)
    assert loss == same and terms == none == {} and torch.equal(drawn, as_many)
    assert not any("router" in name or "shared" in name for name in plain)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"model.moe.experts": 2, "model.moe.top_k": 3}, "top_k 3 is more than experts 2: lower top_k"),
        ({"model.moe.experts": 4, "model.moe.capacity": 0}, "model.moe.capacity=0 is refused"),
        ({"model.moe.experts": 4, "model.moe.balance": -1}, "model.moe.balance=-1 is refused"),
        ({"model.moe.experts": 4, "train.lanes": 4}, "model.moe.experts=4 and train.lanes=4 exclude each other"),
        ({"model.moe.experts": 4, "train.compile": True}, "model.moe.experts=4 and train.compile=true exclude"),
        (
            {"model.moe.experts": 4, "train.parallel.tensor": 2},
            "model.moe.experts=4 and train.parallel.tensor=2 exclude each other",
        ),
        (
            {"model.moe.experts": 4, "train.parallel.pipeline": 2, "train.micro_batch_size": 4, "model.tie": False},
            "model.moe.experts=4 and train.parallel.pipeline=2 exclude each other",
        ),
        ({"model.moe.experts": 4, "model.weights": "."}, "model.weights are a plain Llama's, which has no experts"),
    ],
)
def test_what_experts_cannot_be_is_one_sentence(overrides, sentence):
    with pytest.raises(SpaceError) as refused:
        load("gpt").configure(overrides)
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


def test_a_mixture_is_not_saved_as_a_llama(tmp_path):
    config = config_of()
    with pytest.raises(ConfigError, match=r"^model\.moe\.experts is 4, and Hugging Face's Llama has no experts: open"):
        llama.save(Llama(257, **sizes(config)).state_dict(), config, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_trial_with_experts_cut_in_the_middle_goes_on_to_the_bit(tmp_path):
    config = config_of(samples={"tokens": 4})

    class Task(GptTask):
        def __init__(self, _: object) -> None:
            super().__init__(config)

        def model(self):
            self.net = super().model()
            return self.net

    settings = {"task": Task, "batch_size": 12, "optim": {"name": "adamw", "lr": 3e-3}}
    whole = uninterrupted(tmp_path / "whole", **settings)
    cut = Trial(tmp_path / "cut", **settings)
    steps = whole.reporter.committed[0].step
    assert cut.attempt(killed_at(steps - 2)) is None
    assert cut.attempt() is not None
    assert cut.digest() == whole.digest()
    reported = {name for _, name in whole.reporter.values}
    assert {"train/loss_tokens", "train/loss_balance", "train/loss_z", "val/expert_load_max"} <= reported


def test_activations_computed_again_change_nothing(tmp_path):
    digests = set()
    for checkpoint in ("none", "full", "selective"):

        class Task(GptTask):
            def __init__(self, _: object) -> None:
                super().__init__(config_of(samples={"tokens": 0}))

            def model(self):
                self.net = super().model()
                return self.net

        trial = uninterrupted(tmp_path / checkpoint, task=Task, num_epochs=1, activations={"checkpoint": checkpoint})
        digests.add(trial.digest())
    assert len(digests) == 1


SEARCH = """
from hpo import Choice, Float, Objective, Study
from studies.gpt.config import Config

SMALL = {"hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "num_layers": 1, "mlp_size": 16}
STUDY = Study(
    name="mixed",
    config=Config.model_validate(
        {
            "data": {"corpus": {"general": 40, "target": 30}},
            "model": SMALL,
            "samples": {"tokens": 0},
            "train": {"num_epochs": 1, "batch_size": 8, "optim": {"name": "adamw", "lr": 3e-3}},
        }
    ),
    task="studies.gpt.task:GptTask",
    space={
        "model.moe.experts": Choice([1, 2, 4]),
        "model.moe.top_k": Choice([1, 2]),
        "model.moe.capacity": Choice([None, 1.0]),
        "model.moe.balance": Float(1e-3, 1e-1, log=True),
        "model.moe.z_loss": Float(1e-4, 1e-2, log=True),
    },
    objectives=[Objective("val/loss", "minimize", select="best")],
    metrics=("train/loss*", "val/*"),
    enqueue=[
        {"model.moe.experts": experts, "model.moe.top_k": 1, "model.moe.balance": 0.01, "model.moe.z_loss": 0.001}
        for experts in (1, 4)
    ],
)
"""


@pytest.fixture(scope="module")
def searched(tmp_path_factory, process) -> Home:
    place: Path = tmp_path_factory.mktemp("mixed")
    (place / "mixed.py").write_text(SEARCH)
    home = Home.at(place / "home")
    found = hpo.run(
        str(place / "mixed.py"), trials=3, seed=2, home=home.root, executor="inline", sampler="random", progress=False
    )
    assert found.state == "complete"
    return home


def shown(*arguments: str) -> Any:
    ran = CliRunner().invoke(app, [*arguments, "--json"])
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout)


@pytest.mark.whole
def test_experts_and_their_weights_are_searched(searched):
    kinds = set()
    for number in range(3):
        trial = shown("show", str(number), "--study", "mixed", "--home", str(searched.root))
        experts = trial["params"]["model.moe.experts"]
        kinds.add(experts > 1)
        assert trial["state"] == "complete" and ("val/expert_load_max" in trial["curves"]) == (experts > 1)
        assert ("train/loss_balance" in trial["curves"]) == (experts > 1)
    assert kinds == {True, False}


@pytest.mark.whole
def test_a_diagnosis_has_the_check_of_experts_for_those_that_have_any(searched):
    for number in range(2):
        trial = shown("show", str(number), "--study", "mixed", "--home", str(searched.root))
        mixed = trial["params"]["model.moe.experts"] > 1
        options = ("--study", "mixed", "--home", str(searched.root), "--print-only", "--steps", "1", "--points", "0")
        checks = [finding["check"] for finding in shown("diagnose", str(number), *options)["findings"]]
        assert (checks[-1] == "dead experts") == mixed and checks.count("dead experts") == mixed
