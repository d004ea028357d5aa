"""Writing checkpoints, one at a time: in the caller's time, or from a copy of the state in a thread of their own.

Training stands still only for the copy, into host memory that is kept from one save to the next. Several ranks all call
every method at the same point, and each writes what it holds; the manifest comes last, once all of them are durable.
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
from trainer.checkpoint.stored import Stored
from trainer.errors import CheckpointError
from trainer.files.durable import sync
from trainer.report import CheckpointRef, numbers
from trainer.runtime.failpoint import failpoint

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


class Alone:
    """What saving and loading ask of the ranks that do it together, and the answers of one process."""

    first = True  # whether this is rank 0
    suffix = ""  # of the names of this rank's files

    def mine(self, tensor: Tensor) -> tuple[Tensor | None, Sequence[int] | None]:
        """What this rank saves of it, None for nothing; and where in the whole that begins, None if it is the whole."""
        return tensor, None

    def take(self, path: tuple[str, ...], stored: Stored) -> Any:
        """What this rank reads of the tensor that stands at these keys of a saved state."""
        return stored.read()

    def agree(self, value: Any) -> Any:
        """Rank 0's value."""
        return value

    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's value on rank 0, in their order, None on the others; called by the thread that saves."""
        return [value]

    def heard(self, durable: int) -> int:
        """Rank 0's `Saver.durable`, as of the last window."""
        return durable


@dataclass(frozen=True)
class _Save:
    """One save: of `state`, under the name `tmp` until it is `path`. `header` goes to the manifest."""

    state: files.Packed
    tmp: Path
    path: Path
    header: dict[str, Any]
    metrics: Mapping[str, float]


class Saver:
    """Saves below `directory` for the attempt that holds `fence`; one save at a time.

    `start` begins one, `finish` waits for it, `ready` says whether that would take no time. `reserve` makes the memory
    for copies beforehand. `ranks` save together. What is saved lies in `place`, and until it is whole in `directory`.
    """

    def __init__(self, directory: Path, fence: int, config_hash: str, place: Disk = DISK) -> None:
        self.directory, self.fence, self.config_hash, self.place = directory, fence, config_hash, place
        self.ranks = Alone()
        self.seconds = 0.0  # for which training has stood still for saves
        self._number = 0  # of the last save
        self._finish: Callable[[], CheckpointRef | None] | None = None
        self._future: Future[CheckpointRef | None] | None = None
        self._reserving: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._buffers: dict[tuple[str, str], Tensor] = {}

    @property
    def durable(self) -> int:
        """The number of this process's save once it has ended, 0 before."""
        return self._number if self._future is not None and self._future.done() else 0

    @property
    def ready(self) -> bool:
        """The same on all ranks."""
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
        """Begin to save `state`, in the `background` from a copy, else as it is once `finish` is called, and files
        `copied` by their names; raises CheckpointError."""
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
        """The checkpoint that `start` began, now durable; None where there is none. Raises CheckpointError."""
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
        """Wait for the thread, and drop what it has saved if nobody has asked for it."""
        future, self._future, self._finish = self._future, None, None
        try:
            if future is not None and (ref := future.result()) is not None:
                self.place.discard(ref.path)
        except (CheckpointError, OSError, RuntimeError) as error:  # another error ends the attempt, and is what counts
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
        """In the thread, make and touch the memory for copies of such a state: its first use costs more than a copy."""
        self._reserving = self._submit(self._touch, files.pack(state, self.ranks.mine))

    def _touch(self, packed: files.Packed) -> None:
        for item, tensors in packed.tensors.items():
            for key, tensor in tensors.items():
                self._buffer((item, key), tensor).zero_()

    def _copied(self, packed: files.Packed) -> files.Packed:
        """The tensors, copied to the host; buffers of the last copy are used again."""
        if self._reserving is not None:
            self._reserving.result()
        copies: dict[str, dict[str, Tensor]] = {}
        for item, tensors in packed.tensors.items():
            copies[item] = {key: self._buffer((item, key), tensor) for key, tensor in tensors.items()}
            for key, tensor in tensors.items():
                copies[item][key].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        if any(tensor.is_cuda for tensors in packed.tensors.values() for tensor in tensors.values()):
            import torch

            torch.cuda.synchronize()
        return replace(packed, tensors=copies)

    def _buffer(self, name: tuple[str, str], like: Tensor) -> Tensor:
        found = self._buffers.get(name)
        if found is None or found.shape != like.shape or found.dtype != like.dtype:
            import torch

            found = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
            self._buffers[name] = found
        return found

    def _write(self, save: _Save) -> CheckpointRef | None:
        """Make it durable; the checkpoint on rank 0, None on the others. Raises CheckpointError."""
        try:
            mine = self._write_mine(save)
            parts = self.ranks.gather(mine)
            return None if parts is None else self._complete(save, parts)
        except OSError as error:
            # After the rename, a failed sync leaves a directory of which nobody can tell whether it is durable.
            shutil.rmtree(save.tmp, ignore_errors=True)
            with suppress(OSError):
                self.place.discard(save.path)
            where, why = self.place.shown(self.directory), error.strerror or str(error).rstrip(".")
            raise CheckpointError(
                f"the checkpoint of step {save.header['step']} could not be written to {where}: {why}; the ones "
                "before it are intact. Mend that, then resume."
            ) from error

    def _write_mine(self, save: _Save) -> dict[str, Any] | OSError:
        """This rank's files for the manifest; what goes wrong is told to rank 0."""
        try:
            if save.state.tensors or self.ranks.first:
                _make_durably(self.directory)
                self.place.begin(save.tmp)
            mine = files.write_mine(save.tmp, save.state, self.ranks.suffix)
            self.place.send(save.tmp, save.path, mine)
            failpoint("checkpoint.after_files")
            return mine
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
        self.place.publish(save.tmp, save.path)
        failpoint("checkpoint.after_rename")
        return CheckpointRef(save.path, save.header["step"], save.header["epoch"], sha256, size, save.metrics)


def _make_durably(directory: Path) -> None:
    """Make the directory and its missing parents, each of them synced into its own parent."""
    if not directory.is_dir():
        _make_durably(directory.parent)
        directory.mkdir(exist_ok=True)
        sync(directory.parent)
