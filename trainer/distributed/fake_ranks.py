"""Provides ranks that train fake tensors, for an estimate: their collectives return shapes and send nothing.

`fake_collectives` gives torch's collectives kernels for tensors without storage, which bypass the process groups. So a
rank uses the groups that it has; a process on its own gets torch's "fake" group of any size for the duration.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainer.compat.fake import unset_fake_temporarily
from trainer.compat.parallel import concatenating, fake_store, register_fake_collectives
from trainer.config import ParallelConfig
from trainer.distributed import member
from trainer.distributed.join import kind_of
from trainer.distributed.member import Member, Page
from trainer.errors import ConfigError
from trainer.ranks import ALONE, Solo

_HOST = torch.device("cpu")


def rehearsals(config: ParallelConfig) -> Generator[Solo]:
    """Yields this process's part; in a process that is not a rank, the parts of the ranks that may be the largest.

    Raises ConfigError if ranks divide the model in a way that fake tensors cannot follow.
    """
    if config.ranks == 1:
        yield ALONE
        return
    if config.pipeline > 1 or config.offload:
        scope = "what a stage needs, which waits for others," if config.pipeline > 1 else "what is not offloaded"
        raise ConfigError(
            f"train.parallel.{'pipeline' if config.pipeline > 1 else 'offload'} is set, and {scope} cannot be "
            "estimated: leave train.memory_limit out, and set train.micro_batch_size to a number."
        )
    register_fake_collectives()

    if member.this() is not None:
        with _meshes():
            yield _own(config)  # type: ignore[arg-type]
        return
    # If each parameter is divided, the first rank holds the largest part; under zero1 any rank may hold the most.
    for rank in range(config.ranks) if config.shard == "zero1" else (0,):
        yield from _played(config, rank)


@cache
def _own(config: ParallelConfig) -> Solo:
    this = member.this()
    assert this is not None
    return kind_of(config)(config, this, _HOST)


def _played(config: ParallelConfig, rank: int) -> Iterator[Solo]:
    hook = sys.excepthook  # torch installs one that names the rank, and leaves it in place
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=config.ranks)
    try:
        with tempfile.TemporaryFile() as page, _meshes():
            yield kind_of(config)(config, Member(rank, config.ranks, Page(page.fileno(), config.ranks)), _HOST)
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


@contextmanager
def _meshes() -> Iterator[None]:
    """Makes meshes that FSDP concatenates from two others hold real numbers, since FSDP looks up its position in
    them."""

    def of_numbers(made: Callable[[list[DeviceMesh]], DeviceMesh]) -> Callable[[list[DeviceMesh]], DeviceMesh]:
        def concatenated(meshes: list[DeviceMesh]) -> DeviceMesh:
            with unset_fake_temporarily():
                return made(meshes)

        return concatenated

    with concatenating(of_numbers):
        yield
