"""Explains the equivalents of Optuna's names to its users."""

from __future__ import annotations

from typing import Any

_PARAMETER = "declare it in the space, as space={{'NAME': {}}}, and read trial.params.NAME"
_DIRECTION = "name the metric, as minimize='val/loss' or maximize='val/accuracy'"
OF_HPO = {
    "Categorical": "write hpo.Choice([...])",
    "Uniform": "write hpo.Float(low, high)",
    "LogUniform": "write hpo.Float(low, high, log=True)",
    "create_study": "put @hpo.study(space=..., minimize=...) above the function, then hpo.run(function, trials=100)",
    "load_study": "write hpo.open('NAME')",
    "samplers": "give a sampler's name, as sampler='tpe'",
    "pruners": "give a strategy's name, as strategy='median'",
}
OF_TRIAL = {
    "suggest_float": _PARAMETER.format("hpo.Float(low, high)"),
    "suggest_int": _PARAMETER.format("hpo.Int(low, high)"),
    "suggest_categorical": _PARAMETER.format("hpo.Choice([...])"),
    "suggest_uniform": _PARAMETER.format("hpo.Float(low, high)"),
    "suggest_loguniform": _PARAMETER.format("hpo.Float(low, high, log=True)"),
    "should_prune": "return where trial.report(epoch, metrics) gives True",
    "set_user_attr": "report numbers by trial.report, and write anything else to a file in trial.directory",
}
OF_STUDY = {
    "optimize": "write hpo.run(study, trials=100)",
    "best_params": "write hpo.open('NAME').best['params']",
    "best_value": "write hpo.open('NAME').best['value']",
    "best_trial": "write hpo.open('NAME').best",
    "enqueue_trial": "give enqueue=[{...}] to the study or to hpo.run",
}
ARGUMENTS = {
    "direction": _DIRECTION,
    "directions": _DIRECTION,
    "pruner": "give strategy='median', or another one",
    "n_trials": "give trials=100",
    "timeout": "give time=3600, or time='1h'",
    "n_jobs": "give workers=4",
    "study_name": "give name='NAME'",
    "load_if_exists": "leave it out: a study that exists is continued",
}
_NAMES = {
    "TPESampler": "tpe",
    "RandomSampler": "random",
    "GridSampler": "grid",
    "QMCSampler": "qmc",
    "GPSampler": "gp",
    "CmaEsSampler": "cmaes",
    "NSGAIISampler": "nsga2",
    "NSGAIIISampler": "nsga3",
    "MedianPruner": "median",
    "PercentilePruner": "percentile",
    "SuccessiveHalvingPruner": "asha",
    "HyperbandPruner": "hyperband",
    "ThresholdPruner": "threshold",
    "PatientPruner": "patient",
    "WilcoxonPruner": "wilcoxon",
    "NopPruner": "none",
}


def missing(owner: str, name: str, known: dict[str, str]) -> AttributeError:
    """Returns the error for an attribute that `owner` does not have; for one `known` from Optuna, with the
    equivalent."""
    if name in known:
        return AttributeError(f"{owner} has no {name}, which is Optuna's: {known[name]}.")
    return AttributeError(f"{owner} has no attribute {name!r}.")


def argument(owner: str, name: str) -> str:
    """Returns a sentence about an argument that `owner` does not take."""
    if name in ARGUMENTS:
        return f"{owner} takes no {name}=, which is Optuna's: {ARGUMENTS[name]}."
    return f"{owner} takes no argument {name!r}."


def specification(option: str, value: Any) -> str:
    """Returns a sentence about an object that was passed instead of a sampler's or a strategy's name."""
    kind = type(value).__name__
    fix = "give a name, or a mapping with one, {'name': NAME, OPTION: VALUE}"
    if name := _NAMES.get(kind):
        fix = f"give its name, {option}={name!r}, or with options {option}={{'name': {name!r}, OPTION: VALUE}}"
    return f"{option}={kind}(...) names nothing: {fix}." if name else f"{option}={value!r}: {fix}."
