"""The checkpoints of one trial, as one attempt sees them.

A save is durable before anyone hears of it: written under a temporary name, every file synced, then the manifest, then
renamed, then the parent directory synced. No name is used twice, so an old checkpoint is never written over. It counts
only once the ledger has a row for it; until then it is an orphan, and swept by a later attempt.
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

from trainer.checkpoint import copied, files, manifest
from trainer.checkpoint.location import DISK, Disk
from trainer.checkpoint.saver import Saver
from trainer.checkpoint.stored import Take, whole
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
    """A committed checkpoint that could not be used, and why; `path` is where it lies now, `shown` as users know it."""

    ref: CheckpointRef
    path: Path
    reason: str
    shown: str


class CheckpointStore:
    """Saves, loads and drops the checkpoints in `directory` for the attempt that holds `fence`.

    `committed` are those the ledger has kept, newest first, and `flagged` the directory name of the one its row calls
    the best. `on_change(changes)` is told, by directory name,
    what rows are to become (`state`: "deleted" before the files go, or "damaged"; `best`: 0 or 1), all at once; it
    returns the names of those that must not be deleted, and what it raises, such as Fenced, leaves the files.
    `config_hash` is noted in each manifest. `saver` writes. `place` is where they lie, by their paths.
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
        place: Disk = DISK,
    ) -> None:
        self.directory, self.place = directory, place
        self.fence = fence
        self.kept = list(committed)
        self.flagged = set(flagged)
        self.damaged: list[Damage] = []
        self.saver = Saver(directory, fence, config_hash, place)
        self._on_change = on_change or (lambda changes: ())

    def save(
        self,
        state: dict[str, Any],
        *,
        step: int,
        epoch: int,
        metrics: Mapping[str, float] | None = None,
        files: copied.Source | None = None,
    ) -> CheckpointRef:
        """Write `state` and make it durable; it is an orphan until `commit`. Raises CheckpointError.

        `metrics` are those of its step, by which retention judges it. `files`, a directory, a file, or a mapping of
        names to files, are copied whole, whatever their format; `copy_files` gives them back.
        """
        whole = None if files is None else copied.found(files)
        self.saver.start(state, step=step, epoch=epoch, metrics=metrics or {}, background=False, copied=whole)
        ref = self.saver.finish()
        assert ref is not None, "one process"
        return ref

    def commit(self, ref: CheckpointRef, keep: CheckpointConfig, pinned: Pinned | None = None) -> None:
        """The ledger has the row of `ref` now: keep it, and drop what `keep` does not ask for."""
        self.kept.insert(0, ref)
        self.tidy(keep, pinned)

    def tidy(self, keep: CheckpointConfig, pinned: Pinned | None = None) -> None:
        """Flag the best of those kept, and drop what `keep` does not ask for; also what a kill left undone. The newest
        of a step that is `pinned` stays as well."""
        best = self._best(keep)
        wanted = {ref.path.name for ref in best[:1]}
        names = (ref.path.name for ref in self.kept)
        changes: dict[str, dict[str, Any]] = {
            name: {"best": int(name in wanted)} for name in names if name in wanted ^ self.flagged
        }
        needed_again = [ref for ref in self.kept if pinned is not None and pinned(ref.step)][:1]
        dropped = expired(self.kept, keep, best, needed_again, self.place)
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
        own = [ref for ref in self.kept if self.owns(ref)]
        values = {ref.path: ref.metrics.get(keep.monitor, math.nan) for ref in own}
        return best_of(own, values, keep.mode)[: keep.keep_best]

    def load_latest(self) -> tuple[dict[str, Any], CheckpointRef] | None:
        """The newest committed state that is undamaged, its tensors on the CPU; None where there is none.

        A damaged checkpoint is renamed `*.corrupt`, leaves `kept` and enters `damaged`. One that lies outside
        `directory` belongs to another trial and cannot be trained anew here: it stays, and CheckpointError is raised.
        """
        while self.kept:
            ref = self.kept[0]
            try:
                return self.read(ref), ref
            except files.Damaged as damage:
                if not self.owns(ref):
                    raise CheckpointError(f"checkpoint {self.place.shown(ref.path)} is damaged: {damage}.") from damage
                self._on_change({ref.path.name: {"state": "damaged"}})
                aside = self.place.set_aside(ref.path)
                self.damaged.append(Damage(ref, aside, str(damage), self.place.shown(aside)))
                self.kept.pop(0)
        return None

    def load_scheduled(self, scheduled: Pinned) -> tuple[dict[str, Any], CheckpointRef] | None:
        """The newest committed state of a step that is `scheduled` and undamaged; None where there is none."""
        for ref in self.kept:
            if scheduled(ref.step) and self.owns(ref):
                try:
                    return self.read(ref), ref
                except files.Damaged as damage:
                    log.warning(
                        "checkpoint %s is damaged, an older one is used: %s", self.place.shown(ref.path), damage
                    )
        return None

    def read(self, ref: CheckpointRef, *, verified: bool = False) -> dict[str, Any]:
        """What this rank reads of a committed state; raises Damaged. `verified`: rank 0 has just found its files whole,
        which says nothing of a copy that this rank makes."""
        with self.place.opened(ref.path, ref.sha256) as directory:
            known = verified and directory == ref.path
            return files.read(directory, ref.sha256, self.saver.ranks.take, verified=known)[0]

    def copy_files(self, ref: CheckpointRef, target: Path) -> list[str]:
        """Copy the files that `save` was given into the directory `target`; their names. Raises Damaged."""
        with self.place.opened(ref.path, ref.sha256) as directory:
            names = copied.of_manifest(manifest.check(directory, ref.sha256)["files"])
            for name in names:
                copied.check_name(name)
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(directory / copied.FILES / name, target / name)
            return names

    def load(self, path: Path) -> dict[str, Any]:
        """The state in a directory that a user names. Raises CheckpointError."""
        return load(path, self.saver.ranks.take)

    def owns(self, ref: CheckpointRef) -> bool:
        """Whether `ref` is this trial's own, and not one to start from that another trial has left."""
        return ref.path.parent == self.directory

    def remove(self, ref: CheckpointRef) -> None:
        """Remove the files of a checkpoint whose row is gone; what cannot be removed now is swept later."""
        self.kept = [kept for kept in self.kept if kept.path != ref.path]
        if self.owns(ref):
            self._discard(ref.path)

    def sweep(self, committed: Collection[str] = ()) -> list[Path]:
        """Remove what no row vouches for: orphans and unfinished saves of this attempt and those before it.

        A later attempt's are left alone, so one that has been fenced without knowing does no harm; so are those that
        are `committed` by directory name, of which this attempt may not have heard.
        """
        kept = {ref.path.name for ref in self.kept} | set(committed)
        entries = self.place.entries(self.directory)
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
            self.place.discard(path)
        except OSError as error:
            log.warning("checkpoint %s could not be removed: %s", self.place.shown(path), error.strerror or error)


def expired(
    committed: Sequence[CheckpointRef],
    keep: CheckpointConfig,
    best: Sequence[CheckpointRef] = (),
    needed: Sequence[CheckpointRef] = (),
    place: Disk = DISK,
) -> list[CheckpointRef]:
    """Which of `committed` (newest first) to drop: all but the newest `keep_last`, the `best` (best first), the first
    of each `keep_every` epochs and those `needed`, and of these what does not fit into `max_bytes`, the oldest first;
    the newest, the best and those needed stay whatever they take. A file that several of them share counts once."""
    asked = {ref.path for ref in (*committed[: keep.keep_last], *best, *_regular(committed, keep.keep_every), *needed)}
    stay = {ref.path for ref in (*committed[:1], *best[:1], *needed)}
    if keep.max_bytes is None:
        return [ref for ref in committed if ref.path not in asked]
    held: dict[Any, int] = {}
    for ref in (ref for ref in committed if ref.path in stay):
        held |= place.sizes(ref.path, ref.size)
    for ref in (ref for ref in committed if ref.path in asked - stay):
        more = {**held, **place.sizes(ref.path, ref.size)}
        if sum(more.values()) > keep.max_bytes:
            asked.remove(ref.path)
        else:
            held = more
    return [ref for ref in committed if ref.path not in asked]


def _regular(committed: Sequence[CheckpointRef], every: int | None) -> list[CheckpointRef]:
    """The first one from each `every` epochs on."""
    if every is None:
        return []
    epochs = [ref.epoch // every for ref in committed]
    return [ref for ref, now, before in zip(committed, epochs, [*epochs[1:], 0], strict=True) if now > before]


def best_of(
    committed: Sequence[CheckpointRef], values: Mapping[Path, float], mode: Literal["min", "max"]
) -> list[CheckpointRef]:
    """`committed` (newest first) from best to worst: the earlier step of equals, one of each step, all finite."""
    of_step: dict[int, CheckpointRef] = {}
    for ref in committed:
        if math.isfinite(values[ref.path]):
            of_step.setdefault(ref.step, ref)
    sign = 1 if mode == "min" else -1
    return sorted(of_step.values(), key=lambda ref: (sign * values[ref.path], ref.step))


def load(path: Path, take: Take = whole, *, weights_alone: bool = False, shown: str = "") -> dict[str, Any]:
    """The state in a checkpoint directory that a user names, or what `files.read` gives of it; `shown` is what the user
    calls it, if not its path. Raises CheckpointError."""
    try:
        return files.read(path, None, take, weights_alone=weights_alone)[0]
    except files.Damaged as damage:
        raise CheckpointError(f"checkpoint {shown or path} cannot be used: {damage}.") from damage
