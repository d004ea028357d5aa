"""Holds the base of all kinds of ranks: their numbers, their agreement, and rank 0 speaking for all."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.checkpoint import files
from trainer.checkpoint.store import CheckpointStore, Pinned
from trainer.compat import foreach
from trainer.config import CheckpointConfig, ParallelConfig
from trainer.distributed.member import Member
from trainer.errors import CheckpointError
from trainer.ranks import Solo
from trainer.report import CheckpointRef, Relay, Report, Reporter, Verdict
from trainer.runtime.window import Window


class Several(Solo):
    """One of several ranks; a wish to leave on any rank is seen by all of them in the same window."""

    def __init__(self, config: ParallelConfig, member: Member, device: torch.device) -> None:
        self.config, self.member, self.device = config, member, device
        shape = (config.pipeline, config.data, config.tensor)
        self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pipeline", "data", "tensor"))
        self.ranks = config.ranks
        self.micro_batch_size = member.micro_batch_size
        self.shares = config.data
        self.share = self.mesh.get_local_rank("data")
        self.stream = (self.share,)
        self._speaks = self.mesh.get_local_rank("tensor") == 0  # one rank of a replica speaks for all of them
        self._wish = False  # this rank's
        self._wishes: float | Tensor = 0.0  # summed over all ranks, as of the last window
        self.first = member.rank == 0
        self._durable: float | Tensor = 0.0  # rank 0's, as of the last window

    @cached_property
    def _savers(self) -> Any:
        """Returns a group for the saver threads: a group serves one thread at a time."""
        return dist.new_group(backend="gloo")

    def lead(self, reporter: Reporter, checkpoints: CheckpointStore) -> Any:
        _ = self._savers  # made by all ranks at once
        self._saver = checkpoints.saver
        self._saver.ranks = self
        return _Reporter(reporter, self), _Store(checkpoints, self)

    def everyone(self, value: Any) -> list[Any]:
        self.beat()
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values

    def earliest(self, found: tuple[tuple[int, ...], str]) -> tuple[tuple[int, ...], str]:
        candidates = self.everyone(found)
        rank = min(range(self.ranks), key=lambda i: candidates[i][0])
        order, words = candidates[rank]
        return order, f"{words} (on rank {rank})" if rank else words

    def leaving(self, reporter: Reporter) -> bool:
        self.beat()
        self._wish = self.member.page.leaving or reporter.preempted
        return float(self._wishes) > 0

    def total(self, window: Window, params: Sequence[nn.Parameter]) -> Window:
        """Returns the window's totals by one small all-reduce in float64.

        It also carries the wish to leave and the number of the durable save.
        """
        self.beat()
        names = sorted(window.terms)
        totals = [window.loss, window.count, *(window.terms[name] for name in names)]
        durable = self._saver.durable if self.first else 0
        local = [float(self._wish), durable, *(totals if self._speaks else [0.0] * len(totals))]
        numbers = torch.stack([torch.as_tensor(n, dtype=torch.float64, device=self.device) for n in local])
        dist.all_reduce(numbers)
        numbers = numbers.tolist() if self.device.type == "cpu" else numbers
        self._wishes, self._durable, loss, count, *terms = numbers
        return Window(loss, count, dict(zip(names, terms, strict=True)))

    def sum_over_replicas(self, gradients: list[Tensor]) -> None:
        """Replaces each gradient by its sum over all replicas, in one all-reduce."""
        self.sum_over(self.mesh["data"], gradients)

    def sum_over(self, mesh: DeviceMesh, gradients: list[Tensor]) -> None:
        """Replaces each gradient by its sum over the ranks of a mesh of one dimension, in one all-reduce."""
        self.beat()
        if mesh.size() > 1 and gradients:
            flat = torch.cat([g.flatten() for g in gradients])
            dist.all_reduce(flat, group=mesh.get_group())
            sums = flat.split([g.numel() for g in gradients])
            foreach.copy_(gradients, [s.view_as(g) for s, g in zip(sums, gradients, strict=True)])

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        self.beat()
        for tensor in tensors:
            dist.all_reduce(tensor, group=self.mesh.get_group("data"))

    def agree(self, value: Any) -> Any:
        self.beat()
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    @property
    def suffix(self) -> str:  # type: ignore[override]
        return f"-{self.member.rank + 1:05d}-of-{self.ranks:05d}"

    def mine(self, tensor: Tensor) -> tuple[Tensor | None, Sequence[int] | None]:
        return (None, [0] * tensor.ndim) if tensor.is_meta else (tensor, None)

    def gather(self, value: Any) -> list[Any] | None:
        values = [None] * self.ranks if self.first else None
        dist.gather_object(value, values, dst=0, group=self._savers)
        return values

    def heard(self, durable: int) -> int:
        return int(self._durable)

    def beat(self) -> None:
        """Records this rank's progress; called before it waits for the others."""
        self.member.page.beat(self.member.rank)


def outline(value: Any) -> Any:
    """Returns a meta tensor of the same shape for a tensor that another rank saves; any other value unchanged."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value


class _Reporter(Relay):
    """A reporter through which rank 0 reports and every rank gets the verdict."""

    def __init__(self, reporter: Reporter, ranks: Several) -> None:
        super().__init__(reporter)
        self._ranks, self._leads = ranks, ranks.first

    @property
    def preempted(self) -> bool:
        return self._leads and self.reporter.preempted

    def report(self, report: Report) -> Verdict:
        return self._ranks.agree(self.reporter.report(report) if self._leads else None)

    def event(self, kind: str, **fields: Any) -> None:
        if self._leads:
            self.reporter.event(kind, **fields)

    def artifact(self, path: Path, name: str | None = None) -> None:
        if self._leads:
            self.reporter.artifact(path, name)

    def tag(self, key: str, value: str) -> None:
        if self._leads:
            self.reporter.tag(key, value)


class _Store:
    """A store through which rank 0 manages the checkpoints and every rank reads its part of the chosen one."""

    def __init__(self, store: CheckpointStore, ranks: Several) -> None:
        self._store, self._ranks = store, ranks
        self._leads = ranks.first
        self.saver = store.saver

    @property
    def damaged(self) -> list[Any]:
        return self._store.damaged

    def load_latest(self) -> tuple[dict[str, Any], CheckpointRef] | None:
        return self._read_all(self._store.load_latest() if self._leads else None)

    def _read_all(self, loaded: tuple[dict[str, Any], CheckpointRef] | None) -> Any:
        """Returns on every rank the checkpoint that rank 0 has loaded."""
        ref = self._ranks.agree(loaded and loaded[1])
        if ref is None or loaded is not None:
            return loaded
        try:
            return self._store.read(ref, verified=True), ref
        except files.Damaged as damage:  # damaged on the way here, since rank 0 read it whole
            shown = self._store.location.shown(ref.path)
            raise CheckpointError(f"checkpoint {shown} cannot be read: {damage}.") from damage

    def load_scheduled(self, scheduled: Pinned) -> tuple[dict[str, Any], CheckpointRef] | None:
        return self._read_all(self._store.load_scheduled(scheduled) if self._leads else None)

    def load(self, path: Path) -> dict[str, Any]:
        state, wrong = {}, ""
        if self._leads:
            try:
                state = self._store.load(path)
            except CheckpointError as error:
                wrong = str(error)
        if wrong := self._ranks.agree(wrong):
            raise CheckpointError(wrong)
        return state or files.read(path, None, self._ranks.take, verified=True)[0]

    def commit(self, ref: CheckpointRef, keep: CheckpointConfig, pinned: Pinned | None = None) -> None:
        if self._leads:
            self._store.commit(ref, keep, pinned)

    def tidy(self, keep: CheckpointConfig, pinned: Pinned | None = None) -> None:
        if self._leads:
            self._store.tidy(keep, pinned)

    def sweep(self) -> list[Path]:
        return self._store.sweep() if self._leads else []

    def owns(self, ref: CheckpointRef) -> bool:
        return self._store.owns(ref)
