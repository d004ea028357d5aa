"""Holds `TrainConfig`, the configuration of a training run, and its parts. Torch-free; the driver imports it.

Every field has a dotted path (`train.optim.lr`). A field that is None takes the default its comment names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainer.config import combinations
from trainer.config.activations import ActivationConfig
from trainer.config.average import AverageConfig
from trainer.config.batch import BatchGrowthConfig
from trainer.config.fields import Beta, Bytes, Frozen, Mode, NonNegative, Positive, Share, added
from trainer.config.freeze import FreezeConfig
from trainer.config.gradients import ClipConfig, GradientConfig
from trainer.config.init import InitConfig
from trainer.config.optim import OptimConfig
from trainer.config.parallel import ParallelConfig
from trainer.config.phases import LossWeights, Phase
from trainer.config.precision import LossScaleConfig, Precision
from trainer.config.schedule import OneCycleConfig, PlateauConfig, ScheduleConfig
from trainer.config.stability import RollbackConfig

__all__ = [
    "ActivationConfig",
    "AverageConfig",
    "BatchGrowthConfig",
    "Beta",
    "CheckpointConfig",
    "ClipConfig",
    "EarlyStoppingConfig",
    "FreezeConfig",
    "Frozen",
    "GradientConfig",
    "GuardConfig",
    "InitConfig",
    "LossScaleConfig",
    "LossWeights",
    "Mode",
    "NonNegative",
    "OneCycleConfig",
    "OptimConfig",
    "ParallelConfig",
    "Phase",
    "PlateauConfig",
    "Positive",
    "Precision",
    "RollbackConfig",
    "ScheduleConfig",
    "Share",
    "TrainConfig",
]


class EarlyStoppingConfig(Frozen):
    """Ends the trial as complete once `monitor` has not improved by `min_delta` for `patience` epochs. None: never.

    With a `divergence`, a value of `monitor` that is worse, or NaN, ends the trial at once, as infeasible.
    """

    monitor: str | None = None
    mode: Mode = "min"
    patience: Annotated[int, Field(ge=1)] = 10
    min_delta: NonNegative = 0.0
    divergence: Annotated[float, Field(allow_inf_nan=False)] | None = None


class GuardConfig(Frozen):
    """Keeps steps with a non-finite loss or gradient from changing the weights; this many in a row end the fit."""

    max_consecutive: Annotated[int, Field(ge=1)] = 10


class CheckpointConfig(Frozen):
    """Sets when to save, and which checkpoints to keep.

    Kept are the last ones, the best by `monitor` (None: no best), and the first of each `keep_every` epochs. Of these
    the oldest are deleted while a trial's take more than `max_bytes`; the newest and the best stay in any case.
    `asynchronous` writes while training goes on, at the price of a second copy of the state in host memory.
    """

    every_epochs: Annotated[int, Field(ge=1)] | None = 1
    every_steps: Annotated[int, Field(ge=1)] | None = None
    asynchronous: bool = False
    keep_last: Annotated[int, Field(ge=1)] = 2
    keep_best: Annotated[int, Field(ge=0)] = 1
    keep_every: Annotated[int, Field(ge=1)] | None = None
    max_bytes: Bytes | None = None  # of one trial, such as 2GB; None: no bound
    monitor: str | None = None
    mode: Mode = "min"

    def due(self, step: int, epochs: int | None) -> bool:
        """Returns True if a checkpoint is due after `step` steps, which are `epochs` whole epochs or None."""
        by_epochs = bool(self.every_epochs and epochs is not None and epochs % self.every_epochs == 0)
        return by_epochs or bool(self.every_steps and step % self.every_steps == 0)


class TrainConfig(Frozen):
    """All settings of a training run other than its model and its data."""

    num_epochs: Annotated[int, Field(ge=1)] = 10
    folds: Annotated[int, Field(ge=1)] = 1  # of cross-validation, each trained num_epochs; see trainer.cross_validation
    seeds: Annotated[int, Field(ge=1)] = 1  # trainings of a trial, each num_epochs, by whose mean it is judged
    batch_size: Annotated[int, Field(ge=1)] = 32  # samples of one optimizer step
    drop_last: bool = False  # leave out the last window of an epoch if it is not full, unless it is the only one
    batch_growth: BatchGrowthConfig = BatchGrowthConfig()  # of batch_size, over the epochs
    # Samples of one forward pass; None: batch_size, also once batches grow. auto: as many as fit by the estimate.
    micro_batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    memory_limit: Bytes | None = None  # of a step, such as 16GiB; None: the GPU's, and on a CPU there is no bound
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    num_threads: Annotated[int, Field(ge=1)] = 1  # intra-op; another number gives other weights
    # Loader processes; any number gives the same weights. 0: none on a CPU, and one for a GPU, unless little is read,
    # from tensors in memory. none: none anywhere. auto: the quickest of 0, 1, 2 and 4, measured at the start.
    num_workers: Annotated[int, Field(ge=0)] | Literal["auto", "none"] = 0
    prefetch: Annotated[int, Field(ge=1)] = 2  # micro-batches that each loader process reads ahead
    data_timeout: Positive | None = 600.0  # seconds to wait for one micro-batch; None: no limit
    validate_data: bool = False  # look at 32 samples before training: types, shapes, finite values, range of labels
    data_retry: bool = False  # once a loader worker is lost, go on without workers instead of failing
    precision: Precision = "auto"
    deterministic: bool = True
    # The model's forward and backward by torch.compile, which needs a C++ compiler. graphs: also recorded as CUDA
    # graphs, each launched at once, for small models; on a CPU the same as true.
    compile: bool | Literal["graphs"] = False
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    resume_from: Path | None = None  # a checkpoint directory to start from, if the trial has none of its own
    peak_tflops: Positive | Literal["auto"] | None = None  # of one device; with it, train/mfu is reported
    activations: ActivationConfig = ActivationConfig()
    init: InitConfig = InitConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    clip: ClipConfig = ClipConfig()
    gradients: GradientConfig = GradientConfig()
    freeze: FreezeConfig = added(FreezeConfig())
    loss_scale: LossScaleConfig = LossScaleConfig()  # fp16
    average: AverageConfig = AverageConfig()
    early_stopping: EarlyStoppingConfig = EarlyStoppingConfig()
    guard: GuardConfig = GuardConfig()
    rollback: RollbackConfig = RollbackConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    parallel: ParallelConfig = ParallelConfig()
    # Trials of a worker that train together, as lanes of one model; any number above 1 gives the same weights. auto: a
    # new study measures how many, and keeps that number; so may a study that sets nothing (docs/guide/lanes.md).
    lanes: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = 1

    def batch_size_at(self, epoch: int) -> int:
        """Returns the samples of one optimizer step of epoch `epoch`, counted from 0."""
        return self.batch_growth.size(self.batch_size, epoch)

    @property
    def parts(self) -> int:
        """Returns how often a trial trains from the beginning: its folds, or its seeds."""
        return self.folds * self.seeds

    @property
    def largest_batch_size(self) -> int:
        return self.batch_size_at(self.num_epochs - 1)

    @property
    def fixed_micro_batch_size(self) -> int | None:
        """Returns the micro-batch size if it is set as a number, else None."""
        return None if self.micro_batch_size == "auto" else self.micro_batch_size

    @property
    def fixed_lanes(self) -> int:
        """Returns the number of lanes if it is set as a number, else 1."""
        return 1 if self.lanes == "auto" else self.lanes

    @property
    def largest_share(self) -> int:
        """Returns the largest number of samples of a window on one rank."""
        return -(-self.largest_batch_size // self.parallel.data)

    @property
    def largest_pass(self) -> int:
        """Returns the samples of the largest forward pass, unless the estimate chooses them."""
        return min(self.fixed_micro_batch_size or self.batch_size, self.largest_share)

    @model_validator(mode="after")
    def _fields_go_together(self) -> TrainConfig:
        combinations.check(self)
        return self
