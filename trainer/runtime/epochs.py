"""Maps the epochs of a run to its steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainer.config import TrainConfig


@dataclass(frozen=True)
class Epochs:
    """The steps of each epoch: `steps`, and for `later` (epoch, steps) pairs another number from that epoch on.

    It is a pure function of the data set's size and the configuration: without state, and without end.
    """

    steps: int
    later: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, samples: int, config: TrainConfig) -> Epochs:
        """Returns the epochs of a data set of `samples`, in the batches of `config`."""
        growths = (0, *config.batch_growth.epochs)
        lengths = [(epoch, windows(samples, config.batch_size_at(epoch), config.drop_last)) for epoch in growths]
        return cls(lengths[0][1], tuple(lengths[1:]))

    def length(self, epoch: int) -> int:
        """Returns the steps of epoch `epoch`, from 0."""
        return [steps for first, _, steps in self._phases() if first <= epoch][-1]

    def step(self, epoch: float) -> float:
        """Returns the steps before `epoch`, whole for a whole epoch."""
        first, start, steps = [phase for phase in self._phases() if phase[0] <= max(epoch, 0)][-1]
        return start + (epoch - first) * steps

    def epoch(self, step: float) -> float:
        """Returns the number of epochs, with a fraction, that `step` steps make."""
        first, start, steps = [phase for phase in self._phases() if phase[1] <= max(step, 0)][-1]
        return first + (step - start) / steps

    def closed_by(self, step: int) -> int | None:
        """Returns the number of epochs that are over after `step` steps; None within one."""
        first, start, steps = [phase for phase in self._phases() if phase[1] <= step][-1]
        whole, rest = divmod(step - start, steps)
        return None if rest else first + whole

    def _phases(self) -> Iterator[tuple[int, int, int]]:
        """Yields (first epoch, steps before it, steps of each of its epochs) of every run of epochs of one length."""
        first, start, steps = 0, 0, self.steps
        for epoch, other in (*self.later, (0, 0)):
            yield first, start, steps
            start += (epoch - first) * steps
            first, steps = epoch, other


def windows(samples: int, batch_size: int, drop_last: bool) -> int:
    """Returns how many batches an epoch has.

    The last may hold fewer samples, and is left out with `drop_last` unless it is the only one.
    """
    return max(samples // batch_size, 1) if drop_last else -(-samples // batch_size)
