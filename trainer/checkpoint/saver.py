"""Writes checkpoints, one at a time: in the caller's thread, or in one of its own from a copy of the state.

Training pauses only for the copy, into host memory that is reused by later saves. All ranks call every method at the
same point, and each writes its own part; the manifest comes last, once all files are durable.
"""

from __future__ import annotations

import logging
import operator
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint import files
from trainer.checkpoint.location import DISK, Disk
from trainer.checkpoint.stored_tensors import Stored
from trainer.errors import CheckpointError
from trainer.files.durable import sync
from trainer.report import CheckpointRef, numbers
from trainer.runtime.failpoint import failpoint

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


class Alone:
    """The interface through which ranks save and load together, implemented for one process."""

    first = True  # True on rank 0
    suffix = ""  # ends the names of this rank's files

    def mine(self, tensor: Tensor) -> tuple[Tensor | None, Sequence[int] | None]:
        """Returns this rank's part of the tensor to save, None for nothing, and its offset, None for the whole."""
        return tensor, None

    def take(self, path: tuple[str, ...], stored: Stored) -> Any:
        """Returns this rank's part of the tensor at these keys of a saved state."""
        return stored.read()

    def agree(self, value: Any) -> Any:
        """Returns rank 0's value."""
        return value

    def gather(self, value: Any) -> list[Any] | None:
        """Returns every rank's value in order on rank 0, None on the others; called by the thread that saves."""
        return [value]

    def heard(self, durable: int) -> int:
        """Returns rank 0's `Saver.durable` of the last window."""
        return durable


@dataclass(frozen=True)
class _Save:
    """One save of `state`, under the name `tmp` until it is complete at `path`. `header` goes to the manifest."""

    state: files.Packed
    tmp: Path
    path: Path
    header: dict[str, Any]
    metrics: Mapping[str, float]


class Saver:
    """Saves below `directory` for the attempt that holds `fence`; one save at a time.

    `start` begins a save, `finish` waits for it, and `ready` is True once `finish` would return at once. `reserve`
    allocates the memory for copies beforehand. `ranks` save together. Checkpoints are stored in `location`, and built
    in `directory`.
    """

    def __init__(self, directory: Path, fence: int, config_hash: str, location: Disk = DISK) -> None:
        self.directory, self.fence, self.config_hash, self.location = directory, fence, config_hash, location
        self.ranks = Alone()
        self.seconds = 0.0  # that training has spent waiting for saves
        self._number = 0  # of the last save
        self._finish: Callable[[], CheckpointRef | None] | None = None
        self._future: Future[CheckpointRef | None] | None = None
        self._reserving: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._buffers: dict[tuple[str, str], Tensor] = {}

    @property
    def durable(self) -> int:
        """Returns the number of this process's save once it has ended, 0 before."""
        return self._number if self._future is not None and self._future.done() else 0

    @property
    def ready(self) -> bool:
        """Returns True once the save has ended; the same on all ranks."""
        return self._future is not None and self.ranks.heard(self.durable) == self._number

    def start(
        self,
        state: dict[str, Any],
        *,
        step: int,
        epoch: int,
        metrics: Mapping[str, float],
        background: bool,
        copied: Mapping[str, Path] | None = None,
    ) -> None:
        """Begins to save `state`, and files `copied` by their names; raises CheckpointError.

        In the `background` it is saved from a copy, else in its state when `finish` is called.
        """
        assert self._finish is None, "one save at a time"
        began = time.perf_counter()
        self._number += 1
        packed = files.pack(state, self.ranks.mine, copied)
        path = self.ranks.agree(self.directory / f"step-{step:08d}.f{self.fence}.{os.urandom(4).hex()}")
        header = {
            "step": operator.index(step),
            "epoch": operator.index(epoch),
            "fence": self.fence,
            "config_hash": self.config_hash,
        }
        save = _Save(packed, path.with_name(f"{path.name}.tmp"), path, header, numbers(metrics))
        self._finish = self._in_background(save) if background else lambda: self._write(save)
        self.seconds += time.perf_counter() - began

    def finish(self) -> CheckpointRef | None:
        """Returns the checkpoint that `start` began, now durable; None if there is none. Raises CheckpointError."""
        finish, self._finish = self._finish, None
        if finish is None:
            return None
        began = time.perf_counter()
        try:
            return self.ranks.agree(finish())
        finally:
            self._future = None
            self.seconds += time.perf_counter() - began

    def close(self) -> None:
        """Waits for the thread, and drops its save if nothing has fetched it."""
        future, self._future, self._finish = self._future, None, None
        try:
            if future is not None and (ref := future.result()) is not None:
                self.location.discard(ref.path)
        except (CheckpointError, OSError, RuntimeError) as error:  # the error that ends the attempt matters more
            log.warning("a save that nothing waits for any more has failed: %s", error)
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _in_background(self, save: _Save) -> Callable[[], CheckpointRef | None]:
        save = replace(save, state=self._copied(save.state))
        failpoint("checkpoint.after_copy")
        self._future = self._submit(self._write, save)
        return self._future.result

    def _submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        return self._thread.submit(call, *arguments)

    def reserve(self, state: dict[str, Any]) -> None:
        """Allocates and touches the copies' memory in the thread, because its first use costs more than a copy."""
        self._reserving = self._submit(self._touch, files.pack(state, self.ranks.mine))

    def _touch(self, packed: files.Packed) -> None:
        for name, tensors in packed.tensors.items():
            for key, tensor in tensors.items():
                self._buffer((name, key), tensor).zero_()

    def _copied(self, packed: files.Packed) -> files.Packed:
        """Returns the state with its tensors copied to the host, into the buffers of the last copy."""
        if self._reserving is not None:
            self._reserving.result()
        copies: dict[str, dict[str, Tensor]] = {}
        for name, tensors in packed.tensors.items():
            copies[name] = {key: self._buffer((name, key), tensor) for key, tensor in tensors.items()}
            for key, tensor in tensors.items():
                copies[name][key].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        if any(tensor.is_cuda for tensors in packed.tensors.values() for tensor in tensors.values()):
            import torch

            torch.cuda.synchronize()
        return replace(packed, tensors=copies)

    def _buffer(self, name: tuple[str, str], like: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            import torch

            buffer = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
            self._buffers[name] = buffer
        return buffer

    def _write(self, save: _Save) -> CheckpointRef | None:
        """Makes the save durable. Returns the checkpoint on rank 0, None on the others. Raises CheckpointError."""
        try:
            entries = self._write_mine(save)
            parts = self.ranks.gather(entries)
            return None if parts is None else self._complete(save, parts)
        except OSError as error:
            # If a sync fails after the rename, nobody can tell whether the directory is durable.
            shutil.rmtree(save.tmp, ignore_errors=True)
            with suppress(OSError):
                self.location.discard(save.path)
            where, why = self.location.shown(self.directory), error.strerror or str(error).rstrip(".")
            raise CheckpointError(
                f"the checkpoint of step {save.header['step']} could not be written to {where}: {why}; the ones "
                "before it are intact. Fix that, then resume."
            ) from error

    def _write_mine(self, save: _Save) -> dict[str, Any] | OSError:
        """Returns this rank's entries of the manifest, or the error, which rank 0 then raises."""
        try:
            if save.state.tensors or self.ranks.first:
                _make_durably(self.directory)
                self.location.begin(save.tmp)
            entries = files.write_mine(save.tmp, save.state, self.ranks.suffix)
            self.location.send(save.tmp, save.path, entries)
            failpoint("checkpoint.after_files")
            return entries
        except OSError as error:
            return error

    def _complete(self, save: _Save, parts: Sequence[dict[str, Any] | OSError]) -> CheckpointRef:
        written: dict[str, Any] = {}
        for part in parts:
            if isinstance(part, OSError):
                raise part
            written |= part
        torch = sys.modules.get("torch")  # without it the state holds no tensor
        header = save.header | ({"torch": torch.__version__} if torch else {})
        sha256, size = files.complete(save.tmp, save.state, header, written)
        failpoint("checkpoint.before_rename")
        self.location.publish(save.tmp, save.path)
        failpoint("checkpoint.after_rename")
        return CheckpointRef(save.path, save.header["step"], save.header["epoch"], sha256, size, save.metrics)


def _make_durably(directory: Path) -> None:
    """Makes the directory and its missing parents, each of them synced into its own parent."""
    if not directory.is_dir():
        _make_durably(directory.parent)
        directory.mkdir(exist_ok=True)
        sync(directory.parent)
