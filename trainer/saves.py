"""Writes and commits the checkpoints of a fit, in the background or not, and applies retention."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.checkpoint.store import CheckpointStore, Pinned
from trainer.config import TrainConfig
from trainer.ranks import Solo
from trainer.report import CheckpointRef, Report, Reporter
from trainer.runtime.failpoint import failpoint
from trainer.state import TrainState


class Saves:
    """The checkpoints of a fit, one save at a time.

    `committed_step` is the step of the newest checkpoint from which a resumed run would start.
    """

    def __init__(
        self, config: TrainConfig, ranks: Solo, reporter: Reporter, checkpoints: CheckpointStore, state: TrainState
    ) -> None:
        self._config, self._ranks, self._reporter, self._state = config, ranks, reporter, state
        self._checkpoints, self._saver = checkpoints, checkpoints.saver
        self._background = config.checkpoint.asynchronous
        self._reserved = not self._background  # True once there is memory for copies of the state, if needed
        self.committed_step = 0

    def scheduled(self, step: int) -> bool:
        """Returns True if a checkpoint is due at `step`.

        Other checkpoints come from interruptions, and only interrupted runs have them.
        """
        return self._config.checkpoint.due(step, self._state.epochs.closed_by(step))

    @property
    def _pinned(self) -> Pinned | None:
        """Returns the test for steps whose newest checkpoint retention keeps, to roll back to."""
        return self.scheduled if self._config.rollback.enabled else None

    def start(self, metrics: Mapping[str, float]) -> None:
        s = self._state
        whole = self._ranks.whole(s.state_dict())
        self._saver.start(whole, step=s.step, epoch=s.epoch, metrics=metrics, background=self._background)

    def waited_for(self) -> CheckpointRef | None:
        """Returns the checkpoint that was started; None if there is none, or if a thread writes it."""
        return None if self._background else self._saver.finish()

    def look_after(self) -> None:
        """Commits a save that has become durable. Reserves memory for copies of the state, once the state is
        complete."""
        if self._saver.ready:
            self.settle()
        if not self._reserved and self._ranks.keeper(self._state.optimizer).state:
            self._reserved = True
            self._saver.reserve(self._ranks.own(self._state.state_dict()))

    def settle(self) -> None:
        """Waits for the save in progress, if there is one, and commits it.

        A later rollback or end then finds the same checkpoints as if training had waited for each save.
        """
        if (ref := self._saver.finish()) is not None:
            failpoint("checkpoint.before_commit")
            self._reporter.report(Report(self._state.step, {}, checkpoint=ref))
            self.commit(ref)

    def commit(self, ref: CheckpointRef) -> None:
        """Keeps a checkpoint whose report is committed."""
        self.committed_step = ref.step
        self._checkpoints.commit(ref, self._config.checkpoint, self._pinned)

    def tidy(self) -> None:
        """Applies retention to the checkpoints that the fit resumes from, the newest of which is the state's."""
        self.committed_step = self._state.step
        self._checkpoints.tidy(self._config.checkpoint, self._pinned)
