"""Holds `train.parallel`: the ranks of a trial, and how its work is divided among them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from trainer.config.fields import Frozen, Positive
from trainer.report import Json

Count = Annotated[int, Field(ge=1)]


class ParallelConfig(Frozen):
    """The number of ranks (processes, each with its own device) that train one trial. By default one: no ranks.

    `data` replicas of the model each take a share of every batch, so `batch_size` means the same as for one process;
    `micro_batch_size` is that of one rank's forward pass. `timeout`, in seconds, must exceed the longest time that a
    rank may take for one window, evaluation or save: a rank that shows no progress for longer ends the trial.
    """

    nproc: Count | None = None  # ranks of a trial: sets data to nproc / (tensor * pipeline), and is not kept
    data: Count = 1
    tensor: Count = 1  # ranks of one replica, which divide the layers that the task's parallel_plan names
    pipeline: Count = 1  # ranks of one replica, which hold successive stages of the parts in the task's pipeline_plan
    # Of a pipeline: gpipe runs all forward passes before the backward ones; interleaved has several stages a rank.
    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    stages_per_rank: Annotated[int, Field(ge=2)] = 2  # of schedule=interleaved
    shard: Literal["none", "zero1", "zero2", "zero3"] = "none"  # over the replicas: see docs/guide/distributed.md
    offload: bool = False  # keeps the parts of zero2 and zero3 in host memory, and fetches them layer by layer
    # Format in which zero3's ranks exchange parameters: bf16 halves the traffic. Gradients are summed in fp32 anyway.
    gather: Literal["fp32", "bf16"] = "fp32"
    bucket_mb: Positive = 25.0  # MB of gradients that are reduced at once, during backward
    static_graph: bool = False  # every step uses the same parameters in the same order: DDP may reorder its work
    find_unused: bool = False  # some parameters get no gradient in some steps
    compression: Literal["none", "fp16", "bf16", "powersgd"] = "none"  # of gradients sent between ranks
    powersgd_rank: Count = 2  # columns of the two factors that compression=powersgd sends
    sync_batchnorm: bool = False  # batch statistics over all ranks; GPU only
    context: Count = 1  # ranks of one sequence: refused, and docs/guide/distributed.md says why
    expert: Count = 1  # of the replicas, so many share the experts that the task's expert_plan names
    timeout: Positive = 600.0

    @property
    def ranks(self) -> int:
        """Returns the number of processes of one trial."""
        return self.data * self.tensor * self.pipeline

    @property
    def stages(self) -> int:
        """Returns the number of stages into which a pipeline divides the model."""
        return self.pipeline * (self.stages_per_rank if self.schedule == "interleaved" else 1)

    @property
    def parts(self) -> bool:
        """Returns True if ranks hold only parts of parameters."""
        return self.shard in ("zero2", "zero3") or self.tensor > 1 or self.expert > 1

    def shape(self) -> dict[str, Any]:
        """Returns the fields that decide the division of work and differ from one process's."""
        return self.model_dump(include={"data", "tensor", "pipeline", "shard", "expert"}, exclude_defaults=True)

    @model_validator(mode="before")
    @classmethod
    def _data_of_nproc(cls, given: Json) -> Any:
        if not isinstance(given, dict) or not isinstance(given.get("nproc"), int) or given["nproc"] < 1:
            return given
        sizes = [given.get(axis, 1) for axis in ("tensor", "pipeline", "data")]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            return given
        nproc, (tensor, pipeline, data) = given["nproc"], sizes
        if nproc % (tensor * pipeline):
            raise ValueError(f"nproc={nproc} is not a multiple of tensor={tensor} times pipeline={pipeline}.")
        if data not in (1, wanted := nproc // (tensor * pipeline)):
            raise ValueError(f"nproc={nproc} asks for data={wanted}, and data is {data}: leave one of them out.")
        return given | {"nproc": None, "data": wanted}

    @model_validator(mode="after")
    def _check(self) -> ParallelConfig:
        if self.static_graph and self.find_unused:
            raise ValueError("static_graph and find_unused exclude each other: set one of them to false.")
        if self.context > 1:
            raise ValueError(
                f"context={self.context} is refused, since torch's context parallelism does not run on a CPU: divide "
                "the layers and the sequence by tensor and the task's parallel_plan, and leave context out."
            )
        if self.expert > 1:
            self._check_experts()
        if self.shard != "none" and self.data == 1:
            raise ValueError(f"shard={self.shard} divides among replicas and data is 1: set data to 2 or more.")
        if self.offload and self.shard not in ("zero2", "zero3"):
            raise ValueError(
                f"offload is for what ranks have parts of, and shard is {self.shard}: set shard to zero2 or zero3, or "
                "leave offload out."
            )
        if self.gather != "fp32" and self.shard != "zero3":
            raise ValueError(
                f"gather={self.gather} is for what zero3 gathers, and shard is {self.shard}: set shard to zero3, or "
                "leave gather out."
            )
        for name in ("tensor", "pipeline"):
            if self.shard == "zero1" and (ranks := getattr(self, name)) > 1:
                raise ValueError(f"shard=zero1 and {name}={ranks} exclude each other: use shard=zero2 or zero3.")
        if self.pipeline == 1 and "schedule" in self.model_fields_set and self.schedule != "1f1b":
            raise ValueError("schedule is read only by a pipeline: set pipeline to 2 or more, or leave schedule out.")
        if "stages_per_rank" in self.model_fields_set and self.schedule != "interleaved" and self.stages_per_rank != 2:
            raise ValueError(
                f"stages_per_rank is read only by schedule=interleaved, and it is {self.schedule}: set it, or leave "
                "stages_per_rank out."
            )
        set_ = self.model_fields_set & {
            "bucket_mb",
            "static_graph",
            "find_unused",
            "compression",
            "powersgd_rank",
            "sync_batchnorm",
        }
        if (self.parts or self.pipeline > 1) and any(
            getattr(self, name) != type(self).model_fields[name].default for name in set_
        ):
            raise ValueError(
                f"{', '.join(sorted(set_))} belong to replicas of whole models, shard=none and zero1: leave them out."
            )
        return self

    def _check_experts(self) -> None:
        if self.data % self.expert:
            raise ValueError(
                f"expert={self.expert} replicas share the experts, and data is {self.data}: set data to a multiple of "
                f"{self.expert}."
            )
        others = {"shard": self.shard != "none", "tensor": self.tensor > 1, "pipeline": self.pipeline > 1}
        if name := next((name for name, is_set in others.items() if is_set), None):
            raise ValueError(
                f"expert={self.expert} and {name}={getattr(self, name)} exclude each other: leave one of them out."
            )
