"""The dpo study: preferences learnt against a reference that is the model itself, and what best-of-n picks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_runs import MemoryReporter
from typer.testing import CliRunner

from hpo import load
from hpo.cli.main import app
from hpo.storage.home import Home
from studies._lm.adapter import BASE
from studies._lm.base import base_model
from studies._lm.config import ModelConfig
from studies._lm.pairs import preferences, true_reward
from studies._lm.policy import answers, log_probs, reference_log_probs
from studies._lm.text import IGNORED
from studies.dpo.best_of import best_of, kl_bound, sizes
from studies.dpo.task import DpoTask
from trainer.checkpoint.store import CheckpointStore
from trainer.data.text import Bytes
from trainer.loop import fit
from trainer.losses import LOSSES

pytestmark = pytest.mark.whole


def task(**overrides: Any) -> DpoTask:
    return DpoTask(load("dpo").configure(overrides).config)


def trained(directory: Path, **overrides: Any) -> dict[str, float]:
    """The last metrics of a fit."""
    it, reporter = task(**overrides), MemoryReporter(None)
    outcome = fit(it, it.config.train, reporter, CheckpointStore(directory, 1, []))
    assert outcome.kind == "complete", outcome.error
    return {key: value for (step, key), value in reporter.values.items() if step == outcome.step}


# --- The policy and its reference


def perturbed(it: DpoTask) -> Any:
    """A model whose adapters say something."""
    model, generator = it.model().eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn(p.shape, generator=generator))
    return model


@pytest.mark.parametrize("name", ["dpo", "ipo", "kto"])
def test_the_loss_is_that_of_whole_answers_against_the_plain_model(name):
    """Of each answer by itself, without padding and without peft."""
    it = task(**{"loss.name": name, "data.generated": 40})
    model, base, data = perturbed(it), base_model(ModelConfig()), it.train_set()
    batch = data.__getitems__(range(6))
    found = it.loss(model, batch)

    def of(one: Any, which: str) -> torch.Tensor:
        totals = []
        for i in range(6):
            tokens, labels = data.data[i][which], data.data[i][f"{which}_labels"]
            log_p = one(input_ids=tokens[None]).logits[0].log_softmax(-1).detach()
            held = [t for t in range(1, len(tokens)) if labels[t] != IGNORED]
            total = sum(log_p[t - 1, tokens[t]] for t in held)
            totals.append(total / (len(held) if name == "ipo" else 1))
        return torch.stack(totals)

    policy, reference = ({which: of(one, which) for which in it._answers} for one in (model, base))
    if name == "kto":
        both = [torch.cat([r["chosen"], r["rejected"]]) for r in (policy, reference)]
        want = LOSSES["kto"](*both, torch.arange(12) < 6, policy["other"] - reference["other"], beta=0.1)
    else:
        pairs = (policy["chosen"], policy["rejected"], reference["chosen"], reference["rejected"])
        want = LOSSES[name](*pairs, beta=0.1)
    assert found.sum.item() == pytest.approx(want.sum.item(), rel=1e-4)
    assert float(found.count) == float(want.count)
    found.sum.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad), "the reference leaves no trace"


def test_a_fresh_policy_is_its_reference():
    it = task(**{"data.generated": 40})
    model = it.model().eval()
    batch = it.train_set().__getitems__(range(4))
    with torch.no_grad():
        policy, _ = log_probs(model, batch["chosen"], batch["chosen_labels"])
        assert torch.equal(policy, reference_log_probs(model, batch["chosen"], batch["chosen_labels"]))
    assert it.loss(model, batch).sum.item() / 4 == pytest.approx(math.log(2))


@pytest.fixture(scope="module")
def dropping(tmp_path_factory) -> str:
    """A model over bytes whose own layers drop out, as GPT-2's do by default."""
    from transformers import GPT2Config, GPT2LMHeadModel

    path, sizes = tmp_path_factory.mktemp("models"), {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=257, **sizes)).save_pretrained(path)
    return str(path)


def of_dropping(path: str, **overrides: Any) -> DpoTask:
    given = {"model.path": path, "model.tokenizer": "bytes", "model.modules": "c_attn", "data.generated": 40}
    return task(**given, **overrides)


@pytest.mark.parametrize("name", ["dpo", "ipo", "kto"])
def test_the_reference_never_drops_out(name, dropping):
    """And while neither does the policy, which is its reference at first, the loss is that of no difference."""
    it = of_dropping(dropping, **{"loss.name": name, "model.dropout": 0.0})
    model = it.model().train()
    batch = it.train_set().__getitems__(range(8))
    first, second = (reference_log_probs(model, batch["chosen"], batch["chosen_labels"]) for _ in range(2))
    assert torch.equal(first, second)
    loss = it.loss(model, batch)
    at_first = {"dpo": math.log(2), "ipo": (1 / (2 * it.config.loss.beta)) ** 2, "kto": 0.5}
    assert loss.sum.item() / float(loss.count) == pytest.approx(at_first[name], rel=1e-5)
    assert all(module.training for module in model.modules())


def test_ktos_reference_point_does_not_drop_out(dropping):
    it = of_dropping(dropping, **{"loss.name": "kto", "model.dropout": 0.5, "model.base_dropout": 0.5})
    model = perturbed(it).train()
    first, second = (it._ratios(model, it.train_set().__getitems__(range(8))) for _ in range(2))
    assert torch.equal(first["other"][0], second["other"][0])
    assert not torch.equal(first["chosen"][0], second["chosen"][0])


@pytest.mark.parametrize(("rate", "expected"), [(None, 0.1), (0.0, 0.0), (0.3, 0.3)])
def test_the_bases_own_dropout_is_set(rate, expected, dropping):
    model: Any = of_dropping(dropping, **{"model.base_dropout": rate}).model()
    rates = {module.p for name, module in model.named_modules() if type(module).__name__ == "Dropout"}
    assert rates - {0.05} == {expected}  # but for the adapters'
    assert model.config.resid_pdrop == expected


def test_answers_are_drawn_from_the_model():
    """As often as it says: the first letter of many answers, and each answer up to its end."""
    model, prompt = base_model(ModelConfig()), [*b"abcd?"]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([prompt])).logits[0, -1].softmax(-1)
        torch.manual_seed(0)
        tokens, labels = answers(model, [prompt] * 1000, 8, Bytes.end)
    drawn = torch.bincount(tokens[:, 5], minlength=257) / 1000
    assert float((drawn - expected).abs().sum()) < 0.15
    for row, held in zip(tokens[:50], labels[:50] != IGNORED, strict=True):
        answer = row[held].tolist()
        assert len(answer) == 8 or answer.index(Bytes.end) == len(answer) - 1
    short, _ = answers(model, [prompt, [*b"x?"]], 3, Bytes.end)
    assert short[1, :2].tolist() == [*b"x?"]


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_answers_are_those_of_whole_rows_however_many_are_read_at_a_time(rows):
    """Drawn by the same numbers from a model that reads each row anew, alone, for every token."""
    it, prompts = task(), [[*b"abcd?"], [*b"x?"], [*b"hgfed?"], [*b"abc?"], [*b"jj?"]]
    model, end = perturbed(it), ord("a")
    torch.manual_seed(3)
    chance = torch.rand(len(prompts), 6)
    torch.manual_seed(3)
    with torch.no_grad():
        tokens, labels = answers(model, prompts, 6, end, rows)
        for row, held, prompt, uniform in zip(tokens, labels != IGNORED, prompts, chance, strict=True):
            read, answer = list(prompt), row[held].tolist()
            for u in uniform[: len(answer)]:
                total = model(input_ids=torch.tensor([read])).logits[0, -1].softmax(-1).cumsum(-1)
                read.append(int((total <= u * total[-1]).sum()))
            assert read == [*prompt, *answer]
            assert len(answer) == 6 or answer.index(end) == len(answer) - 1


# --- What is measured


def test_generated_preferences_follow_the_true_reward():
    records = preferences(2000, seed=0)
    better = np.array([true_reward(one["chosen"]) - true_reward(one["rejected"]) for one in records])
    assert len({one["prompt"] for one in records}) == 2000
    for gap in (1, 2, 3):  # Bradley & Terry: the better one wins with the probability sigmoid(gap)
        won = (better == gap).sum() / (abs(better) == gap).sum()
        assert won == pytest.approx(1 / (1 + math.exp(-gap)), abs=0.06)


def test_the_best_of_n_by_true_scores_is_the_largest():
    worth = torch.tensor([[1.0, 4.0, 2.0, 3.0], [0.0, 1.0, 5.0, 2.0]])
    assert [best_of(worth, worth, n) for n in (1, 2, 4)] == [2.25, (4 + 3 + 1 + 5) / 4, 4.5]
    assert best_of(-worth, worth, 4) == 0.5
    assert sizes(16) == [1, 2, 4, 8, 16] and sizes(9) == [1, 2, 4, 8, 9]


def test_the_bound_is_the_divergence_where_no_two_answers_are_alike():
    """Of uniform answers on [0, 1] the best of n has density n x^(n-1): KL = log n - (n-1)/n."""
    x = (np.arange(1_000_000) + 0.5) / 1_000_000
    for n in (1, 2, 4, 16):
        density = n * x ** (n - 1)
        assert kl_bound(n) == pytest.approx((density * np.log(density)).mean(), abs=1e-4)


def test_alignment_earns_more_true_reward_than_its_reference(tmp_path):
    found = trained(tmp_path, **{"train.num_epochs": 2, "data.generated": 400})
    assert found["val/reward_accuracy"] > 0.6
    assert found["val/win_rate"] > 0.55
    assert found["val/kl"] > 0.1
    assert found["train/reward_margin"] > 0


def test_a_reward_model_picks_better_answers(tmp_path):
    found = trained(tmp_path, **{"preset": "reward", "train.num_epochs": 2, "data.generated": 400})
    assert found["val/reward_accuracy"] > 0.55
    assert found["val/best_of_16"] > found["val/best_of_1"] + 0.3
    assert found["val/best_of_4_kl_bound"] == pytest.approx(kl_bound(4))


def test_the_best_answer_to_each_prompt_is_written_with_its_score():
    """The file against the metrics: its answers are the best of 3 by the scores that a pass over each gives."""
    it = task(preset="reward", **{"data.generated": 40, "evaluation.prompts": 5, "evaluation.best_of": 3})
    model = perturbed(it)
    with torch.no_grad():
        found = it.evaluate(model)
        it.progress = 0.5
        [(name, text)] = it.artifacts(model).items()
        records = [json.loads(line) for line in text.splitlines()]
        for one in records:
            tokens = torch.tensor([[*one["prompt"].encode(), *one["response"].encode(), Bytes.end]])[:, : 5 + 8]
            labels = torch.where(torch.arange(tokens.shape[1]) < 5, IGNORED, tokens)
            assert one["score"] == pytest.approx(float(model(tokens, labels)), abs=1e-4)
    assert name == "picked/epoch-0002.jsonl"
    assert [one["prompt"] for one in records] == [one["prompt"] for one in it._records[1][:5]]
    assert np.mean([true_reward(one["response"]) for one in records]) == pytest.approx(found["val/best_of_3"])
    assert found["val/kl_share"] == pytest.approx((math.log(3) - 2 / 3) / it.config.evaluation.most_kl)
    assert task(**{"data.generated": 40}).artifacts(model) == {}


def test_a_reward_models_checkpoint_holds_head_and_adapters(tmp_path):
    it = task(preset="reward")
    model, again = it.model(), it.model()
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(model.state_dict()) == names | {BASE} and {"head.weight", "head.bias"} < names
    with torch.no_grad():
        model.head.bias.add_(1.0)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.head.bias, model.head.bias)
    with pytest.raises(RuntimeError, match=r"head\.bias"):
        again.load_state_dict({name: value for name, value in model.state_dict().items() if name != "head.bias"})


@pytest.mark.parametrize("given", [{"loss.name": "dpo"}, {"preset": "reward"}])
def test_no_more_rows_are_evaluated_at_once_than_are_trained_on(given):
    given = given | {"data.generated": 120, "evaluation.prompts": 16}
    it, whole = task(**given, **{"train.micro_batch_size": 7}), task(**given, **{"train.batch_size": 64})
    model, seen = perturbed(it), []
    read = model.lm if it.scores else model
    read.register_forward_pre_hook(lambda _, __, given: seen.append(len(given["input_ids"])), with_kwargs=True)
    found = []
    for one in (it, whole):
        torch.manual_seed(0)
        with torch.no_grad():
            found.append(one.evaluate(model))
        if one is it:
            assert max(seen) == 7
    assert found[0] == pytest.approx(found[1], rel=1e-3), "in parts the same answers are drawn, and judged alike"


def test_pairs_are_judged_alike_whatever_is_trained():
    """By -log sigmoid of 0.1 times the difference of the log-ratios of whole answers."""
    found = []
    for given in ({"loss.beta": 0.02}, {"loss.beta": 0.5}, {"loss.name": "ipo"}, {"loss.name": "kto"}):
        it = task(**given, **{"data.generated": 40, "evaluation.most_kl": 4.0})
        torch.manual_seed(0)
        model = perturbed(it)
        with torch.no_grad():
            found.append(it.evaluate(model))
            ratios = it._ratios(model, it._held_back.__getitems__(range(8)))
        if given == {"loss.beta": 0.02}:
            (chosen, ref_chosen), (rejected, ref_rejected) = ratios["chosen"], ratios["rejected"]
            better = 0.1 * (chosen - ref_chosen - rejected + ref_rejected)
            assert found[0]["val/reward_margin"] == pytest.approx(float(better.mean()), rel=1e-4)
            assert found[0]["val/loss"] == pytest.approx(float(torch.log1p((-better).exp()).mean()), rel=1e-4)
            assert found[0]["val/kl_share"] == pytest.approx(found[0]["val/kl"] / 4)
    assert all(one == pytest.approx(found[0]) for one in found[1:])


@pytest.mark.usefixtures("process")
def test_a_policy_that_has_drifted_too_far_is_infeasible(home):
    small = {"train.num_epochs": 1, "data.generated": 40, "evaluation.prompts": 4, "evaluation.most_kl": 1e-9}
    small["train.optim.lr"] = 0.02  # far enough that the KL of a few drawn answers is not below 0 by chance
    options = [word for path, value in small.items() for word in ("-o", f"{path}={value}")]
    arguments = ["run", "--study", "dpo", "--trials", "1", "--executor", "inline", *options]
    CliRunner().invoke(app, [*arguments, "--home", str(home.root)])
    trial = json.loads(CliRunner().invoke(app, ["show", "0", "--json", "--home", str(home.root)]).stdout)
    assert trial["state"] == "infeasible" and "val/kl_share" in trial["error"]


def test_a_reward_model_searches_nothing_that_it_does_not_read():
    for given in ({"preset": "reward"}, {"loss.name": "reward"}):
        space = load("dpo").configure(given).space
        assert not {"loss.beta", "loss.label_smoothing"} & space.decode(space.from_unit([0.5] * len(space))).keys()


# --- From the command line


@pytest.mark.usefixtures("process")
def test_pairs_of_ones_own_are_learnt_from_the_command_line(home, tmp_path):
    file = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": f"{i}? ", "chosen": "yes", "rejected": "no"} for i in range(24)]
    file.write_text("".join(json.dumps(one) + "\n" for one in pairs))
    small = ["-o", "train.num_epochs=1", "-o", "evaluation.prompts=4", "-o", "loss.name=dpo"]
    arguments = ["run", "--study", "dpo", "--trials", "1", "--executor", "inline", "-o", f"data.path={file}", *small]
    result = CliRunner().invoke(app, [*arguments, "--home", str(home.root)])
    assert result.exit_code == 0, result.output
    curves = json.loads(CliRunner().invoke(app, ["show", "0", "--json", "--home", str(home.root)]).stdout)["curves"]
    assert {"val/kl", "val/reward_margin"} <= curves.keys()
    assert "val/win_rate" not in curves  # no true reward is known


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.path={file}", ["line 2 lacks the field 'rejected'", "it has prompt, chosen"]),
        ("data.path={equal}", ["record 2: chosen and rejected are both 'b'", "leave it out"]),
        ("loss.beta=0", ["loss.beta='0'", "greater than 0"]),
        ("loss.name=ppo", ["loss.name='ppo'", "'kto'"]),
        ("data.max_length=5", ["?' has 5 tokens and data.max_length is 5"]),
        ("model.modules=foo", ["model.modules=foo names no linear layers of the model"]),
        ("train.micro_batch_size=4", ["loss.name=kto", "a rank has 4", "set train.micro_batch_size to 8 or more"]),
    ],
)
def test_what_cannot_be_used(home: Home, tmp_path, override, words):
    file, equal = tmp_path / "pairs.jsonl", tmp_path / "equal.jsonl"
    one = {"prompt": "a", "chosen": "b", "rejected": "c"}
    file.write_text(json.dumps(one) + "\n" + json.dumps({"prompt": "a", "chosen": "b"}) + "\n")
    equal.write_text(json.dumps(one) + "\n" + json.dumps(one | {"rejected": "b"}) + "\n")
    arguments = ["run", "--study", "dpo", "--trials", "1", "-o", override.format(file=file, equal=equal)]
    result = CliRunner().invoke(app, [*arguments, "--home", str(home.root)])
    assert result.exit_code == 2, result.output
    [line] = result.stderr.strip().splitlines()
    assert all(word in line for word in words), line
