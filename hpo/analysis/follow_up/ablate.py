"""`hpo ablate`: a trial, by default the best, with each of its parameters, one at a time, back at its default.

What gets worse shows what the search has found; what does not is a parameter that needs no tuning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

from hpo.analysis.follow_up.derived_study import SEED, SeedRun, SourceStudy, Spread, not_repeated
from hpo.errors import SpaceError, UserError
from hpo.space.config import as_json, flatten
from hpo.text import aligned, command, counted

ROUNDING = 2.0**-21  # of a value: four units in the last place of a float32
FOUND, DEFAULTS = "as found", "all defaults"


@dataclass(frozen=True)
class Variant:
    """The best trial's parameters with `label` at its default, which is `default`; those of `along` depend on what it
    was and go too. `refused` says why there is no such configuration."""

    label: str
    params: Mapping[str, Any]
    default: Any = None
    along: Sequence[str] = ()
    refused: str = ""


def variants(of: SourceStudy, trial: Mapping[str, Any]) -> list[Variant]:
    """As found, each parameter that is not at its default, and none of them."""
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


def _without(of: SourceStudy, best: Mapping[str, Any], path: str) -> Variant:
    params = _active(of, {name: value for name, value in best.items() if name != path})
    along = sorted(best.keys() - params.keys() - {path})
    try:
        return Variant(path, params, _taken(of.study.build(params), path), along)
    except SpaceError as error:
        return Variant(path, params, of.base.get(path), along, str(error))


def _taken(config: Any, path: str) -> Any:
    """What a field is trained with: where an optimizer's is left open, the optimizer's own."""
    from trainer.config.optim import OptimConfig

    value = flatten(as_json(config))[path]
    section, _, name = path.rpartition(".")
    optim = attrgetter(section)(config) if section else config
    if value is not None or not isinstance(optim, OptimConfig):
        return value
    taken = optim.hyperparameters
    return taken["betas"][int(name[-1]) - 1] if name in ("beta1", "beta2") and "betas" in taken else taken.get(name)


def _active(of: SourceStudy, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Those whose conditions still hold, also by one another, where what is not among `params` has its default."""
    conditions = {path: of.study.space.dimensions[path].conditions for path in params}
    kept = {
        path: value
        for path, value in params.items()
        if all(params.get(on, of.base.get(on)) in allowed for on, allowed in conditions[path].items())
    }
    return kept if len(kept) == len(params) else _active(of, kept)


def listed(of: SourceStudy, found: Sequence[Variant], seeds: int) -> list[dict[str, Any]]:
    """The variants, as found too, each under the same `seeds` seeds: by that of the trial it was selected."""
    return [
        {"label": one.label, "params": {**one.params, SEED: seed}}
        for one in found
        if not one.refused
        for seed in of.unused_seeds(seeds)
    ]


@dataclass(frozen=True)
class Ablated:
    """One variant: what it came to, and by how much it is worse than what was found, seed by seed. What went `along`
    is part of the difference."""

    label: str
    found: Any
    default: Any
    value: Spread | None
    worse: Spread | None
    along: Sequence[str]
    refused: str


@dataclass(frozen=True)
class Ablation:
    """By one objective: the variants, what was found first, then by what they cost.

    `changed`: the trial's parameters changed in the middle of training, and what was found are the last ones.
    """

    study: str
    name: str
    trial: int
    changed: bool
    metric: str
    rows: Sequence[Ablated]


def ablations(
    of: SourceStudy,
    name: str,
    trial: Mapping[str, Any],
    tried: Sequence[Variant],
    found: Mapping[str, Sequence[SeedRun]],
) -> list[Ablation]:
    """One for each objective."""
    ablated = []
    for place, objective in enumerate(of.objectives):
        values = {label: [run.values[place] for run in runs] for label, runs in found.items()}
        sign = 1.0 if objective.direction == "minimize" else -1.0
        rows = [_ablated(trial, one, values.get(one.label, []), values[FOUND], sign) for one in tried]
        rows.sort(key=lambda row: (row.label != FOUND, row.worse is None, -row.worse.mean if row.worse else 0.0))
        ablated.append(Ablation(of.name, name, trial["number"], trial["changed"], objective.metric, rows))
    return ablated


def _ablated(
    trial: Mapping[str, Any],
    one: Variant,
    values: Sequence[float | None],
    as_found: Sequence[float | None],
    sign: float,
) -> Ablated:
    worse = Spread.of_pairs(values, as_found, sign)
    worse = None if one.label == FOUND else worse
    of_it = Spread.of(values), worse, one.along, one.refused
    return Ablated(one.label, trial["params"].get(one.label), one.default, *of_it)


def facts(found: Sequence[Ablation]) -> Any:
    """JSON values: an object, or of several objectives a list of them."""
    rows = [asdict(one) for one in found]
    return rows if len(rows) > 1 else rows[0]


def describe(found: Sequence[Ablation]) -> str:
    """A table for each objective."""
    return "\n\n".join(map(_described, found))


def _described(found: Ablation) -> str:
    """A line for each variant."""
    table = [["at its default", "found", "default", found.metric, "worse by"]]
    for row in found.rows:
        own = ["", ""] if row.label in (FOUND, DEFAULTS) else [_short(row.found), _short(row.default)]
        table.append([row.label, *own, str(row.value or "no value"), _worse(row)])
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
        lines.append("One seed cannot tell a small difference from chance: --seeds 3 can.")
    return "\n".join(lines)


def _worse(row: Ablated) -> str:
    """By how much; 0 for what is no more than the rounding of a float32, in which most metrics are computed."""
    if row.worse is None or row.value is None:
        return ""
    return "0" if abs(row.worse.mean) <= ROUNDING * abs(row.value.mean) and not row.worse.error else str(row.worse)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
