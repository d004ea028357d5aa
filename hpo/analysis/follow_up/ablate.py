"""`hpo ablate`: trains a trial, by default the best, again with one parameter at a time set back to its default.

A variant that is worse shows that the search gained from this parameter; one that is not worse, that the parameter
needs no tuning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

from hpo.analysis.follow_up.derived_study import SEED, SeedRun, SourceStudy, not_repeated
from hpo.door import option
from hpo.errors import SpaceError, UserError
from hpo.search.spread import Spread
from hpo.space.config import as_json, flatten
from hpo.text import aligned, command, counted

ROUNDING = 2.0**-21  # of a value: four units in the last place of a float32
FOUND, DEFAULTS = "as found", "all defaults"


@dataclass(frozen=True)
class Variant:
    """The trial's parameters with `label` at its default.

    default  the default of that parameter
    along    parameters that are dropped too, since they are active only with the value that `label` had
    refused  the reason why the configuration is invalid; empty if it is valid
    """

    label: str
    params: Mapping[str, Any]
    default: object = None
    along: Sequence[str] = ()
    refused: str = ""


def variants(of: SourceStudy, trial: Mapping[str, Any]) -> list[Variant]:
    """Returns the unchanged trial, a variant for each parameter that is not at its default, and one with all defaults.

    The last is left out if only one parameter differs. Raises UserError if none does.
    """
    best = trial["params"]
    changed = [path for path in best if best[path] != of.base.get(path)]
    if not changed:
        raise UserError(
            f"trial {trial['number']} of study {of.name!r} has every parameter at its default: nothing to ablate."
        )
    return [
        Variant(FOUND, best),
        *(_without(of, best, path) for path in sorted(changed)),
        *([Variant(DEFAULTS, {})] if len(changed) > 1 else []),
    ]


def _without(of: SourceStudy, best: Mapping[str, object], path: str) -> Variant:
    params = _active(of, {name: value for name, value in best.items() if name != path})
    along = sorted(best.keys() - params.keys() - {path})
    try:
        return Variant(path, params, _taken(of.study.build(params), path), along)
    except SpaceError as error:
        return Variant(path, params, of.base.get(path), along, str(error))


def _taken(config: Any, path: str) -> Any:
    """Returns the value that a field is trained with: for an unset hyperparameter the optimizer's default."""
    from trainer.config.optim import OptimConfig

    value = flatten(as_json(config))[path]
    section, _, name = path.rpartition(".")
    optim = attrgetter(section)(config) if section else config
    if value is not None or not isinstance(optim, OptimConfig):
        return value
    taken = optim.hyperparameters
    return taken["betas"][int(name[-1]) - 1] if name in ("beta1", "beta2") and "betas" in taken else taken.get(name)


def _active(of: SourceStudy, params: Mapping[str, object]) -> Mapping[str, Any]:
    """Returns the parameters whose conditions hold, given each other and the defaults of those not in `params`."""
    conditions = {path: of.study.space.dimensions[path].conditions for path in params}
    kept = {
        path: value
        for path, value in params.items()
        if all(params.get(on, of.base.get(on)) in allowed for on, allowed in conditions[path].items())
    }
    return kept if len(kept) == len(params) else _active(of, kept)


def listed(of: SourceStudy, found: Sequence[Variant], seeds: int) -> list[dict[str, Any]]:
    """Returns the valid variants, including the unchanged trial, each under the same `seeds` seeds.

    The trial's own seed is not used again, since the trial was selected by it.
    """
    return [
        {"label": variant.label, "params": {**variant.params, SEED: seed}}
        for variant in found
        if not variant.refused
        for seed in of.unused_seeds(seeds)
    ]


@dataclass(frozen=True)
class Ablated:
    """The result of one variant.

    selected  the value that the parameter has in the trial
    value     the variant's values
    worse     by how much they are worse than the trial's, seed by seed, including the effect of `along`
    """

    label: str
    selected: object
    default: object
    value: Spread | None
    worse: Spread | None
    along: Sequence[str]
    refused: str


@dataclass(frozen=True)
class Ablation:
    """The variants by one objective: the unchanged trial first, then the others, worst first.

    changed  whether the trial's parameters changed during training; the variants then start from the last ones
    """

    study: str
    name: str
    trial: int
    changed: bool
    metric: str
    rows: Sequence[Ablated]

    def as_json(self) -> dict[str, Any]:
        rows = [asdict(row) for row in self.rows]
        return asdict(self) | {
            "rows": [{"label": row.pop("label"), "found": row.pop("selected"), **row} for row in rows]
        }


def ablations(
    of: SourceStudy,
    name: str,
    trial: Mapping[str, Any],
    tried: Sequence[Variant],
    found: Mapping[str, Sequence[SeedRun]],
) -> list[Ablation]:
    """Returns an ablation for each objective."""
    ablated = []
    for index, objective in enumerate(of.objectives):
        values = {label: [run.values[index] for run in runs] for label, runs in found.items()}
        sign = 1.0 if objective.direction == "minimize" else -1.0
        rows = [_ablated(trial, variant, values.get(variant.label, []), values[FOUND], sign) for variant in tried]
        rows.sort(key=lambda row: (row.label != FOUND, row.worse is None, -row.worse.mean if row.worse else 0.0))
        ablated.append(Ablation(of.name, name, trial["number"], trial["changed"], objective.metric, rows))
    return ablated


def _ablated(
    trial: Mapping[str, Any],
    variant: Variant,
    values: Sequence[float | None],
    as_found: Sequence[float | None],
    sign: float,
) -> Ablated:
    worse = Spread.of_pairs(values, as_found, sign)
    worse = None if variant.label == FOUND else worse
    results = Spread.of(values), worse, variant.along, variant.refused
    return Ablated(variant.label, trial["params"].get(variant.label), variant.default, *results)


def facts(found: Sequence[Ablation]) -> object:
    """Returns JSON values: an object, or a list of objects where there are several objectives."""
    rows = [ablation.as_json() for ablation in found]
    return rows if len(rows) > 1 else rows[0]


def describe(found: Sequence[Ablation]) -> str:
    """Returns a table for each objective."""
    return "\n\n".join(map(_described, found))


def _described(found: Ablation) -> str:
    """Returns a table with a line for each variant, and the notes below it."""
    table = [["at its default", "found", "default", found.metric, "worse by"]]
    for row in found.rows:
        cells = ["", ""] if row.label in (FOUND, DEFAULTS) else [_short(row.selected), _short(row.default)]
        table.append([row.label, *cells, str(row.value or "no value"), _worse(row)])
    lines = aligned(table)
    if any(row.value is None and not row.refused for row in found.rows):
        lines.append(f"what came to no value: `{command(f'compare --study {found.name}')}` says why")
    lines += [f"{row.label} cannot go back alone: {row.refused}" for row in found.rows if row.refused]
    lines += [f"with {row.label} went {', '.join(row.along)}, not there without it" for row in found.rows if row.along]
    seeds = max((row.value.count for row in found.rows if row.value), default=0)
    lines.append(
        f"trial {found.trial} of study {found.study}, over {counted(seeds, 'seed')} it was not selected by, paired"
    )
    lines += not_repeated([found.trial] if found.changed else [])
    if seeds == 1:
        lines.append(f"One seed cannot tell a small difference from chance: {option('seeds', '3')} can.")
    return "\n".join(lines)


def _worse(row: Ablated) -> str:
    """Returns the difference as text: 0 within the rounding of a float32, in which most metrics are computed."""
    if row.worse is None or row.value is None:
        return ""
    return "0" if abs(row.worse.mean) <= ROUNDING * abs(row.value.mean) and not row.worse.error else str(row.worse)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
