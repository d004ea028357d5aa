"""Lists the strategies by name and builds a strategy from its specification."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any

from pydantic import ValidationError

from hpo.errors import UserError
from hpo.search.own_part import is_own, own_part
from hpo.search.strategies.asha import first_rung
from hpo.search.strategies.base import BaseStrategy, Strategy
from hpo.space import optuna_names
from hpo.text import near

# name -> path. A new strategy needs a line here.
STRATEGIES = {
    "none": "hpo.search.strategies.none:NoStrategy",
    "median": "hpo.search.strategies.median:Median",
    "percentile": "hpo.search.strategies.percentile:Percentile",
    "patient": "hpo.search.strategies.patient:Patient",
    "threshold": "hpo.search.strategies.threshold:Threshold",
    "wilcoxon": "hpo.search.strategies.wilcoxon:Wilcoxon",
    "paired": "hpo.search.strategies.paired:Paired",
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

# The strategy of a study that names none and trains no folds or seeds. It is ordered, stops no trial of four epochs or
# fewer, and derives its first rung from the epochs of a trial. docs/performance.md has its results.
DEFAULT: Mapping[str, Any] = {"name": "asha"}
SPREADS = ("/std", "/low", "/high")  # ends of metrics over seeds that are no means


def default(parts: int, metrics: Collection[str] = ()) -> Mapping[str, object]:
    """Returns the default strategy of a study whose trials train `parts` folds or seeds and are judged by these
    metrics. It stops no trial if the metrics are not means over folds or seeds."""
    if parts == 1:
        return DEFAULT
    return {"name": "none" if any(metric.endswith(SPREADS) for metric in metrics) else "paired"}


def make_strategy(spec: str | Mapping[str, Any]) -> Strategy:
    """Returns the strategy for a name or for `{"name": ..., option: value}`.

    Raises UserError with the option, its value and the fix.
    """
    if not isinstance(spec, str | Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UserError(optuna_names.specification("strategy", spec))
    options = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = options.get("name")
    strategy = _class_of(name)
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


def _class_of(name: Any) -> Any:
    if is_own(name):
        return own_part("strategy", name, BaseStrategy)
    if name not in STRATEGIES:
        raise UserError(
            f"unknown strategy {name!r}: choose one of {', '.join(STRATEGIES)}, or one of your own by its path, as in "
            f"'my_module:MyStrategy'{near(str(name), STRATEGIES) or '.'}"
        )
    module, _, attribute = STRATEGIES[name].partition(":")
    return getattr(import_module(module), attribute)


def complete(spec: Mapping[str, Any], epochs: float, parts: int = 1) -> dict[str, Any]:
    """Returns the specification with all of its options, as stored by a study whose trials train `epochs` epochs, or
    `parts` folds or seeds.

    The first rung of `asha` follows from the epochs unless the specification sets it. A complete specification is
    returned unchanged. Raises UserError for `paired` if trials train once.
    """
    whole = make_strategy(spec).model_dump()
    if whole["name"] == "paired" and "parts" not in spec:
        if parts == 1:
            raise UserError(
                "strategy 'paired' compares trials by the folds or seeds that each trains, and each trains once: set "
                "train.folds or train.seeds, or choose another strategy."
            )
        whole["parts"] = parts
    if whole["name"] == "asha" and "min_epochs" not in spec:
        whole["min_epochs"] = first_rung(epochs)
    return whole


def check_several(strategy: Strategy, objectives: int) -> None:
    """Raises UserError if a strategy cannot rank trials by this many objectives."""
    if objectives > 1 and not strategy.several:
        known = [name for name in STRATEGIES if make_strategy(name).several]
        raise UserError(
            f"strategy {strategy.name!r} takes one objective and the study has {objectives}: choose one of "
            f"{', '.join(known)}."
        )
