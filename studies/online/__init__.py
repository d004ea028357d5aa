"""Online preferences: a language model learns from learnt rewards of its answers, by PPO, GRPO or online DPO."""

from hpo import Choice, Float, Int, Objective, Study
from studies.online.config import Config

STUDY = Study(
    name="online",
    config=Config(),
    task="studies.online.task:OnlineTask",
    check="studies.online.config:check",
    space={
        "method": Choice(["ppo", "grpo", "online_dpo"]),
        "train.optim.lr": Float(3e-4, 1e-2, log=True),
        "loss.beta": Float(0.02, 0.5, log=True),
        "rollout.group_size": Int(2, 16, powers_of_two=True, when={"method": "grpo"}),
        "reward.members": Choice([1, 2, 4], tier=2),
        "reward.combine": Choice(["mean", "min", "cautious"], when={"reward.members": [2, 4]}, tier=2),
        "loss.clip": Float(0.1, 0.4, when={"method": ["ppo", "grpo"]}, tier=2),
        "rollout.steps": Choice([1, 2, 4], tier=2),
        "loss.value_weight": Float(0.03, 1.0, log=True, when={"method": "ppo"}, tier=3),
        "loss.trace": Float(0.8, 1.0, when={"method": "ppo"}, tier=3),
        "reward.caution": Float(0.3, 3.0, log=True, when={"reward.combine": "cautious"}, tier=3),
        "model.rank": Int(4, 32, powers_of_two=True, tier=3),
    },
    objectives=[Objective("val/true_reward", "maximize")],
    plan={"model.rank": [32, 8], "train.batch_size": [64, 32, 16]},
    read_when={
        "rollout.group_size": "method == 'grpo'",
        "loss.clip": "method != 'online_dpo'",
        **{
            f"loss.{name}": "method == 'ppo'"
            for name in ("target_kl", "value_weight", "value_clip", "discount", "trace")
        },
        "reward.combine": "reward.members > 1",
        "reward.caution": "reward.combine == 'cautious'",
    },
)
