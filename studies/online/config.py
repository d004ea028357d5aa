"""Configures the online study. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from studies._lm.config import CONTEXT, check_packages
from studies._lm.words import LENGTH, LETTERS
from trainer.config import (
    CheckpointConfig,
    Frozen,
    NonNegative,
    OptimConfig,
    Positive,
    ScheduleConfig,
    Share,
    TrainConfig,
)

Count = Annotated[int, Field(ge=1)]
PROMPT = LENGTH + 1  # tokens of a prompt: a word and `?`


class DataConfig(Frozen):
    """Generated prompts, `deab?`, that are answered in training, drawn from `seed`."""

    prompts: Count = 512
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0


class ModelConfig(Frozen):
    """LoRA on the tiny Llama that the studies `lora` and `dpo` have; nothing drops out."""

    rank: Count = 8
    alpha: Positive | None = None  # None: twice the rank


class RewardConfig(Frozen):
    """Reward models, each trained from another seed on the same generated `pairs`, `epochs` times, and then frozen.

    The loss is -log sigmoid(r(chosen) - r(rejected)) (Bradley & Terry 1952). The learnt reward is that of one model, or
    of several their mean, their `min`, or the mean less `caution` times their standard deviation (Coste et al. 2023,
    arXiv 2310.02743, who subtract the variance).
    """

    pairs: Count = 256
    members: Count = 1
    combine: Literal["mean", "min", "cautious"] = "mean"
    caution: NonNegative = 1.0
    hidden_size: Count = 16
    epochs: Count = 12
    lr: Positive = 1e-2


class RolloutConfig(Frozen):
    """Answers of the policy: an epoch has `answers`, each of which is trained on in `steps` optimizer steps.

    A prompt gets one answer (ppo), two (online_dpo), or `group_size` (grpo) of at most `max_new_tokens`, drawn from
    softmax(logits / temperature).
    """

    answers: Count = 1024
    steps: Count = 2
    group_size: Count = 4
    max_new_tokens: Count = 8
    temperature: Positive = 1.0


class LossConfig(Frozen):
    """The loss. All three methods maximise E[r] - beta KL(policy, reference), each in its way.

    `beta` is the price of a nat: within the rewards (ppo), as a penalty on each token (grpo), or DPO's beta. With a
    `target_kl` PPO begins with `beta` and adapts it, so that the divergence stays near that many nats.
    """

    beta: Positive = 0.1
    target_kl: Positive | None = None
    clip: Annotated[float, Field(gt=0, lt=1)] = 0.2  # of ppo and grpo
    value_weight: Positive = 0.1
    value_clip: Positive = 0.2
    discount: Share = 1.0  # gamma
    trace: Share = 0.95  # lambda


class EvalConfig(Frozen):
    """Evaluation: the policy and its reference answer this many held-back prompts, drawn at temperature 1."""

    prompts: Count = 256


TRAIN = TrainConfig(
    num_epochs=5,
    batch_size=64,
    optim=OptimConfig(lr=2e-3, weight_decay=0.0),
    schedule=ScheduleConfig(name="cosine", warmup_ratio=0.1),
    checkpoint=CheckpointConfig(monitor="val/true_reward", mode="max"),
    lanes=1,  # answers are drawn within a step
)


class Config(Frozen):
    """The whole configuration of the study. A sample is an answer that is to be drawn."""

    method: Literal["ppo", "grpo", "online_dpo"] = "ppo"
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    loss: LossConfig = LossConfig()
    evaluation: EvalConfig = EvalConfig()
    train: TrainConfig = TRAIN

    @property
    def group(self) -> int:
        """Returns the number of answers to each prompt."""
        return {"ppo": 1, "grpo": self.rollout.group_size, "online_dpo": 2}[self.method]

    @model_validator(mode="after")
    def _answers_are_compared(self) -> Config:
        if self.method == "grpo" and self.group == 1:
            raise ValueError(
                "rollout.group_size=1 leaves grpo no answer to compare another with: set it to 2 or more, or method to "
                "ppo."
            )
        if self.train.batch_size % self.group:
            raise ValueError(
                f"train.batch_size={self.train.batch_size} is not a multiple of the {self.group} answers that "
                f"{self.method} draws to a prompt: set it to {self.group * -(-self.train.batch_size // self.group)}."
            )
        if self.rollout.answers % self.train.batch_size:
            raise ValueError(
                f"rollout.answers={self.rollout.answers} is not a multiple of train.batch_size "
                f"{self.train.batch_size}: set it to "
                f"{self.train.batch_size * -(-self.rollout.answers // self.train.batch_size)}."
            )
        return self

    @model_validator(mode="after")
    def _there_is_room(self) -> Config:
        if (length := PROMPT + self.rollout.max_new_tokens) > CONTEXT:
            raise ValueError(
                f"rollout.max_new_tokens={self.rollout.max_new_tokens} and a prompt of {PROMPT} tokens are {length}, "
                f"and the model reads {CONTEXT}: set it to {CONTEXT - PROMPT} or less."
            )
        needed, words = self.data.prompts + self.evaluation.prompts + self.reward.pairs, len(LETTERS) ** LENGTH // 2
        if needed > words:
            raise ValueError(
                f"data.prompts, evaluation.prompts and reward.pairs are {needed} different prompts, and at most "
                f"{words} are generated: lower one of them."
            )
        return self

    @model_validator(mode="after")
    def _answers_are_drawn_at_once(self) -> Config:
        train = self.train
        refused = {
            f"train.parallel: {train.parallel.ranks} ranks": train.parallel.ranks > 1,
            f"train.micro_batch_size={train.micro_batch_size}": train.micro_batch_size not in (None, train.batch_size),
            f"train.batch_growth={list(train.batch_growth.epochs)}": bool(train.batch_growth.epochs),
            f"train.lanes={train.lanes}": train.lanes != 1,
            f"train.compile={'graphs' if train.compile == 'graphs' else 'true'}": bool(train.compile),
        }
        for setting, is_set in refused.items():
            if is_set:
                raise ValueError(
                    f"{setting}: one process draws the answers of a batch, judges them and keeps them for its next "
                    f"steps, all at once: leave {setting.partition('=')[0].partition(':')[0]} out."
                )
        return self


def check(config: Config) -> None:
    """Refuses a study whose packages are missing."""
    check_packages()
