"""Trains on preferences, and evaluates the policy or reward model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from studies._lm.config import depth_of, rows_at_once
from studies._lm.merged import language_model
from studies._lm.pairs import true_reward
from studies._lm.policy import answers, in_parts, log_probs, reference_log_probs, unwrapped
from studies._lm.records import Record, split
from studies._lm.text import IGNORED, batches, padded, prompt_of, tokenizer, tokens_of
from studies.dpo import best_of
from studies.dpo.config import Config, records
from studies.dpo.model import policy_model, reward_model
from trainer.data import Padded
from trainer.data.text import Tokenizer
from trainer.errors import ConfigError
from trainer.losses import LOSSES
from trainer.model.eval_mode import as_evaluated
from trainer.task import LanguageModel, Loss, Task

Batch = dict[str, Tensor]


class DpoTask(Task):
    """A policy that prefers the chosen answers, or with `loss.name=reward` a model that scores them higher."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.depth = depth_of(config.model)
        self.scores = config.loss.name == "reward"
        self.picked: list[dict[str, Any]] = []  # best-of-n answers of the last evaluation

    @cached_property
    def text(self) -> Tokenizer:
        return tokenizer(self.config.model)

    def of_depth(self, depth: int) -> DpoTask:
        model = self.config.model.model_copy(update={"layers": depth})
        return DpoTask(self.config.model_copy(update={"model": model}))

    def model(self) -> nn.Module:
        return (reward_model if self.scores else policy_model)(self.config.model)

    def train_set(self) -> Padded:
        return self._samples(self._records[0])

    def largest_batch(self, size: int) -> Batch:
        tokens = torch.zeros(size, self.config.data.max_length, dtype=torch.long)
        return {f"{answer}{kind}": tokens.clone() for answer in self._answers for kind in ("", "_labels")}

    @property
    def _answers(self) -> tuple[str, ...]:
        """Returns the parts of a sample that are read: for kto also an answer to another prompt."""
        return ("chosen", "rejected", "other") if self.config.loss.name == "kto" else ("chosen", "rejected")

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        if self.scores:
            better = self._rewards(model, batch, "chosen") - self._rewards(model, batch, "rejected")
            return Loss(-F.logsigmoid(better).sum(), len(better), {"reward_accuracy": (better > 0).float().sum()})
        return self._preference(self._ratios(model, batch))

    def _preference(self, ratios: dict[str, tuple[Tensor, Tensor]]) -> Loss:
        """Returns the loss, given log pi and log reference of each kind of answer."""
        loss = self.config.loss
        (chosen, ref_chosen), (rejected, ref_rejected) = ratios["chosen"], ratios["rejected"]
        if loss.name == "kto":
            desirable = torch.arange(2 * len(chosen), device=chosen.device) < len(chosen)
            policy, reference = torch.cat([chosen, rejected]), torch.cat([ref_chosen, ref_rejected])
            other, ref_other = ratios["other"]
            return LOSSES["kto"](policy, reference, desirable, (other - ref_other).detach(), beta=loss.beta)
        options = {"label_smoothing": loss.label_smoothing} if loss.name == "dpo" else {}
        return LOSSES[loss.name](chosen, rejected, ref_chosen, ref_rejected, beta=loss.beta, **options)

    def _ratios(self, model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns log pi and log reference of each kind of answer, [batch] each; for ipo per token, as in TRL.

        KTO's reference point, on the answers to other prompts, is computed like the reference: without dropout.
        """
        ratios = {}
        for answer in self._answers:
            tokens, labels = batch[answer], batch[f"{answer}_labels"]
            reference = reference_log_probs(model, tokens, labels)
            with as_evaluated(unwrapped(model)) if answer == "other" else nullcontext():
                policy, count = log_probs(model, tokens, labels)
            per = count.clamp(min=1) if self.config.loss.name == "ipo" else 1
            ratios[answer] = policy / per, reference / per
        return ratios

    def _rewards(self, model: nn.Module, batch: Batch, which: str) -> Tensor:
        return model(batch[which], batch[f"{which}_labels"])

    # --- Evaluation

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Returns the metrics on held-back pairs, and on answers to held-back prompts.

        `val/loss`, the mean of -log sigmoid(r(chosen) - r(rejected)), `val/reward_accuracy` and `val/reward_margin` are
        the same for every training loss: the reward r is `evaluation.beta` times the log-ratio to the reference, or the
        reward model's score. A policy has `val/kl` to its reference on answers drawn from it, and on generated data
        `val/true_reward` and `val/win_rate` against answers of the reference; a reward model has the worth of its
        picks: `val/best_of_4` and so on. `val/kl_share` is the part of `evaluation.most_kl` that is spent, for
        best-of-n an upper bound.
        """
        better = self._judged(model)
        metrics = {"val/loss": float(-F.logsigmoid(better).mean()), "val/reward_margin": float(better.mean())}
        metrics |= {"val/reward_accuracy": float((better > 0).float().mean())}
        prompts = [record["prompt"] for record in self._records[1][: self.config.evaluation.prompts]]
        return metrics | (self._picked(model, prompts) if self.scores else self._drawn(model, prompts))

    def _judged(self, model: nn.Module) -> Tensor:
        """Returns by how much the reward of each held-back pair's chosen answer is larger, [pairs]."""
        reward = self._rewards if self.scores else self._log_ratios
        parts = batches(self._held_back, self._rows, next(model.parameters()).device)
        better = torch.cat([reward(model, batch, "chosen") - reward(model, batch, "rejected") for batch in parts])
        return better if self.scores else self.config.evaluation.beta * better

    def _log_ratios(self, model: nn.Module, batch: Batch, which: str) -> Tensor:
        return _log_ratio(model, batch[which], batch[f"{which}_labels"])

    def _drawn(self, model: nn.Module, prompts: Sequence[str]) -> dict[str, float]:
        """Returns the metrics of the policy's answers, compared with its reference's."""
        policy: Any = unwrapped(model)
        tokens, labels = self._answer(policy, prompts)
        ratio = in_parts(partial(_log_ratio, policy), self._rows, tokens, labels)
        kl = float(ratio.mean())
        metrics = {"val/kl": kl, "val/kl_share": kl / self.config.evaluation.most_kl}
        if not self.config.data.path:
            with policy.disable_adapter():
                others = _worth(self._texts(*self._answer(policy, prompts)))
            rewards = _worth(self._texts(tokens, labels))
            wins = (rewards > others).float() + 0.5 * (rewards == others).float()
            metrics |= {"val/true_reward": float(rewards.mean()), "val/win_rate": float(wins.mean())}
        return metrics

    def _picked(self, model: nn.Module, prompts: Sequence[str]) -> dict[str, float]:
        """Returns the true reward, or else the model's own, of the best of n answers of the reference."""
        scorer: Any = unwrapped(model)
        scores, worths, texts = [], [], []
        for _ in range(self.config.evaluation.best_of):
            with scorer.lm.disable_adapter():
                tokens, labels = self._answer(scorer.lm, prompts)
            scores.append(in_parts(scorer, self._rows, tokens, labels).cpu())
            texts.append(self._texts(tokens, labels))
            worths.append(scores[-1] if self.config.data.path else _worth(texts[-1]))
        counts, score, worth = best_of.sizes(len(scores)), torch.stack(scores, dim=1), torch.stack(worths, dim=1)
        self.picked = [
            {"prompt": prompt, "response": texts[best][row], "score": float(score[row, best])}
            for row, (prompt, best) in enumerate(zip(prompts, score.argmax(dim=1).tolist(), strict=True))
        ]
        picked = {f"val/best_of_{n}": best_of.best_of(score, worth, n) for n in counts}
        picked["val/kl_share"] = best_of.kl_bound(counts[-1]) / self.config.evaluation.most_kl
        return picked | {f"val/best_of_{n}_kl_bound": best_of.kl_bound(n) for n in counts}

    def _answer(self, model: Any, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        encoded = [prompt_of(self.text, prompt, self.config.data) for prompt in prompts]
        return answers(model, encoded, self.config.evaluation.max_new_tokens, self.text.end, self._rows)

    def _texts(self, tokens: Tensor, labels: Tensor) -> list[str]:
        """Returns the answers as text, without their ends."""
        drawn = [row[answered].tolist() for row, answered in zip(tokens, labels != IGNORED, strict=True)]
        return [self.text.decode(ids) for ids in drawn]

    def artifacts(self, model: nn.Module) -> dict[str, str]:
        """Returns a reward model's picks, best of `evaluation.best_of`, as `picked/epoch-N.jsonl`."""
        if not self.picked:
            return {}
        epoch = round(self.progress * self.config.train.num_epochs)
        lines = "".join(json.dumps(pick, ensure_ascii=False) + "\n" for pick in self.picked)
        return {f"picked/epoch-{epoch:04d}.jsonl": lines}

    def language_model(self, model: nn.Module) -> LanguageModel:
        """Returns the merged policy. Raises ConfigError for a reward model."""
        if self.scores:
            raise ConfigError(
                "loss.name=reward trains a model of rewards, whose head a causal language model does not have: open "
                "the trial by hpo.load(...).load_model."
            )
        return language_model(model, self.config.model)

    # --- Data

    @cached_property
    def _records(self) -> tuple[list[Record], list[Record]]:
        data = self.config.data
        return split(records(data), data.val_share, data.seed)

    @property
    def _rows(self) -> int:
        return rows_at_once(self.config.train)

    @cached_property
    def _held_back(self) -> Padded:
        return self._samples(self._records[1])

    def _samples(self, records: Sequence[Record]) -> Padded:
        """Returns each record's prompt with its answers; the other answer is the next prompt's chosen one."""
        others = [*records[1:], records[0]]
        rows = [record | {"other": other["chosen"]} for record, other in zip(records, others, strict=True)]
        return padded([self._sample(row) for row in rows], self.text.end)

    def _sample(self, row: Record) -> dict[str, Tensor]:
        sample: dict[str, Tensor] = {}
        for answer in self._answers:
            encoded = tokens_of(self.text, row["prompt"], row[answer], self.config.data)
            sample |= {answer: encoded["tokens"], f"{answer}_labels": encoded["labels"]}
        return sample


def _worth(texts: Sequence[str]) -> Tensor:
    """Returns the true rewards of answers to generated prompts, [prompts]."""
    return torch.tensor([true_reward(text) for text in texts])


def _log_ratio(policy: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """Returns log policy/reference of each answer, [batch]."""
    return log_probs(policy, tokens, labels)[0] - reference_log_probs(policy, tokens, labels)
