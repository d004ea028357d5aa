"""`TrainConfig`: the configuration of a training run, and its parts. Torch-free; the driver imports it.

Every field has a dotted path (`train.optim.lr`). A field that is None takes the default its comment names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainer.config.activations import ActivationConfig
from trainer.config.average import AverageConfig
from trainer.config.batch import BatchGrowthConfig
from trainer.config.fields import Beta, Bytes, Frozen, Mode, NonNegative, Positive, Share
from trainer.config.gradients import ClipConfig, GradientConfig
from trainer.config.idle import idle_fields
from trainer.config.init import InitConfig
from trainer.config.optim import OPTIMIZERS, OptimConfig
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
    """End, as complete, once `monitor` has not improved by `min_delta` for `patience` epochs. None: never.

    With a `divergence`, a value of `monitor` that is worse, or NaN, ends the trial at once, as infeasible.
    """

    monitor: str | None = None
    mode: Mode = "min"
    patience: Annotated[int, Field(ge=1)] = 10
    min_delta: NonNegative = 0.0
    divergence: Annotated[float, Field(allow_inf_nan=False)] | None = None


class GuardConfig(Frozen):
    """Steps whose loss or gradient is not finite never reach the weights; this many in a row end the fit."""

    max_consecutive: Annotated[int, Field(ge=1)] = 10


class CheckpointConfig(Frozen):
    """When to save, and what to keep: the last ones, the best by `monitor` (None: no best), and of every `keep_every`
    epochs the first one.

    Of those, the oldest go while a trial's take more than `max_bytes`; the newest and the best stay in any case.
    `asynchronous` writes while training goes on, at the price of a second copy of the state in the host's memory.
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
        """Whether one is to be saved after `step` steps, which are so many whole epochs, or None."""
        by_epochs = bool(self.every_epochs and epochs is not None and epochs % self.every_epochs == 0)
        return by_epochs or bool(self.every_steps and step % self.every_steps == 0)


class TrainConfig(Frozen):
    """All of a training run but its model and its data."""

    num_epochs: Annotated[int, Field(ge=1)] = 10
    folds: Annotated[int, Field(ge=1)] = 1  # of cross-validation, each trained num_epochs; see trainer.cross_validation
    seeds: Annotated[int, Field(ge=1)] = 1  # trainings of a trial, each num_epochs, by whose mean it is judged
    batch_size: Annotated[int, Field(ge=1)] = 32  # samples of one optimizer step
    drop_last: bool = False  # leave out the last window of an epoch where it is not full, unless it is the only one
    batch_growth: BatchGrowthConfig = BatchGrowthConfig()  # of batch_size, over the epochs
    # Samples of one forward pass; None: batch_size, also once batches grow. auto: as many as fit by the estimate.
    micro_batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    memory_limit: Bytes | None = None  # of a step, such as 16GiB; None: the GPU's, and on a CPU there is no bound
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    num_threads: Annotated[int, Field(ge=1)] = 1  # intra-op; another number gives other weights
    # Loader processes; any number gives the same weights. auto: the quickest of 0, 1, 2 and 4, measured at the start.
    num_workers: Annotated[int, Field(ge=0)] | Literal["auto"] = 0
    prefetch: Annotated[int, Field(ge=1)] = 2  # micro-batches that each loader process has at hand
    data_timeout: Positive | None = 600.0  # seconds that one micro-batch may be waited for; None: for ever
    validate_data: bool = False  # look at 32 samples before training: types, shapes, finite values, range of labels
    data_retry: bool = False  # once a loader worker is lost, go on without workers instead of failing
    precision: Precision = "auto"
    deterministic: bool = True
    compile: bool = False  # the model's forward and backward by torch.compile; needs a C++ compiler
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    resume_from: Path | None = None  # a checkpoint directory to start from, where the trial has none of its own
    peak_tflops: Positive | Literal["auto"] | None = None  # of one device; with it, train/mfu is reported
    activations: ActivationConfig = ActivationConfig()
    init: InitConfig = InitConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    clip: ClipConfig = ClipConfig()
    gradients: GradientConfig = GradientConfig()
    loss_scale: LossScaleConfig = LossScaleConfig()  # fp16
    average: AverageConfig = AverageConfig()
    early_stopping: EarlyStoppingConfig = EarlyStoppingConfig()
    guard: GuardConfig = GuardConfig()
    rollback: RollbackConfig = RollbackConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    parallel: ParallelConfig = ParallelConfig()
    # Trials of a worker that train together, as lanes of one model; any number above 1 gives the same weights. auto: a
    # study that begins measures how many, and keeps that number; so may one that says nothing (docs/guide/lanes.md).
    lanes: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = 1

    def batch_size_at(self, epoch: int) -> int:
        """Samples of one optimizer step of epoch `epoch`, counted from 0."""
        return self.batch_growth.size(self.batch_size, epoch)

    @property
    def parts(self) -> int:
        """How often a trial trains from the beginning: its folds, or its seeds."""
        return self.folds * self.seeds

    @property
    def largest_batch_size(self) -> int:
        return self.batch_size_at(self.num_epochs - 1)

    @property
    def fixed_micro_batch_size(self) -> int | None:
        """The micro-batch that is asked for by its size."""
        return None if self.micro_batch_size == "auto" else self.micro_batch_size

    @property
    def fixed_lanes(self) -> int:
        """The lanes that are asked for by their number; else a trial is on its own."""
        return 1 if self.lanes == "auto" else self.lanes

    @property
    def largest_share(self) -> int:
        """Samples of the largest window that are one rank's."""
        return -(-self.largest_batch_size // self.parallel.data)

    @property
    def largest_pass(self) -> int:
        """Samples of the largest forward pass, where they are not chosen by the estimate."""
        return min(self.fixed_micro_batch_size or self.batch_size, self.largest_share)

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> TrainConfig:
        if found := idle_fields(self, "refused"):
            raise ValueError(found[0])
        return self

    @model_validator(mode="after")
    def _noise_is_measurable(self) -> TrainConfig:
        if self.gradients.noise_scale and (self.fixed_micro_batch_size or self.batch_size) >= self.batch_size:
            raise ValueError(
                "gradients.noise_scale compares the micro-batches of a window: "
                f"set micro_batch_size below batch_size={self.batch_size}, to a quarter of it for example."
            )
        return self

    @model_validator(mode="after")
    def _folds_are_possible(self) -> TrainConfig:
        if self.folds > 1 and self.seeds > 1:
            raise ValueError(
                f"folds={self.folds} and seeds={self.seeds}: a trial repeats by one of them, so leave one."
            )
        parts = "folds" if self.folds > 1 else "seeds"
        if self.parts > 1 and self.parallel.ranks > 1:
            raise ValueError(f"{parts} are trained by one process: leave parallel out, or {parts}=1.")
        if self.parts > 1 and self.checkpoint.keep_every is not None:
            raise ValueError(
                f"checkpoint.keep_every counts epochs, which each of the {parts} begins anew: leave it out, or set "
                f"{parts}=1."
            )
        return self

    @model_validator(mode="after")
    def _lanes_do_the_same(self) -> TrainConfig:
        if self.fixed_lanes > 1 and (found := _no_lanes(self)):
            raise ValueError(
                f"lanes is {self.lanes}: trials that train as lanes of one model cannot do with {found}; "
                f"leave {found.partition('=')[0].partition(',')[0]} out, or lanes=1."
            )
        return self

    @model_validator(mode="after")
    def _penalty_is_differentiable(self) -> TrainConfig:
        """A penalty's own derivative is a second one: not of what is compiled, rescaled, divided or derived again."""
        others = {
            "compile": self.compile,
            f"precision={self.precision}": self.precision in ("fp16", "fp8"),
            "optim.name=sophia": self.optim.name == "sophia",
            "parallel.shard, tensor and pipeline": self.parallel.parts or self.parallel.pipeline > 1,
        }
        if self.gradients.penalty is not None and (found := _first(others)):
            raise ValueError(
                f"gradients.penalty takes second derivatives, which do not go with {found}: leave one of them out."
            )
        return self

    @model_validator(mode="after")
    def _sophia_is_differentiable(self) -> TrainConfig:
        found = _first({"compile": self.compile, "precision=fp8": self.precision == "fp8"})
        if self.optim.name == "sophia" and found:
            raise ValueError(
                f"optim.name=sophia takes second derivatives, which do not go with {found}: choose adamw or lion, or "
                f"leave {found.partition('=')[0]} out."
            )
        return self

    @model_validator(mode="after")
    def _what_is_recomputed_is_differentiated_once(self) -> TrainConfig:
        others = {
            "compile, which chooses by itself what it computes twice": self.compile,
            "optim.name=sophia, which differentiates twice": self.optim.name == "sophia",
            "gradients.penalty, which differentiates twice": self.gradients.penalty is not None,
        }
        for name in ("checkpoint", "offload"):
            if getattr(self.activations, name) != "none" and (found := _first(others)):
                raise ValueError(f"activations.{name} does not go with {found}: leave one of them out.")
        return self

    @model_validator(mode="after")
    def _optimizer_has_what_it_steps_on(self) -> TrainConfig:
        parallel, optim = self.parallel, self.optim
        known = OPTIMIZERS.get(optim.name)
        if parallel.parts and known is not None and not known.sharded:
            others = ", ".join(name for name, other in OPTIMIZERS.items() if other.sharded)
            raise ValueError(
                f"optim.name is {optim.name!r}, which needs whole parameters, and parallel gives each rank parts of "
                f"them: choose one of {others}, or use shard=none or zero1, and tensor=1."
            )
        if parallel.parts and (optim.name, optim.implementation) == ("sgd", "fused"):  # torch 2.13 has no rule for it
            raise ValueError(
                "optim.implementation is 'fused', which sgd has for whole parameters alone: leave it auto."
            )
        if optim.name == "sophia" and (parallel.pipeline > 1 or parallel.shard == "zero1"):
            held = "parallel.shard=zero1" if parallel.shard == "zero1" else f"parallel.pipeline={parallel.pipeline}"
            raise ValueError(
                f"optim.name is 'sophia', which differentiates through all parameters at once, and {held} divides "
                f"them: choose adamw or lion, or leave {held.split('=')[0]} out."
            )
        return self

    @model_validator(mode="after")
    def _ranks_have_work(self) -> TrainConfig:
        if self.batch_size < self.parallel.data:
            raise ValueError(
                f"batch_size is {self.batch_size} and parallel.data is {self.parallel.data}: give every rank at least "
                "one sample of a batch."
            )
        unknown = self.parallel.pipeline > 1 or self.parallel.offload
        if unknown and (self.memory_limit is not None or self.micro_batch_size == "auto"):
            raise ValueError(
                "memory_limit and micro_batch_size=auto go by an estimate, and there is none of a pipeline's stages, "
                "nor of what is not offloaded: leave them out, or parallel.pipeline and parallel.offload."
            )
        if self.parallel.ranks > 1 and self.gradients.noise_scale:
            raise ValueError("gradients.noise_scale is measured by one process: leave it out, or train.parallel.")
        if self.parallel.gather == "bf16" and self.precision != "bf16":
            raise ValueError(
                f"parallel.gather=bf16 gives layers weights in bf16, and precision is {self.precision}: set it to "
                "bf16, or leave parallel.gather out."
            )
        if self.compile and self.parallel.ranks > 1:
            self._check_compiled(self.parallel)
        if self.parallel.compression == "powersgd" and self.optim.wrap == "sam":
            raise ValueError(
                "parallel.compression=powersgd keeps what one pass has left out, and SAM takes two: use fp16."
            )
        if self.parallel.parts and (found := _whole(self, "lookahead", "sam")):
            raise ValueError(
                f"{_need(found)} whole parameters, and parallel gives each rank parts of them: "
                "leave that out, or use shard=none or zero1, and tensor=1."
            )
        if self.parallel.pipeline > 1:
            self._check_pipeline(self.parallel.pipeline)
        return self

    def _check_compiled(self, parallel: ParallelConfig) -> None:
        if parallel.parts or parallel.pipeline > 1:
            raise ValueError(
                "compile is for one process and for replicas of whole models: leave it out, or set parallel.shard to "
                "none or zero1, and tensor and pipeline to 1."
            )
        if parallel.static_graph or parallel.find_unused or parallel.bucket_mb < 1:
            raise ValueError(
                "compile cuts the model where parallel's buckets end, of which torch's first has 1 MB: set bucket_mb "
                "to 1 or more, and leave static_graph and find_unused out."
            )

    def _check_pipeline(self, stages: int) -> None:
        if found := _whole(self, "lookahead"):
            raise ValueError(
                f"{_need(found)} the whole model, and parallel.pipeline gives each rank a stage of it: "
                "leave that out, or use data or shard in place of pipeline."
            )
        share = -(-self.batch_size // self.parallel.data)
        micro = self.micro_batch_size if isinstance(self.micro_batch_size, int) else share
        if -(-share // micro) < stages:
            raise ValueError(
                f"parallel.pipeline is {stages} and a rank's {share} samples of a batch are fewer than {stages} "
                f"micro-batches, so stages would only wait: set micro_batch_size to {max(share // stages, 1)} or less, "
                "or raise batch_size."
            )


def _first(others: Mapping[str, bool]) -> str | None:
    """The first name that holds."""
    return next((name for name, holds in others.items() if holds), None)


def _need(found: list[str]) -> str:
    return f"{' and '.join(found)} {'need' if len(found) > 1 else 'needs'}"


def _whole(config: TrainConfig, *wraps: str) -> list[str]:
    """What is asked for that ranks with less than a whole cannot do: number formats that rescale, copies of all the
    weights, and these wrappers."""
    holds = {
        f"precision={config.precision}": config.precision in ("fp16", "fp8"),
        f"gradients.noise={config.gradients.noise}": bool(config.gradients.noise),
        "optim.name=ranger": config.optim.name == "ranger",
        f"optim.wrap={config.optim.wrap}": config.optim.wrap in wraps,
        f"average.name={config.average.name}": config.average.name != "none",
    }
    return [name for name, it_does in holds.items() if it_does]


def _no_lanes(c: TrainConfig) -> str | None:
    """What of the configuration lanes cannot do, as `field=value`."""
    alone = {
        f"parallel, {c.parallel.ranks} ranks": c.parallel.ranks > 1,
        f"folds={c.folds}": c.folds > 1,
        f"seeds={c.seeds}": c.seeds > 1,
        "compile=true": c.compile,
        f"precision={c.precision}": c.precision in ("fp16", "fp8"),
        f"num_workers={c.num_workers}": c.num_workers != 0,
        f"num_threads={c.num_threads}": c.num_threads > 1,  # where threads meet depends on the number of lanes
        "batch_growth": bool(c.batch_growth.epochs),
        f"micro_batch_size={c.micro_batch_size}": c.micro_batch_size == "auto",
        "memory_limit": c.memory_limit is not None,
        f"optim.name={c.optim.name}": c.optim.name == "sophia",
        f"optim.wrap={c.optim.wrap}": c.optim.wrap == "sam",
        f"activations.checkpoint={c.activations.checkpoint}": c.activations.checkpoint != "none",
        f"activations.offload={c.activations.offload}": c.activations.offload != "none",
        "gradients.penalty": c.gradients.penalty is not None,
        "gradients.noise_scale": c.gradients.noise_scale,
        "rollback.enabled": c.rollback.enabled,
        "checkpoint.asynchronous": c.checkpoint.asynchronous,
    }
    return next((name for name, found in alone.items() if found), None)
