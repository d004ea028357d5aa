"""Divides CPUs and GPUs among workers. Pure except for `devices` and `keep_to_share`, which alone imports torch."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from hpo.declaration.study import Study
from hpo.door import option
from hpo.errors import UserError
from hpo.space.config import as_json, flatten

GPU_SHARE = "HPO_GPU_SHARE"  # the part of its GPU's memory that a worker process may take
GPUS_ASKED = "HPO_GPUS_ASKED"  # the value of --gpus-per-worker, if it asks for any
CGROUP = Path("/sys/fs/cgroup")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE = re.compile(r"\d+|GPU-\S+|MIG-\S+")


@dataclass(frozen=True)
class Resources:
    """The user's resources for each worker; None leaves the choice to the executor.

    A part of a GPU is 1/2, 1/3, ... of one.
    """

    cpus: int | None = None
    gpus: float | None = None

    def __post_init__(self) -> None:
        if self.cpus is not None and self.cpus < 1:
            raise UserError(f"{option('cpus_per_worker', self.cpus)}: give 1 or more.")
        if self.gpus is not None and not (0 < self.gpus < 1 or _whole(self.gpus)):
            raise UserError(
                f"{option('gpus_per_worker', format(self.gpus, 'g'))}: give a whole number, or a part of one GPU, "
                "such as 0.5."
            )


def _whole(gpus: float) -> bool:
    return gpus >= 0 and float(gpus).is_integer()  # an infinity is not an integer


NOTHING_SAID = Resources()


@dataclass(frozen=True)
class Needs:
    """The needs of a trial of the study: ranks, the threads of each, and whether they may use GPUs."""

    ranks: int
    threads: int
    gpu: bool


def needs(study: Study) -> Needs:
    fields = flatten(as_json(study.config))
    device = str(fields.get("train.device", "auto"))
    return Needs(study.shape.ranks, int(fields.get("train.num_threads") or 1), device != "cpu")


def gpus_each(asked: float | None, wanted: Needs, workers: int, present: int) -> float:
    """Returns the GPUs of each worker: as requested, else one per rank, shared if there are more workers than GPUs."""
    if asked is None:
        if not present or not wanted.gpu:
            return 0
        return wanted.ranks if wanted.ranks > 1 else 1 / max(1, math.ceil(workers / present))
    if wanted.ranks > 1 and 0 < asked < wanted.ranks:
        raise UserError(
            f"{option('gpus_per_worker', format(asked, 'g'))}: train.parallel asks for {wanted.ranks} ranks, and "
            "every rank needs a GPU of "
            f"its own; give {wanted.ranks}, or 0."
        )
    return asked


def devices(environ: Mapping[str, str] = os.environ, driver: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Returns the GPUs of this host that the process may use, by their names in CUDA_VISIBLE_DEVICES.

    Stops at the first invalid name, as CUDA does; with -1 it shows no GPU (CUDA C++ Programming Guide, "CUDA
    Environment Variables").
    """
    if (visible := environ.get(_VISIBLE)) is not None:
        return list(takewhile(_DEVICE.fullmatch, (name.strip() for name in visible.split(","))))
    return [str(number) for number, _ in enumerate(driver.glob("*"))]


def gpu_slots(workers: int, each: float, present: Sequence[str]) -> list[dict[str, str]]:
    """Returns for each worker the environment that shows it its GPUs: `each` of them, or a share of one.

    Raises UserError if there are fewer. If there are none to divide, the environment stays unchanged.
    """
    if not each:
        return [{} for _ in range(workers)]
    together = math.floor(1 / each + 1e-9) if each < 1 else 1  # workers on one GPU
    size = max(1, int(each))
    needed = math.ceil(workers / together) * size
    if needed > len(present):
        raise UserError(
            f"{workers} workers with {each:g} GPUs each need {needed}, and this host shows {len(present)}: ask for "
            f"fewer by {option('workers')} or {option('gpus_per_worker')}."
        )
    share = gpu_share(each)
    starts = [slot // together * size for slot in range(workers)]
    return [{_VISIBLE: ",".join(present[start : start + size])} | share for start in starts]


def host_gpus(asked: float | None, wanted: Needs, workers: int) -> list[dict[str, str]]:
    """Returns `gpu_slots` of this host. Raises UserError if it lacks the requested GPUs."""
    present = devices()
    slots = gpu_slots(workers, gpus_each(asked, wanted, workers, len(present)), present)
    return [slot | gpus_asked(asked) for slot in slots]


def gpu_share(each: float) -> dict[str, str]:
    """Returns the environment that keeps a worker within its part of a GPU's memory; empty for a whole one."""
    return {GPU_SHARE: repr(each)} if 0 < each < 1 else {}


def gpus_asked(asked: float | None) -> dict[str, str]:
    """Returns the environment of a worker for which the user asks for GPUs; empty for any other."""
    return {GPUS_ASKED: f"{asked:g}"} if asked else {}


def keep_to_share() -> None:
    """Limits this process to the share of the GPU's memory that the executor has set, if any.

    Raises UserError if the user asks for GPUs and torch finds none. Without such a request a GPU that torch cannot use
    is ignored: the trials' train.device decides.
    """
    share, requested = os.environ.get(GPU_SHARE), os.environ.get(GPUS_ASKED)
    if not share and not requested:
        return
    import torch

    if share and torch.cuda.is_available():  # a whole GPU is not touched here, which would take some of its memory
        torch.cuda.set_per_process_memory_fraction(float(share))  # pyright: ignore[reportUnknownMemberType]
    elif requested and not torch.cuda.is_available():
        raise UserError(
            f"{option('gpus_per_worker', requested)}: torch {torch.__version__} finds no GPU here that it can use; "
            "install a build "
            "for CUDA, or give 0."
        )


def cpu_slots(workers: int, each: int, usable: Sequence[int] | None) -> list[list[int]]:
    """Returns for each worker its own `each` CPUs. Raises UserError if there are not enough."""
    if usable is None:
        raise UserError(f"{option('cpus_per_worker', each)}: this system binds no process to CPUs; leave it out.")
    if workers * each > len(usable):
        raise UserError(
            f"{option('cpus_per_worker', each)}: {workers} workers need {workers * each} CPUs, and {len(usable)} can "
            "be used "
            "here; ask for fewer."
        )
    return [list(usable[slot * each : (slot + 1) * each]) for slot in range(workers)]


def container_memory(root: Path = CGROUP) -> tuple[int, int] | None:
    """Returns (limit, use) of this container's memory in bytes; None without a limit.

    They are cgroup v2's memory.max and memory.current.
    """
    try:
        bound = (root / "memory.max").read_text().strip()
        return (int(bound), int((root / "memory.current").read_text())) if bound.isdigit() else None
    except OSError:  # cgroup v1, or not Linux
        return None


def memory_left(root: Path = CGROUP) -> int:
    """Returns the bytes that processes of this host, or of this container, may still take."""
    import psutil

    bound = container_memory(root)
    free = psutil.virtual_memory().available
    return free if bound is None else min(free, bound[0] - bound[1])
