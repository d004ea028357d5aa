"""`hpo confirm`: the best trials again under other seeds, judged also by what no trial was selected by.

The best of many trials is partly the luckiest: its own value is too good on average. What its configuration is worth
is said by runs that took no part in the choice, and by data that took none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpo.analysis.listed import SEED, Found, Repeat, Spread
from hpo.words import aligned, counted


def listed(of: Found, top: int, seeds: int) -> list[dict[str, Any]]:
    """The `top` best trials, each under the same `seeds` seeds: those that follow on the largest the study has used."""
    first = 1 + max(trial["config"][SEED] for trial in of.ranked)
    return [
        {"label": _label(trial["number"]), "params": {**trial["params"], SEED: first + i}}
        for trial in of.ranked[:top]
        for i in range(seeds)
    ]


def _label(number: int) -> str:
    return f"trial {number}"


def held_out(of: Found, given: str | None) -> str | None:
    """The metric that no trial is selected by: the one given, else `test/x` where the objective is `val/x`."""
    if given is not None:
        return given
    area, slash, rest = of.objective.metric.partition("/")
    return f"test/{rest}" if slash and area == "val" else None


@dataclass(frozen=True)
class Confirmed:
    """One configuration: its value when it was selected, and what it came to under other seeds."""

    trial: int
    selected: float
    again: Spread | None
    held_out: Spread | None
    failed: int

    @property
    def gap(self) -> float | None:
        """Held out minus selected."""
        return None if self.held_out is None else self.held_out.mean - self.selected


@dataclass(frozen=True)
class Confirmation:
    """The configurations, the best under other seeds first."""

    study: str
    name: str
    metric: str
    hold_out: str | None
    rows: Sequence[Confirmed]

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "rows": [{**asdict(row), "gap": row.gap} for row in self.rows]})


def confirmation(of: Found, name: str, hold_out: str | None, found: Mapping[str, Sequence[Repeat]]) -> Confirmation:
    rows = []
    for trial in of.ranked:
        if (runs := found.get(_label(trial["number"]))) is not None:
            again, held = (Spread.of([getattr(run, field) for run in runs]) for field in ("value", "held_out"))
            failed = sum(run.value is None for run in runs)
            rows.append(Confirmed(trial["number"], trial["value"], again, held, failed))
    sign = -1.0 if of.objective.direction == "maximize" else 1.0
    rows.sort(key=lambda row: (row.again is None, sign * row.again.mean if row.again else 0.0, row.trial))
    return Confirmation(of.name, name, of.objective.metric, hold_out, rows)


def describe(found: Confirmation) -> str:
    """A line for each configuration, and what they say."""
    known = any(row.held_out for row in found.rows)
    table = [["trial", "selected", f"{found.metric} again", *([str(found.hold_out), "gap"] if known else [])]]
    for row in found.rows:
        cells = [str(row.trial), f"{row.selected:.5g}", str(row.again or "none")]
        if known:
            cells += [str(row.held_out or "none"), "" if row.gap is None else f"{row.gap:+.3g}"]
        table.append(cells)
    return "\n".join([*aligned(table), *_said(found, known)])


def _said(found: Confirmation, known: bool) -> list[str]:
    first = found.rows[0]
    runs = max((row.again.count for row in found.rows if row.again), default=0)
    mean = f"mean ± standard error over {runs} seeds" if runs > 1 else "of one seed, which says nothing of its spread"
    lines = [f"{mean}; selected: the value in study {found.study}"]
    if known:
        lines.append(f"gap: {found.hold_out} minus the value it was selected by; nothing here is chosen by it")
    elif found.hold_out:
        lines.append(
            f"no trial has reported {found.hold_out}: name a metric by --hold-out, or have the task measure it"
        )
    if failed := sum(row.failed for row in found.rows):
        lines.append(f"{counted(failed, 'run')} came to no value and {'is' if failed == 1 else 'are'} in no mean")
    if first.again is None:
        return [*lines, "no run came to a value"]
    lines.append(f"best under other seeds: trial {first.trial}")
    if len(found.rows) > 1 and (second := found.rows[1].again) and first.again.error and second.error:
        apart = abs(first.again.mean - second.mean)
        error = (first.again.error**2 + second.error**2) ** 0.5
        if apart < 2 * error:
            lines[-1] += f", by {apart:.2g}, which is within twice its standard error ({error:.2g}) of the next"
    return lines
