"""Computes how much of the difference between a study's trials each parameter explains."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from hpo.door import option
from hpo.errors import HpoError, UserError
from hpo.text import counted


@contextmanager
def _forests_when_used() -> Iterator[None]:
    """Delays Optuna's import of scikit-learn, a second of processor time, until fANOVA or MDI grows a forest."""

    def forest(*args: Any, **options: Any) -> Any:
        from sklearn.ensemble import RandomForestRegressor

        return RandomForestRegressor(*args, **options)

    name = "sklearn.ensemble"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = stand_in = ModuleType(name)
    stand_in.RandomForestRegressor = forest  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del sys.modules[name]


with _forests_when_used():
    from optuna.importance import (
        BaseImportanceEvaluator,
        FanovaImportanceEvaluator,
        MeanDecreaseImpurityImportanceEvaluator,
        PedAnovaImportanceEvaluator,
    )

SEED = 0  # seed of the forests, so that the same trials give the same figures
EVALUATORS: dict[str, Callable[[], BaseImportanceEvaluator]] = {
    "ped-anova": PedAnovaImportanceEvaluator,  # Watanabe et al. 2023, arXiv 2304.10255
    "fanova": lambda: FanovaImportanceEvaluator(seed=SEED),  # Hutter et al. 2014
    "mdi": lambda: MeanDecreaseImpurityImportanceEvaluator(seed=SEED),
}
FEW = 20  # complete trials, below which shares change much with each further trial

Target = Callable[[FrozenTrial], float] | None


def lacking_importances(study: optuna.Study, target: Target = None) -> str:
    """Returns why there are no importances; empty if there are."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    values = {target(trial) if target else trial.value for trial in complete}
    if len([value for value in values if value is not None and math.isfinite(value)]) < 2:
        lack = {0: "none is complete", 1: "one is complete"}.get(len(complete), f"of {len(complete)} none differ")
        return f"it takes complete trials with different values, and {lack}"
    return "" if any(trial.params for trial in complete) else "nothing was searched"


def quiet() -> None:
    """Suppresses Optuna's warnings that do not concern users, for example that a smaller target counts as better."""
    warnings.filterwarnings("ignore", "PedAnovaImportanceEvaluator computes the importances of params to achieve low")
    warnings.filterwarnings("ignore", "Some regimes for parameter")  # conditional parameters that few trials have


def importances(study: optuna.Study, evaluator: str = "ped-anova", target: Target = None) -> dict[str, float]:
    """Returns parameter -> its share, the largest first.

    ped-anova covers all parameters, the other evaluators those that every complete trial has. `target` returns the
    value to be explained, of which less is better; by default the only objective. Raises HpoError if there are no
    importances, UserError for an unknown evaluator.
    """
    if evaluator not in EVALUATORS:
        raise UserError(f"{option('evaluator', repr(evaluator))} is not known: choose one of {', '.join(EVALUATORS)}.")
    if why := lacking_importances(study, target):
        raise HpoError(f"study {study.study_name!r} has no importances yet: {why}.")
    with warnings.catch_warnings():
        quiet()
        shares = optuna.importance.get_param_importances(study, evaluator=EVALUATORS[evaluator](), target=target)
    return {name: float(share) for name, share in shares.items()}


def describe(study: optuna.Study, found: dict[str, float], metric: str, evaluator: str) -> str:
    """Returns a line for each parameter, and the parameters left out."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    width = max(map(len, found), default=0)
    lines = [f"{study.study_name}: {metric} over {counted(len(complete), 'complete trial')}, by {evaluator}"]
    for name, share in found.items():
        count = sum(name in trial.params for trial in complete)
        by = f"  by {count} that have it" if count < len(complete) else ""
        lines.append(f"  {name:<{width}}  {share:4.0%}  {'█' * round(share * 40)}".rstrip() + by)
    if unjudged := sorted({name for trial in complete for name in trial.params} - found.keys()):
        lines.append(f"not judged, as only some trials have them: {', '.join(unjudged)}")
    return "\n".join([*lines, *filter(None, [caution(study)])])


def caution(study: optuna.Study) -> str:
    """Returns a warning if the shares rest on few trials, else an empty string."""
    few = len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))) < FEW
    return f"With fewer than {FEW} complete trials these shares can still change much." if few else ""


def facts(study: optuna.Study, found: dict[str, float], metric: str, evaluator: str) -> dict[str, Any]:
    """Returns the content of `describe` as JSON values."""
    named = {"study": study.study_name, "metric": metric, "evaluator": evaluator}
    return {**named, "importances": found, "caution": caution(study) or None}
