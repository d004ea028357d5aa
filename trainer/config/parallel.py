"""`train.parallel`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from trainer.config.fields import Frozen, Positive

Count = Annotated[int, Field(ge=1)]


class ParallelConfig(Frozen):
    """How many ranks (processes, each with a device of its own) train one trial. By default one: no ranks at all.

    `data` replicas of the model each take their share of every batch, so `batch_size` means what it means for one
    process; `micro_batch_size` is that of one rank's forward pass. `timeout`, in seconds, must exceed the longest that
    a rank may take for one window, one evaluation or one save: a rank that shows no progress for longer ends the
    trial.
    """

    data: Count = 1
    tensor: Count = 1  # ranks of one replica, which divide the layers that the task's parallel_plan names
    pipeline: Count = 1  # ranks of one replica, which hold successive stages of the parts in the task's pipeline_plan
    schedule: Literal["1f1b", "gpipe"] = "1f1b"  # of a pipeline: gpipe runs all forward passes before the backward ones
    shard: Literal["none", "zero1", "zero2", "zero3"] = "none"  # over the replicas: see docs/guide/distributed.md
    bucket_mb: Positive = 25.0  # of gradients that are reduced at once, while backward goes on
    static_graph: bool = False  # every step uses the same parameters in the same order: DDP may reorder its work
    find_unused: bool = False  # some parameters get no gradient in some steps
    compression: Literal["none", "fp16", "bf16"] = "none"  # of gradients on their way between ranks
    sync_batchnorm: bool = False  # batch statistics over all ranks; GPU only
    timeout: Positive = 600.0

    @property
    def ranks(self) -> int:
        """Processes of one trial."""
        return self.data * self.tensor * self.pipeline

    @property
    def parts(self) -> bool:
        """Whether a rank holds parts of parameters."""
        return self.shard in ("zero2", "zero3") or self.tensor > 1

    def shape(self) -> dict[str, Any]:
        """What decides who computes what: the fields that differ from those of one process."""
        return self.model_dump(include={"data", "tensor", "pipeline", "shard"}, exclude_defaults=True)

    @model_validator(mode="after")
    def _check(self) -> ParallelConfig:
        if self.static_graph and self.find_unused:
            raise ValueError("static_graph and find_unused exclude each other: set one of them to false.")
        if self.shard != "none" and self.data == 1:
            raise ValueError(f"shard={self.shard} divides among replicas and data is 1: set data to 2 or more.")
        if self.shard == "zero1" and self.tensor > 1:
            raise ValueError(f"shard=zero1 and tensor={self.tensor} exclude each other: use shard=zero2 or zero3.")
        if self.pipeline > 1 and (self.shard != "none" or self.tensor > 1):
            other = f"shard={self.shard}" if self.shard != "none" else f"tensor={self.tensor}"
            raise ValueError(f"pipeline={self.pipeline} and {other} exclude each other: combine pipeline with data.")
        if self.pipeline == 1 and "schedule" in self.model_fields_set and self.schedule != "1f1b":
            raise ValueError("schedule is read only by a pipeline: set pipeline to 2 or more, or leave schedule out.")
        set_ = self.model_fields_set & {"bucket_mb", "static_graph", "find_unused", "compression", "sync_batchnorm"}
        if (self.parts or self.pipeline > 1) and any(
            getattr(self, name) != type(self).model_fields[name].default for name in set_
        ):
            raise ValueError(
                f"{', '.join(sorted(set_))} belong to replicas of whole models, shard=none and zero1: leave them out."
            )
        return self
