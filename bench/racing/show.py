"""The race's table and its figure, from the cells that have ended."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = Mapping[str, Any]
OURS, TAUGHT = "hpo", "hpo, one earlier study"
TENTHS = range(1, 11)
STYLES = ("-", (0, (1, 1)), "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
COLORS = (
    "#000000",
    "#777777",
    "#d55e00",
    "#0072b2",
    "#009e73",
    "#aa7799",
)  # of other lightness each: they differ in grey too


def best_at(curve: Sequence[Sequence[float]], seconds: float, column: int = 1) -> float:
    """The best value (or, column 2, its held-out value) that there was after so many seconds; NaN before the first."""
    reached = [point for point in curve if point[0] <= seconds]
    return float(reached[-1][column]) if reached else math.nan


def by_contender(rows: Iterable[Row], workload: str) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["workload"] == workload:
            found.setdefault(row["contender"], []).append(row)
    return found


def means(rows: Sequence[Row], tenth: int) -> float:
    """The mean over seeds at a tenth of the budget; NaN until each seed has a value."""
    return float(np.mean([best_at(row["curve"], row["budget"] * tenth / 10) for row in rows]))


def an_hour(rows: Sequence[Row], what: str) -> float:
    return float(np.mean([row[what] / row["budget"] * 3600 for row in rows]))


def table(rows: Sequence[Row], workload: str) -> str:
    """A workload's table in Markdown, and who was ahead of whom at each tenth of the budget."""
    found = by_contender(rows, workload)
    first = next(iter(found.values()))[0]
    header = [
        "contender",
        *(f"{10 * tenth} %" for tenth in TENTHS),
        "held-out",
        "first, s",
        "trials/h",
        "epochs/h",
        "seeds",
    ]
    loads = sorted(row["load"] for rows in found.values() for row in rows)
    lines = [
        f"{workload}: best {first['metric']} ({first['mode']}) at tenths of {first['budget']:g} s, means over seeds; "
        f"{first['processes']} processes each, begun at loads of {loads[0]} to {loads[-1]}",
        "",
        _line(header),
        _line(["---"] * len(header)),
    ]
    lines += [_line(_cells(name, rows)) for name, rows in found.items()]
    return "\n".join([*lines, "", *verdicts(found, first["mode"]), ""])


def _cells(name: str, rows: Sequence[Row]) -> list[str]:
    began = [row["curve"][0][0] if row["curve"] else math.inf for row in rows]
    held_out = float(np.mean([best_at(row["curve"], row["budget"], 2) for row in rows]))
    values = [*(means(rows, tenth) for tenth in TENTHS), held_out]
    shown = ["" if math.isnan(value) else f"{value:.4f}" for value in values]
    hours = [f"{an_hour(rows, what):.0f}" for what in ("trials", "epochs")]
    return [name, *shown, f"{np.mean(began):.1f}", *hours, str(len(rows))]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def verdicts(found: Mapping[str, Sequence[Row]], mode: str) -> list[str]:
    """For each of ours and each peer the tenths at which our mean is ahead, even and behind; then epochs an hour."""
    others = {name: rows for name, rows in found.items() if name not in (OURS, TAUGHT)}
    if OURS not in found or not others:
        return []
    lines = [
        f"- {ours} against {name}: {_tenths(found[ours], rows, mode) or 'neither has a value from each seed'}"
        for ours in (OURS, TAUGHT)
        if ours in found
        for name, rows in others.items()
    ]
    peers = {name: an_hour(rows, "epochs") for name, rows in others.items()}
    best = max(peers, key=lambda name: peers[name])
    ratio = an_hour(found[OURS], "epochs") / peers[best] if peers[best] else math.inf
    return [*lines, f"- epochs an hour: hpo has {ratio:.2f} times those of the best peer, {best}"]


def _tenths(ours: Sequence[Row], theirs: Sequence[Row], mode: str) -> str:
    at: dict[str, list[str]] = {}
    for tenth in TENTHS:
        if word := standing(means(ours, tenth), means(theirs, tenth), mode):
            at.setdefault(word, []).append(f"{10 * tenth} %")
    return "; ".join(f"{word} at {', '.join(tenths)}" for word, tenths in at.items())


def standing(ours: float, theirs: float, mode: str) -> str:
    """ahead, even or behind, empty where neither has a value (NaN); who has none is behind who has one."""
    if math.isnan(ours) or math.isnan(theirs):
        return "" if math.isnan(ours) and math.isnan(theirs) else "behind" if math.isnan(ours) else "ahead"
    gained = ours - theirs if mode == "maximize" else theirs - ours
    return "even" if abs(gained) < 1e-9 else "ahead" if gained > 0 else "behind"


def plot(rows: Sequence[Row], workloads: Sequence[str], file: Path) -> None:
    """Best validation value so far over seconds: the mean over seeds, and from the worst to the best of them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(workloads), figsize=(4.6 * len(workloads), 3.8), squeeze=False)
    for axis, workload in zip(axes[0], workloads, strict=True):
        found, visible = by_contender(rows, workload), list[float]()
        for (name, cells), style, color in zip(found.items(), STYLES, COLORS, strict=False):
            seconds = np.linspace(0, cells[0]["budget"], 400)
            values = np.array([[best_at(cell["curve"], second) for second in seconds] for cell in cells])
            mean = values.mean(axis=0)
            axis.plot(seconds, mean, linestyle=style, color=color, label=name, linewidth=1.6)
            axis.fill_between(seconds, values.min(axis=0), values.max(axis=0), color=color, alpha=0.12, linewidth=0)
            visible += mean[int(0.3 * len(mean)) :].tolist()
        first = next(iter(found.values()))[0]
        axis.set(title=workload, xlabel="seconds since the command", ylabel=f"best {first['metric']} so far")
        _limit(axis, visible)
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None, dpi=150)
    pyplot.close(figure)


def _limit(axis: Any, values: Sequence[float]) -> None:
    """Show the means from 30 % of the budget on: the first epochs would press the rest into a line."""
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        room = 0.08 * (max(finite) - min(finite)) or 0.01
        axis.set_ylim(min(finite) - room, max(finite) + room)
