"""Makes this process one of the ranks that train a trial, of the kind that the configuration names."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainer.config import ParallelConfig
from trainer.distributed import member
from trainer.distributed.member import Member
from trainer.errors import ConfigError
from trainer.ranks import Solo
from trainer.runtime.dotted import named

_KINDS = {
    "none": "trainer.distributed.ddp:Replicas",
    "zero1": "trainer.distributed.zero1:Zero1",
    "zero2": "trainer.distributed.fsdp:Sharded",
    "zero3": "trainer.distributed.fsdp:Sharded",
    "tensor": "trainer.distributed.tensor_parallel:Split",
    "expert": "trainer.distributed.expert_parallel:Owners",
    "pipeline": "trainer.distributed.pipeline:Pipeline",
}


def join(config: ParallelConfig, device: torch.device) -> Solo:
    """Returns this process's part in training a trial under `config`.

    Raises ConfigError if the process was launched otherwise.
    """
    if config.ranks == 1:
        return Solo()
    this = member.this()
    if this is None or this.world != config.ranks:
        role = "alone" if this is None else f"one of {this.world}"
        raise ConfigError(
            f"train.parallel asks for {config.ranks} ranks and this process is {role}: start them by "
            "trainer.distributed.launch.launch, as `hpo run` does."
        )
    return kind_of(config)(config, this, device)


def kind_of(config: ParallelConfig) -> Callable[[ParallelConfig, Member, torch.device], Solo]:
    """Returns the class of a rank's part under `config`, for several ranks."""
    kind = "tensor" if config.tensor > 1 and config.shard == "none" else config.shard
    kind = "expert" if config.expert > 1 else "pipeline" if config.pipeline > 1 else kind
    return named(_KINDS[kind], "train.parallel")
