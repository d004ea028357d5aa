"""The online study: which answers it draws, what it learns of them, and that a cut trial goes on with the same."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from trainer_runs import MemoryReporter, Trial, killed_at, uninterrupted
from typer.testing import CliRunner

from hpo import load
from hpo.cli.main import app
from hpo.space.config import as_json
from hpo.storage.home import Home
from studies._lm.adapter import BASE
from studies._lm.base import base_model
from studies._lm.config import ModelConfig
from studies._lm.exported import save_adapter
from studies._lm.pairs import preferences, true_reward
from studies.online.config import PROMPT
from studies.online.rewards import combined, encoded, ensemble
from studies.online.task import OnlineTask
from trainer.checkpoint.store import CheckpointStore
from trainer.data.text import Bytes
from trainer.errors import ConfigError
from trainer.loop import fit
from trainer.runtime.seeding import seed_all

pytestmark = pytest.mark.whole

METHODS = ("ppo", "grpo", "online_dpo")
TINY: dict[str, Any] = {
    "data.prompts": 40, "evaluation.prompts": 16, "reward.pairs": 40, "reward.epochs": 2, "rollout.answers": 16,
    "train.batch_size": 8, "train.num_epochs": 2,
}  # fmt: skip


def task(**overrides: Any) -> OnlineTask:
    overrides |= {"rollout.group_size": 4} if overrides.get("method") == "grpo" else {}
    return OnlineTask(load("online").configure(TINY | overrides).config)


def stepped(it: OnlineTask, model: Any, step: int, seed: int = 0) -> Any:
    """The loss at a step, under the trainer's seeds of one."""
    seed_all(1000 * seed + step)
    it.step = step
    data = it.train_set()
    size = it.config.train.batch_size
    windows = [data.order(0, 0, size)[i : i + size] for i in range(0, len(data), size)]
    return it.loss(model, data.__getitems__(windows[step % len(windows)]))


def perturbed(it: OnlineTask) -> Any:
    """A model whose adapters say something."""
    seed_all(0)
    model, generator = it.model().train(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.policy.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn(p.shape, generator=generator))
    return model


# --- Answers


def test_a_batch_of_prompts_stands_once_for_each_step_on_its_answers():
    it = task(**{"method": "grpo", "rollout.steps": 3})
    data = it.train_set()
    places = np.array(data.order(0, 0, 8)).reshape(2, 3, 2, 4)  # rollouts, steps, groups, answers
    assert len(data) == places.size
    assert (places == places[:, :1, :, :1]).all(), "the same prompts at each step, one prompt in each group"
    assert len({*places[:, 0, :, 0].flat}) == 4
    assert data.order(0, 0, 8) == data.order(0, 0, 8) != data.order(0, 1, 8) != data.order(1, 1, 8)


@pytest.mark.parametrize("method", METHODS)
def test_answers_are_drawn_once_and_kept_for_the_steps_on_them(method):
    it = task(method=method)
    model = perturbed(it)
    stepped(it, model, 0)
    first = [tensor.clone() for tensor in model.kept.rollout()]
    with torch.no_grad():
        for p in model.policy.parameters():
            p.add_(0.01 * p.requires_grad)
    stepped(it, model, 1)
    assert all(map(torch.equal, model.kept.rollout(), first))
    stepped(it, model, 2)
    assert not torch.equal(model.kept.rollout().tokens, first[0])


def test_draws_are_a_function_of_seed_and_step():
    it, drawn = task(), []
    for seed in (0, 0, 1):
        model = perturbed(it)
        stepped(it, model, 0, seed)
        drawn.append(model.kept.rollout().tokens.clone())
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_what_is_kept_is_that_of_whole_rows(temperature):
    """Log-probabilities of each answer by itself, read without a cache; the reference is the plain model."""
    it = task(**{"rollout.temperature": temperature, "reward.members": 2, "reward.combine": "min"})
    model, base = perturbed(it), base_model(ModelConfig())
    stepped(it, model, 0)
    rollout = model.kept.rollout()
    for i, row in enumerate(rollout.tokens):
        count = int(rollout.mask[i].sum())
        assert (rollout.mask[i, :count].all() and count == 8) or row[PROMPT + count - 1] == Bytes.end
        with torch.no_grad():
            for net, kept in ((model.policy, rollout.old), (base, rollout.reference)):
                logits = net(input_ids=row[None, : PROMPT + count]).logits[0, PROMPT - 1 : -1]
                log_p = (logits / temperature).log_softmax(-1)
                expected = log_p.gather(1, row[PROMPT : PROMPT + count, None]).squeeze(1)
                torch.testing.assert_close(kept[i, :count], expected, rtol=1e-4, atol=1e-5)
            by_members = [m(row[None, : PROMPT + count], torch.tensor([PROMPT + count])) for m in model.reward]
        assert float(rollout.rewards[i]) == pytest.approx(float(min(by_members)), abs=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_the_first_step_moves_by_rewards_alone(method):
    """A fresh policy is its reference: no divergence, ratios of 1, no penalty."""
    it = task(method=method)
    model = it.model().train()
    loss = stepped(it, model, 0)
    assert float(model.kept.rollout().divergence) == pytest.approx(0.0, abs=1e-5)
    if method == "grpo":
        assert loss.sum.item() == pytest.approx(0.0, abs=1e-4), "advantages of a group add up to 0"
    if method == "online_dpo":
        assert (loss.sum / loss.count).item() == pytest.approx(np.log(2), abs=1e-5)
    loss.sum.backward()
    trained = {name.partition(".")[0] for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert trained == ({"policy", "critic"} if method == "ppo" else {"policy"})


def test_the_coefficient_follows_the_divergence_of_the_last_answers():
    it = task(**{"loss.target_kl": 0.5, "loss.beta": 0.2})
    model = perturbed(it)
    stepped(it, model, 0)
    assert float(model.kept.beta) == pytest.approx(0.2)
    apart = float(model.kept.rollout().divergence)
    stepped(it, model, 2)
    expected = 0.2 * (1 + 0.1 * min(max((apart - 0.5) / 0.5, -0.2), 0.2))
    assert float(model.kept.beta) == pytest.approx(expected) != 0.2


def test_a_part_of_a_batch_is_refused():
    it = task()
    with pytest.raises(ConfigError, match=r"a step got 4 of its 8 answers.*lower train\.batch_size"):
        it.loss(it.model(), it.train_set().__getitems__(range(4)))


# --- Rewards


def test_reward_models_tell_pairs_apart_that_they_have_not_seen():
    it = task(**{"reward.pairs": 400, "reward.epochs": 12, "reward.members": 3})
    [*members] = ensemble(it.config)
    others = [r for r in preferences(400, 77) if true_reward(r["chosen"]) != true_reward(r["rejected"])]
    better = [true_reward(r["chosen"]) > true_reward(r["rejected"]) for r in others]
    scores = []
    for member in members:
        assert not any(p.requires_grad for p in member.parameters())
        with torch.no_grad():
            chosen, rejected = (
                member(*encoded([r["prompt"] + r[which] for r in others])) for which in ("chosen", "rejected")
            )
        scores.append(chosen)
        assert float(((chosen > rejected) == torch.tensor(better)).float().mean()) > 0.75
    assert not torch.equal(scores[0], scores[1]), "members differ by their seeds"
    again = ensemble(it.config)
    assert all(map(torch.equal, again.state_dict().values(), ensemble(it.config).state_dict().values()))


def test_members_are_combined_as_said():
    rewards = torch.tensor([[1.0, 4.0], [3.0, 4.0], [2.0, 1.0]])
    assert combined(rewards, "mean", 2.0).tolist() == [2.0, 3.0]
    assert combined(rewards, "min", 2.0).tolist() == [1.0, 1.0]
    spread = np.std(rewards.numpy(), axis=0)
    assert combined(rewards, "cautious", 2.0).numpy() == pytest.approx([2.0, 3.0] - 2 * spread)
    for combine in ("mean", "min", "cautious"):
        assert torch.equal(combined(rewards[:1], combine, 2.0), rewards[0])


def test_the_gap_is_by_how_much_more_the_learnt_reward_has_risen():
    """Computed again from the answers that are written, and the reference's, drawn under the data's seed."""
    it = task(**{"reward.members": 2})
    model = perturbed(it).eval()
    with torch.no_grad():
        seed_all(5)
        measured = it.evaluate(model)
        it.progress = 0.5
        [(name, text)] = it.artifacts(model).items()
        fresh = task(**{"reward.members": 2})
        reference = fresh.model().eval()
        seed_all(0)
        before = fresh.evaluate(reference)
    rows = [json.loads(line) for line in text.splitlines()]
    assert name == "answers/epoch-0001.jsonl" and len(rows) == 16
    assert all(row["true_reward"] == true_reward(row["response"]) for row in rows)
    truth, learnt = (np.mean([row[kind] for row in rows]) for kind in ("true_reward", "reward"))
    assert measured["val/true_reward"] == pytest.approx(truth)
    assert measured["val/reward"] == pytest.approx(learnt, rel=1e-5)
    risen = (learnt - before["val/reward"]) - (truth - before["val/true_reward"])
    assert before["val/kl"] == pytest.approx(0.0, abs=1e-5) and measured["val/kl"] > 0.1
    assert before["val/gap"] == pytest.approx(0.0, abs=1e-5) and measured["val/gap"] == pytest.approx(risen, abs=1e-4)


# --- Training


@pytest.mark.parametrize("method", METHODS)
def test_answers_come_to_be_worth_more(method, tmp_path):
    """Both rewards of held-back prompts' answers rise above those of the reference, 1.9 on average."""
    settings = {"rollout.answers": 512, "train.batch_size": 64, "train.num_epochs": 2, "reward.pairs": 256}
    settings |= {"reward.epochs": 12, "evaluation.prompts": 128, "data.prompts": 256, "train.optim.lr": 5e-3}
    it, reporter = task(method=method, **settings), MemoryReporter(None)
    outcome = fit(it, it.config.train, reporter, CheckpointStore(tmp_path, 1, []))
    assert outcome.kind == "complete", outcome.error
    last = {key: value for (step, key), value in reporter.values.items() if step == outcome.step}
    assert last["val/true_reward"] > 2.4
    assert last["val/kl"] > 0.1
    assert {"train/kl", "train/reward", "train/beta", "train/length"} <= last.keys()
    assert not [fields for kind, fields in reporter.events if kind == "unsaved_attributes"]


def test_reward_models_stay_as_they_are(tmp_path):
    it = task()
    before = {name: tensor.clone() for name, tensor in it.model().reward.state_dict().items()}
    trial = uninterrupted(tmp_path, task=cut_task(), **GIVEN)
    assert {name: tensor.tolist() for name, tensor in trial.task.net.reward.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in before.items()
    }


GIVEN: dict[str, Any] = {"batch_size": 8, "micro_batch_size": None, "optim": {"name": "adamw", "lr": 3e-3}}


def cut_task(**overrides: Any) -> type[OnlineTask]:
    config = task(**overrides).config

    class Cut(OnlineTask):
        def __init__(self, _: object) -> None:
            super().__init__(config)

        def model(self):
            self.net = super().model()
            return self.net

    return Cut


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("read", [2, 6])
def test_a_trial_cut_between_two_steps_on_its_answers_goes_on(method, read, tmp_path):
    """To the bit. Killed before a second step on answers, read from the checkpoint: the policy has changed."""
    kind = cut_task(method=method, **{"loss.target_kl": 0.5} if method == "ppo" else {})
    whole = uninterrupted(tmp_path / "whole", task=kind, **GIVEN)
    cut = Trial(tmp_path / "cut", kind, **GIVEN)
    assert cut.attempt(killed_at(read)) is None
    assert cut.attempt() is not None
    assert cut.digest() == whole.digest()


def test_a_checkpoint_holds_all_that_a_resumed_trial_needs():
    model: Any = task().model()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    kept = {name for name in model.state_dict() if name.partition(".")[0] in ("reward", "kept")}
    assert set(model.state_dict()) == trained | kept | {BASE}
    assert "kept.tokens" in kept and "reward.0.mean" in kept and "critic.weight" in trained
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "kept.tokens"}
    with pytest.raises(RuntimeError, match=r"kept\.tokens"):
        task().model().load_state_dict(state)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
def test_a_policy_is_saved_as_plain_adapters(tmp_path):
    """Of all that a trial trains, `PeftModel.from_pretrained` gets the policy's adapters."""
    it = task()
    model, file = perturbed(it), tmp_path / "trial.safetensors"
    save_file(model.state_dict(), file, {"config": json.dumps(as_json(it.config))})
    save_adapter(str(file), str(tmp_path / "adapter"))
    tokens = torch.tensor([[*b"abcd?ab"]])
    with torch.no_grad():
        loaded = PeftModel.from_pretrained(base_model(ModelConfig()), tmp_path / "adapter")
        torch.testing.assert_close(loaded(input_ids=tokens).logits, model.policy(input_ids=tokens).logits)


# --- From the command line


@pytest.mark.usefixtures("process")
def test_a_search_from_the_command_line(home):
    tiny = TINY | {"train.batch_size": 16, "rollout.answers": 32}
    small = [word for path, value in tiny.items() for word in ("-o", f"{path}={value}")]
    arguments = ["run", "--study", "online", "--trials", "3", "--executor", "inline", "--strategy", "none", *small]
    result = CliRunner().invoke(app, [*arguments, "--home", str(home.root)])
    assert result.exit_code == 0, result.output
    trial = json.loads(CliRunner().invoke(app, ["show", "0", "--json", "--home", str(home.root)]).stdout)
    measured = {"val/true_reward", "val/reward", "val/gap", "val/kl", "val/length"}
    assert measured <= trial["curves"].keys()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["method=grpo", "rollout.group_size=1"], ["rollout.group_size=1", "set it to 2 or more"]),
        (["method=grpo", "rollout.group_size=3"], ["train.batch_size=64", "the 3 answers", "set it to 66"]),
        (["train.batch_size=48"], ["rollout.answers=1024 is not a multiple of train.batch_size 48: set it to 1056"]),
        (["reward.members=0"], ["reward.members='0'", "greater than or equal to 1"]),
        (["method=ppo", "loss.target_kl=0"], ["loss.target_kl='0'", "greater than 0"]),
        (["rollout.max_new_tokens=508"], ["508", "a prompt of 5 tokens", "set it to 507 or less"]),
        (["train.parallel.data=2"], ["train.parallel: 2 ranks", "leave train.parallel out"]),
        (["train.micro_batch_size=16"], ["train.micro_batch_size=16", "leave train.micro_batch_size out"]),
        (["train.lanes=2"], ["train.lanes=2"]),
        (["train.batch_growth.epochs=[1]"], ["train.batch_growth=[1]", "leave train.batch_growth out"]),
        (["train.compile=true"], ["train.compile=true", "leave train.compile out"]),
        (["data.prompts=9000"], ["9512 different prompts", "at most 5000"]),
        (["method=grpo", "loss.target_kl=2"], ["loss.target_kl", "is read only with method == 'ppo'"]),
        (["method=bandit"], ["method='bandit'", "'grpo'"]),
    ],
)
def test_what_cannot_be_used(home: Home, overrides, words):
    options = [word for override in overrides for word in ("-o", override)]
    arguments = ["run", "--study", "online", "--trials", "1", *options, "--home", str(home.root)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    [line] = result.stderr.strip().splitlines()
    assert all(word in line for word in words), line
