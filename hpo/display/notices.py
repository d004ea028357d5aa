"""Holds the notices that a run begins with: overrides that are kept, automatic choices, and the study's data."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from hpo.door import option, step
from hpo.ledger.stored_spec import StoredSpec
from hpo.search.samplers import auto
from hpo.search.samplers.registry import SAMPLERS
from hpo.space.assignments import NO_PRESET
from hpo.text import counted
from trainer.config.lanes import LANES


def kept_overrides(spec: StoredSpec, given: Mapping[str, object] | None) -> str:
    """Returns a notice of the overrides that the study began with and this command does not repeat.

    A preset replaces all of them but the number of lanes, which the study may have measured itself.
    """
    if given is None:
        return ""
    left_out = {*given, *spec.of_search_alone}
    kept = {path: value for path, value in spec.overrides.items() if path not in left_out}
    lanes = kept.pop(LANES, 1)
    kept = {} if "preset" in given else kept
    text = " ".join(f"{path}={json.dumps(value)}" for path, value in kept.items())
    note = [f"overrides kept from before: {text}; a study without them takes another {option('name')}"] if kept else []
    preset = "" if "preset" in given else spec.of_search_alone.get("preset", NO_PRESET)
    if preset not in ("", NO_PRESET):
        without = option("overrides", f"preset={NO_PRESET}")
        note.append(f"preset={preset}, under which this study searches; a new study takes none by {without}")
    return "\n".join([*note, f"{LANES}={lanes}, with which this study began"] if lanes != 1 else note)


def unasked(spec: StoredSpec, workers: int = 1, last: float = math.inf) -> Iterator[str]:
    """Yields notices of settings that the user did not choose by name.

    They are the rungs of `asha` for trials of `last` epochs, a threshold without bounds, the choice of `auto`, a slow
    sampler, workers without work, and a run without workers.
    """
    if not workers:
        yield "no worker begins here: others join by `hpo worker`"
    strategy = spec.strategy
    if strategy["name"] == "asha":
        yield from _rungs(strategy, " before it" if spec.order == "ordered" else "", last)
    if strategy["name"] == "paired":
        yield (
            f"strategy: paired: a trial stops once it is worse than the best complete one in the {strategy['parts']} "
            f"folds or seeds so far (paired t-test, p < {strategy['p_threshold']:g}); {option('strategy', 'none')} "
            "trains each to its end"
        )
    if strategy["name"] == "threshold" and strategy.get("lower") is None and strategy.get("upper") is None:
        yield (
            "strategy: threshold has no bounds, so it stops only a loss that is not finite: declare them in the study, "
            'strategy={"name": "threshold", "upper": 0.7}.'
        )
    if spec.sampler == "auto":
        bare = bool(spec.earlier) and not any(trial.get("curve") for trial in spec.earlier)
        yield f"sampler: auto, which is {auto.rule(len(spec.objectives), bare, spec.planned or None)}"
    if spec.sampler in SAMPLERS and (slow := SAMPLERS[spec.sampler].slow):
        yield f"sampler: {spec.sampler}, which takes {slow}: workers wait for it"
    if spec.order == "ordered" and workers > spec.window:
        yield (
            f"of {workers} workers {spec.window} can work at a time, since that is the study's window: a wider one, "
            f"{step(f'run --window {2 * workers} --allow-drift')}, makes it another study from here on"
        )


def _rungs(asha: Mapping[str, Any], before: str, last: float) -> Iterator[str]:
    eta, first, bound = asha["eta"], asha["min_epochs"], min(asha["max_epochs"] or math.inf, last)
    rungs = [rung for rung in (first * eta**k for k in range(3)) if rung < bound]
    if last <= first:
        epochs = counted(int(last), "epoch")
        yield f"strategy: asha: no trial is stopped, since each has {epochs} and the first rung is epoch {first}"
    elif rungs:
        more = " ..." if rungs[-1] * eta < bound else ""
        yield (
            f"strategy: asha: a trial stops at {'epochs' if more or rungs[1:] else 'epoch'} "
            f"{', '.join(map(str, rungs))}{more} unless it is among the best 1/{eta} of the trials that have reported "
            f"there{before}; {option('strategy', 'none')} trains each to its end"
        )


def data_report(data: Mapping[str, object]) -> Iterator[str]:
    """Yields the counts of the study's data check in one line, without zeros, then each text and list."""
    texts = {name: value for name, value in data.items() if isinstance(value, str | list)}
    counts = {name: value for name, value in data.items() if name not in texts and value}
    if counts:
        yield "data: " + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in counts.items())
    for name, value in texts.items():
        yield f"  {name.replace('_', ' ')}: {value if isinstance(value, str) else ', '.join(map(str, value))}"
