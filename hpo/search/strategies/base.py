"""The contract of strategies: when to stop a trial.

A strategy is a frozen pydantic model, its options are its fields, and its JSON is its specification. It holds no
state: a decision is a function of the history alone, so it is the same after any restart. Values are losses
(lower is better); a NaN is a value that is not finite and ranks behind every other. With several objectives a loss
is a tuple, one for each; a strategy takes that which has `several`. Where it has `rungs`, the losses of a trial that
breaks constraints at their epoch rank behind those of all that break none (`pareto.beyond`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from pydantic import ValidationError

from hpo.errors import UserError
from hpo.search.curves import Curve, Group, first_losses
from hpo.search.pareto import ranked
from hpo.text import near
from trainer.report import Verdict


class History(Protocol):
    """What a decision about one trial may read, as of the report that closed `epoch`.

    In ordered mode with window W "the others" are the trials <= number - W, which have ended; for `at` see there.
    """

    @property
    def number(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def value(self) -> Any:
        """The trial's own loss at `epoch`."""
        ...

    @property
    def curve(self) -> Curve:
        """The trial's own (epoch, loss), ascending, up to and including `epoch`."""
        ...

    def at(self, epoch: int) -> Mapping[int, Any]:
        """Number -> loss of the others that closed exactly this epoch, whatever became of them.

        In ordered mode "the others" are all before this one: the trial waits until each has come to `epoch` or ended.
        """
        ...

    def order(self, epoch: int, beyond: float, group: Group | None = None) -> Sequence[int]:
        """The trials that have reported within [epoch, beyond), this one among them, by the first loss there, the best
        first, as `pareto.ranked` has it; or those of a group that this one is of."""
        ...

    def curves(self, states: Collection[str] = ("complete",)) -> Mapping[int, Curve]:
        """Number -> whole curve of the others that are in one of `states`."""
        ...

    def checkpoint(self, number: int) -> str | None:
        """The newest kept checkpoint of another trial, as a `restart_from` names it; None where it has none."""
        ...


class Strategy(Protocol):
    """`name` is its key in STRATEGIES."""

    name: Any

    def wants(self, epoch: int) -> bool:
        """Whether a report that closes `epoch` needs a decision; cheap, asked at every one."""
        ...

    def decide(self, history: History) -> Verdict:
        """The verdict on the report that closed `history.epoch`. Pure."""
        ...

    def model_dump(self, *, exclude_unset: bool = False) -> dict[str, Any]:
        """The specification that `make_strategy` takes, on request without what was not given."""
        ...


# name -> where it is. To add one is to add its line here.
STRATEGIES = {
    "none": "hpo.search.strategies.none:NoStrategy",
    "median": "hpo.search.strategies.median:Median",
    "percentile": "hpo.search.strategies.percentile:Percentile",
    "patient": "hpo.search.strategies.patient:Patient",
    "threshold": "hpo.search.strategies.threshold:Threshold",
    "wilcoxon": "hpo.search.strategies.wilcoxon:Wilcoxon",
    "halving": "hpo.search.strategies.halving:Halving",
    "asha": "hpo.search.strategies.asha:Asha",
    "hyperband": "hpo.search.strategies.hyperband:Hyperband",
    "asha-promote": "hpo.search.promotion.asha:AshaPromote",
    "pasha": "hpo.search.promotion.pasha:Pasha",
    "hyperband-promote": "hpo.search.promotion.hyperband:HyperbandPromote",
    "freeze-thaw": "hpo.search.promotion.freeze_thaw:FreezeThaw",
    "bohb": "hpo.search.promotion.bohb:Bohb",
    "pbt": "hpo.search.population.pbt:Pbt",
    "pb2": "hpo.search.population.pb2:Pb2",
}

# What a study has that names none: ordered, and no trial of four epochs or fewer can stop (docs/performance.md has what
# it finds). Its first rung goes by the epochs of a trial.
DEFAULT: Mapping[str, Any] = {"name": "asha"}

# Strategies that bring a sampler of their own.
BRINGS = {"freeze-thaw": "freeze-thaw", "bohb": "bohb"}


def make_strategy(spec: str | Mapping[str, Any]) -> Strategy:
    """The strategy of a name or of `{"name": ..., option: value}`. Raises UserError naming option, value and fix."""
    options = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = options.get("name")
    if name not in STRATEGIES:
        raise UserError(
            f"unknown strategy {name!r}: choose one of {', '.join(STRATEGIES)}{near(str(name), STRATEGIES) or '.'}"
        )
    module, _, attribute = STRATEGIES[name].partition(":")
    strategy = getattr(import_module(module), attribute)
    try:
        return strategy.model_validate(options, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        option = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            known = [key for key in strategy.model_fields if key != "name"]
            has = f"it has {', '.join(known) or 'none'}{near(option, known) or '.'}"
            raise UserError(f"strategy {name!r} has no option {option!r}; {has}") from error
        reason = first["msg"][:1].lower() + first["msg"][1:]
        raise UserError(f"strategy {name!r}: {option}={first['input']!r} is refused: {reason}.") from error


def settled(spec: Mapping[str, Any], epochs: float) -> dict[str, Any]:
    """A strategy as a study has it whose trials train so many epochs: all of its options, and where none is given the
    first rung of `asha` that goes with them. One that is settled stays as it is."""
    from hpo.search.strategies.asha import first_rung

    whole = make_strategy(spec).model_dump()
    if whole["name"] == "asha" and "min_epochs" not in spec:
        whole["min_epochs"] = first_rung(epochs)
    return whole


def has_rungs(strategy: Strategy) -> bool:
    """Whether the strategy only ever ranks losses, so that constraints may enter their order."""
    return getattr(strategy, "rungs", False)


def check_several(strategy: Strategy, objectives: int) -> None:
    """Raise UserError where a strategy cannot rank trials by so many objectives."""
    if objectives > 1 and not getattr(strategy, "several", False):
        known = [name for name in STRATEGIES if getattr(type(make_strategy(name)), "several", False)]
        raise UserError(
            f"strategy {strategy.name!r} takes one objective and the study has {objectives}: choose one of "
            f"{', '.join(known)}."
        )


@dataclass(frozen=True)
class TableHistory:
    """A history in memory, for simulation and tests.

    tables   number -> ascending (epoch, loss) of every trial, the decided one included
    states   number -> state; a trial that is not named runs
    visible  the highest number among the others that may be read, in ordered mode; None for all
    """

    number: int
    epoch: int
    tables: Mapping[int, Curve]
    states: Mapping[int, str] = field(default_factory=dict[int, str])
    visible: int | None = None

    @property
    def value(self) -> Any:
        return self.curve[-1][1]

    @property
    def curve(self) -> Curve:
        own = self.tables[self.number]
        return own[: bisect_right(own, self.epoch, key=lambda point: point[0])]

    def _others(self) -> Mapping[int, Curve]:
        limit = math.inf if self.visible is None else self.visible
        return {number: curve for number, curve in self.tables.items() if number != self.number and number <= limit}

    def at(self, epoch: int) -> Mapping[int, Any]:
        seen = self._others() if self.visible is None else {n: c for n, c in self.tables.items() if n < self.number}
        return first_losses(seen, epoch, epoch + 1)

    def order(self, epoch: int, beyond: float, group: Group | None = None) -> Sequence[int]:
        return ranked(first_losses({**self._others(), self.number: self.curve}, epoch, beyond, group))

    def curves(self, states: Collection[str] = ("complete",)) -> Mapping[int, Curve]:
        return {
            number: curve for number, curve in self._others().items() if self.states.get(number, "running") in states
        }

    def checkpoint(self, number: int) -> str | None:
        """A table holds none."""
        return None
