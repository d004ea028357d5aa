"""Holds the checkpoints of one trial for one attempt.

A save is durable before it is announced: written under a temporary name, every file synced, then the manifest, then
renamed, then the parent directory synced. No name is used twice, so an old checkpoint is never overwritten. A
checkpoint counts only once the ledger has a row for it; until then it is an orphan, which a later attempt sweeps.
"""

from __future__ import annotations

import logging
import math
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.checkpoint import copied_files, files, manifest
from trainer.checkpoint.location import DISK, Disk
from trainer.checkpoint.saver import Saver
from trainer.checkpoint.stored_tensors import Take, whole
from trainer.config import CheckpointConfig
from trainer.errors import CheckpointError
from trainer.report import CheckpointRef
from trainer.runtime.failpoint import failpoint

_NAME = re.compile(r"step-\d{8,}\.f(?P<fence>\d+)\.[0-9a-f]+(?P<tmp>\.tmp)?$")
log = logging.getLogger(__name__)

Pinned = Callable[[int], bool]

Changes = Mapping[str, Mapping[str, Any]]  # directory name -> column of its row -> value


@dataclass(frozen=True)
class Damage:
    """A committed checkpoint that could not be used, with the reason.

    `path` is its new path, `shown` the user's name for it.
    """

    ref: CheckpointRef
    path: Path
    reason: str
    shown: str


class CheckpointStore:
    """Saves, loads and drops the checkpoints in `directory` for the attempt that holds `fence`.

    `committed` are the ones that the ledger has kept, newest first, and `flagged` the directory name of the one that
    its row marks as the best. `on_change(changes)` is called with all changes of rows at once, by directory name
    (`state`: "deleted" before the files are removed, or "damaged"; `best`: 0 or 1). It returns the names of checkpoints
    that must not be deleted; an error that it raises, such as Fenced, leaves the files in place. `config_hash` is
    written into each manifest. `saver` writes. `location` is where they are stored, by their paths.
    """

    def __init__(
        self,
        directory: Path,
        fence: int,
        committed: Sequence[CheckpointRef] = (),
        *,
        flagged: Sequence[str] = (),
        config_hash: str = "",
        on_change: Callable[[Changes], Collection[str]] | None = None,
        location: Disk = DISK,
    ) -> None:
        self.directory, self.location = directory, location
        self.fence = fence
        self.kept = list(committed)
        self.flagged = set(flagged)
        self.damaged: list[Damage] = []
        self.saver = Saver(directory, fence, config_hash, location)
        self._on_change = on_change or (lambda changes: ())

    def save(
        self,
        state: dict[str, Any],
        *,
        step: int,
        epoch: int,
        metrics: Mapping[str, float] | None = None,
        files: copied_files.Source | None = None,
    ) -> CheckpointRef:
        """Writes `state` and makes it durable; it is an orphan until `commit`. Raises CheckpointError.

        `metrics` are those of its step; retention ranks checkpoints by them. `files`, a directory, a file, or a mapping
        of names to files, are copied whole, in any format; `copy_files` reads them back.
        """
        whole = None if files is None else copied_files.found(files)
        self.saver.start(state, step=step, epoch=epoch, metrics=metrics or {}, background=False, copied=whole)
        ref = self.saver.finish()
        assert ref is not None, "one process"
        return ref

    def commit(self, ref: CheckpointRef, keep: CheckpointConfig, pinned: Pinned | None = None) -> None:
        """Keeps `ref`, whose row is now in the ledger, and drops checkpoints that `keep` does not require."""
        self.kept.insert(0, ref)
        self.tidy(keep, pinned)

    def tidy(self, keep: CheckpointConfig, pinned: Pinned | None = None) -> None:
        """Flags the best kept checkpoint, and drops those that `keep` does not require, including leftovers of a kill.

        The newest at a step that is `pinned` stays as well.
        """
        best = self._best(keep)
        wanted = {ref.path.name for ref in best[:1]}
        names = (ref.path.name for ref in self.kept)
        changes: dict[str, dict[str, Any]] = {
            name: {"best": int(name in wanted)} for name in names if name in wanted ^ self.flagged
        }
        needed_again = [ref for ref in self.kept if pinned is not None and pinned(ref.step)][:1]
        dropped = expired(self.kept, keep, best, needed_again, self.location)
        for old in dropped:
            changes.setdefault(old.path.name, {})["state"] = "deleted"
        needed = self._on_change(changes) if changes else ()
        self.flagged = wanted
        for old in (ref for ref in dropped if ref.path.name not in needed):
            failpoint("retention.after_row")
            self.remove(old)
            failpoint("retention.after_files")

    def _best(self, keep: CheckpointConfig) -> list[CheckpointRef]:
        if keep.monitor is None:
            return []
        owned = [ref for ref in self.kept if self.owns(ref)]
        values = {ref.path: ref.metrics.get(keep.monitor, math.nan) for ref in owned}
        return best_of(owned, values, keep.mode)[: keep.keep_best]

    def load_latest(self) -> tuple[dict[str, Any], CheckpointRef] | None:
        """Returns the newest committed state that is undamaged, its tensors on the CPU; None if there is none.

        A damaged checkpoint is renamed `*.corrupt`, leaves `kept` and enters `damaged`. A checkpoint outside
        `directory` belongs to another trial and cannot be trained anew here: it stays, and CheckpointError is raised.
        """
        while self.kept:
            ref = self.kept[0]
            try:
                return self.read(ref), ref
            except files.Damaged as damage:
                if not self.owns(ref):
                    shown = self.location.shown(ref.path)
                    raise CheckpointError(f"checkpoint {shown} is damaged: {damage}.") from damage
                self._on_change({ref.path.name: {"state": "damaged"}})
                aside = self.location.set_aside(ref.path)
                self.damaged.append(Damage(ref, aside, str(damage), self.location.shown(aside)))
                self.kept.pop(0)
        return None

    def load_scheduled(self, scheduled: Pinned) -> tuple[dict[str, Any], CheckpointRef] | None:
        """Returns the newest committed, undamaged state of a step that is `scheduled`; None if there is none."""
        for ref in self.kept:
            if scheduled(ref.step) and self.owns(ref):
                try:
                    return self.read(ref), ref
                except files.Damaged as damage:
                    log.warning(
                        "checkpoint %s is damaged, an older one is used: %s", self.location.shown(ref.path), damage
                    )
        return None

    def read(self, ref: CheckpointRef, *, verified: bool = False) -> dict[str, Any]:
        """Returns this rank's part of a committed state; raises Damaged.

        `verified` means that rank 0 has just checked its files, which does not cover a copy that this rank makes.
        """
        with self.location.opened(ref.path, ref.sha256) as directory:
            known = verified and directory == ref.path
            return files.read(directory, ref.sha256, self.saver.ranks.take, verified=known)[0]

    def copy_files(self, ref: CheckpointRef, target: Path) -> list[str]:
        """Copies the files passed to `save` into the directory `target`; returns their names. Raises Damaged."""
        with self.location.opened(ref.path, ref.sha256) as directory:
            names = copied_files.of_manifest(manifest.check(directory, ref.sha256)["files"])
            for name in names:
                copied_files.check_name(name)
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(directory / copied_files.FILES / name, target / name)
            return names

    def load(self, path: Path) -> dict[str, Any]:
        """Returns the state in a directory that a user names. Raises CheckpointError."""
        return load(path, self.saver.ranks.take)

    def owns(self, ref: CheckpointRef) -> bool:
        """Returns True if `ref` is this trial's own, rather than another trial's that this one started from."""
        return ref.path.parent == self.directory

    def remove(self, ref: CheckpointRef) -> None:
        """Removes the files of a checkpoint whose row is gone; those that cannot be removed now are swept later."""
        self.kept = [kept for kept in self.kept if kept.path != ref.path]
        if self.owns(ref):
            self._discard(ref.path)

    def sweep(self, committed: Collection[str] = ()) -> list[Path]:
        """Removes directories without a row: orphans and unfinished saves of this attempt and earlier ones.

        Directories of later attempts are kept, so an attempt that was fenced unknowingly does no harm. So are those
        `committed`, by directory name, of which this attempt may not know.
        """
        kept = {ref.path.name for ref in self.kept} | set(committed)
        entries = self.location.entries(self.directory)
        kept |= {path.stem for path in entries if path.suffix == ".corrupt"}
        orphans = [
            path
            for path in entries
            if (match := _NAME.match(path.name)) and int(match["fence"]) <= self.fence and path.name not in kept
        ]
        for path in orphans:
            self._discard(path)
        return orphans

    def _discard(self, path: Path) -> None:
        try:
            self.location.discard(path)
        except OSError as error:
            log.warning("checkpoint %s could not be removed: %s", self.location.shown(path), error.strerror or error)


def expired(
    committed: Sequence[CheckpointRef],
    keep: CheckpointConfig,
    best: Sequence[CheckpointRef] = (),
    needed: Sequence[CheckpointRef] = (),
    location: Disk = DISK,
) -> list[CheckpointRef]:
    """Returns the checkpoints of `committed` (newest first) to drop.

    Kept are the newest `keep_last`, the `best` (best first), the first of each `keep_every` epochs and those `needed`.
    Of these the oldest are dropped until the rest fits into `max_bytes`; the newest, the best and those needed always
    stay. A file that several of them share counts once.
    """
    kept = {ref.path for ref in (*committed[: keep.keep_last], *best, *_regular(committed, keep.keep_every), *needed)}
    stay = {ref.path for ref in (*committed[:1], *best[:1], *needed)}
    if keep.max_bytes is None:
        return [ref for ref in committed if ref.path not in kept]
    sizes: dict[Any, int] = {}
    for ref in (ref for ref in committed if ref.path in stay):
        sizes |= location.sizes(ref.path, ref.size)
    for ref in (ref for ref in committed if ref.path in kept - stay):
        more = {**sizes, **location.sizes(ref.path, ref.size)}
        if sum(more.values()) > keep.max_bytes:
            kept.remove(ref.path)
        else:
            sizes = more
    return [ref for ref in committed if ref.path not in kept]


def _regular(committed: Sequence[CheckpointRef], every: int | None) -> list[CheckpointRef]:
    """Returns the first checkpoint of each `every` epochs."""
    if every is None:
        return []
    epochs = [ref.epoch // every for ref in committed]
    return [ref for ref, now, before in zip(committed, epochs, [*epochs[1:], 0], strict=True) if now > before]


def best_of(
    committed: Sequence[CheckpointRef], values: Mapping[Path, float], mode: Literal["min", "max"]
) -> list[CheckpointRef]:
    """Returns `committed` (newest first) from best to worst; ties go to the earlier step.

    There is one checkpoint for each step, and all values are finite.
    """
    of_step: dict[int, CheckpointRef] = {}
    for ref in committed:
        if math.isfinite(values[ref.path]):
            of_step.setdefault(ref.step, ref)
    sign = 1 if mode == "min" else -1
    return sorted(of_step.values(), key=lambda ref: (sign * values[ref.path], ref.step))


def load(path: Path, take: Take = whole, *, weights_only: bool = False, shown: str = "") -> dict[str, Any]:
    """Returns the state in a checkpoint directory that a user names, as `files.read` does. Raises CheckpointError.

    `shown` is the user's name for it, if not its path.
    """
    try:
        return files.read(path, None, take, weights_only=weights_only)[0]
    except files.Damaged as damage:
        raise CheckpointError(f"checkpoint {shown or path} cannot be used: {damage}.") from damage
