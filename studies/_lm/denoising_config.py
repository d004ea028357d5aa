"""Holds what the configurations of BERT and T5 have in common. Torch-free."""

from __future__ import annotations

from trainer.config import CheckpointConfig, ClipConfig, OptimConfig, ParallelConfig, ScheduleConfig, TrainConfig


def training(batch_size: int) -> TrainConfig:
    """Returns the defaults of a training, for batches of so many rows."""
    return TrainConfig(
        num_epochs=10,
        batch_size=batch_size,
        optim=OptimConfig(lr=3e-3, beta1=0.9, beta2=0.98, weight_decay=0.01),
        schedule=ScheduleConfig(name="linear", warmup_ratio=0.1),
        clip=ClipConfig(norm=1.0),
        checkpoint=CheckpointConfig(monitor="val/loss", mode="min"),
    )


def check_ranks(parallel: ParallelConfig, num_heads: int) -> None:
    """Raises ValueError for ranks among which such a model cannot be divided."""
    for name, ranks in (("pipeline", parallel.pipeline), ("expert", parallel.expert)):
        if ranks > 1:
            raise ValueError(
                f"train.parallel.{name}={ranks} is not for this model: divide it by train.parallel.data or tensor."
            )
    if num_heads % parallel.tensor:
        raise ValueError(
            f"train.parallel.tensor={parallel.tensor} does not divide model.num_heads {num_heads}: a rank takes whole "
            "heads."
        )
