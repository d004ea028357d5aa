"""Defines the contract of strategies, which decide when to stop a trial.

A strategy is a frozen pydantic model, its options are its fields, and its JSON is its specification. It holds no
state: a decision is a function of the history alone, so it is the same after any restart. Values are losses
(lower is better); NaN ranks behind every other value. With several objectives a loss is a tuple with an entry for each;
strategies that accept such losses set `several`. For a strategy that sets `rungs`, the loss of a trial that breaks
constraints at that epoch ranks behind the losses of all trials that break none (`pareto.beyond`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict

from hpo.search.curves import Curve, Group
from trainer.report import Verdict


class History(Protocol):
    """The data that a decision about one trial may read, as of the report that closed `epoch`.

    In ordered mode with window W "the others" are the trials up to number - W, which have ended; `at` differs, see
    there.
    """

    @property
    def number(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def value(self) -> Any:
        """Returns the trial's own loss at `epoch`."""
        ...

    @property
    def curve(self) -> Curve:
        """Returns the trial's own (epoch, loss) pairs, ascending, up to and including `epoch`."""
        ...

    def at(self, epoch: int) -> Mapping[int, Any]:
        """Returns number -> loss of the other trials that closed exactly this epoch, whatever their state.

        In ordered mode "the others" are all trials with a lower number: the trial waits until each of them has reached
        `epoch` or ended.
        """
        ...

    def order(self, epoch: int, beyond: float, group: Group | None = None) -> Sequence[int]:
        """Returns the trials that reported within [epoch, beyond), this one included, best first.

        They are ordered by their first loss in that range, as in `pareto.ranked`. With a `group`, to which this trial
        belongs, only its members are returned.
        """
        ...

    def curves(self, states: Collection[str] = ("complete",)) -> Mapping[int, Curve]:
        """Returns number -> whole curve of the other trials in one of `states`."""
        ...

    def checkpoint(self, number: int) -> str | None:
        """Returns the newest kept checkpoint of another trial, as `restart_from` names it; None if it has none."""
        ...


class Strategy(Protocol):
    """A stopping strategy. `name` is its registry key or its path; `BaseStrategy` explains the class attributes."""

    name: Any
    several: ClassVar[bool]
    rungs: ClassVar[bool]
    brings: ClassVar[str]

    def wants(self, epoch: int) -> bool:
        """Returns whether a report that closes `epoch` needs a decision. It is called at every report and must be
        cheap."""
        ...

    def decide(self, history: History) -> Verdict:
        """Returns the verdict on the report that closed `history.epoch`. A pure function."""
        ...

    def model_dump(self, *, exclude_unset: bool = False) -> dict[str, Any]:
        """Returns the specification that `registry.make_strategy` takes; `exclude_unset` omits options not set."""
        ...


class BaseStrategy(BaseModel):
    """The base of strategies: a frozen model whose fields are its options.

    A strategy of your own derives from this class, implements `wants` and `decide` as `Strategy` describes them, and is
    named as `module:Class` (docs/guide/extend.md). Class attributes declare its abilities:

    several  whether it ranks losses of several objectives, which are tuples
    rungs    whether constraints may enter the order of losses: it only ranks them, or looks at `pareto.breaks`
    brings   the name of the sampler that it uses
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    several: ClassVar[bool] = False
    rungs: ClassVar[bool] = False
    brings: ClassVar[str] = ""

    name: Any
